"""Broken quantizers, around the ones that come with Intarsia."""

import random
from typing import ClassVar

import torch
from attrs import evolve, frozen

from contracts.planted import offering, planting
from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.options import QuantizerOptions
from intarsia.testing.quantizers import QuantizerContract
from intarsia.types import HEAD, Weight, dense
from intarsia_int4 import provide_quantizers as provide_int4
from intarsia_int4.quantizer import Int4Quantizer
from intarsia_int8 import provide_quantizers as provide_int8
from intarsia_int8.quantizer import Int8Quantizer

FAULTS = []
plant = planting(FAULTS)


class Int8(Int8Quantizer):
    """Weights in `int8_g32`: a good one."""

    asked: ClassVar = {"group": 32}

    def remade(self, made, /, **tensors):
        return evolve(made, tensors={**made.tensors, **tensors})


class Rows(Int8):
    """Weights in `int8`."""

    asked: ClassVar = {"group": 0}


class Int4(Int4Quantizer):
    """Weights in `int4_g32_zero`."""

    asked: ClassVar = {"group": 32, "zero_points": True}


def contract(part):
    """Return the contract for a broken quantizer."""
    [provider] = provide_int4() if issubclass(part, Int4) else provide_int8()

    def build(context):
        return part(context.options, None)

    class Broken(QuantizerContract):
        derandomize = True
        options = part.asked

        def provider(self):
            return offering(provider, build)

    return Broken


# --- numbers ----------------------------------------------------------------------------------------------------------


@plant("test_a_weight_is_of_the_format_that_it_says")
class NamesAnother(Int8):
    """It names another format than it makes."""

    @property
    def format(self):
        return "int8_g64"


@plant("test_a_weight_is_of_the_format_that_it_says")
class StoresHalves(Rows):
    """A row's scale is a half float, where the format has float32."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        return self.remade(made, scale=made.tensors["scale"].half())


@plant("test_a_weight_is_of_the_format_that_it_says")
class Transposes(Int8):
    """It says the shape the other way round."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        return evolve(made, shape=made.shape[::-1])


@plant("test_every_number_is_within_what_the_format_gives")
class ScalesColumns(Rows):
    """It rounds by the largest number of the column, and stores that of the row."""

    def quantize(self, name, weight):
        made, floats = super().quantize(name, weight), weight.dequantize().float()
        steps = floats / (floats.abs().amax(0, keepdim=True) / 127).clamp(min=1e-30)
        return self.remade(made, weight=steps.round().to(torch.int8))


@plant("test_every_number_is_within_what_the_format_gives")
class ClipsEarly(Int8):
    """It clips at 126."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        return self.remade(made, weight=made.tensors["weight"].clamp(-126, 126))


@plant("test_every_number_is_within_what_the_format_gives")
class Truncates(Int8):
    """It cuts off what is behind the point."""

    def quantize(self, name, weight):
        made, floats = super().quantize(name, weight), weight.dequantize().float()
        scale = made.format._spread(made.tensors["scale"].float(), floats.shape[1])
        return self.remade(made, weight=(floats / scale).trunc().clamp(-127, 127).to(torch.int8))


@plant("test_every_number_is_within_what_the_format_gives")
class WastesHalf(Int8):
    """Its scales are twice as large as they need be."""

    def quantize(self, name, weight):
        made, floats = super().quantize(name, weight), weight.dequantize().float()
        wide = made.tensors["scale"] * 2
        steps = floats / made.format._spread(wide.float(), floats.shape[1]).clamp(min=1e-30)
        return self.remade(made, scale=wide, weight=steps.round().to(torch.int8))


@plant("test_zeros_stay_zeros")
class ShiftsZero(Int4):
    """Its zero points are one too high."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        return evolve(made, tensors={**made.tensors, "zero": (made.tensors["zero"] + 1).clamp(max=15)})


