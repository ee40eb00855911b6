"""Every op against numpy in float64, what a row's bits depend on, and how kernels are chosen.

Shape legend: T tokens, C in features, N out features, E embed, F ffn, H heads, K kv heads,
D head dim, P pages, S slots a page.
"""

import numpy as np
import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.defaults import provide_kernels
from intarsia.errors import PluginError
from intarsia.models.cache import LayerTensors
from intarsia.ops import ANY_FORMAT, BY_FORMAT, OPS, resolve
from intarsia.protocols import Kernel
from intarsia.testing.kernels import KernelsContract
from intarsia.types import Weight, dense

#: Half a unit in the last place, relative: the error of one rounding.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
dtypes = st.sampled_from(sorted(ROUNDING, key=str))
rows = st.sampled_from([0, 1, 2, 3, 7, 8, 9, 16, 33])
seeds = st.integers(0, 2**31)
several = settings(deadline=None, max_examples=60)


def normal(seed, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(tensor):
    return tensor.double().numpy()


def call(op):
    return OPS[op].call


def check(actual, expected, bound):
    """Each number is within its own bound of the expected one."""
    assert actual.shape == expected.shape
    error = np.abs(exact(actual) - expected)
    assert (error <= bound).all(), float((error - bound).max())


@frozen
class TenthFormat:
    """A format of whole numbers, a tenth each."""

    name: str = "tenths"

    def dequantize(self, weight):
        return weight.tensors["tenths"].float() / 10

    def rows(self, weight, index):
        numbers = weight.tensors["tenths"][index]
        return Weight(self, {"tenths": numbers}, tuple(numbers.shape))

    def shard(self, weight, dim, start, stop):
        raise NotImplementedError


def tenths(seed, *shape):
    whole = torch.randint(-100, 100, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)
    return Weight(TenthFormat(), {"tenths": whole}, shape)


class TestReferences(KernelsContract):
    """Most of their numbers are claims: norms, rotations, products, tables, collectives."""

    def provider(self):
        return next(provider for provider in provide_kernels() if provider.key == "torch")


# --- each op against float64 ------------------------------------------------------------------------------------------


@several
@given(st.sampled_from([1, 3, 8]), st.integers(1, 40), st.integers(1, 40), seeds)
def test_linear_reads_a_quantized_weight_through_its_format(num_rows, n, c, seed):
    weight, x = tenths(seed, n, c), normal(seed, num_rows, c)
    expected = exact(x) @ (weight.tensors["tenths"].double().numpy() / 10).T
    check(call("linear")(x, weight), expected, 1e-4)
    half = call("linear")(x.bfloat16(), weight)
    assert half.dtype == torch.bfloat16


def test_embedding_reads_a_quantized_weight_through_its_format():
    weight = tenths(3, 20, 8)
    out = call("embedding")(torch.tensor([19, 0, 19]), weight, torch.float32)
    check(out, exact(weight.dequantize())[[19, 0, 19]], 0)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_rms_norm_of_zeros_is_zero(dtype):
    out = call("rms_norm")(torch.zeros(2, 8, dtype=dtype), torch.ones(8, dtype=dtype), 1e-5)
    assert torch.equal(out, torch.zeros(2, 8, dtype=dtype))


def test_the_squares_of_large_halves_do_not_overflow():
    out = call("rms_norm")(torch.full((1, 64), 6e4, dtype=torch.float16), torch.ones(64, dtype=torch.float16), 1e-5)
    assert torch.equal(out, torch.ones(1, 64, dtype=torch.float16))


@several
@given(dtypes, rows, st.integers(1, 200), st.sampled_from([1.0, 30.0]), seeds)
def test_silu_mul_gates_the_second_half_with_the_first(dtype, num_rows, ffn, size, seed):
    x = normal(seed, num_rows, 2 * ffn, dtype=dtype) * size
    gate, up = np.split(exact(x), 2, -1)
    expected = gate / (1 + np.exp(-gate)) * up
    check(
        call("silu_mul")(x), expected, np.abs(expected) * 5 * ROUNDING[dtype] + 1e-4 * (dtype != torch.float32) + 1e-6
    )


def test_silu_mul_of_many_tokens_is_that_of_each():
    x = normal(0, 300, 2 * 1000)
    gate, up = np.split(exact(x), 2, -1)
    check(call("silu_mul")(x), gate / (1 + np.exp(-gate)) * up, 1e-5)


def gelu(x):
    """The tanh form, in float64."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


#: Numbers below a format's smallest normal one are rounded to steps of their own.
SUBNORMAL = {torch.float32: 0.0, torch.bfloat16: 0.0, torch.float16: 2.0**-25}


@several
@given(dtypes, rows, st.integers(1, 200), st.sampled_from([0.1, 1.0, 30.0]), seeds)
def test_gelu_is_its_tanh_form(dtype, num_rows, ffn, size, seed):
    x = normal(seed, num_rows, ffn, dtype=dtype) * size
    before = x.clone()
    expected = gelu(exact(x))
    # Below zero, 1 + tanh cancels: the error is of x's size.
    bound = 4 * np.abs(exact(x)) * ROUNDING[torch.float32] + 1.01 * np.abs(expected) * ROUNDING[dtype]
    out = call("gelu_tanh")(x)
    assert out.dtype == dtype and torch.equal(x, before)
    check(out, expected, bound + SUBNORMAL[dtype])


@several
@given(dtypes, rows, st.integers(1, 200), st.sampled_from([1.0, 30.0]), seeds)
def test_gelu_mul_gates_the_second_half_with_the_first(dtype, num_rows, ffn, size, seed):
    x = normal(seed, num_rows, 2 * ffn, dtype=dtype) * size
    before = x.clone()
    gate, up = np.split(exact(x), 2, -1)
    expected = gelu(gate) * up
    bound = 4 * np.abs(gate * up) * ROUNDING[torch.float32] + 2.01 * np.abs(expected) * ROUNDING[dtype]
    out = call("gelu_tanh_mul")(x)
    assert torch.equal(x, before)
    check(out, expected, bound + SUBNORMAL[dtype] * (np.abs(up) + 1))


@several
@given(dtypes, rows, st.integers(1, 200), st.sampled_from([0.5, 30.0, 50.0]), st.sampled_from([1e-2, 1.0, 1e3]), seeds)
def test_soft_cap_bends_numbers_to_within_the_cap(dtype, num_rows, vocab, cap, size, seed):
    x = normal(seed, num_rows, vocab, dtype=dtype) * size
    before = x.clone()
    expected = cap * np.tanh(exact(x) / cap)
    out = call("soft_cap")(x, cap)
    assert torch.equal(x, before) and float(out.abs().max() if out.numel() else 0) <= cap
    # Rounded to the format three times: the quotient, its tanh, the product.
    check(out, expected, 3.5 * np.abs(expected) * ROUNDING[dtype] + 2 * SUBNORMAL[dtype] * cap + 1e-30)


def test_soft_cap_of_endless_numbers_is_the_cap():
    x = torch.tensor([[torch.inf, -torch.inf, 3e38, 0.0]])
    assert call("soft_cap")(x, 30.0).tolist() == [[30.0, -30.0, 30.0, 0.0]]


# --- the cache --------------------------------------------------------------------------------------------------------


def poisoned(order, num_pages, page_size, heads, head_dim, dtype=torch.float32):
    size = {"P": num_pages + 1, "S": page_size, "K": heads, "D": head_dim}
    shape = [size[axis] for axis in order]
    return LayerTensors(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))


def by_slot(stored, order):
    """(P, S, K, D) -> slots in order, with no help from the code under test."""
    return np.moveaxis(stored.float().numpy(), order.index("S"), 1).reshape(-1, *stored.shape[-1:]).copy()


@several
@given(st.sampled_from(["PSKD", "PKSD"]), st.integers(1, 5), st.integers(1, 6), st.integers(1, 3), st.data())
def test_cache_write_fills_exactly_the_slots_that_it_is_told(order, num_pages, page_size, heads, data):
    head_dim = 4
    slots = data.draw(st.lists(st.integers(0, num_pages * page_size - 1), unique=True))
    keys, values = normal(1, len(slots), heads, head_dim), normal(2, len(slots), heads, head_dim)
    cache = poisoned(order, num_pages, page_size, heads, head_dim)
    call("cache_write")(keys, values, cache, torch.tensor(slots, dtype=torch.int64), order)
    for new, stored in ((keys, cache.keys), (values, cache.values)):
        left = stored.clone()
        for i, slot in enumerate(slots):
            page, offset = divmod(slot, page_size)
            place = left[page, offset] if order == "PSKD" else left[page, :, offset]
            assert torch.equal(place, new[i])
            place.fill_(torch.nan)
        assert left.isnan().all()


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_slot_minus_one_touches_nothing_but_the_spare_page(order, page_size):
    cache = poisoned(order, 4, page_size, 2, 4)
    slots = torch.tensor([-1, page_size, -1])
    call("cache_write")(normal(1, 3, 2, 4), normal(2, 3, 2, 4), cache, slots, order)
    for stored, new in ((cache.keys, normal(1, 3, 2, 4)), (cache.values, normal(2, 3, 2, 4))):
        used = stored[:4].clone()
        place = used[1, 0] if order == "PSKD" else used[1, :, 0]
        assert torch.equal(place, new[1])
        place.fill_(torch.nan)
        assert used.isnan().all()


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
def test_cache_write_rounds_to_the_dtype_of_the_cache(order):
    cache = poisoned(order, 1, 4, 2, 4, dtype=torch.bfloat16)
    keys, values = normal(1, 1, 2, 4), normal(2, 1, 2, 4)
    call("cache_write")(keys, values, cache, torch.tensor([2]), order)
    stored = cache.keys[0, 2] if order == "PSKD" else cache.keys[0, :, 2]
    check(stored, exact(keys[0]), np.abs(exact(keys[0])) * ROUNDING[torch.bfloat16])


# --- a row's bits do not depend on the rows beside it -----------------------------------------------------------------

LINEAR_SHAPES = [(64, 64), (257, 64), (96, 48), (33, 20), (1, 7), (7, 1), (960, 576), (576, 1536), (2048, 97)]
BATCHES = [*range(1, 41), 64, 65, 127, 200]


@pytest.mark.parametrize("shape", LINEAR_SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_row_of_an_fp32_linear_has_the_same_bits_alone_and_in_any_batch(shape, with_bias):
    n, c = shape
    weight, x = dense(normal(1, n, c)), normal(2, max(BATCHES), c)
    bias = normal(3, n) if with_bias else None
    alone = torch.cat([call("linear")(row.unsqueeze(0), weight, bias) for row in x])
    for size in BATCHES:
        assert torch.equal(call("linear")(x[:size], weight, bias), alone[:size]), size
        assert torch.equal(call("linear")(x[-size:], weight, bias), alone[-size:]), size


def test_a_row_of_an_fp32_linear_keeps_its_bits_through_a_large_head():
    weight, x = dense(normal(1, 49152, 64)), normal(2, 40, 64)
    alone = torch.cat([call("linear")(row.unsqueeze(0), weight) for row in x[:4]])
    for size in (1, 2, 3, 5, 8, 11, 40):
        assert torch.equal(call("linear")(x[:size], weight)[:4], alone[:size]), size


ROW_OPS = {
    "rms_norm": lambda x, w: call("rms_norm")(x, w, 1e-5),
    "add_rms_norm": lambda x, w: torch.cat(call("add_rms_norm")(x, x * 0.3, w, 1e-5), -1),
    "layer_norm": lambda x, w: call("layer_norm")(x, w, w.flip(0), 1e-5),
    "silu_mul": lambda x, w: call("silu_mul")(torch.cat([x, x + 1], -1)),
    "gelu_tanh_mul": lambda x, w: call("gelu_tanh_mul")(torch.cat([x, x + 1], -1)),
    "gelu_tanh": lambda x, w: call("gelu_tanh")(x),
    "soft_cap": lambda x, w: call("soft_cap")(x, 3.0),
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("op", ROW_OPS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(op, dtype, threads):
    """More than 32768 numbers make torch cut the work between threads, here in the middle of a row."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (3, 20, 33, 576, 1000, 1537, 8192):
            w, x = normal(1, width, dtype=dtype), normal(2, 100, width, dtype=dtype)
            alone = torch.cat([ROW_OPS[op](row.unsqueeze(0), w) for row in x])
            for size in (1, 2, 3, 8, 33, 41, 67, 100):
                assert torch.equal(ROW_OPS[op](x[:size], w), alone[:size]), (width, size)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("op", ROW_OPS)
def test_rows_that_are_no_whole_vectors_have_the_same_bits_alone_and_in_any_batch(op, dtype):
    """Rows that lie end to end are one loop to torch: what is left of it comes from scalar code, wherever it ends."""
    for width in (1, 5, 17, 24, 80, 96, 100):
        w, x = normal(1, width, dtype=dtype), normal(2, 40, width, dtype=dtype)
        alone = torch.cat([ROW_OPS[op](row.unsqueeze(0), w) for row in x])
        for size in range(1, 41):
            assert torch.equal(ROW_OPS[op](x[:size], w), alone[:size]), (width, size)
            assert torch.equal(ROW_OPS[op](x[-size:], w), alone[-size:]), (width, size)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("op", ["gelu_tanh", "soft_cap"])
def test_a_row_longer_than_what_torch_cuts_has_the_same_bits_alone_and_in_any_batch(op, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for width in (32767, 32768, 32769, 50257, 65537):
            x = normal(2, 9, width)
            alone = torch.cat([ROW_OPS[op](row.unsqueeze(0), None) for row in x])
            for size in (1, 2, 3, 8, 9):
                assert torch.equal(ROW_OPS[op](x[:size], None), alone[:size]), (width, size)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", ROUNDING)
def test_a_token_of_rope_has_the_same_bits_alone_and_in_any_batch(dtype):
    for dim, half in ((64, 32), (20, 10), (20, 3), (128, 64)):
        x, angles = normal(1, 600, 5, dim, dtype=dtype), normal(2, 600, 1, half)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        whole = call("rope")(x, cos, sin)
        for t in range(0, 600, 37):
            at = slice(t, t + 1)
            assert torch.equal(call("rope")(x[at], cos[at], sin[at]), whole[at])


# --- choosing kernels -------------------------------------------------------------------------------------------------


def kernel(op, **facts):
    return Kernel(op=op, call=lambda *args: (op, args), **facts)


def test_without_kernels_every_op_is_its_reference():
    ops = resolve([], "float32", ["dense", "tenths"])
    names = {op for op in OPS if op not in BY_FORMAT}
    names |= {f"{op}[{f}]" for op in OPS if op in BY_FORMAT for f in ("dense", "tenths")}
    assert ops.choices.keys() == names
    assert all(choice.source == "torch" and choice.kernel is OPS[choice.kernel.op] for choice in ops.choices.values())
    x = normal(0, 3, 8)
    assert torch.equal(ops.rms_norm(x, torch.ones(8), 1e-5), call("rms_norm")(x, torch.ones(8), 1e-5))
    assert torch.equal(ops.linear(x, tenths(0, 4, 8)), call("linear")(x, tenths(0, 4, 8)))
    assert ops.orders() == {"PSKD", "PKSD"}


def test_the_first_provider_that_has_a_fitting_kernel_gives_it():
    first, second, third = kernel("rope"), kernel("rope"), kernel("silu_mul")
    ops = resolve([("a", [first]), ("b", [second, third])], "float32", ["dense"])
    assert (ops.choices["rope"].kernel, ops.choices["rope"].source) == (first, "a")
    assert (ops.choices["silu_mul"].kernel, ops.choices["silu_mul"].source) == (third, "b")
    assert ops.rope is first.call


def test_a_kernel_is_passed_over_where_it_lacks_the_dtype():
    half = kernel("rope", dtypes=frozenset({"bfloat16"}))
    assert resolve([("a", [half])], "bfloat16", ["dense"]).choices["rope"].source == "a"
    assert resolve([("a", [half])], "float32", ["dense"]).choices["rope"].source == "torch"
    several = [half, kernel("rope", dtypes=frozenset({"float32", "float16"}))]
    assert resolve([("a", several)], "float32", ["dense"]).choices["rope"].kernel is several[1]


def test_each_weight_format_has_its_own_kernel():
    narrow = kernel("linear", formats=frozenset({"tenths"}))
    wide = kernel("linear", formats=frozenset({ANY_FORMAT}))
    silent = kernel("embedding")  # names no format: reads none
    ops = resolve([("a", [narrow, silent]), ("b", [wide])], "float32", ["dense", "tenths"])
    assert ops.choices["linear[tenths]"].source == "a"
    assert ops.choices["linear[dense]"].source == "b"
    assert {ops.choices[f"embedding[{f}]"].source for f in ("dense", "tenths")} == {"torch"}
    weight, x = tenths(0, 4, 8), normal(0, 1, 8)
    assert ops.linear(x, weight) == ("linear", (x, weight, None))


def test_a_kernel_for_an_op_that_does_not_exist_is_refused_with_the_nearest_names():
    with pytest.raises(PluginError, match=r"'fast'.*'rms_nrom'.*'rms_norm'"):
        resolve([("fast", [kernel("rms_nrom")])], "float32", ["dense"])


def test_an_op_promises_what_its_kernel_says_and_numeric_where_it_says_nothing():
    fused = kernel("silu_mul", invariance={"float32": "neighbours"})
    ops = resolve([("a", [fused, kernel("rope")])], "float32", ["dense"])
    promised = ops.invariance("float32")
    assert promised.keys() == ops.choices.keys()
    assert (promised["silu_mul"], promised["rope"]) == ("neighbours", "numeric")
    assert (promised["linear[dense]"], promised["rms_norm"]) == ("bitwise", "bitwise")
    half = ops.invariance("bfloat16")
    assert (half["silu_mul"], half["linear[dense]"], half["rms_norm"]) == ("numeric", "numeric", "bitwise")


def test_what_was_measured_on_cpus_is_not_promised_elsewhere():
    assert resolve([], "float32", ["dense"]).invariance("float32")["linear[dense]"] == "bitwise"
    elsewhere = resolve([], "float32", ["dense"], "cuda:0").invariance("float32")
    assert elsewhere["linear[dense]"] == "numeric" and elsewhere["rms_norm"] == "bitwise"
