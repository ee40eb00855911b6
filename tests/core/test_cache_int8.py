"""The cache in int8: what an entry is, where it lies, who writes and reads it, and what an engine makes of it.

Shape legend: T tokens, K kv heads, D head dim, P pages, S slots a page.
"""

import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import count_preemptions, engine_of
from intarsia import SamplingParams
from intarsia.cli import run
from intarsia.models.cache import LayerTensors, TensorCache
from intarsia.ops import OPS, int8_entries
from intarsia.testing import poison_cache, prompt_logits
from intarsia.testing.attention_rows import int8_numbers as by_numpy
from intarsia.types import CacheGroup, CacheLayout, CacheMove
from models import tiny_llama

CPU = torch.device("cpu")
several = settings(deadline=None, max_examples=60)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
orders = pytest.mark.parametrize("order", ["PSKD", "PKSD"])


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- entries ----------------------------------------------------------------------------------------------------------


@several
@given(
    st.sampled_from(DTYPES), st.integers(1, 4), st.integers(1, 3), st.integers(1, 70), st.integers(-44, 37), st.data()
)
def test_an_entry_is_off_by_half_its_scale_at_most(dtype, tokens, heads, head_dim, exponent, data):
    x = (normal(data.draw(st.integers(0, 99)), tokens, heads, head_dim) * 10.0**exponent).to(dtype)
    x = torch.where(x.isfinite(), x, 0)
    numbers, scales = int8_entries(x)
    assert (numbers.dtype, scales.dtype) == (torch.int8, torch.float32)
    right_numbers, right_scales = by_numpy(x)
    assert torch.equal(numbers, right_numbers) and torch.equal(scales, right_scales)
    scale = scales.double().unsqueeze(-1)
    error = (numbers.double() * scale - x.double()).abs()
    # A scale of the smallest floats is rounded to a multiple of 2**-149: 127 of its numbers can miss by 64 of these.
    assert (error <= 0.50001 * scale + 64 * 2.0**-149).all()
    assert numbers.abs().max() <= 127


def test_the_largest_number_of_a_vector_is_127_and_outliers_cost_their_own_vector_alone():
    x = normal(0, 2, 2, 64)
    x[0, 1, 5] = 1e4
    numbers, scales = int8_entries(x)
    assert (numbers.abs().amax(dim=-1) == 127).all() and int(numbers[0, 1, 5]) == 127
    assert scales[0, 1] > 70 and (scales[[0, 1, 1], [0, 0, 1]] < 0.04).all()


def test_a_zero_vector_is_zeros_with_scale_zero():
    x = normal(0, 2, 2, 8)
    x[1, 0] = 0
    x[1, 1] = -0.0
    numbers, scales = int8_entries(x)
    assert (numbers[1] == 0).all() and (scales[1] == 0).all() and (scales[0] > 0).all()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_vector_that_is_not_finite_has_scale_nan_and_numbers_zero_and_no_other_has(value, dtype):
    x = normal(0, 3, 2, 8).to(dtype)
    x[1, 0, 3] = value
    numbers, scales = int8_entries(x)
    assert scales[1, 0].isnan() and (numbers[1, 0] == 0).all()
    assert int(scales.isnan().sum()) == 1


def test_the_largest_floats_have_entries():
    x = torch.full((1, 1, 3), 3.4e38)
    x[0, 0, 1] = -3.4e38
    numbers, scales = int8_entries(x)
    assert numbers.tolist() == [[[127, -127, 127]]] and scales.isfinite().all()


@several
@given(st.integers(1, 9), st.integers(0, 8), st.integers(1, 33))
def test_a_tokens_entries_depend_on_that_token_alone(tokens, at, head_dim):
    x, at = normal(tokens, tokens, 3, head_dim), at % tokens
    numbers, scales = int8_entries(x)
    alone = int8_entries(x[at : at + 1])
    assert torch.equal(numbers[at : at + 1], alone[0]) and torch.equal(scales[at : at + 1], alone[1])


# --- memory -----------------------------------------------------------------------------------------------------------


