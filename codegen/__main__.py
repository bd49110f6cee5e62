"""`python -m eplb_codegen`."""

import sys

from .cli import main

sys.exit(main())
