"""A session over several batches, and weights that its arithmetic cannot hold."""

from __future__ import annotations

import pytest
import torch
from cases import Case, model_folder, open_tiny, policy_of, scenario_of
from tiny_models import reference_generate

from hrm.errors import InputError
from runtime import native_library, session
from runtime.checkpoint import open_checkpoint
from runtime.device import choose_device
from runtime.session import open_session
from runtime.weight_source import WeightSource

FOLDER = model_folder("mixtral")
CASE = Case("cgopipe", policy_of(batch_size=2, micro_batch_size=2, num_micro_batches=1, micro_batch_token_budget=80))


def test_a_later_batch_may_have_longer_prompts_than_the_first() -> None:
    prompts = [[3, 1], [4, 1, 5], [9, 2, 6, 5] * 5, [3, 5, 8]]
    wanted, _ = reference_generate(FOLDER, prompts, 5)
    running = open_tiny(FOLDER, CASE)
    running.arenas["cpu"].planned["KV cache"] *= 10  # the plan's prompts have 12 tokens at most
    running.arenas["cpu"].peak *= 10
    tokens = {index: found for run in running.generate(prompts) for index, found in run.tokens.items()}
    assert [tokens[index] for index in range(4)] == wanted


def test_laying_out_is_part_of_the_time_and_said_apart() -> None:
    (run,) = open_tiny(FOLDER, CASE).generate([[3, 1, 4], [1, 5]])
    assert 0.0 < run.laid_out_s < run.prefill_s + run.decode_s


def test_compiled_kernels_are_there_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    order = []
    monkeypatch.setattr(session, "open_library", lambda: order.append("library"))
    monkeypatch.setattr(session, "load_weights", lambda *_, **__: order.append("weights"))
    open_tiny(FOLDER, CASE)
    assert order == ["library", "weights"]
    assert callable(native_library.open_library)


class TooLarge:
    """Weights of ones, but for one value of one expert."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def top(self, name: str) -> torch.Tensor:
        return torch.ones_like(self._source.top(name))

    def dense(self, layer: int) -> dict[str, torch.Tensor]:
        return {name: torch.ones_like(tensor) for name, tensor in self._source.dense(layer).items()}

    def expert(self, layer: int, expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        w1, w3, w2 = (torch.ones_like(matrix) for matrix in self._source.expert(layer, expert))
        if (layer, expert) == (1, 3):
            w3[0, 0] = 1e6
        return w1, w3, w2


def test_a_weight_beyond_fp16_is_refused_by_name() -> None:
    scenario = scenario_of(FOLDER, compute="fp16")
    checkpoint = open_checkpoint(FOLDER)
    device = choose_device("cpu", cpu_only=False)
    with pytest.raises(InputError, match="expert 3 of layer 1 has values beyond 65,504"):
        open_session(scenario, CASE.policy, "cgopipe", TooLarge(checkpoint), checkpoint.numerics, device)
