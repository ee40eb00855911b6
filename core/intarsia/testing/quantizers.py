"""The contract of quantizers, as tests to inherit.

::

    from intarsia.testing.quantizers import QuantizerContract

    class TestMine(QuantizerContract):
        options = {"group": 64}

        def provider(self):
            return my_plugin.provide_quantizers()[0]

pytest runs the inherited tests. Weights are read back through their format's `dequantize` and compared with what they
were made of, number by number. How good a format is for a model is not a matter of contract; `intarsia eval` measures
it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch

from intarsia.errors import CheckpointError, CompositionError
from intarsia.quantizing.integers import IntegerFormat, pack_nibbles
from intarsia.quantizing.options import QuantizerOptions
from intarsia.quantizing.rotated import RotatedFormat
from intarsia.quantizing.sparse import best_two, compress
from intarsia.testing.claims import hypothesis, unclaimed
from intarsia.testing.quantizer_bounds import check_layout
from intarsia.testing.quantizer_case import SHAPES, drawn, odd_rows, refusal
from intarsia.testing.quantizer_engine import EngineClaims
from intarsia.types import EMBED, HEAD, POSITIONS, Weight, dense

__all__ = ["QuantizerContract"]

#: Names as models have them, of all kinds.
_NAMES = (
    *(EMBED, POSITIONS, "layers.0.qkv.weight", "layers.0.out.weight", "layers.11.down.weight"),
    *("layers.1.experts.0.gate_up.weight", "layers.3.router.weight", HEAD),
)
#: Of `QuantizerOptions`, one thing after another.
_CHOICES: tuple[dict[str, Any], ...] = (
    {},
    {"head": True},
    {"head": False},
    {"embed": True},
    {"embed": False},
    {"exclude": ("layers.0.*",)},
    {"exclude": ("*",)},
    {"exclude": ("head.weight",), "head": True},
    {"include": ("*.down.weight",)},
    {"include": ("layers.*",), "exclude": ("*.qkv.weight",), "embed": True, "head": True},
)
_CALLED = "layers.7.gate_up.weight"


class QuantizerContract(EngineClaims):
    """What every quantizer keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `max_error`, is in `QuantizerCase`.
    """

    # --- numbers ----------------------------------------------------------------------------------------------------

    def test_a_weight_is_of_the_format_that_it_says(self) -> None:
        """What comes out has the format's name, the shape that went in, and the tensors that its format documents."""
        said = self.build().format
        for numbers, made in self.each():
            assert made.format.name == said, f"it says that it makes {said!r}, and makes {made.format.name!r}"
            assert tuple(made.shape) == tuple(numbers.shape), f"of {tuple(numbers.shape)} it makes {made.shape}"
            found = made.dequantize()
            assert found.shape == numbers.shape, f"{tuple(numbers.shape)} is dequantized to {tuple(found.shape)}"
            assert found.is_floating_point(), f"it is dequantized to {found.dtype}"
            check_layout(made)

    def test_every_number_is_within_what_the_format_gives(self) -> None:
        """A number is at most half a step of its own scale off, or as far as the format is documented to be."""
        for numbers, made in self.each():
            self.check(numbers, made)
        for shift in (0.04, -0.5):
            numbers = drawn(9, 384, seed=3) + shift
            if (made_of := self.made(numbers)) is not None:
                self.check(numbers, made_of, f"numbers around {shift}")

    def test_errors_lean_to_no_side(self) -> None:
        """Rounded numbers are as often too large as too small; so are those halfway between two that there are."""
        for said, numbers in self._evenly():
            made = self.made(numbers)
            if made is None:
                continue
            off = made.dequantize().double() - numbers.double()
            mean, spread = float(off.mean()), float(off.square().mean().sqrt())
            assert abs(mean) <= 5 * spread / off.numel() ** 0.5, (
                f"{said} lean by {mean:.3g}, where errors are of {spread:.3g}"
            )

    def _evenly(self) -> Iterator[tuple[str, torch.Tensor]]:
        normal = drawn(64, 512, seed=8)
        yield "normal numbers", torch.cat((normal, -normal))
        layout = next(self.each())[1].format
        if isinstance(layout, IntegerFormat) and self.rounds_to_nearest and layout.offset != "min":
            most = 127 if layout.bits == 8 else 7
            halfway = torch.randint(-most, most, (64, 512), generator=torch.Generator().manual_seed(9)) + 0.5
            # Ends that make a scale of 1 in each group.
            halfway[:, 0::16], halfway[:, 1::16] = -most - (layout.bits == 4), most
            yield "numbers halfway between two steps", halfway / 16

    def test_zeros_stay_zeros(self) -> None:
        """A row of zeros comes out as zeros; so do a column and a group, where `keeps_zeros` and nothing is rotated."""
        numbers = drawn(6, 384, seed=4)
        numbers[2], numbers[:, 9], numbers[4, 128:256] = 0, 0, 0
        if (made := self.made(numbers)) is None:
            unclaimed("it takes no matrix of 384 columns")
        found = made.dequantize()
        assert bool(found.isfinite().all()), "zeros bring numbers that are not finite"
        assert not found[2].any(), "a row of zeros does not come out as zeros"
        if self.keeps_zeros and not isinstance(made.format, RotatedFormat):
            assert not found[:, 9].any() and not found[4, 128:256].any(), "zeros beside other numbers become others"

    def test_odd_rows_stay_within_their_own_bounds(self) -> None:
        """Rows of the smallest and the largest floats, of outliers, of one number: each is as exact as any other."""
        for columns in (33, 128, 200):
            said, rows = zip(*odd_rows(columns), strict=True)
            if (made := self.made(torch.stack(rows))) is None:
                continue
            for index, (what, row) in enumerate(zip(said, rows, strict=True)):
                self.check(row[None], made.rows(slice(index, index + 1)), what)

    def test_a_last_group_may_be_smaller(self) -> None:
        """Columns that no group divides end in a smaller one, with a scale of its own; or the weight is refused."""
        step = max(self.step(), 2)
        taken = 0
        for columns in (1, step - 1, step + 1, step + step // 2, 4 * step + 1, 576):
            last = (columns - 1) // step * step
            for factor in (1.0, 0.01, 100.0):
                numbers = drawn(5, columns, seed=columns)
                numbers[:, last:] *= factor
                if (made := self.made(numbers)) is not None:
                    taken += 1
                    self.check(numbers, made, f"a last group of {columns - last} columns, {factor:g} times as large")
        if not taken:
            unclaimed("it refuses weights whose columns are no multiple of its group")

    def test_any_matrix(self) -> None:
        """Of any shape, size and place: all of the above holds."""
        hyp = hypothesis()
        strategies = hyp.strategies

        def tried(outs: int, ins: int, power: int, shift: float) -> None:
            numbers = (drawn(outs, ins, seed=outs * ins) * 20 + shift) * 10.0**power
            made = self.made(numbers)
            if made is None:
                return
            self.check(numbers, made)
            check_layout(made)
            said = self.build().num_bytes(self.name, (outs, ins))
            assert made.num_bytes == said, f"({outs}, {ins}) takes {made.num_bytes} bytes, and {said} were said"

        drawing = hyp.given(
            outs=strategies.integers(1, 40),
            ins=strategies.integers(1, 300),
            power=strategies.integers(-36, 36),
            shift=strategies.floats(-3, 3),
        )
        hyp.settings(
            max_examples=self.examples,
            derandomize=self.derandomize,
            deadline=None,
            database=None,
            suppress_health_check=list(hyp.HealthCheck),
        )(drawing(tried))()

    # --- what goes in -----------------------------------------------------------------------------------------------

    def test_weights_are_read_in_any_float_dtype(self) -> None:
        """bfloat16 and float16 become what the same numbers do in float32."""
        for dtype in (torch.bfloat16, torch.float16):
            for shape in SHAPES:
                numbers = drawn(*shape, seed=5).to(dtype)
                narrow, wide = self.made(numbers), self.made(numbers.float())
                assert (narrow is None) == (wide is None), f"{shape} is taken in one dtype and refused in another"
                if narrow is not None and wide is not None:
                    _same(narrow, wide, f"the same numbers in {dtype}")

    def test_weights_are_read_wherever_they_lie(self) -> None:
        """Rows that are not contiguous, and a part of something larger, are read as their copies are."""
        for shape in ((9, 130), (16, 256)):
            numbers = drawn(*shape, seed=6)
            wide = torch.full((shape[0] + 2, shape[1] + 5), torch.nan)
            wide[1:-1, 2:-3] = numbers
            for said, other in (("transposed", numbers.t().contiguous().t()), ("a part", wide[1:-1, 2:-3])):
                found, right = self.made(other), self.made(numbers)
                if found is not None and right is not None:
                    _same(found, right, f"a matrix that is {said}")

    def test_what_is_not_finite_is_refused_by_name(self) -> None:
        """NaN and infinity end in a CheckpointError that names the weight, wherever they are in it."""
        quantizer = self.build()
        for bad in (float("nan"), float("inf"), float("-inf")):
            for row, column in ((0, 0), (4, 129), (2, 64)):
                numbers = drawn(5, 130)
                numbers[row, column] = bad
                if not quantizer.accepts(_CALLED, (5, 130)):
                    unclaimed(f"it takes no {_CALLED!r} of 130 columns")
                message = refusal(lambda numbers=numbers: quantizer.quantize(_CALLED, dense(numbers)))  # type: ignore[misc]
                assert message is not None, f"{bad} in row {row}, column {column} is taken"
                assert _CALLED in message, f"the message does not name {_CALLED!r}: {message}"

    def test_what_it_is_given_stays_as_it_was(self) -> None:
        """A weight that is quantized is not changed, and a result shares no memory with it."""
        for dtype in (torch.float32, torch.bfloat16):
            numbers = drawn(9, 128).to(dtype)
            before = numbers.clone()
            if (made := self.made(numbers)) is None:
                unclaimed("it takes no matrix of 128 columns")
            assert torch.equal(numbers, before), f"it writes to the {dtype} weight that it is given"
            found = made.dequantize().clone()
            numbers.fill_(7)
            assert torch.equal(made.dequantize(), found), "what it makes changes with what it was given"

    def test_a_weight_in_another_format_is_read_by_its_numbers(self) -> None:
        """What a quantizer before it has made is read through `dequantize`, or refused by a CheckpointError."""
        for other in _stored():
            values, message, made = other.dequantize().float(), "", None
            quantizer = self.build()
            if not quantizer.accepts(_CALLED, tuple(other.shape)):
                continue
            try:
                made = quantizer.quantize(_CALLED, other)
            except CheckpointError as error:
                message = str(error)
            if made is None:
                assert _CALLED in message, f"the message does not name {_CALLED!r}: {message}"
                continue
            if (right := self.made(values, name=_CALLED)) is not None:
                _same(made, right, f"the numbers of a weight in {other.format.name}")

    # --- what comes out ---------------------------------------------------------------------------------------------

    def test_the_same_weight_gives_the_same_bits(self) -> None:
        """Whatever `random` says, and whatever its name is, equal numbers become equal weights."""
        for shape in ((7, 130), (16, 256)):
            found = []
            for seed, name in enumerate((self.name, self.name, "layers.1.out.weight")):
                torch.manual_seed(seed)
                random.seed(seed)
                found.append(self.made(drawn(*shape), name=name))
            for other in found[1:]:
                if found[0] is not None and other is not None:
                    _same(found[0], other, "a weight that is quantized again")

    def test_each_weight_is_quantized_for_itself(self) -> None:
        """One quantizer serves a whole model: a weight is what it would be alone, and stays so."""
        quantizer = self.build()
        several = [drawn(8, 256, seed=seed) * (seed + 1) for seed in range(3)]
        found = [self.made(numbers, quantizer, f"layers.{i}.out.weight") for i, numbers in enumerate(several)]
        for i, (numbers, made) in enumerate(zip(several, found, strict=True)):
            right = self.made(numbers, name=f"layers.{i}.out.weight")
            if made is not None and right is not None:
                _same(made, right, f"the weight after {i} others")

    def test_bytes_said_are_bytes_taken(self) -> None:
        """`num_bytes` is what the tensors take, and no more memory is held behind them."""
        quantizer = self.build()
        for _, made in self.each():
            said = quantizer.num_bytes(self.name, made.shape)
            assert made.num_bytes == said, f"{made.shape} takes {made.num_bytes} bytes, and {said} were said"
            behind = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in made.tensors.values()}
            held = sum(storage.nbytes() for storage in behind.values())
            assert held <= said + 64 * len(behind), f"{said} bytes are views of memory of {held}"

    def test_parts_are_the_parts_of_the_whole(self) -> None:
        """`rows` and `shard` give what the same cut of the dequantized weight is; a cut within a group is refused."""
        step = self.step()
        for shape in ((9, 4 * step + 3), (12, 8 * step)):
            made = self.made(drawn(*shape, seed=2))
            if made is None:
                continue
            whole = made.dequantize()
            for index in (slice(2, 7), slice(0, 1), torch.tensor([8, 0, 3, 3])):
                _equal(made.rows(index), whole[index], f"rows {index}")
            for start, stop in ((0, 5), (3, 9), (0, shape[0])):
                _equal(made.shard(0, start, stop), whole[start:stop], f"rows {start} to {stop}")
            for start, stop in ((0, step), (step, 3 * step), (3 * step, shape[1])):
                part = made.shard(1, start, stop)
                _equal(part, whole[:, start:stop], f"columns {start} to {stop}")
                _equal(part.shard(0, 1, 4), whole[1:4, start:stop], f"rows 1 to 4 of columns {start} to {stop}")
            self._check_cut(made, whole, step)

    def _check_cut(self, made: Weight, whole: torch.Tensor, step: int) -> None:
        """A cut that its format says is none may be made all the same, if it is right."""
        for start, stop in ((1, 3 * step), (step, 2 * step + 1)):
            try:
                part = made.shard(1, start, stop)
            except CompositionError:
                assert step > 1, "any column may be a cut, and this one is refused"
                continue
            _equal(part, whole[:, start:stop], f"columns {start} to {stop}")

    # --- which weights ----------------------------------------------------------------------------------------------

    def test_routers_and_positions_stay_as_they_are(self) -> None:
        """What routes tokens to experts, and learned positions, are never taken, whatever the options say."""
        wider = {"embed": True, "head": True} if issubclass(self.provider().options, QuantizerOptions) else {}
        quantizer = self.build(**wider)
        for name in (POSITIONS, "layers.0.router.weight", "layers.17.router.weight"):
            assert not quantizer.accepts(name, (64, 256)), f"it takes {name!r}"

    def test_it_takes_what_its_options_say(self) -> None:
        """`include`, `exclude`, `head` and `embed` decide which weights are taken, as `QuantizerOptions` says."""
        if not issubclass(self.provider().options, QuantizerOptions):
            unclaimed("its options are not those of `intarsia.quantizing.options.QuantizerOptions`")
        for choice in _CHOICES:
            quantizer, options = self.build(**choice), self.settled(**choice)
            for name in _NAMES:
                taken = quantizer.accepts(name, (256, 512))
                assert taken == options.takes(name), (
                    f"{name!r} is {'taken' if taken else 'left'}, with {choice or 'default options'}"
                )


