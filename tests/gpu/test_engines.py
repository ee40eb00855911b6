"""Engines on a GPU: tiny models of every family against transformers; our parts against the plain ones; memory."""

import gc
import random

import pytest
import torch

from gpu.parts import DEVICE
from intarsia import Engine, SamplingParams
from intarsia.plugins import Registry
from intarsia.testing import poison_cache, prompt_logits
from intarsia.testing.tiny import save_tiny_model

pytestmark = pytest.mark.gpu

try:
    from families import CASES, saved
except ImportError as error:
    CASES, WHY = (), f"transformers is not here: {error}"
else:
    WHY = ""

PLAIN = {"attention": "eager", "kernels": ["torch"], "runner": "eager"}
OURS = {"attention": "flash", "kernels": ["cuda", "torch"], "runner": "eager"}


def engine_of(model, dtype="float32", *, poisoned=True, memory="64MiB", max_model_len=128, **sections):
    engine = {"device": DEVICE, "dtype": dtype, "seed": 0, "max_model_len": max_model_len}
    made = Engine.from_config({"model": str(model), "engine": engine, "cache": {"memory": memory}, **sections})
    if poisoned:
        poison_cache(made)
    return made


def greedy(num_tokens=12):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def prompts(lengths=(40, 9, 17, 32), num_ids=64):
    rng = random.Random(7)
    return [[rng.randrange(num_ids) for _ in range(length)] for length in lengths]


def has(slot, key):
    return key in Registry.discover().offers(slot)


@pytest.mark.skipif(not CASES, reason=WHY or "no cases")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_tiny_model_of_every_family_equals_transformers(case, tmp_path):
    model = saved(case, tmp_path / "model")
    given = prompts(case.lengths, 256)
    with torch.no_grad():
        expected = [model(torch.tensor([ids])).logits[0].float() for ids in given]
    with engine_of(tmp_path / "model", max_model_len=case.max_model_len) as engine:
        for chunk in (None, 7):
            found = prompt_logits(engine, given[0], chunk=chunk).cpu()
            assert float((found - expected[0]).abs().max()) <= 1e-3
        answers = engine.generate(given, greedy(6))
        # What the model itself chooses at each of the answer's places: the answer, if it is its greedy one.
        for ids, answer in zip(given, answers, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([[*ids, *answer.token_ids]])).logits[0, len(ids) - 1 : -1]
            chosen = logits.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
            assert bool((logits.max(-1).values - chosen <= 1e-3).all()), "a greedy id that is not among the best"


@pytest.mark.parametrize("sections", [{}, OURS], ids=["auto", "flash and cuda"])
def test_greedy_ids_in_fp32_equal_those_of_the_plain_parts(tmp_path, sections):
    model = save_tiny_model(tmp_path / "model", layers=4)
    if sections and not (has("attention", "flash") and has("kernels", "cuda")):
        pytest.skip("flash or cuda is not installed")
    given = prompts((3, 70, 1, 16, 33, 64))
    with engine_of(model, **PLAIN) as engine:
        expected = [c.token_ids for c in engine.generate(given, greedy(24))]
    with engine_of(model, **sections) as engine:
        assert [c.token_ids for c in engine.generate(given, greedy(24))] == expected
        alone = [engine.generate([ids], greedy(24))[0].token_ids for ids in given]
        engine.parts.cache.check_integrity()
    assert alone == expected


def test_greedy_ids_equal_the_cpus(tmp_path):
    model = save_tiny_model(tmp_path / "model", layers=4)
    given = prompts((3, 70, 1, 16))
    with engine_of(model) as engine:
        found = [c.token_ids for c in engine.generate(given, greedy(24))]
    plain = {"model": str(model), "engine": {"device": "cpu", "dtype": "float32", "max_model_len": 128}}
    with Engine.from_config({**plain, "cache": {"memory": "64MiB"}}) as engine:
        assert [c.token_ids for c in engine.generate(given, greedy(24))] == found


@pytest.mark.parametrize("runner", ["eager", "cuda_graph"])
def test_a_seeded_answer_is_the_same_alone_and_in_a_batch_where_the_engine_says_so(tmp_path, runner):
    if not has("runner", runner):
        pytest.skip(f"there is no runner {runner}")
    model = save_tiny_model(tmp_path / "model")
    given = prompts((5, 30, 17))
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=16, ignore_eos=True) for i in range(3)]
    with engine_of(model, runner=runner, poisoned=runner == "eager") as engine:
        if engine.explain()["invariance"]["level"] != "bitwise":
            pytest.skip("what cuBLAS does around the kernels decides")
        together = [c.token_ids for c in engine.generate(given, params)]
        assert [engine.generate([p], q)[0].token_ids for p, q in zip(given, params, strict=True)] == together


def test_graphs_choose_the_ids_of_the_eager_runner(tmp_path):
    if not has("runner", "cuda_graph"):
        pytest.skip("there is no runner cuda_graph")
    model = save_tiny_model(tmp_path / "model", layers=4)
    given = prompts((3, 70, 1, 16, 33))
    with engine_of(model, runner="eager") as engine:
        expected = [c.token_ids for c in engine.generate(given, greedy(24))]
    with engine_of(model, runner="cuda_graph", poisoned=False) as engine:
        for _ in range(2):
            assert [c.token_ids for c in engine.generate(given, greedy(24))] == expected
            assert engine.generate([given[1]], greedy(24))[0].token_ids == expected[1]


def test_memory_is_back_at_its_level_after_engines_close(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    levels = []
    for _ in range(3):
        with engine_of(model, "bfloat16") as engine:
            engine.generate(prompts((20, 3)), greedy(8))
            assert torch.cuda.memory_allocated() > 60 << 20, "the cache is on the device"
        del engine
        gc.collect()
        torch.cuda.empty_cache()
        levels.append(torch.cuda.memory_allocated())
    # The first engine may leave what is made once a process, such as cuBLAS's workspace.
    assert levels[1] == levels[2] and levels[2] - levels[0] <= 1 << 20
