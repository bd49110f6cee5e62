"""`python .../worker JOB.json RANK`: run one rank of a job."""

import importlib.util
import sys
from pathlib import Path

# The folder of this file is on sys.path, and would show its modules as top-level names; so would
# the folder above. The package is found by its path, and sys.path stays the interpreter's own.
here = Path(sys.path.pop(0)).resolve()
spec = importlib.util.spec_from_file_location("worker", here / "__init__.py")
assert spec is not None and spec.loader is not None
sys.modules["worker"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)

from worker.rank import main  # noqa: E402

if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
