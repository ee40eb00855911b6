"""The eager runner against transformers: logits and greedy tokens, chunks, layer ranges, windows, bf16, SmolLM2.

Shape legend: T tokens, E embed, V vocab.
"""

from functools import partial

import pytest
import torch
from attrs import evolve
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from intarsia import Engine, SamplingParams
from intarsia.defaults import sdpa
from intarsia.defaults.attention import build_eager
from intarsia.errors import ModelNotFoundError
from intarsia.executor import forward_batch
from intarsia.models.cache import TensorCache
from intarsia.models.eager import EagerRunner
from intarsia.ops import resolve
from intarsia.protocols import PartContext, RunnerContext
from intarsia.references import find_model
from intarsia.testing import poison_cache, prompt_logits
from intarsia.types import (
    AttentionSpec,
    CacheGroup,
    CacheLayout,
    DecoderSpec,
    EngineOptions,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    Row,
    dense,
)
from models import tiny_llama

BACKENDS = {"eager": build_eager, "sdpa": sdpa.build}
backends = pytest.mark.parametrize("attention", BACKENDS)


def naive_engine(model, attention="sdpa", *, dtype="float32", page_size=16, fmt="auto", memory="64MiB"):
    """An engine of the plain parts alone: what this file tests is the runner."""
    return Engine.from_config(
        {
            "model": str(model),
            # One thread: several wait for each other at length where a machine is busy.
            "engine": {"dtype": dtype, "threads": 1, "max_model_len": 512},
            "attention": attention,
            "runner": "eager",
            "scheduler": {"use": "static", "max_batch": 8},
            "cache": {"use": "contiguous", "memory": memory, "page_size": page_size, "format": fmt},
        }
    )


def prompt(length, seed=0, vocab=256):
    return torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def reference_logits(model, ids):
    return model(torch.tensor([ids])).logits[0].float()


def reference_greedy(model, ids, tokens):
    """What the model chooses at each of `tokens`' places: the tokens themselves if they are its greedy answer."""
    logits = reference_logits(model, [*ids, *tokens])
    return tuple(logits[len(ids) - 1 : -1].argmax(-1).tolist())


def greedy(num_tokens):
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def check_logits(actual, expected, bound=1e-4):
    assert actual.shape == expected.shape and actual.dtype == torch.float32
    assert float((actual - expected).abs().max()) <= bound


