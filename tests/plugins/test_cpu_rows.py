"""The row ops of the kernels `cpu`, on every path of this CPU: against float64, and what a row's bits depend on.

Shape legend: T tokens, E embed, H heads, K kv heads, D head dim, F ffn, L rows of logits, V vocab.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.models.cache import LayerTensors
from intarsia.ops import COLLECTIVES, OPS
from intarsia.types import dense
from intarsia_cpu import build
from intarsia_cpu.rows import RowOps, row_kernels
from native import compiled  # noqa: F401

PATHS = [path for path in build.supported() if not path.endswith("_vnni")]
#: Half a unit in the last place, relative: the error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
DTYPES = list(ROUNDING)
WIDTHS = [1, 3, 15, 16, 17, 31, 33, 64, 100, 576, 1537]
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 2**31)
several = settings(deadline=None, max_examples=40)


@pytest.fixture(scope="session", params=PATHS)
def ops(request, compiled):  # noqa: F811
    return RowOps(compiled(request.param))


@pytest.fixture(scope="session")
def best(compiled):  # noqa: F811
    return RowOps(compiled(PATHS[0]))


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inside(tensor):
    """The same numbers as a part of a wider tensor, amid NaN: what lies beside them is not theirs."""
    wide = torch.full((*tensor.shape[:-1], tensor.shape[-1] + 5), torch.nan, dtype=tensor.dtype)
    wide[..., 2:-3] = tensor
    return wide[..., 2:-3]


def exact(tensor):
    return tensor.double().numpy()


def near(actual, expected, dtype, size=None, relative=1e-5):
    """Within fp32's error of the size (of the expected number itself where none is given), and one rounding."""
    assert actual.dtype == dtype and actual.shape == expected.shape
    bound = relative * np.abs(expected if size is None else size) + 1.01 * np.abs(expected) * ROUNDING[dtype] + 1e-30
    error = np.abs(exact(actual) - expected)
    assert (error <= bound).all(), float((error - bound).max())


