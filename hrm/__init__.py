"""Plan batch generation of mixture-of-experts models that do not fit the GPU.

Data flows one way: profile + model + workload -> work -> search -> plan -> report. The names below are for scripts and
notebooks; each is imported when it is first used, so that `import hrm` costs nothing.
"""

from typing import TYPE_CHECKING

from hrm.lazy_names import import_lazily

if TYPE_CHECKING:
    from hrm.errors import HrmError, InfeasibleError, InputError
    from hrm.graph import TaskGraph
    from hrm.pins import Pins
    from hrm.plan_finding import build_graph, find_alternatives, find_plan
    from hrm.plans import Plan
    from hrm.policy import Policy
    from hrm.profile_files import load_profile
    from hrm.sensitivity_plot import draw_tornado
    from hrm.trace import Trace
    from hrm.workload import Workload, load_workload, uniform_workload

__version__ = "0.1.0"

__all__ = [
    "HrmError",
    "InfeasibleError",
    "InputError",
    "Pins",
    "Plan",
    "Policy",
    "TaskGraph",
    "Trace",
    "Workload",
    "build_graph",
    "draw_tornado",
    "find_alternatives",
    "find_plan",
    "load_profile",
    "load_workload",
    "uniform_workload",
]

_MODULES = {
    "HrmError": "errors",
    "InfeasibleError": "errors",
    "InputError": "errors",
    "Pins": "pins",
    "Plan": "plans",
    "Policy": "policy",
    "TaskGraph": "graph",
    "Trace": "trace",
    "Workload": "workload",
    "build_graph": "plan_finding",
    "draw_tornado": "sensitivity_plot",
    "find_alternatives": "plan_finding",
    "find_plan": "plan_finding",
    "load_profile": "profile_files",
    "load_workload": "workload",
    "uniform_workload": "workload",
}

__getattr__, __dir__ = import_lazily(__name__, _MODULES)
