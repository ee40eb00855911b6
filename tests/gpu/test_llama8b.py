"""A model of Llama 3 8B's shape, with random weights, in bf16: it runs, means the same in every part, and fits."""

import random

import pytest
import torch

from intarsia import Engine, SamplingParams
from intarsia.testing import poison_cache, prompt_logits
from intarsia_bench.gpu import random_weights

pytestmark = pytest.mark.gpu

#: Weights, and a cache of a few sequences.
BYTES = 24 << 30


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if torch.cuda.mem_get_info()[0] < BYTES:
        pytest.skip(f"the model takes {BYTES >> 30} GiB")
    folder = random_weights.save_config(tmp_path_factory.mktemp("llama"))
    config = {
        "model": {"use": str(folder), "loader": "random"},
        "engine": {"device": "cuda", "dtype": "bfloat16", "max_model_len": 4096, "seed": 0},
        "cache": {"memory": "4GiB"},
    }
    with Engine.from_config(config, plugins=[random_weights]) as made:
        poison_cache(made)
        yield made


def prompt(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(128256) for _ in range(length)]


def test_it_has_eight_billion_parameters_on_the_device(engine):
    assert engine.parts.weight_bytes == 2 * 8_030_261_248
    assert torch.cuda.memory_allocated() >= engine.parts.weight_bytes


def test_logits_are_finite_and_differ_little_between_chunks(engine):
    ids = prompt(700)
    whole, pieces = (prompt_logits(engine, ids, chunk=chunk) for chunk in (None, 256))
    assert bool(whole.isfinite().all()) and float(whole.std()) > 0
    # Each is a rounding of the same numbers in bf16 through 32 layers.
    assert float((whole - pieces).abs().mean()) <= 0.05 * float(whole.std())


def test_a_mixed_batch_answers_every_request_and_leaves_no_page(engine):
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    answers = engine.generate([prompt(n, n) for n in (1, 17, 300, 1500)], params)
    assert [len(answer.token_ids) for answer in answers] == [16] * 4
    engine.parts.cache.check_integrity()