# --- tiny llamas ------------------------------------------------------------------------------------------------------

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
VARIANTS = {
    "MHA": {"heads": 4, "kv_heads": 4},
    "GQA": {"heads": 4, "kv_heads": 2},
    "MQA": {"heads": 4, "kv_heads": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "tied": {"tie": True, "heads": 4, "kv_heads": 4},
    "wide heads": {"head_dim": 24},
    "narrow heads": {"head_dim": 6, "kv_heads": 1, "attention_bias": True, "tie": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "llama3": {"rope_parameters": LLAMA3, "heads": 4, "kv_heads": 4},
}
LENGTHS = (1, 2, 15, 16, 17, 40, 100)


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request, tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("variant"), seed=len(request.param), **VARIANTS[request.param])


@pytest.fixture(scope="module", params=BACKENDS)
def variant_engine(variant, request):
    with naive_engine(variant[0], request.param) as engine:
        yield engine


def test_logits_equal_transformers_at_every_position(variant, variant_engine):
    for length in LENGTHS:
        ids = prompt(length, seed=length)
        check_logits(prompt_logits(variant_engine, ids), reference_logits(variant[1], ids))


def test_greedy_tokens_equal_transformers_alone_and_in_batches(variant, variant_engine):
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    alone = [variant_engine.generate([ids], greedy(12))[0].token_ids for ids in prompts]
    assert [len(tokens) for tokens in alone] == [12] * len(prompts)
    assert alone == [reference_greedy(variant[1], ids, tokens) for ids, tokens in zip(prompts, alone, strict=True)]
    # Two batches, with prompts and answers of different lengths side by side.
    params = [greedy(12 - i) for i in range(len(prompts))]
    together = variant_engine.generate(prompts + prompts[:3], params + [greedy(12)] * 3)
    assert [c.token_ids for c in together[: len(prompts)]] == [tokens[: 12 - i] for i, tokens in enumerate(alone)]
    assert [c.token_ids for c in together[len(prompts) :]] == alone[:3]


# --- chunks and pages -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


@backends
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_a_prompt_in_chunks_equals_transformers_whatever_the_page_size(tiny, attention, page_size):
    with naive_engine(tiny[0], attention, page_size=page_size) as engine:
        for length in (15, 16, 17, 31, 32, 33, 37):
            expected = reference_logits(tiny[1], prompt(length, seed=length))
            for chunk in (1, 7, 16, 36, 37, None):
                poison_cache(engine)
                check_logits(prompt_logits(engine, prompt(length, seed=length), chunk=chunk), expected)


@backends
def test_a_poisoned_cache_does_not_reach_the_answers(tiny, attention):
    prompts = [prompt(length, seed=length) for length in (15, 16, 17, 33)]
    with naive_engine(tiny[0], attention) as engine:
        poison_cache(engine)
        answers = [c.token_ids for c in engine.generate(prompts, greedy(20))]
    assert answers == [reference_greedy(tiny[1], ids, tokens) for ids, tokens in zip(prompts, answers, strict=True)]


@backends
def test_a_cache_in_bf16_serves_an_fp32_model_to_within_its_rounding(tiny, attention):
    ids = prompt(40)
    expected = reference_logits(tiny[1], ids)
    with naive_engine(tiny[0], attention, fmt="bfloat16") as engine:
        assert engine.parts.layout.entry_bytes == 2
        actual = prompt_logits(engine, ids, chunk=7)
    error = (actual - expected).abs()
    # Keys and values are rounded to 8 bits; the logits have a deviation of some 5.
    assert 1e-4 < float(error.max()) < 0.05 * float(expected.std()) * 8
    assert float(error.mean()) < 0.02 * float(expected.std())


# --- the runner by itself ---------------------------------------------------------------------------------------------


def rows_of(engine, *shapes):
    """Rows of (start, length), each with a page table of its own, and their ids."""
    size, rows, page = engine.parts.layout.page_size, [], 0
    for i, (start, length) in enumerate(shapes):
        count = -(-(start + length) // size)
        ids = tuple(prompt(start + length, seed=i)[start:])
        pages = (tuple(range(page, page + count)),)
        rows.append(Row(sequence_id=(f"r{i}", 0), token_ids=ids, start=start, pages=pages))
        page += count
    return rows, [row.token_ids for row in rows]


@backends
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layer_ranges_laid_end_to_end_equal_the_whole_run_bit_for_bit(tiny, attention, dtype):
    with naive_engine(tiny[0], attention, dtype=dtype) as engine, torch.inference_mode():
        executor = engine.parts.executor
        runner, cache, layout = executor._stage._runner, executor._stage._cache, engine.parts.layout
        rows, ids = rows_of(engine, (0, 20), (0, 3), (0, 1))
        batch = forward_batch(rows, ids, layout, torch.device("cpu"))
        batch = evolve(batch, attention=engine.parts.attention.prepare(batch, layout))
        run = partial(runner.run, batch, cache)
        whole = run(range(4))
        for cut in range(5):
            assert torch.equal(run(range(cut, 4), run(range(cut))), whole), cut
        hidden = None
        for layer in range(4):
            hidden = run(range(layer, layer + 1), hidden)
        assert torch.equal(hidden, whole)
        assert not torch.equal(run(range(3)), whole)


def qwen2_runner(model, attention, page_size):
    """A hand-made spec: the first layers see everything, the others a window. Two cache groups, q/k/v biases only."""
    config, state = model.config, {k.removeprefix("model."): v.detach() for k, v in model.state_dict().items()}
    head_dim = config.hidden_size // config.num_attention_heads
    rope = RopeSpec("default", config.rope_parameters["rope_theta"], head_dim)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                config.num_attention_heads,
                config.num_key_value_heads,
                head_dim,
                head_dim**-0.5,
                rope,
                qkv_bias=True,
                window=config.sliding_window if kind == "sliding_attention" else None,
            ),
            MlpSpec(config.intermediate_size, "silu"),
        )
        for kind in config.layer_types
    )
    spec = DecoderSpec(
        "hand-made", config.vocab_size, config.hidden_size, 256, NormSpec(eps=config.rms_norm_eps), False, layers
    )
    weights = {
        "embed.weight": dense(state["embed_tokens.weight"]),
        "norm.weight": state["norm.weight"],
        "head.weight": dense(state["lm_head.weight"]),
    }
    for i in range(len(layers)):
        parts = {
            "attention_norm": ("input_layernorm",),
            "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            "out": ("self_attn.o_proj",),
            "mlp_norm": ("post_attention_layernorm",),
            "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
            "down": ("mlp.down_proj",),
        }
        for name, sources in parts.items():
            joined = torch.cat([state[f"layers.{i}.{source}.weight"] for source in sources])
            weights[f"layers.{i}.{name}.weight"] = joined if joined.ndim == 1 else dense(joined)
        biases = [state[f"layers.{i}.{source}.bias"] for source in parts["qkv"]]
        weights[f"layers.{i}.qkv.bias"] = torch.cat(biases)
    members = {None: [], config.sliding_window: []}
    for i, layer in enumerate(layers):
        members[layer.attention.window].append(i)
    groups = tuple(
        CacheGroup(
            kind="full" if window is None else "window",
            layers=tuple(indices),
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            window=window,
        )
        for window, indices in members.items()
    )
    layout = CacheLayout(order="PKSD", format="float32", entry_bytes=4, page_size=page_size, groups=groups)
    context = RunnerContext(
        engine=EngineOptions(device="cpu", dtype="float32", max_model_len=256),
        spec=spec,
        layout=layout,
        ops=resolve([], "float32", ["dense"]),
        attention=BACKENDS[attention](PartContext(engine=EngineOptions(device="cpu", dtype="float32"), spec=None)),
        weights=weights,
    )
    return EagerRunner.build(context)


