"""The names that scripts and notebooks import from the packages."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

NAMES = {
    "hrm": "HrmError InfeasibleError InputError Pins Plan Policy TaskGraph Trace Workload build_graph draw_tornado "
    "find_alternatives find_plan load_profile load_workload uniform_workload",
    "simulator": "Comparison Simulation Sweep compare_schedules draw_sweep draw_timeline simulate_plan simulate_policy "
    "sweep_plans",
    "runtime": "BatchRun RandomWeights Session choose_device open_checkpoint open_session run_prompts run_saved_plan",
}


@pytest.mark.parametrize("package", NAMES)
def test_a_package_has_exactly_these_names_and_each_resolves_and_says_what_it_is(package: str) -> None:
    module = import_module(package)
    assert sorted(module.__all__) == sorted(NAMES[package].split())
    for name in module.__all__:
        found = getattr(module, name)
        assert (found.__doc__ or "").strip() and found.__name__ == name
        assert name in dir(module)


@pytest.mark.parametrize("package", NAMES)
def test_another_name_is_none(package: str) -> None:
    with pytest.raises(AttributeError, match=f"'{package}' has no attribute 'find_nothing'"):
        _ = import_module(package).find_nothing


def test_importing_the_packages_imports_nothing_heavy() -> None:
    code = "import sys, hrm, simulator, runtime; print({'torch', 'numpy', 'highspy', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
