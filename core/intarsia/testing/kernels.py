"""The contract of kernels, as tests to inherit.

::

    from intarsia.testing.kernels import KernelsContract

    class TestMine(KernelsContract):
        def provider(self):
            return my_plugin.provide_kernels()[0]

pytest runs the inherited tests. Every kernel that the set offers is called, for each dtype and weight format that it
says it is for, and its results are compared with the op's meaning in float64, within the dtype's rounding. What a set
does not offer is not claimed: the reference of that op runs in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from attrs import evolve

from intarsia.ops import BY_FORMAT, NAMES, resolve
from intarsia.protocols import Kernel
from intarsia.testing.caches import tiny_spec
from intarsia.testing.claims import hypothesis, unclaimed
from intarsia.testing.kernel_calls import Call, on_device
from intarsia.testing.kernel_case import spread
from intarsia.testing.kernel_engine import EngineClaims
from intarsia.testing.kernel_products import judge_linear
from intarsia.testing.kernel_rows import ACTIVATIONS, COLLECTIVES, NORMS, ROTATIONS
from intarsia.types import INVARIANCE_ORDER, Dtype, Weight, dense

__all__ = ["KernelsContract"]

_WRITERS = ("cache_write", "attention_inputs")
#: Ops whose results have a row a token.
_BY_ROW = tuple(name for name in NAMES if name not in COLLECTIVES)
_DTYPES = ("float32", "float16", "bfloat16")
#: A packed weight may be so many times as large as before.
_PACKED = 1.25


class KernelsContract(EngineClaims):
    """What every set of kernels keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `dtypes`, is in `KernelCase`.
    """

    # --- what is offered --------------------------------------------------------------------------------------------

    def test_what_is_offered_can_be_chosen(self) -> None:
        """Kernels name ops that there are, and of formats, orders, dtypes and levels those that the op has."""
        for dtype, kernels in self.sets():
            for kernel in kernels:
                _check_offer(kernel)
            formats = sorted({name for kernel in kernels if kernel.op in BY_FORMAT for name in kernel.formats} - {"*"})
            resolve([("on trial", kernels)], dtype, formats or ["dense"])

    def test_it_offers_something_wherever_it_fits(self) -> None:
        """A set that fits an engine has a kernel for its dtype; and it is the same set each time that it is asked."""
        for dtype, kernels in self.sets():
            assert kernels, f"it fits engines of {dtype}, and has no kernel for them"
            again = dict(self.sets())[dtype]
            assert [_facts(kernel) for kernel in kernels] == [_facts(kernel) for kernel in again], "it changes its mind"

    # --- numbers ----------------------------------------------------------------------------------------------------

    def test_products_equal_float64(self) -> None:
        """Rows times the weight, with the bias: of every format that is read, at one row, ragged sizes, thousands."""
        for dtype, kernel in self.kernels(("linear",)):
            for index, (rows, outs, ins) in enumerate(self.sizes):
                every = index in (1, 3)
                self._check(self.calls(kernel, dtype, rows=rows, outs=outs, width=ins, seed=index, every=every))

    def test_long_sums_lose_nothing(self) -> None:
        """Sums of thousands of numbers of one sign are as exact as short ones: they are kept in float32."""
        for dtype, kernel in self.kernels(("linear", "rms_norm", "add_rms_norm", "layer_norm")):
            for call in self.calls(kernel, dtype, rows=2, outs=9, width=self.widths[-1], seed=2):
                _check(_positive(call))

    def test_norms_equal_float64(self) -> None:
        """Divided by the root of the mean square and eps, times the weight; the sum with the residual comes out too."""
        self._check_rows(tuple(NORMS))

    def test_rotations_equal_float64(self) -> None:
        """The pairs (i, i + h) of the first 2h dimensions are turned by their angles, and the others pass."""
        self._check_rows(tuple(ROTATIONS))

    def test_activations_equal_float64(self) -> None:
        """The first half of the features gates the second; caps bend, and are never passed."""
        self._check_rows(tuple(ACTIVATIONS))

    def test_embeddings_are_rows_of_their_table(self) -> None:
        """Ids are looked up in tables of every format that is read, in the dtype that is asked for."""
        for dtype, kernel in self.kernels(("embedding",)):
            for seed, (rows, width) in enumerate(((1, 1), (9, 64), (40, 577))):
                self._check(self.calls(kernel, dtype, rows=rows, outs=50, width=width, seed=seed, every=seed == 1))

    def test_each_token_is_written_to_its_slot(self) -> None:
        """A key and a value to each slot, rounded to the entry format; slot -1 is nowhere, and no other is touched."""
        for dtype, kernel in self.kernels(("cache_write",)):
            for seed, (rows, width) in enumerate(((1, 1), (2, 64), (9, 33), (40, 128))):
                self._check(self.calls(kernel, dtype, rows=rows, width=width, seed=seed))

    def test_a_fused_kernel_equals_its_chain(self) -> None:
        """What stands for a chain of ops computes what they do, one after another."""
        for dtype, kernel in self.kernels(("attention_inputs", "norm_linear")):
            for seed, (rows, width) in enumerate(((1, 16), (3, 64), (9, 33), (5, 128), (7, 200), (2, 576))):
                self._check(self.calls(kernel, dtype, rows=rows, width=width, seed=seed, every=seed == 1))

    def test_tokens_are_drawn_by_their_numbers(self) -> None:
        """An id is where the running sum in id order passes the row's number, over what the filters keep."""
        for dtype, kernel in self.kernels(("sample_rows",)):
            for seed, width in enumerate((1, 7, 64, 1024, 2100)):
                self._check(self.calls(kernel, dtype, rows=24, width=width, seed=seed))

    def test_one_device_has_nothing_to_collect(self) -> None:
        """Collectives of one device give what they are given, or the rows that are asked for."""
        for dtype, kernel in self.kernels(tuple(COLLECTIVES)):
            for seed in range(2):
                self._check(self.calls(kernel, dtype, rows=5, width=9, seed=seed))

    def test_any_call(self) -> None:
        """Of any op, number of rows, width and variant: the result is right."""
        hyp = hypothesis()
        offered = [(dtype, kernel) for dtype, kernels in self.sets() for kernel in kernels]
        whole = hyp.strategies.integers

        def tried(place: int, rows: int, width: int, outs: int, seed: int) -> None:
            dtype, kernel = offered[place % len(offered)]
            self._check(self.calls(kernel, dtype, rows=rows, width=width, outs=outs, seed=seed))

        drawing = hyp.given(
            place=whole(0, 999), rows=whole(1, 70), width=whole(1, 200), outs=whole(1, 130), seed=whole(0, 99)
        )
        hyp.settings(
            max_examples=self.examples,
            derandomize=self.derandomize,
            deadline=None,
            database=None,
            suppress_health_check=list(hyp.HealthCheck),
        )(drawing(tried))()

    def _check_rows(self, ops: Sequence[str]) -> None:
        for dtype, kernel in self.kernels(ops):
            for seed, width in enumerate(self.widths):
                self._check(self.calls(kernel, dtype, rows=(1, 3, 8)[seed % 3], width=width, seed=seed))
            for seed in (1, 2):
                self._check(self.calls(kernel, dtype, rows=self.many_rows, width=34, seed=seed))

    def _check(self, calls: Iterator[Call]) -> None:
        for call in calls:
            _check(call)

    # --- rows -------------------------------------------------------------------------------------------------------

    def test_a_row_depends_on_no_other_as_far_as_is_promised(self) -> None:
        """`bitwise`: a row has the same bits alone and anywhere in any batch; `neighbours`: so has a chunk of rows."""
        promised = 0
        for dtype, kernel in self.kernels(_BY_ROW):
            level = kernel.invariance.get(dtype, "numeric")
            for call in self._best(kernel, dtype, rows=23) if level != "numeric" else ():
                promised += 1
                whole = call.run()
                for start, stop in _parts(level):
                    for said, found in zip(whole, call.some(slice(start, stop)).run(), strict=True):
                        assert _same(said[start:stop], found), (
                            f"{call.name}: rows {start} to {stop} of 23 have other bits alone"
                        )
        if not promised:
            unclaimed("it promises no more than `numeric`")

    def _best(self, kernel: Kernel, dtype: Dtype, **facts: Any) -> Iterator[Call]:
        """Yield calls over weights as they are in an engine: packed, where the kernel packs them."""
        for width in (self.widths[3], self.widths[-3]):
            for call in self.calls(kernel, dtype, width=width, **facts):
                packs = kernel.pack is not None or kernel.op == "norm_linear"
                if not packs or call.said.endswith("packed"):
                    yield call

    def test_no_rows_give_no_rows(self) -> None:
        """A call without tokens returns without tokens."""
        for dtype, kernel in self.kernels(_BY_ROW):
            for call in self.calls(kernel, dtype, rows=3):
                full, found = call.run(), call.some(slice(0, 0)).run()
                for some, none in zip(full, found, strict=True):
                    assert none.shape == (0, *some.shape[1:]), f"{call.name}: no rows bring {tuple(none.shape)}"

    def test_what_is_not_finite_shows_and_harms_no_other_row(self) -> None:
        """A row with NaN in it gives NaN or infinity, and the others what they give without it."""
        for dtype, kernel in self.kernels(tuple(name for name in _BY_ROW if name not in ("embedding", "sample_rows"))):
            for call in self.calls(kernel, dtype, rows=7):
                before = call.run()
                x = call.arguments[0].clone()
                x[1].view(-1)[-1] = torch.nan
                after = call.having({0: x}).run()
                others = torch.tensor([0, 2, 3, 4, 5, 6])
                for one, other in zip(before, after, strict=True):
                    close = torch.allclose(one[others].float(), other[others].float(), rtol=1e-2, atol=1e-2)
                    assert close, f"{call.name}: NaN in one row changes another"
                shown = any(not bool(result[1].isfinite().all()) for result in after if result.is_floating_point())
                assert shown, f"{call.name}: NaN in a row is not seen in its result"

    def test_what_lies_beside_is_not_read(self) -> None:
        """Rows that are parts of wider ones, amid NaN, give what their copies give."""
        for dtype, kernel in self.kernels(_BY_ROW):
            for call in self.calls(kernel, dtype, rows=6):
                _check(spread(call))

    # --- what goes in and out ---------------------------------------------------------------------------------------

    def test_arguments_stay_as_they_were(self) -> None:
        """No kernel writes to what it is given, but to the cache."""
        for dtype, kernel in self.kernels(NAMES):
            for call in self.calls(kernel, dtype):
                before = [_copied(value) for value in call.arguments]
                call.run()
                for place, (value, copy) in enumerate(zip(call.arguments, before, strict=True)):
                    assert _unchanged(value, copy), f"{call.name}: it writes to its argument {place}"

    def test_a_later_call_changes_no_earlier_result(self) -> None:
        """Results are tensors of their own, and not a buffer that the next call fills again."""
        for dtype, kernel in self.kernels(_BY_ROW):
            for one, other in zip(self.calls(kernel, dtype, seed=1), self.calls(kernel, dtype, seed=5), strict=True):
                first = one.run()
                kept = [result.clone() for result in first]
                other.run()
                for said, result in zip(kept, first, strict=True):
                    assert _same(said, result), f"{one.name}: its result changes with the next call"

    def test_packing_keeps_the_weight(self) -> None:
        """A packed weight has the name, shape and numbers that it should, and about the bytes that it had before."""
        packs = 0
        for dtype, kernel in self.kernels(("linear",)):
            if kernel.pack is None:
                continue
            for name in sorted(kernel.formats):
                for outs, ins in ((256, 1024), (33, 70)):
                    packs += 1
                    weight = self.weight(name, outs, ins, getattr(torch, dtype), 3)
                    self._check_packing(kernel, on_device(weight, self.device))
        if not packs:
            unclaimed("it packs no weight")

    def _check_packing(self, kernel: Kernel, weight: Weight) -> None:
        assert kernel.pack is not None
        before, said = _copied(weight), f"{weight.format.name} of {weight.shape}"
        packed = kernel.pack(weight)
        assert _unchanged(weight, before), f"{said}: packing changes the weight that is packed"
        assert packed.format.name == kernel.packed, f"{said} is packed as {packed.format.name!r}, not {kernel.packed!r}"
        assert tuple(packed.shape) == tuple(weight.shape), f"{said} is packed to {packed.shape}"
        right, found = weight.dequantize(), packed.dequantize()
        assert torch.equal(found.double(), right.double()), f"{said} is packed to other numbers"
        if weight.shape[0] >= 256:
            assert packed.num_bytes <= _PACKED * weight.num_bytes, (
                f"{said} takes {weight.num_bytes} bytes, and packed {packed.num_bytes}"
            )


