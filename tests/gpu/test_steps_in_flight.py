"""Two steps in flight on a GPU: answers are those of one at a time, and no step waits for the host."""

import pytest
import torch

from gpu.parts import DEVICE
from intarsia import Engine, SamplingParams
from intarsia.testing.tiny import save_tiny_model

pytestmark = pytest.mark.gpu

LOADS = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 0.9, "seed": 3, "top_p": 0.9},
    "chosen on the host": {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2, "logprobs": 1},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def answers(model, depth, params, **sections):
    config = {
        "model": str(model),
        "engine": {"device": DEVICE, "dtype": "float32", "max_model_len": 128},
        "cache": {"memory": "16MiB"},
        "scheduler": {"use": "inflight", "max_tokens": 40},
        "executor": {"use": "local", "depth": depth},
        **sections,
    }
    prompts = [[(i * 7 + j) % 60 for j in range(5 + 9 * i)] for i in range(6)]
    with Engine.from_config(config) as engine:
        assert engine.explain()["steps"]["in_flight"] == depth
        found = engine.generate(prompts, params)
        # What a step reads is memory of another stream: under other loads it would be given away too early.
        again = [completion for _ in range(4) for completion in engine.generate(prompts, params)]
        torch.cuda.synchronize()
        assert [c.token_ids for c in again] == [c.token_ids for c in found] * 4
        assert not engine.has_work and engine.stats()["cache"]["used"] == 0
    return [(c.token_ids, c.choices[0].finish_reason) for c in found]


@pytest.mark.parametrize("runner", ["eager", "cuda_graph"])
@pytest.mark.parametrize("load", LOADS)
def test_answers_are_those_of_one_step_at_a_time(model, load, runner):
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=stops, **LOADS[load])
        for stops in ([], [], list(range(0, 60, 6)), [], list(range(0, 60, 9)), [])
    ]
    one, two = (answers(model, depth, params, runner=runner, attention="flash") for depth in (1, 2))
    assert two == one


def test_a_gpu_has_two_steps_in_flight_by_itself(model):
    with Engine.from_config({"model": str(model), "engine": {"device": DEVICE}}) as engine:
        assert engine.explain()["steps"]["in_flight"] == 2