def layout(order="PKSD", page_size=4, head_dims=(8, 6)):
    """Two groups whose layers alternate and whose heads differ."""
    full, window = head_dims
    return CacheLayout(
        order=order,
        format="int8",
        entry_bytes=1,
        scale_bytes=4,
        page_size=page_size,
        groups=(
            CacheGroup(kind="full", layers=(0, 2), num_kv_heads=2, head_dim=full),
            CacheGroup(kind="window", layers=(1,), num_kv_heads=3, head_dim=window, window=5),
        ),
    )


@orders
@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("head_dims", [(8, 6), (7, 33), (64, 80)])
def test_a_token_takes_head_dim_and_four_bytes_a_head_and_tensor(order, page_size, head_dims):
    told = layout(order, page_size, head_dims)
    token = 2 * 2 * 2 * (head_dims[0] + 4) + 2 * 3 * (head_dims[1] + 4)
    assert (told.token_bytes, told.page_bytes) == (token, token * page_size)
    assert sum(len(g.layers) * told.layer_token_bytes(g) for g in told.groups) == token
    cache = TensorCache.allocate(told, 5, CPU)
    assert cache.num_bytes == 6 * told.page_bytes
    # What is reserved is that, but for two bytes a run of an odd number of bytes.
    reserved = sum(layer.keys.untyped_storage().nbytes() for layer in cache.layers)
    assert 6 * told.page_bytes <= reserved <= 6 * (told.page_bytes + 2 * (2 * 2 + 3))


@orders
def test_each_layer_has_the_shape_of_its_group_and_a_scale_a_vector(order):
    cache = TensorCache.allocate(layout(order), 5, CPU)
    for index, (heads, dim) in enumerate([(2, 8), (3, 6), (2, 8)]):
        shape = (6, 4, heads, dim) if order == "PSKD" else (6, heads, 4, dim)
        layer = cache.layer(index)
        assert layer.keys.shape == layer.values.shape == shape
        assert layer.key_scales.shape == layer.value_scales.shape == shape[:-1]
        assert layer.keys.dtype == torch.int8 and layer.key_scales.dtype == torch.float32


def places(tensor):
    """Return the bytes that each page of a tensor takes, as sets of addresses."""
    first, size = tensor.data_ptr(), tensor.element_size()
    pages = []
    for page in range(len(tensor)):
        taken = set()
        for index in np.ndindex(*tensor.shape[1:]):
            at = first + size * sum(i * stride for i, stride in zip((page, *index), tensor.stride(), strict=True))
            taken |= set(range(at, at + size))
        pages.append(taken)
    return pages


@orders
@pytest.mark.parametrize(("page_size", "head_dim"), [(4, 8), (3, 7), (1, 1), (16, 64)])
def test_no_two_numbers_share_memory_and_a_page_with_its_scales_is_one_piece(order, page_size, head_dim):
    size = {"P": 2, "S": page_size, "K": 2, "D": head_dim}
    layer = LayerTensors.empty(order, size, torch.int8, CPU, scaled=True)
    by_page = list(zip(*map(places, layer.tensors), strict=True))
    every = [address for page in by_page for taken in page for address in taken]
    assert len(every) == len(set(every)) == 2 * 2 * 2 * page_size * (head_dim + 4)
    for page in by_page:
        taken = set().union(*page)
        assert max(taken) - min(taken) + 1 <= len(taken) + 4 + (2 if order == "PKSD" else 0)


def test_in_pksd_a_heads_scales_lie_before_its_numbers_and_a_page_of_16_slots_is_whole_cache_lines():
    size = {"P": 3, "S": 16, "K": 2, "D": 64}
    layer = LayerTensors.empty("PKSD", size, torch.int8, CPU, scaled=True)
    start = layer.key_scales[1, 1].data_ptr()
    offsets = [tensor[1, 1].data_ptr() - start for tensor in (layer.value_scales, layer.keys, layer.values)]
    assert offsets == [64, 128, 128 + 16 * 64]
    assert layer.keys.stride(1) == 2 * 16 * 68 and layer.keys.stride(1) % 64 == 0


