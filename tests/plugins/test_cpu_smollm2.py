"""SmolLM2 by the fused step: the ids and the perplexity of transformers."""

import math
import pydoc_data.topics

import pytest
import torch

from engines import engine_of
from intarsia import SamplingParams
from intarsia.errors import ModelNotFoundError
from intarsia.references import find_model
from intarsia.testing import prompt_logits
from intarsia_cpu.build import unavailable
from smollm import fast_bf16_products, smollm_transformers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # a CPU without products of bf16 takes minutes
    pytest.mark.skipif(unavailable() is not None, reason="there is no C++ compiler"),
]

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 4, 8, 16,",
)
GREEDY = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
#: Tokens a window, between the beginnings of two, and windows: of a text that is on every Python.
WINDOW, STRIDE, NUM_WINDOWS = 1024, 512, 12


@pytest.fixture(scope="module", autouse=True)
def smollm2():
    try:
        return find_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


def engine(dtype, **sections):
    options = {"dtype": dtype, "threads": 2, "max_model_len": 2048, "invariance": "bitwise"}
    return engine_of(
        "smollm2", engine=options, cache={"use": "paged", "memory": "512MiB"}, runner="cpu_fused", **sections
    )


@torch.no_grad()
def test_greedy_ids_in_fp32_equal_transformers_alone_and_in_a_batch():
    model = smollm_transformers(torch.float32)
    with engine("float32") as ours:
        prompts = [ours.parts.tokenizer.encode(text) for text in TEXTS]
        together = [completion.token_ids for completion in ours.generate(prompts, GREEDY)]
        assert together == [ours.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    for prompt, found in zip(prompts, together, strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": GREEDY.max_tokens, "eos_token_id": None, "pad_token_id": 0}
        theirs = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert found == tuple(theirs[0, len(prompt) :].tolist())


def perplexity(ids, logits_of):
    """Of a strided window: each token is scored once, behind at least WINDOW - STRIDE others after the first window."""
    total, count = 0.0, 0
    for index in range(NUM_WINDOWS):
        window = ids[index * STRIDE : index * STRIDE + WINDOW]
        scores = torch.log_softmax(logits_of(window).float(), dim=-1)[:-1]
        chosen = scores.gather(1, torch.tensor(window[1:]).unsqueeze(1)).squeeze(1)
        new = chosen if index == 0 else chosen[WINDOW - STRIDE - 1 :]
        total, count = total - float(new.double().sum()), count + len(new)
    return math.exp(total / count)


@pytest.fixture(scope="module")
def text():
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))[:60_000]


@pytest.fixture(scope="module")
def theirs(text):
    model = smollm_transformers(torch.bfloat16)
    with engine("bfloat16") as ours:
        ids = ours.parts.tokenizer.encode(text)
    with torch.no_grad(), fast_bf16_products():
        return perplexity(ids, lambda window: model(torch.tensor([window])).logits[0])


def ours_in(text, **sections):
    with engine("bfloat16", **sections) as ours:
        ids = ours.parts.tokenizer.encode(text)
        return perplexity(ids, lambda window: prompt_logits(ours, window, chunk=256))


def test_the_perplexity_in_bf16_equals_transformers(text, theirs):
    assert ours_in(text) == pytest.approx(theirs, rel=1e-3)


def test_the_perplexity_of_int8_weights_is_near_that_of_bf16(text, theirs):
    """Rotated, as by default; without rotation it is 0.6% more."""
    assert ours_in(text, quantizer="int8") == pytest.approx(theirs, rel=3e-3)