@backends
def test_layers_with_and_without_a_window_have_cache_groups_of_their_own(attention):
    torch.manual_seed(5)
    config = Qwen2Config(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=100,
        use_sliding_window=True,
        sliding_window=5,
        max_window_layers=2,
        attn_implementation="eager",
    )
    model = Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.3)
    ids, page_size = prompt(40, vocab=100), 4
    runner = qwen2_runner(model, attention, page_size)
    cache = TensorCache.allocate(runner.layout, 30, torch.device("cpu"))
    cache.fill(float("nan"))
    # Each group has a table of its own; neither lies in order.
    tables = (tuple(range(10, 0, -1)), (*range(12, 30, 2), 11))
    logits = []
    with torch.inference_mode():
        for start, stop in ((0, 3), (3, 4), (4, 21), (21, 40)):
            row = Row(sequence_id=("a", 0), token_ids=tuple(ids[start:stop]), start=start, pages=tables)
            batch = forward_batch([row], [row.token_ids], runner.layout, torch.device("cpu"))
            batch = evolve(batch, attention=runner.attention.prepare(batch, runner.layout))
            hidden = runner.run(batch, cache, range(4))
            logits.append(runner.logits(hidden, torch.arange(stop - start)))
    check_logits(torch.cat(logits), reference_logits(model, ids))


# --- bf16 -------------------------------------------------------------------------------------------------------------


@backends
def test_bf16_is_as_near_to_fp32_as_transformers_is(tiny, attention, tmp_path):
    path, model = tiny
    ids = prompt(200)
    exact = reference_logits(model, ids)
    half = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation=attention)
    theirs = (reference_logits(half, ids) - exact).abs()
    with naive_engine(path, attention, dtype="bfloat16") as engine:
        ours = (prompt_logits(engine, ids) - exact).abs()
        chunked = (prompt_logits(engine, ids, chunk=16) - exact).abs()
    for error in (ours, chunked):
        assert float(error.mean()) <= 1.2 * float(theirs.mean())
        assert float(error.max()) <= 2 * float(theirs.max())


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------

TEXTS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "1, 2, 4, 8, 16,",
)


@pytest.fixture(scope="module")
def smollm2():
    try:
        path = find_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))
    # What `from_pretrained(gguf_file=...)` does, which asks for the accelerate package besides.
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    unmatched = model.load_state_dict(loaded["tensors"], strict=False)
    assert (unmatched.missing_keys, unmatched.unexpected_keys) == (
        ["lm_head.weight"],
        [],
    ) and config.tie_word_embeddings
    return model.eval()


@pytest.fixture(scope="module")
def smollm2_engine(smollm2):
    with naive_engine("smollm2", memory="512MiB") as engine:
        yield engine


@pytest.fixture(scope="module")
def smollm2_prompts(smollm2_engine):
    return [smollm2_engine.parts.tokenizer.encode(text) for text in TEXTS]


def test_smollm2_logits_equal_transformers(smollm2, smollm2_engine, smollm2_prompts):
    """Within 1e-4 absolute, where the logits reach 36: twice what 30 layers of fp32 rounding were measured to make."""
    for ids in smollm2_prompts:
        expected = reference_logits(smollm2, ids)
        check_logits(prompt_logits(smollm2_engine, ids), expected)
        check_logits(prompt_logits(smollm2_engine, ids, chunk=3), expected)


def test_smollm2_greedy_tokens_equal_transformers_alone_and_in_a_batch(smollm2, smollm2_engine, smollm2_prompts):
    together = [c.token_ids for c in smollm2_engine.generate(smollm2_prompts, greedy(32))]
    assert [len(tokens) for tokens in together] == [32] * len(TEXTS)
    assert together == [reference_greedy(smollm2, *both) for both in zip(smollm2_prompts, together, strict=True)]
    assert together == [smollm2_engine.generate([ids], greedy(32))[0].token_ids for ids in smollm2_prompts]