@orders
def test_moves_take_scales_along(order):
    cache = TensorCache.allocate(layout(order), 5, CPU)
    for i, layer in enumerate(cache.layers):
        for j, tensor in enumerate(layer.tensors):
            for page in range(len(tensor)):
                tensor[page] = 20 * i + 5 * j + page  # below 128
    before = [[tensor.clone() for tensor in layer.tensors] for layer in cache.layers]
    cache.move([CacheMove("copy", 3, 1, group=0), CacheMove("zero", 2, group=1)])
    for index, (layer, old) in enumerate(zip(cache.layers, before, strict=True)):
        assert len(old) == 4
        for tensor, was in zip(layer.tensors, old, strict=True):
            right = was.clone()
            if index == 1:
                right[2] = 0
            else:
                right[3] = was[1]
            assert torch.equal(tensor, right)


@orders
def test_fill_makes_every_entry_stand_for_the_value(order):
    cache = TensorCache.allocate(layout(order), 5, CPU)
    for value in (torch.nan, 0.0, -2.5):
        cache.fill(value)
        for layer in cache.layers:
            for numbers, scales in ((layer.keys, layer.key_scales), (layer.values, layer.value_scales)):
                stands = numbers.float() * scales.unsqueeze(-1)
                assert torch.equal(stands.nan_to_num(9.0), torch.full_like(stands, value).nan_to_num(9.0))


# --- writing ----------------------------------------------------------------------------------------------------------


@several
@given(st.sampled_from(["PSKD", "PKSD"]), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.data())
def test_cache_write_fills_exactly_the_slots_that_it_is_told(order, num_pages, page_size, heads, data):
    slots = data.draw(st.lists(st.integers(0, num_pages * page_size - 1), unique=True))
    told = [*slots, -1]  # a padded token, which goes to the spare page
    x = [normal(seed, len(told), heads, 5) for seed in (1, 2)]
    size = {"P": num_pages + 1, "S": page_size, "K": heads, "D": 5}
    cache = LayerTensors.empty(order, size, torch.int8, CPU, scaled=True)
    cache.fill(torch.nan)
    OPS["cache_write"].call(*x, cache, torch.tensor(told, dtype=torch.int64), order)
    for new, numbers, scales in zip(x, cache.tensors[:2], cache.tensors[2:], strict=True):
        right_numbers, right_scales = by_numpy(new)
        left = scales[:num_pages].clone()
        for i, slot in enumerate(slots):
            page, offset = divmod(slot, page_size)
            at = (page, offset) if order == "PSKD" else (page, slice(None), offset)
            assert torch.equal(numbers[at], right_numbers[i]) and torch.equal(scales[at], right_scales[i])
            left[at] = torch.nan
        assert left.isnan().all()


# --- engines ----------------------------------------------------------------------------------------------------------

TOKEN = 2 * 4 * 2 * (16 + 4)  # of the tiny model: keys and values, layers, kv heads, head dim and scale


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("int8"))[0]


def engine(path, *, memory="64MiB", use="paged", page_size=16, attention="tiled", dtype="float32", **sections):
    """An engine of torch's ops alone, whose unused slots are poisoned."""
    cache = {"use": use, "memory": memory, "format": "int8", "page_size": page_size}
    made = engine_of(
        path,
        engine={"dtype": dtype, "max_model_len": 256},
        cache=cache,
        attention=attention,
        kernels="torch",
        runner="eager",
        scheduler=sections.pop("scheduler", {"use": "inflight"}),
        **sections,
    )
    poison_cache(made)
    return made