def _same(found: Weight, right: Weight, said: str) -> None:
    assert found.tensors.keys() == right.tensors.keys(), f"{said}: other tensors"
    for key, tensor in right.tensors.items():
        assert torch.equal(found.tensors[key], tensor), f"{said}: {key!r} differs"


def _equal(part: Weight, right: torch.Tensor, said: str) -> None:
    found = part.dequantize()
    assert tuple(part.shape) == tuple(right.shape), f"{said}: of shape {part.shape}, and not {tuple(right.shape)}"
    assert torch.equal(found, right), f"{said} are not those of the whole"


def _stored() -> Iterator[Weight]:
    """Yield weights in formats that quantizers and files have."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-127, 128, (9, 256), generator=generator, dtype=torch.int8)
    yield Weight(IntegerFormat(8), {"weight": numbers, "scale": torch.rand(9, generator=generator) + 0.1}, (9, 256))
    nibbles = pack_nibbles(torch.randint(0, 16, (9, 256), generator=generator))
    scale = torch.rand(9, 8, generator=generator).half() + 0.1
    zero = torch.randint(0, 16, (9, 8), generator=generator, dtype=torch.uint8)
    yield Weight(IntegerFormat(4, 32, "zero"), {"weight": nibbles, "scale": scale, "zero": zero}, (9, 256))
    values = drawn(9, 256, seed=7)
    yield compress("w", values, best_two(values.abs()))
