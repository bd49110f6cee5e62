"""`python .../worker JOB.json RANK`: run one rank of a job."""

import sys
from pathlib import Path

# The folder of this file is on sys.path already, and would show its modules as top-level names.
sys.path[0] = str(Path(__file__).resolve().parent.parent)

from worker.rank import main  # noqa: E402

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