def _check_offer(kernel: Kernel) -> None:
    op = kernel.op
    assert op in NAMES, f"there is no op {op!r}"
    assert kernel.dtypes <= set(_DTYPES), f"{op}: dtypes {sorted(kernel.dtypes)} are not all of {_DTYPES}"
    assert set(kernel.invariance) <= set(_DTYPES), f"{op}: it promises something of {sorted(kernel.invariance)}"
    assert not kernel.dtypes or set(kernel.invariance) <= kernel.dtypes, f"{op}: it promises more than it offers"
    levels = set(kernel.invariance.values())
    assert levels <= set(INVARIANCE_ORDER), f"{op}: {sorted(levels)} are not all levels of invariance"
    writes = op in _WRITERS
    assert bool(kernel.formats) <= (op in BY_FORMAT or writes), f"{op}: it reads no weights, and names formats"
    assert kernel.formats or op not in BY_FORMAT, f"{op}: it says of no weight format that it reads it"
    assert bool(kernel.orders) == writes, f"{op}: orders of the cache are for ops that write it"
    assert kernel.orders <= {"PSKD", "PKSD"}, f"{op}: {sorted(kernel.orders)} are not all orders of the cache"
    assert op == "linear" or (kernel.pack is None and not kernel.packed), f"{op}: linears alone pack weights"
    assert (kernel.pack is None) == (not kernel.packed), f"{op}: `pack` and `packed` are said together, or neither"
    assert callable(kernel.call), f"{op}: `call` is not callable"
    if kernel.saves is not None:
        for layers in (1, 4):
            saved = kernel.saves(tiny_spec(layers), 2)
            assert isinstance(saved, int) and saved >= 0, f"{op}: it saves {saved!r} bytes"