def prompts(*lengths, seed=3):
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("attention", ["eager", "tiled", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_logits_are_near_those_over_floats_and_not_the_same(tiny, attention, dtype):
    (prompt,) = prompts(60)
    with engine(tiny, attention=attention, dtype=dtype) as ours:
        assert (ours.parts.layout.format, ours.parts.layout.token_bytes) == ("int8", TOKEN)
        found = prompt_logits(ours, prompt)
        ours.parts.executor._stage._cache.fill(0.0)
    with engine_of(tiny, engine={"dtype": dtype}, attention=attention, kernels="torch", runner="eager") as floats:
        right = prompt_logits(floats, prompt)
    error = (found - right).abs()
    assert 0 < float(error.mean()) < 0.02 * float(right.abs().max())
    # The first token attends to itself alone: its value is rounded, and no score is.
    assert float(error[0].max()) < 0.1 * float(right.abs().max())


def test_bits_do_not_depend_on_chunks_pages_and_order_in_fp32(tiny):
    (prompt,) = prompts(150)
    with engine(tiny) as ours:
        assert ours.explain()["invariance"]["level"] == "bitwise"
        found = prompt_logits(ours, prompt)
        for chunk in (1, 7, 64):
            poison_cache(ours)
            assert torch.equal(prompt_logits(ours, prompt, chunk=chunk), found)
    for use, page_size in (("paged", 1), ("paged", 3), ("contiguous", 16)):
        with engine(tiny, page_size=page_size, use=use) as ours:
            assert torch.equal(prompt_logits(ours, prompt, chunk=23), found)


def answers(engine, texts, **params):
    greedy = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2} | params
    return [completion.choices for completion in engine.generate(texts, SamplingParams(**greedy))]


def test_prefix_hits_forks_and_preemption_change_no_bit(tiny):
    texts = prompts(70, 33, 48, 20)
    sampled = {"temperature": 0.9, "seed": 5, "n": 3}
    with engine(tiny) as ours:
        expected = [answers(ours, [text])[0] for text in texts]
        forked = answers(ours, texts[:2], **sampled)
        again = ours.generate(texts, SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=2))
        assert all(completion.usage.cached_tokens > 0 for completion in again)
        assert [completion.choices for completion in again] == expected
    # Memory for one sequence of full length.
    with engine(tiny, memory=str(256 * TOKEN), scheduler={"use": "inflight", "max_tokens": 40}) as ours:
        preempted = count_preemptions(ours)
        assert answers(ours, texts * 2) == expected * 2
        ours.parts.cache.check_integrity()
        assert preempted
    with engine(tiny, use="contiguous", scheduler={"use": "static"}) as ours:
        assert answers(ours, texts) == expected
        assert answers(ours, texts[:2], **sampled) == forked


def test_speculation_changes_no_token(tiny):
    texts = [prompts(6)[0] * 4, prompts(9, seed=4)[0] * 3]
    with engine(tiny) as plain:
        expected = [[c.token_ids for c in choices] for choices in answers(plain, texts)]
    with engine(tiny, drafter={"use": "ngram", "adaptive": False}) as ours:
        assert [[c.token_ids for c in choices] for choices in answers(ours, texts)] == expected


def test_the_text_of_explain_counts_scales_and_says_that_outputs_differ(tiny, capsys):
    overrides = ["cache.format=int8", "cache.memory=8MiB", "engine.dtype=float32"]
    arguments = ["explain", "-m", str(tiny), *chain.from_iterable(("-o", override) for override in overrides)]
    assert run(arguments) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert f"{TOKEN} bytes = 2 x 4 layers x 2 kv heads x (16 head dim x 1 bytes + 4 bytes of scale)" in out
    assert "int8, rounded: outputs differ from those over floats" in out


def test_as_many_more_sequences_fit_as_entries_are_smaller(tiny):
    fits = {}
    for name in ("int8", "bfloat16", "float32"):
        cache = {"use": "paged", "memory": "4MiB", "format": name}
        with engine_of(tiny, engine={"max_model_len": 256}, cache=cache) as ours:
            fits[name] = ours.parts.cache.capacity(256)
            memory = ours.explain()["memory"]
            assert memory["layout"]["format"] == name
            assert ours.parts.executor._stage._cache.num_bytes == memory["cache"] + memory["spare"]
    # A vector of 16 numbers takes 20 bytes, 32 and 64.
    assert fits["int8"] / fits["bfloat16"] == pytest.approx(1.6, rel=0.05)
    assert fits["int8"] / fits["float32"] == pytest.approx(3.2, rel=0.05)
