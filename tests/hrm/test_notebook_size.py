"""How much the notebooks compute."""

from __future__ import annotations

import pytest

from hrm.errors import InputError
from hrm.notebook_size import SIZE_VARIABLE, at_size


@pytest.mark.parametrize(("value", "chosen"), [(None, 100), ("full", 100), ("small", 1)])
def test_everything_unless_small_is_asked(monkeypatch: pytest.MonkeyPatch, value: str | None, chosen: int) -> None:
    monkeypatch.delenv(SIZE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(SIZE_VARIABLE, value)
    assert at_size(full=100, small=1) == chosen


def test_another_size_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SIZE_VARIABLE, "tiny")
    with pytest.raises(InputError, match=r"HRM_NOTEBOOK_SIZE.*'tiny'.*full or small"):
        at_size(full=100, small=1)
