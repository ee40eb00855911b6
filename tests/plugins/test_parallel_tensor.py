"""Tensor and sequence parallelism over 2, 3 and 4 gloo processes against one process."""

import random

import numpy as np
import pytest
import torch

from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.testing import prompt_logits
from intarsia_parallel.partition import share_out
from intarsia_parallel.traffic import sent, token_payloads
from models import tiny_llama
from sliced_ranks import SlicedRank, run_ranks

STEPS = 4
#: One a prompt, in one batch: where the likeliest id is all that is needed, and where all logits are.
PARAMS = ({"temperature": 0.0}, {"temperature": 1.5, "seed": 7, "top_p": 0.9, "repetition_penalty": 1.2})
#: Odd numbers of tokens, which do not divide between ranks, alone and together.
LENGTHS = (17, 6)
PLAIN = {"kernels": "torch", "runner": "eager", "attention": "eager"}


def prompts(vocab=256):
    rng = random.Random(3)
    return [[rng.randrange(vocab) for _ in range(length)] for length in LENGTHS]


def job(model, *, sequence=False, params=PARAMS, steps=STEPS, **sections):
    return {
        "sections": {"model": str(model), **sections},
        "executor": {"sequence": sequence},
        "prompts": prompts(),
        "params": list(params),
        "steps": steps,
    }


def expected(model, *, params=PARAMS, steps=STEPS, **sections):
    """Return what one process answers: logits of each prompt, and the ids that are chosen, greedily and by a seed."""
    engine = {"max_model_len": 128} | sections.pop("engine", {})
    with engine_of(model, engine=engine, **PLAIN | sections) as one:
        logits = [prompt_logits(one, prompt).numpy() for prompt in prompts()]
        asked = [SamplingParams(**each, max_tokens=steps, ignore_eos=True) for each in params]
        ids = [completion.token_ids for completion in one.generate(prompts(), asked)]
    return logits, ids


def check(results, name, logits, ids, tolerance=1e-4):
    for number, one in enumerate(logits):
        found = results[f"{name}/logits{number}"]
        assert found.shape == one.shape
        np.testing.assert_allclose(found, one, atol=tolerance, rtol=0, err_msg=f"{name}, prompt {number}")
    together = np.concatenate([logits[0][len(logits[0]) // 2 :], *logits[1:]])
    np.testing.assert_allclose(results[f"{name}/mixed"], together, atol=tolerance, rtol=0, err_msg=name)
    assert results[f"{name}/ids"].tolist() == [list(one) for one in ids], name


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
        # 320 logits and 257 tokens: the last rank has none, and the one before it one.
        "more logits than tokens": tiny_llama(root, heads=4, kv_heads=4, vocab=320)[0],
    }
    return root, made


@pytest.mark.slow
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


HOT = {"temperature": 100.0, "seed": 3, "logprobs": 257}


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_an_id_of_a_vocabulary_that_does_not_divide_is_drawn_as_by_one_process(tmp_path, size):
    """At temperature 100 each of 257 ids is about as likely, and what fills ranks up is none of them."""
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=4, layers=1)
    params, steps = [HOT, HOT | {"seed": 4}], 50
    results, _ = run_ranks(tmp_path / "run", size, {"hot": job(model, params=params, steps=steps)})
    logits, ids = expected(model, params=params, steps=steps)
    check(results, "hot", logits, ids)
    assert len({token for one in ids for token in one}) > 60, "they are spread over the vocabulary"
    top = results["hot/top"]
    assert top.shape == (2 * steps, 257, 2)
    assert (top[:, :, 0] == np.arange(257)).all()
    np.testing.assert_allclose(np.exp(top[:, :, 1]).sum(1), 1, atol=1e-5)


QUANTIZED = {
    "int8": {"use": "int8", "activations": "float", "group": 32},
    "int8 rows": {"use": "int8", "activations": "float", "group": 0},
    "int8 embedding": {"use": "int8", "activations": "float", "group": 32, "embed": True},
    "int4": {"use": "int4", "group": 32},
    "sparse": {"use": "sparse24"},
    "sparse int8": {"use": "sparse24", "values": "int8"},
}


def test_quantized_weights_are_those_of_one_process_cut_between_ranks(tmp_path):
    """Rows, groups and fours of columns are rounded as in one process, so that only sums differ.

    Every linear has a bias; those behind the sums are added once.
    """
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2, layers=2, attention_bias=True, mlp_bias=True)
    tied, _ = tiny_llama(tmp_path, heads=4, kv_heads=2, layers=2, tie=True)
    cases = {name: (model, quantizer) for name, quantizer in QUANTIZED.items()}
    cases["tied int8"] = (tied, QUANTIZED["int8"])
    jobs = {}
    for name, (folder, quantizer) in cases.items():
        jobs |= two_ways(folder, name, quantizer=quantizer)
    results, _ = run_ranks(tmp_path / "run", 2, jobs)
    for name, (folder, quantizer) in cases.items():
        logits, ids = expected(folder, quantizer=quantizer)
        for way in ("tp", "sp"):
            check(results, f"{name} {way}", logits, ids)