def _facts(kernel: Kernel) -> object:
    return kernel.op, kernel.formats, kernel.orders, kernel.dtypes, dict(kernel.invariance), kernel.packed


def _check(call: Call) -> None:
    try:
        call.check()
    except AssertionError as error:
        raise AssertionError(f"{call.name}, {call.num_rows} rows: {error}") from None


def _parts(level: str) -> Sequence[tuple[int, int]]:
    if level == "bitwise":
        return ((0, 1), (22, 23), (0, 2), (3, 6), (8, 16), (5, 22))
    return ((0, 8), (8, 16), (15, 23))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.is_floating_point():
        one, other = one.nan_to_num(7e4), other.nan_to_num(7e4)
    return torch.equal(one, other)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, Weight):
        return {key: tensor.clone() for key, tensor in value.tensors.items() if tensor.layout == torch.strided}
    return tuple(map(_copied, value)) if isinstance(value, tuple) else value


def _unchanged(value: Any, copy: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return _same(value, copy)
    if isinstance(value, Weight):
        return all(_same(value.tensors[key], tensor) for key, tensor in copy.items())
    return all(map(_unchanged, value, copy)) if isinstance(value, tuple) else True


def _positive(call: Call) -> Call:
    """Return the call with numbers of about 1, all of them positive; weights of other formats stay as they are."""
    numbers = {p: value.abs() + 0.5 for p, value in enumerate(call.arguments) if isinstance(value, torch.Tensor)}
    stored = call.arguments[1]
    if isinstance(stored, Weight) and stored.format.name == "dense":
        weight = dense(stored.dequantize().abs() + 0.5)
        return evolve(call, judge=judge_linear(weight)).having({**numbers, 1: weight})
    return call.having(numbers)
