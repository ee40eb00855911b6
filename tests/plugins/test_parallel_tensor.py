"""Tensor and sequence parallelism over 2, 3 and 4 gloo processes against one process."""

import random

import numpy as np
import pytest
import torch

from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.testing import prompt_logits
from models import tiny_llama
from sliced_ranks import run_ranks

STEPS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)
#: Odd numbers of tokens, which do not divide between ranks, alone and together.
LENGTHS = (17, 6)
PLAIN = {"kernels": "torch", "runner": "eager", "attention": "eager"}


def prompts(vocab=256):
    rng = random.Random(3)
    return [[rng.randrange(vocab) for _ in range(length)] for length in LENGTHS]


def job(model, *, sequence=False, **sections):
    return {
        "sections": {"model": str(model), **sections},
        "executor": {"sequence": sequence},
        "prompts": prompts(),
        "steps": STEPS,
    }


def expected(model, **sections):
    """Return what one process answers: logits of each prompt, and greedy ids."""
    engine = {"max_model_len": 128} | sections.pop("engine", {})
    with engine_of(model, engine=engine, **PLAIN | sections) as one:
        logits = [prompt_logits(one, prompt).numpy() for prompt in prompts()]
        ids = [completion.token_ids for completion in one.generate(prompts(), GREEDY)]
    return logits, ids


def check(results, name, logits, ids, tolerance=1e-4):
    for number, one in enumerate(logits):
        found = results[f"{name}/logits{number}"]
        assert found.shape == one.shape
        np.testing.assert_allclose(found, one, atol=tolerance, rtol=0, err_msg=f"{name}, prompt {number}")
    together = np.concatenate([logits[0][len(logits[0]) // 2 :], *logits[1:]])
    np.testing.assert_allclose(results[f"{name}/mixed"], together, atol=tolerance, rtol=0, err_msg=name)
    assert results[f"{name}/greedy"].tolist() == [list(one) for one in ids], name


def two_ways(model, name, **sections):
    """Jobs of a model with tensor parallelism alone, and with tokens sharded too."""
    return {f"{name} tp": job(model, **sections), f"{name} sp": job(model, sequence=True, **sections)}


@pytest.fixture(scope="module")
def families(tmp_path_factory):
    """Every family's tiny model, run by two ranks in one start."""
    root = tmp_path_factory.mktemp("families")
    jobs = {}
    for index, case in enumerate(CASES):
        saved(case, root / str(index))
        jobs |= two_ways(root / str(index), case.name, engine={"max_model_len": case.max_model_len})
    return root, run_ranks(root / "run", 2, jobs)[0]


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name for case in CASES])
def test_two_ranks_answer_as_one_process_does_for_every_family(families, index):
    root, results = families
    case = CASES[index]
    logits, ids = expected(root / str(index), engine={"max_model_len": case.max_model_len})
    for way in ("tp", "sp"):
        check(results, f"{case.name} {way}", logits, ids)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Llamas whose sizes are awkward for four ranks."""
    root = tmp_path_factory.mktemp("models")
    made = {
        "each kv head on two ranks": tiny_llama(root, heads=8, kv_heads=2, head_dim=8)[0],
        "one kv head on all ranks": tiny_llama(root, heads=4, kv_heads=1)[0],
        "all biases": tiny_llama(root, heads=4, kv_heads=4, attention_bias=True, mlp_bias=True)[0],
        "tied": tiny_llama(root, heads=4, kv_heads=4, tie=True, vocab=258)[0],
        "fewer ids than ranks fill": tiny_llama(root, heads=4, kv_heads=4, vocab=261)[0],
    }
    return root, made


def test_four_ranks_answer_as_one_process_does(models):
    root, made = models
    jobs = {}
    for name, model in made.items():
        jobs |= two_ways(model, name)
    results, _ = run_ranks(root / "run4", 4, jobs)
    for name, model in made.items():
        logits, ids = expected(model)
        for way in ("tp", "sp"):
            check(results, f"{name} {way}", logits, ids)


QUANTIZERS = {
    "int8": {"use": "int8", "activations": "float", "group": 32},
    "int8 rows": {"use": "int8", "activations": "float", "group": 0},
    "int4": {"use": "int4", "group": 32},
    "sparse": {"use": "sparse24"},
}


def test_quantized_weights_are_those_of_one_process_cut_between_ranks(tmp_path):
    """Rows, groups and fours of columns are rounded as in one process, so that only sums differ."""
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2)
    jobs = {}
    for name, quantizer in QUANTIZERS.items():
        jobs |= two_ways(model, name, quantizer=quantizer)
    results, _ = run_ranks(tmp_path / "run", 2, jobs)
    for name, quantizer in QUANTIZERS.items():
        logits, ids = expected(model, quantizer=quantizer)
        for way in ("tp", "sp"):
            check(results, f"{name} {way}", logits, ids)


def test_smollm2_over_three_ranks_answers_as_one_process_does(tmp_path):
    results, _ = run_ranks(tmp_path / "run", 3, two_ways("smollm2", "smollm2"))
    logits, ids = expected("smollm2")
    for way in ("tp", "sp"):
        check(results, f"smollm2 {way}", logits, ids)


@pytest.mark.parametrize("sequence", [False, True])
def test_counted_traffic_is_what_the_formulas_say(tmp_path, sequence):
    """15 tokens of a mixed batch, which two ranks fill up to an even number."""
    layers, embed, vocab = 3, 32, 257
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2, hidden=embed, layers=layers)
    _, traffic = run_ranks(tmp_path / "run", 2, {"one": job(model, sequence=sequence)})
    tokens = LENGTHS[0] - LENGTHS[0] // 2 + sum(LENGTHS[1:])
    filled = tokens + tokens % 2
    for rank, counted in enumerate(one["one"] for one in traffic):
        if sequence:
            assert counted["reduce_scatter"] == {
                "calls": 2 * layers + 1,
                "bytes": (2 * layers + 1) * filled * embed * 4,
            }
            assert counted["gather_tokens"] == {"calls": 2 * layers, "bytes": 2 * layers * filled * embed * 4}
            assert counted["gather_rows"] == {"calls": 1, "bytes": tokens * embed * 4}
        else:
            assert counted["all_reduce"] == {"calls": 2 * layers + 1, "bytes": (2 * layers + 1) * tokens * embed * 4}
        half = -(-vocab // 2)
        assert counted.get("gather_logits") == ({"calls": 1, "bytes": tokens * half * 4} if rank else None)


def test_a_sequence_s_ranks_keep_a_share_of_the_activations(tmp_path):
    """What a stage hands on is a half of the tokens, rounded up."""
    from sliced_ranks import SlicedRank

    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2)
    rank = SlicedRank({"model": str(model)}, {"tp": 2, "sequence": True}, 0)
    assert rank.tensor.own_tokens(torch.arange(5)).tolist() == [0, 1, 2]
    rank.tensor.rank = 1
    assert rank.tensor.own_tokens(torch.arange(5)).tolist() == [3, 4, 0]