@plant("test_zeros_stay_zeros")
class DividesByZero(Rows):
    """The scale of a row of zeros is 0 / 0."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        scale = made.tensors["scale"]
        return self.remade(made, scale=torch.where(scale > 0, scale, torch.nan))


@plant("test_errors_lean_to_no_side")
class RoundsUp(Int8):
    """What is halfway between two steps is always rounded up."""

    def quantize(self, name, weight):
        made, floats = super().quantize(name, weight), weight.dequantize().float()
        scale = made.format._spread(made.tensors["scale"].float(), floats.shape[1])
        return self.remade(made, weight=(floats / scale + 0.5).floor().clamp(-127, 127).to(torch.int8))


@plant("test_odd_rows_stay_within_their_own_bounds")
class Underflows(Int8):
    """Scales are float16, and those of small numbers are 0."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        scale = made.tensors["scale"]
        return made if scale.dtype == torch.float16 else self.remade(made, scale=scale.clamp(max=6e4).half().float())


@plant("test_odd_rows_stay_within_their_own_bounds")
class Overflows(Rows):
    """It takes half the distance from the smallest number to the largest, which can be more than a float holds."""

    def quantize(self, name, weight):
        made, floats = super().quantize(name, weight), weight.dequantize().float()
        is_large = (floats.amax(1) - floats.amin(1)).isinf()
        return self.remade(made, scale=torch.where(is_large, torch.inf, made.tensors["scale"]))


@plant("test_a_last_group_may_be_smaller")
class SharesTheLast(Int8):
    """A last group that is smaller has the scale of the one before."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        scale = made.tensors["scale"].clone()
        if made.shape[1] % 32 and scale.shape[1] > 1:
            scale[:, -1] = scale[:, -2]
        return self.remade(made, scale=scale)


@plant("test_any_matrix")
class LosesOneColumn(Int8):
    """Of an odd number of rows and one column it makes zeros."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        lost = weight.shape[1] == 1 and weight.shape[0] % 2 == 1 and weight.shape[0] > 1
        return self.remade(made, weight=made.tensors["weight"] * (not lost))


# --- what goes in -----------------------------------------------------------------------------------------------------


@plant("test_weights_are_read_in_any_float_dtype")
class RoundsTwice(Int8):
    """It divides in the dtype of the weight, which has 8 bits in bfloat16."""

    def quantize(self, name, weight):
        made, floats = super().quantize(name, weight), weight.dequantize()
        scale = made.format._spread(made.tensors["scale"].to(floats.dtype), floats.shape[1])
        steps = floats / torch.where(scale > 0, scale, 1)
        return self.remade(made, weight=steps.float().round().clamp(-127, 127).to(torch.int8))


@plant("test_weights_are_read_wherever_they_lie")
class IgnoresStrides(Int8):
    """It reads rows as if they lay end to end from the first number on."""

    def quantize(self, name, weight):
        floats = weight.dequantize()
        first = floats.storage_offset()
        return super().quantize(name, dense(floats.as_strided(floats.shape, (floats.shape[1], 1), first).nan_to_num()))


@plant("test_what_is_not_finite_is_refused_by_name")
class TakesNan(Int8):
    """What is not finite becomes 0."""

    def quantize(self, name, weight):
        floats = weight.dequantize()
        return super().quantize(name, dense(torch.where(floats.isfinite(), floats, 0)))


@plant("test_what_is_not_finite_is_refused_by_name")
class NamesNothing(Int8):
    """It refuses NaN, and does not say where."""

    def quantize(self, name, weight):
        if not weight.dequantize().isfinite().all():
            raise CheckpointError("a weight holds NaN or infinity")
        return super().quantize(name, weight)


@plant("test_what_it_is_given_stays_as_it_was")
class WritesToIt(Int8):
    """It scales the weight that it is given where it is."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        weight.dequantize().clamp_(-0.1, 0.1)
        return made


@plant("test_a_weight_in_another_format_is_read_by_its_numbers")
class ReadsStored(Int8):
    """Of a weight in another format it takes the stored numbers, without their scales."""

    def quantize(self, name, weight):
        stored = weight.tensors.get("weight")
        return super().quantize(name, weight if stored is None else dense(stored.float()))


# --- what comes out ---------------------------------------------------------------------------------------------------


@plant("test_the_same_weight_gives_the_same_bits")
class DrawsLots(Int8):
    """Which of two steps is taken is drawn by lot."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        rounded = made.dequantize()
        return super().quantize(name, dense(rounded + torch.rand_like(rounded) * 1e-3 * rounded))


