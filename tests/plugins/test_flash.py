"""The backend `flash` where there is no GPU: its algorithm in torch ops, what it fits, and whole engines over it."""

import random
from typing import ClassVar

import pytest
import torch
from attrs import evolve, frozen

from attending import AttentionRow, attend, attention_spec
from engines import count_preemptions, engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.errors import ModelNotFoundError
from intarsia.protocols import PartContext
from intarsia.references import find_model
from intarsia.testing import poison_cache, prompt_logits
from intarsia.testing.attention_backends import AttentionContract
from intarsia.testing.attention_case import ROWS
from intarsia.types import DecoderSpec, EngineOptions, Fit, LayerSpec, MlpSpec, NormSpec, Unfit
from intarsia_flash import attention, provide_attention_backends
from intarsia_flash.attention import FlashAttention
from intarsia_flash.online import BLOCK, TILE, OnlineAttention
from models import tiny_llama


class TestWithoutAGpu(AttentionContract):
    page_sizes: ClassVar = (1, 3, 16, 100, 200)
    rows: ClassVar = (*ROWS, (TILE - 1, 2), (40, BLOCK + 3), (200, 5))

    def provider(self):
        (provider,) = provide_attention_backends()
        return provider


def test_no_scores_of_all_tokens_by_all_tokens_are_held():
    """The largest tensor that any op returns is that of a block of queries and a tile of keys, for all heads."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                Largest.size = max(Largest.size, out.numel())
            return out

    spec = attention_spec(4, 2, 16)
    row = AttentionRow.random(spec, 0, 2048, 0)
    cache_and_queries = 2048 * 16 * 6 * 2
    with Largest():
        attend(OnlineAttention(), spec, [row])
    assert Largest.size <= cache_and_queries < 2048 * 2048


# --- what it fits -----------------------------------------------------------------------------------------------------


def context(head_dim=64, device="cuda", dtype="bfloat16", invariance="numeric", **facts):
    layer = LayerSpec(attention_spec(4, 2, head_dim, **facts), MlpSpec(8, "silu"))
    spec = DecoderSpec("llama", 10, 8, 64, NormSpec(), True, (layer, layer))
    return PartContext(engine=EngineOptions(device=device, dtype=dtype, invariance=invariance), spec=spec)


@frozen
class Properties:
    """What torch says of a GPU, from torch 2.10 on."""

    major: int = 9
    shared_memory_per_multiprocessor: int = 233472
    shared_memory_per_block_optin: int = 232448


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that says what it can do, and no more."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties())


def test_it_is_the_choice_of_gpus_and_says_what_else_it_does_not_fit(gpu, monkeypatch):
    found = attention.fit(context())
    assert isinstance(found, Fit) and found.rank > 60
    for facts, word in (({"head_dim": 33}, "layer 0 have 33"), ({"head_dim": 264}, "layer 0 have 264")):
        refusal = attention.fit(context(**facts))
        assert isinstance(refusal, Unfit) and word in refusal.reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    refusal = attention.fit(context(device="cuda:1"))
    assert isinstance(refusal, Unfit) and "8.0" in refusal.reason and "cuda:1 has 7.5" in refusal.reason


def test_on_a_gpu_it_splits_unless_bits_may_not_depend_on_chunks(gpu):
    (provider,) = provide_attention_backends()
    for demanded, splits, promised in (
        ("numeric", True, "neighbours"),
        ("neighbours", True, "neighbours"),
        ("bitwise", False, "bitwise"),
    ):
        part = provider.build(context(invariance=demanded, window=9))
        assert isinstance(part, FlashAttention) and part.splits == splits and part.roomy
        assert part.invariance("bfloat16") == promised
        assert part.formats == ("bfloat16", "int8") and len(part.layers) == 1
    assert provider.build(context(dtype="float32")).formats == ("float32",)


@pytest.mark.parametrize(("major", "shared"), [(8, 232448), (12, 101376)])
def test_a_gpu_of_less_shared_memory_or_older_tensor_cores_has_smaller_tiles(gpu, monkeypatch, major, shared):
    facts = Properties(major, shared, shared)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    (provider,) = provide_attention_backends()
    assert not provider.build(context()).roomy


def test_on_a_cpu_it_ranks_below_what_is_made_for_it():
    (provider,) = provide_attention_backends()
    found = provider.fit(context(device="cpu", head_dim=33))
    assert isinstance(found, Fit) and 10 < found.rank < 20
    part = provider.build(context(device="cpu"))
    assert isinstance(part, OnlineAttention) and part.invariance("float32") == "neighbours"


# --- engines ----------------------------------------------------------------------------------------------------------

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def tiny(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    saved(request.param, path)
    rng = random.Random(7)
    return request.param, path, [[rng.randrange(256) for _ in range(length)] for length in request.param.lengths]


def engine_over(path, attention, case=None, **cache):
    made = engine_of(
        path,
        engine={"max_model_len": 128 if case is None else case.max_model_len},
        cache={"use": "paged", "memory": "64MiB"} | cache,
        scheduler={"use": "inflight", "max_tokens": 24},
        attention=attention,
        kernels="torch",
        runner="eager",
    )
    poison_cache(made)
    return made


def test_every_family_gives_the_ids_and_logits_of_the_oracle(tiny):
    case, path, prompts = tiny
    with engine_over(path, "eager", case) as engine:
        right = prompt_logits(engine, prompts[0])
        expected = [one.token_ids for one in engine.generate(prompts, GREEDY)]
    with engine_over(path, "flash", case) as engine:
        assert engine.explain()["invariance"]["level"] == "neighbours"
        for chunk in (None, 7):
            assert float((prompt_logits(engine, prompts[0], chunk=chunk) - right).abs().max()) <= 1e-4
            poison_cache(engine)
        assert [one.token_ids for one in engine.generate(prompts, GREEDY)] == expected


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@torch.no_grad()
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompts_at_the_edges_of_pages_in_any_chunks_give_the_ids_of_transformers(llama, page_size):
    path, model = llama
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (15, 16, 17, 31, 32, 33, 37)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
        expected.append(
            tuple(model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(prompt) :].tolist())
        )
    for budget in (7, 16, 37):
        with engine_of(
            path,
            cache={"use": "paged", "memory": "64MiB", "page_size": page_size},
            scheduler={"use": "inflight", "max_tokens": budget},
            attention="flash",
            kernels="torch",
            runner="eager",
        ) as engine:
            poison_cache(engine)
            assert [one.token_ids for one in engine.generate(prompts, params)] == expected


def test_answers_are_the_same_under_preemption(llama):
    path, _ = llama
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(20)] for _ in range(6)]
    params = [SamplingParams(temperature=t, seed=i, max_tokens=40, ignore_eos=True) for i, t in enumerate([0, 0.8] * 3)]
    with engine_over(path, "flash") as engine:
        solo = [engine.generate([p], s)[0].token_ids for p, s in zip(prompts, params, strict=True)]
        page = engine.parts.layout.page_bytes
    with engine_over(path, "flash", memory=str(10 * page)) as engine:
        preempted = count_preemptions(engine)
        assert [one.token_ids for one in engine.generate(prompts, params)] == solo
        assert preempted


@pytest.mark.slow
def test_smollm2_gives_the_ids_of_the_oracle():
    try:
        find_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    texts = ["The capital of France is", "def fibonacci(n):\n    ", "Once upon a time, in a small village by the sea,"]
    found = []
    for attention_key in ("eager", "flash"):
        options = {"max_model_len": 256, "threads": 2}
        with engine_of("smollm2", engine=options, attention=attention_key, runner="eager") as engine:
            found.append([one.token_ids for one in engine.generate(texts, evolve(GREEDY, max_tokens=24))])
    assert found[0] == found[1]
