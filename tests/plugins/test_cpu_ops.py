"""Models op by op over the kernels and the attention `cpu`: every family, bitwise in any chunks, pages and threads."""

import copy
import random

import attrs
import pytest
import torch

from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.ops import COLLECTIVES
from intarsia.testing import poison_cache, prompt_logits
from intarsia_cpu import attention, kernels
from intarsia_cpu.build import unavailable
from models import tiny_llama

REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("multiplied", [True, False])
def test_auto_takes_them_where_torch_has_no_products_of_bf16(dtype, multiplied, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: multiplied)
    path, _ = tiny_llama(tmp_path)
    with engine_of(path, engine={"dtype": dtype}, runner="eager") as engine:
        (chosen,) = [each.provider.key for each in engine.parts.selections if each.slot == "kernels"]
    own = dtype == "bfloat16" and not multiplied
    assert chosen == ("cpu" if own else "onednn" if dtype == "bfloat16" else "torch")


MIXTURES = {case.name for case in CASES if "mixtral" in case.name or "moe" in case.name}


@attrs.frozen
class Saved:
    case: object
    path: object
    model: object

    def prompt(self):
        rng = random.Random(7)
        return [rng.randrange(256) for _ in range(min(100, self.case.max_model_len - 1))]

    def engine(self, *, page_size=16, **engine):
        made = engine_of(
            self.path,
            engine={"max_model_len": self.case.max_model_len, "invariance": "bitwise"} | engine,
            cache={"use": "paged", "page_size": page_size, "memory": "64MiB"},
            scheduler="inflight",
            runner="eager",
            attention="cpu",
            kernels="cpu",
        )
        poison_cache(made)
        return made


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def tiny(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("ops")
    return Saved(request.param, path, saved(request.param, path))


@torch.no_grad()
def reference(model, prompt):
    return model(torch.tensor([prompt])).logits[0].float()


def in_any_chunks(tiny, prompt, dtype):
    """The logits of a prompt; asserts that their bits do not depend on chunks, pages and threads."""
    with tiny.engine(dtype=dtype, threads=1) as engine:
        sources = {op: choice.source for op, choice in engine.parts.ops.choices.items()}
        assert {op for op, source in sources.items() if source != "cpu"} <= {*COLLECTIVES}
        assert engine.parts.layout.order == "PKSD"
        found = prompt_logits(engine, prompt)
        poison_cache(engine)
        assert torch.equal(prompt_logits(engine, prompt, chunk=7), found)
    with tiny.engine(dtype=dtype, page_size=3, threads=2) as engine:
        assert torch.equal(prompt_logits(engine, prompt, chunk=64), found)
    return found


def test_logits_equal_transformers_and_are_bitwise_in_any_chunks_pages_and_threads(tiny):
    prompt = tiny.prompt()
    found = in_any_chunks(tiny, prompt, "float32")
    assert float((found - reference(tiny.model, prompt)).abs().max()) <= 1e-4


def test_bf16_is_as_near_to_fp32_as_bf16_of_transformers_and_bitwise(tiny):
    prompt = tiny.prompt()
    exact = reference(tiny.model, prompt)
    theirs = reference(copy.deepcopy(tiny.model).to(torch.bfloat16), prompt)
    found = in_any_chunks(tiny, prompt, "bfloat16")
    error, bound = float((found - exact).abs().mean()), float((theirs - exact).abs().mean())
    # A router that rounds the other way sends a token to another expert: that is no rounding of logits.
    assert error < (3 if tiny.case.name in MIXTURES else 1.5) * bound


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_give_the_same_logprobs_alone_and_together(tmp_path, dtype):
    path, _ = tiny_llama(tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(200) for _ in range(length)] for length in (40, 9, 70, 1)]
    params = [
        SamplingParams(max_tokens=8, temperature=t, seed=i, ignore_eos=True, logprobs=2)
        for i, t in enumerate([0, 1.1, 0, 0.7])
    ]
    options = {"attention": "cpu", "kernels": "cpu", "runner": "eager"}
    with engine_of(path, engine={"dtype": dtype, "invariance": "bitwise", "threads": 2}, **options) as engine:
        alone = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
        together = engine.generate(prompts * 2, params * 2)
    for one, other in zip(together, alone * 2, strict=True):
        assert one.choices == other.choices


def test_parts_say_why_they_do_not_fit_without_a_compiler(monkeypatch, tmp_path):
    path, _ = tiny_llama(tmp_path)
    monkeypatch.setattr(attention, "unavailable", lambda: "no compiler")
    monkeypatch.setattr(kernels.native, "unavailable", lambda: "no compiler")
    with engine_of(path, runner="eager") as engine:
        chosen = {slot: engine.parts.selection(slot) for slot in ("attention", "kernels")}
        assert "cpu" not in {selection.provider.key for selection in chosen.values()}
        assert all("no compiler" in selection.reason for selection in chosen.values())
