"""The errors a person may meet, each with the exit code the command line gives it."""

from __future__ import annotations

__all__ = ["BarMissedError", "HrmError", "InfeasibleError", "InputError"]


class HrmError(Exception):
    """Base of every error that is shown to a person without a traceback.

    Attributes
    ----------
    exit_code : int
        What the `hrm` command returns.
    """

    exit_code = 1


class InputError(HrmError):
    """Wrong input: a file, an option or a combination of them (exit code 2).

    Parameters
    ----------
    fact : str
        What is wrong, with the value that was given.
    where : str, optional
        The file, and the key in it, e.g. ``"t4.yaml: gpu.memory"``.
    way_out : str, optional
        What would be accepted instead.
    """

    exit_code = 2

    def __init__(self, fact: str, *, where: str = "", way_out: str = "") -> None:
        self.fact = fact
        self.where = where
        self.way_out = way_out
        text = f"{where}: {fact}" if where else fact
        super().__init__(f"{text} ({way_out})" if way_out else text)


class InfeasibleError(HrmError):
    """No plan fits (exit code 3). The message names the limit and the nearest change that would fit."""

    exit_code = 3

    def __init__(self, message: str, *, limit: str = "", missing_bytes: float = 0.0) -> None:
        self.limit = limit
        self.missing_bytes = missing_bytes
        super().__init__(message)


class BarMissedError(HrmError):
    """A validation bar was missed (exit code 4)."""

    exit_code = 4