# --- each op against float64 ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0])
def test_norms_equal_float64(ops, dtype, weight_dtype, size):
    for width in WIDTHS:
        x, w = inside(normal(1, 3, width, dtype=dtype) * size), normal(2, width, dtype=weight_dtype)
        bias = normal(3, width, dtype=weight_dtype)
        rms = np.sqrt((exact(x) ** 2).mean(-1, keepdims=True) + 1e-5)
        near(ops.rms_norm(x, w, 1e-5), exact(x) / rms * exact(w), dtype)
        centred = exact(x) - exact(x).mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        off = np.abs(exact(x)).max() / deviation * (1 + np.abs(centred / deviation)) * np.abs(exact(w))
        for b in (bias, None):
            right = centred / deviation * exact(w) + (0 if b is None else exact(b))
            near(ops.layer_norm(x, w, b, 1e-5), right, dtype, size=off + np.abs(right))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_zeros_is_zero_or_the_bias(ops, dtype):
    zeros, ones = torch.zeros(2, 40, dtype=dtype), torch.ones(40, dtype=dtype)
    assert torch.equal(ops.rms_norm(zeros, ones, 1e-5), zeros)
    assert torch.equal(ops.layer_norm(zeros, ones, 3 * ones, 1e-5), zeros + 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_tokens_are_normed_each_for_itself(ops, dtype):
    wide = normal(1, 5, 9, 20, dtype=dtype)
    heads, w = wide[:, 2:6], normal(2, 20, dtype=dtype)
    out = ops.rms_norm(heads, w, 1e-6)
    assert out.shape == heads.shape
    for t, h in np.ndindex(5, 4):
        assert torch.equal(out[t, h], ops.rms_norm(heads[t, h].unsqueeze(0), w, 1e-6)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_of_the_sum_and_the_sum(ops, dtype):
    for width in WIDTHS:
        x, residual = inside(normal(1, 4, width, dtype=dtype)), inside(normal(2, 4, width, dtype=dtype))
        w, before = normal(3, width), (x.clone(), residual.clone())
        out, total = ops.add_rms_norm(x, residual, w, 1e-5)
        assert torch.equal(total, x + residual)
        assert torch.equal(out, ops.rms_norm(total, w, 1e-5))
        assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@several
@given(dtypes, st.integers(0, 9), st.integers(1, 6), st.integers(0, 40), st.integers(0, 9), seeds)
def test_rope_turns_the_pairs_of_the_first_dimensions_and_passes_the_rest(best, dtype, tokens, heads, half, rest, seed):
    if half + rest == 0:
        return
    x = inside(normal(seed, tokens, heads, 2 * half + rest, dtype=dtype))
    angles = normal(seed + 1, tokens, 1, half) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    out = best.rope(x, cos, sin)
    pairs = exact(x)[..., :half] + 1j * exact(x)[..., half : 2 * half]
    turned = pairs * (exact(cos) + 1j * exact(sin))
    size = np.abs(pairs.real) + np.abs(pairs.imag)
    near(out[..., :half], turned.real, dtype, size=size)
    near(out[..., half : 2 * half], turned.imag, dtype, size=size)
    assert torch.equal(out[..., 2 * half :], x[..., 2 * half :])


def gelu(x):
    """The tanh form, in float64."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 5.0, 30.0])
def test_activations_equal_float64(ops, dtype, size):
    for width in WIDTHS:
        x = inside(normal(width, 3, 2 * width, dtype=dtype) * size)
        # A number below fp32's smallest normal one may become 0.
        x = torch.where(exact_large(x), x, torch.zeros_like(x))
        gate, up = np.split(exact(x), 2, -1)
        near(ops.silu_mul(x), gate / (1 + np.exp(-gate)) * up, dtype)
        # Far below zero the exponent's own rounding shows: it is of its size.
        near(ops.gelu_tanh_mul(x), gelu(gate) * up, dtype, size=np.abs(gelu(gate) * up) * 10 + 1e-7 * np.abs(gate * up))
        near(ops.gelu_tanh(x), gelu(exact(x)), dtype, size=np.abs(gelu(exact(x))) * 10 + 1e-7 * np.abs(exact(x)))


def exact_large(x):
    return x.abs() > 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
@pytest.mark.parametrize("size", [1e-4, 1.0, 30.0, 1e4])
def test_soft_caps_equal_float64_from_the_smallest_numbers_on(ops, dtype, cap, size):
    x = inside(normal(1, 3, 1000, dtype=dtype) * size)
    out = ops.soft_cap(x, cap)
    near(out, cap * np.tanh(exact(x) / cap), dtype, relative=1e-6)
    assert float(out.abs().max()) <= cap


def test_activations_of_endless_numbers_are_their_limits_and_nan_stays(ops):
    x = torch.tensor([[torch.inf, -torch.inf, 3e38, -3e38, 0.0, torch.nan]])
    assert ops.soft_cap(x, 30.0)[0, :5].tolist() == [30.0, -30.0, 30.0, -30.0, 0.0]
    silu = ops.silu_mul(torch.cat([x, torch.ones_like(x)], 1))[0]
    assert silu[[0, 2, 4]].tolist() == [torch.inf, x[0, 2], 0] and silu[3].abs() == 0
    for out in (ops.soft_cap(x, 30.0)[0, 5], silu[5], ops.gelu_tanh(x)[0, 5]):
        assert out.isnan()


@several
@given(dtypes, dtypes, st.integers(0, 20), st.integers(1, 50), st.integers(1, 70), seeds)
def test_embedding_looks_rows_up_in_the_run_dtype(best, dtype, table_dtype, tokens, vocab, width, seed):
    table = normal(seed, vocab, width, dtype=table_dtype)
    ids = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(best.embedding(ids, dense(table), dtype), table[ids].to(dtype))


@pytest.mark.parametrize("bad", [-1, 7])
def test_an_id_outside_the_table_is_refused(best, bad):
    with pytest.raises(IndexError, match=r"0\.\.6"):
        best.embedding(torch.tensor([0, bad]), dense(torch.zeros(7, 4)), torch.float32)


@pytest.mark.parametrize("width", [1, 5, 16, 33, 1000])
def test_argmax_is_the_first_of_the_largest(ops, width):
    for seed in range(20):
        x = inside(normal(seed, 3, width).round())
        assert torch.equal(ops.argmax(x), torch.from_numpy(np.argmax(exact(x), -1)))
    for value in (-torch.inf, torch.inf, 0.0):
        assert ops.argmax(torch.full((1, width), value)).tolist() == [0]
    odd = torch.zeros(1, width)
    odd[0, width // 2 :] = torch.nan
    assert ops.argmax(odd).tolist() == [width // 2]


# --- the cache --------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(["PSKD", "PKSD"]),
    dtypes,
    dtypes,
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(1, 3),
    st.integers(1, 40),
    st.data(),
)
def test_cache_write_fills_exactly_the_slots_that_it_is_told(best, order, dtype, entry, pages, page_size, k, d, data):
    slots = data.draw(st.lists(st.integers(0, pages * page_size - 1), unique=True))
    slots.insert(len(slots) // 2, -1)
    keys, values = (inside(normal(i, len(slots), k, d, dtype=dtype)) for i in (1, 2))
    size = {"P": pages + 1, "S": page_size, "K": k, "D": d}
    cache, right = (LayerTensors.empty(order, size, entry, torch.device("cpu")) for _ in range(2))
    for stored in (cache.keys, cache.values, right.keys, right.values):
        stored.fill_(torch.nan)
    best.cache_write(keys, values, cache, torch.tensor(slots), order)
    real = [i for i, slot in enumerate(slots) if slot >= 0]
    told = torch.tensor([slots[i] for i in real], dtype=torch.int64)
    OPS["cache_write"].call(keys[real], values[real], right, told, order)
    for stored, other in ((cache.keys, right.keys), (cache.values, right.values)):
        assert torch.equal(stored.nan_to_num(7e7), other.nan_to_num(7e7))


# --- what a row's bits depend on --------------------------------------------------------------------------------------

VECTOR = normal(5, 3000)
ROW_OPS = {
    "rms_norm": lambda ops, x: ops.rms_norm(x, VECTOR[: x.shape[1]], 1e-5),
    "layer_norm": lambda ops, x: ops.layer_norm(x, VECTOR[: x.shape[1]], VECTOR[: x.shape[1]], 1e-5),
    "add_rms_norm": lambda ops, x: torch.cat(ops.add_rms_norm(x, x.flip(1), VECTOR[: x.shape[1]], 1e-5)[::-1], 1),
    "silu_mul": lambda ops, x: ops.silu_mul(x),
    "gelu_tanh_mul": lambda ops, x: ops.gelu_tanh_mul(x),
    "gelu_tanh": lambda ops, x: ops.gelu_tanh(x),
    "soft_cap": lambda ops, x: ops.soft_cap(x, 2.0),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 34, 576, 2998])
def test_a_row_has_the_same_bits_alone_and_in_any_batch_and_threads(ops, dtype, width):
    x = normal(3, 70, width, dtype=dtype)
    before = torch.get_num_threads()
    try:
        for name, op in ROW_OPS.items():
            torch.set_num_threads(1)
            alone = torch.cat([op(ops, row.unsqueeze(0)) for row in x])
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                for size in (2, 3, 17, 70):
                    assert torch.equal(op(ops, x[:size]), alone[:size]), (name, threads, size)
                    assert torch.equal(op(ops, x[-size:]), alone[-size:]), (name, threads, size)
    finally:
        torch.set_num_threads(before)


def test_every_kernel_stands_for_an_op_and_promises_equal_bits(best):
    kernels = row_kernels(best)
    assert {kernel.op for kernel in kernels} == set(OPS) - {"linear", *COLLECTIVES}
    for kernel in kernels:
        assert kernel.dtypes == {"float32", "bfloat16"} and set(kernel.invariance.values()) == {"bitwise"}
        assert kernel.orders == OPS[kernel.op].orders
