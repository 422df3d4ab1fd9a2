"""What runs the `hrm` command in a test, and the tiny policies, lie beside the tests of `hrm`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "hrm"))
