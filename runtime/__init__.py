"""The execution of a plan: its task graph with real tensors, on one CUDA GPU or with a CPU in its place.

It may import `hrm` and is the only package that may import torch (`pip install '.[runtime]'`); never `simulator`.

The names below are imported when they are first used.
"""

from typing import TYPE_CHECKING

from hrm.lazy_names import import_lazily

if TYPE_CHECKING:
    from runtime.checkpoint import open_checkpoint
    from runtime.device import choose_device
    from runtime.jobs.runner import run_prompts
    from runtime.random_weights import RandomWeights
    from runtime.run_command import run_saved_plan
    from runtime.session import BatchRun, Session, open_session

__all__ = [
    "BatchRun",
    "RandomWeights",
    "Session",
    "choose_device",
    "open_checkpoint",
    "open_session",
    "run_prompts",
    "run_saved_plan",
]

_MODULES = {
    "BatchRun": "session",
    "RandomWeights": "random_weights",
    "Session": "session",
    "choose_device": "device",
    "open_checkpoint": "checkpoint",
    "open_session": "session",
    "run_prompts": "jobs.runner",
    "run_saved_plan": "run_command",
}

__getattr__, __dir__ = import_lazily(__name__, _MODULES)
