"""Tasks and lanes by name, and back: ``load_weights/decode/s3/l7/p2`` on ``host_to_device0``."""

from __future__ import annotations

import re

from hrm.errors import InputError
from hrm.graph import Lane, LaneKind, Op, TaskId

__all__ = ["parse_lane", "parse_task"]

_INTEGER = r"(?:0|-?[1-9]\d{0,8})"
_TASK = re.compile(
    rf"({'|'.join(op.value for op in Op)})/(prefill|decode)/s({_INTEGER})/l({_INTEGER})"
    + "".join(f"(?:/{letter}({_INTEGER}))?" for letter in ("b", "p", "g", "part"))  # in the order of TaskId
)
_LANE = re.compile(rf"({'|'.join(kind.value for kind in LaneKind)})(0|[1-9]\d{{0,8}})?")


def parse_task(text: str) -> TaskId:
    """The task of a name such as ``load_weights/decode/s3/l7/p2``: the reverse of ``str(TaskId)``.

    Raises
    ------
    InputError
        It is no such name.
    """
    found = _TASK.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r:.80} is no task", way_out="a name such as 'load_weights/decode/s3/l7/p2'")
    op, phase, *numbers = found.groups()
    step, layer, *parts = (None if number is None else int(number) for number in numbers)
    return TaskId(Op(op), phase, step, layer, *parts)  # type: ignore[arg-type]  # the pattern has only those


def parse_lane(text: str) -> Lane:
    """The lane of a name such as ``host_to_device0``: the reverse of ``str(Lane)``.

    Raises
    ------
    InputError
        It is no such name.
    """
    found = _LANE.fullmatch(text)
    if found is None:
        raise InputError(f"{text!r:.80} is no lane", way_out=f"one of {', '.join(LaneKind)}, and a device number")
    return Lane(LaneKind(found[1]), None if found[2] is None else int(found[2]))
