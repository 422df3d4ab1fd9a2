"""What tests of the runtime share; what runs the `hrm` command, and tiny policies, lie beside the tests of `hrm`."""

import sys
from pathlib import Path

import pytest

from runtime.native_library import open_library

sys.path.insert(0, str(Path(__file__).parents[1] / "hrm"))


@pytest.fixture(params=["compiled", "torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled kernels where they can be had (`test_native_library` says when they must), and without."""
    if request.param == "torch":
        monkeypatch.setenv("HRM_NATIVE", "0")
    elif open_library() is None:
        pytest.skip("no compiler here")
    return str(request.param)
