"""NVTX ranges around steps: off unless asked for, nested, closed whatever happens, and for GPUs alone."""

import pytest
import torch

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import CompositionError, ExecutionError
from intarsia.types import Fit
from models import tiny_llama

GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
PLAIN = {"runner": "eager", "attention": "eager", "kernels": ["torch"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=1)[0]


@pytest.fixture
def marks(monkeypatch):
    """What is marked, as a device would see it; on this one."""
    seen = []
    monkeypatch.setattr("intarsia.defaults.local.fit", lambda _: Fit(10))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: seen.append(name))
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: seen.append("end"))
    return seen


def test_nothing_is_marked_unless_it_is_asked_for(model, marks):
    with engine_of(model, **PLAIN) as engine:
        engine.generate([[1, 2, 3]], GREEDY)
    assert marks == []


def test_a_step_is_marked_with_its_size_around_what_it_is_made_of(model, marks):
    with engine_of(model, executor={"use": "local", "nvtx": True}, **PLAIN) as engine:
        marks.clear()  # of the warm-up
        engine.generate([[1, 2, 3]], GREEDY)
    parts = ["prepare", "end", "layers", "end", "choose", "end"]
    steps = ["step: 1 rows, 3 tokens", *parts, "end", "step: 1 rows, 1 tokens", *parts, "end"]
    assert marks[: len(steps)] == steps


def test_a_range_ends_where_a_step_fails(model, marks, monkeypatch):
    with engine_of(model, executor={"use": "local", "nvtx": True}, **PLAIN) as engine:
        marks.clear()
        monkeypatch.setattr(type(engine.parts.attention), "prepare", lambda *_: 1 / 0)
        with pytest.raises(ExecutionError, match="division by zero"):
            engine.generate([[1, 2, 3]], GREEDY)
    assert marks == ["step: 1 rows, 3 tokens", "prepare", "end", "end"]


def test_on_a_cpu_there_is_nothing_to_mark(model):
    with pytest.raises(
        CompositionError, match=r"executor.nvtx marks ranges .* NVIDIA GPUs, and the engine runs on cpu"
    ):
        engine_of(model, executor={"use": "local", "nvtx": True}, **PLAIN)