@plant("test_the_same_weight_gives_the_same_bits")
class AsksRandom(Rows):
    """Its scales are a little larger, by a number that `random` gives."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        return self.remade(made, scale=made.tensors["scale"] * (1 + random.random() / 1000))


@plant("test_each_weight_is_quantized_for_itself")
class KeepsTheFirst(Int8):
    """Weights of one shape have the scales of the first."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        if not hasattr(self, "kept"):
            object.__setattr__(self, "kept", {})
        return self.remade(made, scale=self.kept.setdefault(made.shape, made.tensors["scale"]))


@plant("test_bytes_said_are_bytes_taken")
class ForgetsScales(Int8):
    """It counts numbers, and no scales."""

    def num_bytes(self, name, shape):
        return shape[0] * shape[1]


@plant("test_bytes_said_are_bytes_taken")
class HoldsMore(Int8):
    """Its tensors are views of something four times as large."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        numbers = made.tensors["weight"]
        wide = torch.zeros((*numbers.shape, 4), dtype=torch.int8)
        wide[..., 0] = numbers
        return self.remade(made, weight=wide[..., 0])


@frozen
class ForgetfulFormat(IntegerFormat):
    """A format whose parts of columns keep the scales of the first ones."""

    def shard(self, weight, dim, start, stop):
        part = super().shard(weight, dim, start, stop)
        first = weight.tensors["scale"][:, : part.tensors["scale"].shape[-1]]
        return part if dim == 0 else evolve(part, tensors={**part.tensors, "scale": first})


@plant("test_parts_are_the_parts_of_the_whole")
class KeepsTheFirstScales(Int8):
    """A part of the columns has the scales of the first ones."""

    def quantize(self, name, weight):
        return evolve(super().quantize(name, weight), format=ForgetfulFormat(8, 32))


@frozen
class CuttingFormat(IntegerFormat):
    """A format that cuts anywhere."""

    def shard(self, weight, dim, start, stop):
        if dim == 0:
            return super().shard(weight, dim, start, stop)
        tensors = dict(weight.tensors)
        tensors["weight"] = tensors["weight"][:, start:stop]
        tensors["scale"] = tensors["scale"][:, start // 32 : -(-stop // 32)]
        return Weight(self, tensors, (weight.shape[0], stop - start))


@plant("test_parts_are_the_parts_of_the_whole")
class CutsGroups(Int8):
    """It cuts columns within a group, and gives them the scales of other groups."""

    def quantize(self, name, weight):
        return evolve(super().quantize(name, weight), format=CuttingFormat(8, 32))


# --- which weights ----------------------------------------------------------------------------------------------------


@plant("test_routers_and_positions_stay_as_they_are")
class TakesRouters(Int8):
    """It takes routers too."""

    def accepts(self, name, shape):
        return super().accepts(name, shape) or name.endswith(".router.weight")


@plant("test_it_takes_what_its_options_say")
class TakesTheHead(Int8):
    """It takes the head, although it is told to leave it."""

    def accepts(self, name, shape):
        return super().accepts(name, shape) or name == HEAD


@plant("test_it_takes_what_its_options_say")
class ForgetsExclude(Int8):
    """It takes what is excluded."""

    def accepts(self, name, shape):
        options = self.options
        kept = QuantizerOptions(include=options.include, head=options.head, embed=options.embed)
        return kept.takes(name)


# --- engines ----------------------------------------------------------------------------------------------------------


@plant("test_an_engine_computes_with_what_it_made")
class SharesABuffer(Int8):
    """Weights of one shape are made in one buffer: the last one stays."""

    def quantize(self, name, weight):
        made = super().quantize(name, weight)
        if not hasattr(self, "buffers"):
            object.__setattr__(self, "buffers", {})
        buffer = self.buffers.setdefault(made.shape, made.tensors["weight"])
        return self.remade(made, weight=buffer.copy_(made.tensors["weight"]))