@pytest.mark.slow
@pytest.mark.parametrize("sequence", [False, True], ids=["tp", "sp"])
def test_smollm2_over_three_ranks_answers_as_one_process_does(tmp_path, sequence):
    results, _ = run_ranks(tmp_path / "run", 3, {"smollm2": job("smollm2", sequence=sequence)})
    logits, ids = expected("smollm2")
    check(results, "smollm2", logits, ids)


def test_counted_traffic_is_what_the_formulas_say(tmp_path):
    """15 tokens of a mixed batch, which two ranks fill up to 16 where they shard them."""
    llama, _ = tiny_llama(tmp_path, heads=4, kv_heads=2, hidden=32, layers=3)
    olmo, phi = (next(case for case in CASES if case.name == name) for name in ("olmo2", "phi"))
    saved(olmo, tmp_path / "olmo2")
    saved(phi, tmp_path / "phi")
    models = {"llama": llama, "olmo2": tmp_path / "olmo2", "phi": tmp_path / "phi"}
    jobs = {}
    for name, model in models.items():
        jobs |= two_ways(model, name)
    _, traffic = run_ranks(tmp_path / "run", 2, jobs)
    tokens = LENGTHS[0] - LENGTHS[0] // 2 + sum(LENGTHS[1:])
    assert tokens == 15
    for name, model in models.items():
        spec = SlicedRank({"model": str(model)}, {}).parts.spec
        for sequence in (False, True):
            filled = tokens + tokens % 2 if sequence else tokens
            for rank, counted in enumerate(one[f"{name} {'sp' if sequence else 'tp'}"] for one in traffic):
                share = share_out(spec, 2, 1)[rank]
                payloads = token_payloads(spec, share, "float32", sequence=sequence)
                sums = {op: counted[op]["bytes"] for op in payloads}
                # Norms over all heads work on the tokens that were gathered.
                assert sums == {
                    op: size * (tokens if op == "rms_norm_over_ranks" else filled) for op, size in payloads.items()
                }
                logits = {"gather_rows": tokens * spec.embed_dim * 4} if sequence else {}
                logits |= {"gather_logits": tokens * 129 * 4} if rank else {}
                assert {op: counted[op]["bytes"] for op in counted.keys() - payloads.keys()} == logits


def test_a_llama_s_layer_costs_two_sums_of_its_width():
    """The formula by hand: SmolLM2 in bfloat16 over three ranks, 30 layers and the embedding."""
    spec = SlicedRank.composed({"model": "smollm2"}, {}).spec
    share = share_out(spec, 3, 1)[0]
    width = 576 * 2
    assert token_payloads(spec, share, "bfloat16", sequence=False) == {"all_reduce": 61 * width}
    sharded = token_payloads(spec, share, "bfloat16", sequence=True)
    assert sharded == {"reduce_scatter": 61 * width, "gather_tokens": 60 * width}
    assert sent({"all_reduce": 61 * width}, 3) == 61 * width * 4 // 3
    assert sent(sharded, 3) == 121 * width * 2 // 3


def test_a_sequence_s_ranks_keep_a_share_of_the_activations(tmp_path):
    """What a stage hands on is a half of the tokens, rounded up."""
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2)
    rank = SlicedRank({"model": str(model)}, {"tp": 2, "sequence": True}, 0)
    assert rank.tensor.own_tokens(torch.arange(5)).tolist() == [0, 1, 2]
    rank.tensor.rank = 1
    assert rank.tensor.own_tokens(torch.arange(5)).tolist() == [3, 4, 0]
