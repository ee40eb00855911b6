"""QK norm, RoPE and cache write of the kernels `cuda`, in Triton's interpreter: against float64 and the chain of ops.

Shape legend: T tokens, H heads, K kv heads, N = H + 2 K heads, D head dim, h half of the rotated dims, P pages,
S slots a page.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bfloat16_interpreter import _rounds_to_bfloat16  # noqa: F401
from intarsia.models.cache import LayerTensors
from intarsia.ops import OPS
from intarsia_cuda import attention_inputs as ours

#: Half a unit in the last place, relative: the error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DTYPES = list(ROUNDING)
ORDERS = ["PSKD", "PKSD"]
#: (H, K): MHA, GQA, MQA
HEADS = [(2, 2), (4, 2), (5, 1)]
#: (D, h): whole heads turn, or their first dimensions; the widest is in a block of its own
DIMS = [(2, 1), (20, 10), (21, 10), (64, 32), (80, 16), (128, 64), (200, 100), (256, 128), (256, 32)]
dtypes = st.sampled_from(DTYPES)
dims = st.sampled_from(DIMS)
seeds = st.integers(0, 2**31)
several = settings(deadline=None, max_examples=20)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(tensor):
    return tensor.double().numpy()


def angles_of(seed, num_tokens, half, dtype):
    turns = normal(seed, num_tokens, 1, half) * 3
    return turns.cos().to(dtype), turns.sin().to(dtype)


def cache_of(order, num_pages, page_size, kv_heads, head_dim, dtype, *, int8=False):
    """A cache full of NaN; of int8, of ones with scales of NaN."""
    size = {"P": num_pages + 1, "S": page_size, "K": kv_heads, "D": head_dim}
    kind = torch.int8 if int8 else dtype
    cache = LayerTensors.empty(order, size, kind, torch.device("cpu"), scaled=int8)
    cache.fill(torch.nan)
    return cache


def same_caches(one, other, num_pages):
    """Equal bit for bit, but in the spare page, which nothing reads."""
    return all(
        torch.equal(a[:num_pages].float().nan_to_num(7e7), b[:num_pages].float().nan_to_num(7e7))
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )


def chain(qkv, num_heads, norms, eps, angles, cache, slots, order):
    """What eager does without a kernel."""
    last_key = (num_heads + qkv.shape[1]) // 2
    qk, values = qkv[:, :last_key], qkv[:, last_key:]
    if norms is not None:
        parts = zip((qk[:, :num_heads], qk[:, num_heads:]), norms, strict=True)
        qk = torch.cat([OPS["rms_norm"].call(x, weight, eps) for x, weight in parts], dim=1)
    if angles is not None:
        qk = OPS["rope"].call(qk, *angles)
    OPS["cache_write"].call(qk[:, num_heads:], values, cache, slots, order)
    return qk[:, :num_heads]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Every new tensor is full of NaN, that no kernel may leave there."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        tensor = empty(*args, **kwargs)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(ours.torch, "empty", poisoned)


# --- rope -------------------------------------------------------------------------------------------------------------


@several
@given(dtypes, dims, st.integers(1, 5), st.integers(1, 20), seeds)
def test_rope_turns_the_pairs_of_the_first_dimensions_and_passes_the_rest(dtype, dim, num_tokens, heads, seed):
    head_dim, half = dim
    wide = torch.full((num_tokens, heads + 1, head_dim + 3), torch.nan, dtype=dtype)
    x = wide[:, 1:, 2:-1]
    x.copy_(normal(seed, num_tokens, heads, head_dim, dtype=dtype))
    cos, sin = angles_of(seed + 1, num_tokens, half, dtype)
    out = ours.rope(x, cos, sin)
    pairs = exact(x)[..., :half] + 1j * exact(x)[..., half : 2 * half]
    turned = pairs * (exact(cos) + 1j * exact(sin))
    size = (np.abs(pairs.real) + np.abs(pairs.imag)) * 3 * ROUNDING[dtype] + 1e-6 * (dtype != torch.float32)
    assert out.dtype == dtype and out.shape == x.shape
    assert (np.abs(exact(out[..., :half]) - turned.real) <= size).all()
    assert (np.abs(exact(out[..., half : 2 * half]) - turned.imag) <= size).all()
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


@several
@given(dtypes, dims, st.integers(1, 4), seeds)
def test_rope_rounds_where_the_reference_rounds(dtype, dim, num_tokens, seed):
    head_dim, half = dim
    x, angles = normal(seed, num_tokens, 3, head_dim, dtype=dtype), angles_of(seed + 1, num_tokens, half, dtype)
    assert torch.equal(ours.rope(x, *angles), OPS["rope"].call(x, *angles))


def test_rope_of_no_tokens_is_nothing():
    assert ours.rope(torch.zeros(0, 2, 8), *angles_of(0, 0, 4, torch.float32)).shape == (0, 2, 8)


def test_angles_in_another_dtype_are_a_mistake():
    with pytest.raises(AssertionError, match="angles are in the dtype"):
        ours.rope(normal(0, 1, 2, 8, dtype=torch.bfloat16), *angles_of(0, 1, 4, torch.float32))


# --- the cache --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(ORDERS),
    dtypes,
    st.booleans(),
    st.integers(1, 5),
    st.sampled_from([1, 3, 8, 16]),
    st.integers(1, 3),
    st.sampled_from([1, 2, 7, 64, 80, 129, 256]),
    st.data(),
)
def test_cache_write_fills_exactly_the_slots_that_it_is_told(order, dtype, int8, pages, page_size, heads, dim, data):
    slots = data.draw(st.lists(st.integers(0, pages * page_size - 1), unique=True, max_size=12))
    slots.insert(len(slots) // 2, -1)
    wide = normal(1, len(slots), 2 * heads + 1, dim, dtype=dtype)
    keys, values = wide[:, :heads], wide[:, heads : 2 * heads]
    cache, right = (cache_of(order, pages, page_size, heads, dim, dtype, int8=int8) for _ in range(2))
    ours.cache_write(keys, values, cache, torch.tensor(slots), order)
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    told = torch.tensor([slots[i] for i in real], dtype=torch.int64)
    OPS["cache_write"].call(keys[real], values[real], right, told, order)
    assert same_caches(cache, right, pages)
    # Slot -1 is nowhere: not even the spare page is written.
    spare = [tensor[pages].float() for tensor in ((cache.key_scales, cache.value_scales) if int8 else cache.tensors)]
    assert all(tensor.isnan().all() for tensor in spare)


@pytest.mark.parametrize("order", ORDERS)
def test_entries_that_are_not_finite_show_in_their_scale(order):
    keys = normal(1, 3, 2, 16)
    keys[0, 1, 3], keys[1, 0, 0], keys[2, 0] = torch.nan, -torch.inf, 0
    cache, right = (cache_of(order, 1, 4, 2, 16, torch.float32, int8=True) for _ in range(2))
    for write, into in ((ours.cache_write, cache), (OPS["cache_write"].call, right)):
        write(keys, keys.flip(0), into, torch.tensor([2, 0, 3]), order)
    assert same_caches(cache, right, 1)
    assert int(cache.key_scales[0].isnan().sum()) == 4  # two that were written so, and the two heads of slot 1


# --- all of it in one -------------------------------------------------------------------------------------------------


def drawn(dtype, heads, dim, num_tokens, seed, *, norms, rotates, weight_dtype):
    """qkv amid NaN, the weights of its norms, its angles."""
    (num_heads, kv_heads), (head_dim, half) = heads, dim
    total = num_heads + 2 * kv_heads
    wide = torch.full((num_tokens, total * head_dim + 8), torch.nan, dtype=dtype)
    wide[:, : total * head_dim] = normal(seed, num_tokens, total * head_dim, dtype=dtype)
    qkv = wide[:, : total * head_dim].view(num_tokens, total, head_dim)
    weights = tuple(normal(seed + i, head_dim, dtype=weight_dtype) for i in (1, 2)) if norms else None
    return qkv, weights, angles_of(seed + 3, num_tokens, half, dtype) if rotates else None


@settings(deadline=None, max_examples=40)
@given(
    dtypes,
    st.booleans(),
    st.sampled_from(HEADS),
    dims,
    st.integers(1, 6),
    st.sampled_from(ORDERS),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    seeds,
)
def test_one_kernel_is_the_chain_of_norm_rope_and_cache_write(
    dtype, float_weights, heads, dim, num_tokens, order, int8, norms, rotates, seed
):
    weight_dtype = torch.float32 if float_weights else dtype
    qkv, weights, angles = drawn(
        dtype, heads, dim, num_tokens, seed, norms=norms, rotates=rotates, weight_dtype=weight_dtype
    )
    before = qkv.clone()
    slots = torch.randperm(16, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    slots[num_tokens // 2] = -1
    cache, right = (cache_of(order, 2, 8, heads[1], dim[0], dtype, int8=int8) for _ in range(2))
    found = ours.attention_inputs(qkv, heads[0], weights, 1e-5, angles, cache, slots, order)
    expected = chain(qkv, heads[0], weights, 1e-5, angles, right, slots, order)
    assert torch.equal(qkv, before) and found.shape == expected.shape and found.is_contiguous()
    if not norms:
        assert torch.equal(found, expected) and same_caches(cache, right, 2)
        return
    # A norm's sum is taken in another order: its last bits differ, and with them a rounding here and there.
    size = exact(expected.abs().amax(-1, keepdim=True).expand_as(expected)) + 1e-30
    assert (np.abs(exact(found) - exact(expected)) <= 6 * ROUNDING[dtype] * size).all()
    tensors = zip(cache.tensors, right.tensors, strict=True) if not int8 else ()
    for a, b in tensors:
        assert torch.equal(a[:2].isnan(), b[:2].isnan())
        size = float(b[:2].nan_to_num(0).abs().max()) + 1e-30
        assert float((a[:2] - b[:2]).nan_to_num(0).abs().max()) <= 6 * ROUNDING[dtype] * size
    for a, b in ((cache.key_scales, right.key_scales), (cache.value_scales, right.value_scales)) if int8 else ():
        torch.testing.assert_close(a[:2], b[:2], rtol=6 * ROUNDING[dtype], atol=1e-30, equal_nan=True)


@several
@given(dtypes, dims, st.integers(1, 3), seeds)
def test_a_head_is_normed_and_turned_as_in_float64(dtype, dim, num_tokens, seed):
    head_dim, half = dim
    qkv, weights, (cos, sin) = drawn(
        dtype, (2, 1), dim, num_tokens, seed, norms=True, rotates=True, weight_dtype=torch.float32
    )
    cache = cache_of("PSKD", 1, 4, 1, head_dim, dtype)
    found = ours.attention_inputs(qkv, 2, weights, 1e-6, (cos, sin), cache, torch.arange(num_tokens), "PSKD")
    x = exact(qkv[:, :2])
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * exact(weights[0])
    pairs = (x[..., :half] + 1j * x[..., half : 2 * half]) * (exact(cos) + 1j * exact(sin))
    right = np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], -1)
    # Rounded behind the norm, behind each product and behind their sum.
    size = 5 * ROUNDING[dtype] * np.abs(x).max(-1, keepdims=True) * 1.5 + 1e-6
    assert (np.abs(exact(found) - right) <= size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dim", [(20, 10), (128, 64), (256, 32)])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(dtype, int8, dim):
    heads, num_tokens = (5, 1), 9
    qkv, weights, angles = drawn(dtype, heads, dim, num_tokens, 3, norms=True, rotates=True, weight_dtype=dtype)

    def run(at):
        cache = cache_of("PKSD", 3, 4, 1, dim[0], dtype, int8=int8)
        turns = tuple(each[at] for each in angles)
        found = ours.attention_inputs(qkv[at], 5, weights, 1e-5, turns, cache, torch.arange(num_tokens)[at], "PKSD")
        return found, [tensor.float().nan_to_num(7e7) for tensor in cache.tensors]

    whole, stored = run(slice(0, num_tokens))
    for at in (slice(0, 1), slice(4, 5), slice(8, 9), slice(0, 3), slice(3, 8)):
        found, own = run(at)
        assert torch.equal(found, whole[at])
        for slot in range(*at.indices(num_tokens)):
            for a, b in zip(own, stored, strict=True):
                assert torch.equal(a[slot // 4, :, slot % 4], b[slot // 4, :, slot % 4])


def test_no_tokens_are_treated_to_nothing():
    cache = cache_of("PSKD", 1, 4, 1, 8, torch.float32)
    nothing = torch.zeros(0, 4, 8)
    none = torch.zeros(0, dtype=torch.int64)
    found = ours.attention_inputs(nothing, 2, None, 1e-5, angles_of(0, 0, 4, torch.float32), cache, none, "PSKD")
    assert found.shape == (0, 2, 8) and cache.keys.isnan().all()
