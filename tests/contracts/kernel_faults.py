"""Broken kernels, each around the reference of its op."""

from typing import ClassVar

import numpy as np
import torch
from attrs import evolve
from torch.nn import functional

from contracts.planted import planting
from intarsia.ops import OPS, int8_entries
from intarsia.protocols import Kernel
from intarsia.sampling.drawing import draw
from intarsia.sampling.settings import Settings
from intarsia.testing.kernels import KernelsContract
from intarsia.types import Provider, SamplingDefaults, SamplingParams, dense

FAULTS = []
plant = planting(FAULTS)
PLAIN = Settings.of(SamplingParams(temperature=1.0).filled(SamplingDefaults()))


class One:
    """A set of one kernel: by default the reference's."""

    op = "linear"
    facts: ClassVar = {}

    def call(self, *arguments):
        return OPS[self.op].call(*arguments)

    def kernels(self):
        return [evolve(OPS[self.op], call=self.call, **self.facts)]


class Integers(One):
    """A linear over int4 weights."""

    facts: ClassVar = {"formats": frozenset({"int4_g32_zero"})}


def contract(part):
    """Return the contract for a broken set."""

    class Broken(KernelsContract):
        derandomize = True

        def provider(self):
            return Provider(key="broken", summary="broken", build=lambda context: part())

    return Broken


# --- what is offered --------------------------------------------------------------------------------------------------


@plant("test_what_is_offered_can_be_chosen")
class ReadsNothing(One):
    """It does not say which weight formats it reads."""

    facts: ClassVar = {"formats": frozenset()}


@plant("test_what_is_offered_can_be_chosen")
class PromisesALevel(One):
    """It promises a level of invariance that there is not."""

    op = "rope"
    facts: ClassVar = {"invariance": {"float32": "exact"}}


@plant("test_what_is_offered_can_be_chosen")
class SavesLess(One):
    """It says that it saves a negative number of bytes."""

    op = "silu_mul"
    facts: ClassVar = {"saves": lambda spec, size: -size}


@plant("test_it_offers_something_wherever_it_fits")
class OffersNothing(One):
    """It fits every engine, and its kernel is for one dtype."""

    facts: ClassVar = {"dtypes": frozenset({"bfloat16"})}


# --- products ---------------------------------------------------------------------------------------------------------


@plant("test_products_equal_float64")
class DropsTheBias(One):
    """It drops the bias."""

    def call(self, x, weight, bias=None):
        return super().call(x, weight, None)


@plant("test_products_equal_float64")
class IgnoresInputScales(One):
    """It leaves out a weight's `input_scale`."""

    def call(self, x, weight, bias=None):
        tensors = {key: tensor for key, tensor in weight.tensors.items() if key != "input_scale"}
        return super().call(x, evolve(weight, tensors=tensors), bias)


@plant("test_products_equal_float64")
class SharesTheLastScale(One):
    """A last group that is smaller is multiplied by the scale of the one before."""

    facts: ClassVar = {"formats": frozenset({"int8_g32_a16"})}

    def call(self, x, weight, bias=None):
        scale = weight.tensors["scale"].clone()
        if weight.shape[1] % 32 and scale.shape[1] > 1:
            scale[:, -1] = scale[:, -2]
        return super().call(x, evolve(weight, tensors={**weight.tensors, "scale": scale}), bias)


@plant("test_products_equal_float64")
class ShiftsZero(Integers):
    """It takes zero points for one more than they are."""

    def call(self, x, weight, bias=None):
        return super().call(x, evolve(weight, tensors={**weight.tensors, "zero": weight.tensors["zero"] + 1}), bias)


@plant("test_products_equal_float64")
class ReadsHighFirst(Integers):
    """It reads the high half of a byte before the low one."""

    def call(self, x, weight, bias=None):
        packed = weight.tensors["weight"]
        return super().call(x, evolve(weight, tensors={**weight.tensors, "weight": packed << 4 | packed >> 4}), bias)


@plant("test_products_equal_float64")
class DropsTheTail(One):
    """It takes columns in steps of 16, and leaves out what is behind the last whole one."""

    def call(self, x, weight, bias=None):
        x = x.clone()
        x[:, max(16, x.shape[1] // 16 * 16) :] = 0
        return super().call(x, weight, bias)


@plant("test_products_equal_float64")
class RunsOneGrid(One):
    """Of more than 1024 rows it computes the first 1024."""

    def call(self, x, weight, bias=None):
        out = super().call(x, weight, bias)
        out[1024:] = 0
        return out


@plant("test_products_equal_float64")
class ReturnsFloats(One):
    """It returns float32, whatever it is given."""

    def call(self, x, weight, bias=None):
        return super().call(x, weight, bias).float()


@plant("test_products_equal_float64")
class RoundsRows(One):
    """It rounds float32 rows to bfloat16."""

    facts: ClassVar = {"formats": frozenset({"dense"})}

    def call(self, x, weight, bias=None):
        return super().call(x.bfloat16().to(x.dtype), weight, bias)


@plant("test_products_equal_float64")
class RoundsWeights(One):
    """It rounds rows to int8 where the format asks for floats."""

    facts: ClassVar = {"formats": frozenset({"int4_g64_a16"})}

    def call(self, x, weight, bias=None):
        numbers, scales = int8_entries(x.unsqueeze(1))
        return super().call((numbers * scales.unsqueeze(-1))[:, 0].to(x.dtype), weight, bias)


@plant("test_long_sums_lose_nothing")
class SumsInBfloat16(One):
    """It keeps sums in the dtype of what it adds up, piece after piece."""

    def call(self, x, weight, bias=None):
        total = torch.zeros(len(x), weight.shape[0], dtype=x.dtype)
        values = weight.dequantize().to(x.dtype)
        for start in range(0, x.shape[1], 64):
            total = total + functional.linear(x[:, start : start + 64], values[:, start : start + 64])
        return total if bias is None else total + bias


@plant("test_long_sums_lose_nothing")
class SquaresInHalf(One):
    """The squares of a norm are summed in the dtype of the row."""

    op = "rms_norm"

    def call(self, x, weight, eps):
        squares = (x * x).sum(-1, keepdim=True, dtype=x.dtype) / x.shape[-1]
        if x.dtype == torch.bfloat16:
            squares = (x * x).cumsum(-1, dtype=x.dtype)[..., -1:] / x.shape[-1]
        return (x / (squares + eps).sqrt() * weight).to(x.dtype)


# --- norms ------------------------------------------------------------------------------------------------------------


@plant("test_norms_equal_float64")
class ForgetsEpsilon(One):
    """It ignores epsilon."""

    op = "rms_norm"

    def call(self, x, weight, eps):
        return super().call(x, weight, 1e-12)


@plant("test_norms_equal_float64")
class AddsOne(One):
    """It multiplies by 1 + weight."""

    op = "rms_norm"

    def call(self, x, weight, eps):
        return super().call(x, weight + 1, eps)


@plant("test_norms_equal_float64")
class NormsTheRow(One):
    """It norms the row, and not its sum with the residual."""

    op = "add_rms_norm"

    def call(self, x, residual, weight, eps):
        return OPS["rms_norm"].call(x, weight, eps), residual + x


@plant("test_norms_equal_float64")
class ReturnsTheResidual(One):
    """In the place of the sum it returns the residual as it was."""

    op = "add_rms_norm"

    def call(self, x, residual, weight, eps):
        return super().call(x, residual, weight, eps)[0], residual.clone()


@plant("test_norms_equal_float64")
class DividesByOneLess(One):
    """The variance is over one number less than there are."""

    op = "layer_norm"

    def call(self, x, weight, bias, eps):
        wide = x.float()
        deviation = (wide.var(-1, keepdim=True, correction=min(1, x.shape[-1] - 1)) + eps).sqrt()
        out = (wide - wide.mean(-1, keepdim=True)) / deviation * weight
        return (out if bias is None else out + bias).to(x.dtype)


# --- rotations and activations ----------------------------------------------------------------------------------------


@plant("test_rotations_equal_float64")
class TurnsNeighbours(One):
    """It turns pairs of neighbours, and not of halves."""

    op = "rope"

    def call(self, x, cos, sin):
        half, out = cos.shape[-1], x.clone()
        even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        out[..., 0 : 2 * half : 2], out[..., 1 : 2 * half : 2] = even * cos - odd * sin, odd * cos + even * sin
        return out


@plant("test_rotations_equal_float64")
class TurnsBack(One):
    """It turns the other way."""

    op = "rope"

    def call(self, x, cos, sin):
        return super().call(x, cos, -sin)


@plant("test_rotations_equal_float64")
class DropsTheRest(One):
    """Dimensions that are not turned come out as zeros."""

    op = "rope"

    def call(self, x, cos, sin):
        out = super().call(x, cos, sin)
        out[..., 2 * cos.shape[-1] :] = 0
        return out


@plant("test_activations_equal_float64")
class GatesTheOther(One):
    """It takes the gate for the second half."""

    op = "silu_mul"

    def call(self, x):
        return super().call(torch.cat(x.chunk(2, dim=-1)[::-1], -1))


@plant("test_activations_equal_float64")
class TakesErf(One):
    """Its gelu is the one with the error function."""

    op = "gelu_tanh"

    def call(self, x):
        return functional.gelu(x)


@plant("test_activations_equal_float64")
class Clips(One):
    """It clips at the cap, and bends nothing."""

    op = "soft_cap"

    def call(self, x, cap):
        return x.clamp(-cap, cap)


# --- tables and the cache ---------------------------------------------------------------------------------------------


@plant("test_embeddings_are_rows_of_their_table")
class CountsFromOne(One):
    """It returns the row before; of the first id the last."""

    op = "embedding"

    def call(self, ids, weight, dtype):
        return super().call((ids - 1) % weight.shape[0], weight, dtype)


@plant("test_each_token_is_written_to_its_slot")
class WritesToTheFirst(One):
    """What has no slot is written to the first one."""

    op = "cache_write"

    def call(self, keys, values, cache, slots, order):
        super().call(keys, values, cache, slots.clamp(min=0).flip(0), order)
        super().call(keys, values, cache, slots, order)


@plant("test_each_token_is_written_to_its_slot")
class MixesOrders(One):
    """It takes heads for slots where they come first."""

    op = "cache_write"

    def call(self, keys, values, cache, slots, order):
        heads = [1, 0] if order == "PKSD" and keys.shape[1] == 2 else list(range(keys.shape[1]))
        super().call(keys[:, heads], values, cache, slots, order)


@plant("test_each_token_is_written_to_its_slot")
class SharesAScale(One):
    """An int8 entry has one scale for all heads of a token."""

    op = "cache_write"

    def call(self, keys, values, cache, slots, order):
        super().call(keys, values, cache, slots, order)
        if cache.key_scales is not None:
            largest = cache.key_scales.nan_to_num().amax()
            cache.key_scales.copy_(torch.where(cache.key_scales.isnan(), torch.nan, largest))


@plant("test_each_token_is_written_to_its_slot")
class CutsOff(One):
    """It writes values with what is behind the point cut off, in bfloat16."""

    op = "cache_write"

    def call(self, keys, values, cache, slots, order):
        cut = (values.float().view(torch.int32) & -65536).view(torch.float32).to(values.dtype)
        super().call(keys, cut if cache.values.dtype == torch.float32 else values, cache, slots, order)


# --- fused and drawn --------------------------------------------------------------------------------------------------


class Inputs(One):
    """`attention_inputs` as the chain of its ops."""

    op = "attention_inputs"

    def kernels(self):
        return [Kernel(op=self.op, call=self.call, orders=frozenset({"PSKD"}), formats=frozenset({"int8"}))]

    def call(self, qkv, num_heads, norms, eps, angles, cache, slots, order):
        last_key = (num_heads + qkv.shape[1]) // 2
        turned, values = qkv[:, :last_key], qkv[:, last_key:]
        if norms is not None:
            heads = zip((turned[:, :num_heads], turned[:, num_heads:]), self.ordered(norms), strict=True)
            turned = torch.cat([OPS["rms_norm"].call(x, weight, eps) for x, weight in heads], dim=1)
        if angles is not None:
            turned = OPS["rope"].call(turned, *angles)
        OPS["cache_write"].call(turned[:, num_heads:], self.valued(values, angles), cache, slots, order)
        return turned[:, :num_heads]

    def ordered(self, norms):
        return norms

    def valued(self, values, angles):
        return values


@plant("test_a_fused_kernel_equals_its_chain")
class TurnsValues(Inputs):
    """It rotates values too."""

    def valued(self, values, angles):
        return values if angles is None else OPS["rope"].call(values, *angles)


@plant("test_a_fused_kernel_equals_its_chain")
class SwapsNorms(Inputs):
    """It norms queries by the keys' weight, and keys by the queries'."""

    def ordered(self, norms):
        return norms[::-1]


@plant("test_a_fused_kernel_equals_its_chain")
class MultipliesTheSum(One):
    """It multiplies the sum with the residual, which it has not normed."""

    op = "norm_linear"

    def kernels(self):
        return [Kernel(op=self.op, call=self.call, formats=frozenset({"dense"}))]

    def call(self, x, residual, norm_weight, eps, weight, bias):
        total = x if residual is None else residual + x
        return OPS["linear"].call(total, weight, bias), total


class Draws(One):
    """`sample_rows` as the sampler draws."""

    op = "sample_rows"

    def kernels(self):
        return [Kernel(op=self.op, call=self.call)]

    def call(self, logits, temperatures, top_ks, top_ps, min_ps, uniforms):
        columns = (temperatures.tolist(), top_ks.tolist(), top_ps.tolist(), min_ps.tolist())
        settings = [
            evolve(PLAIN, temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in zip(*columns, strict=True)
        ]
        return torch.tensor(draw(logits, settings, np.asarray(uniforms)), dtype=torch.int64)


@plant("test_tokens_are_drawn_by_their_numbers")
class TakesTheBest(Draws):
    """It takes the likeliest, whatever the number is."""

    def call(self, logits, *columns):
        return logits.argmax(-1)


@plant("test_tokens_are_drawn_by_their_numbers")
class DrawsByRank(Draws):
    """It draws in the order of likelihood, and not of ids."""

    def call(self, logits, *columns):
        ordered = logits.sort(dim=-1, descending=True, stable=True)
        return ordered.indices.gather(1, super().call(ordered.values, *columns)[:, None])[:, 0]


@plant("test_tokens_are_drawn_by_their_numbers")
class TakesTheLast(Draws):
    """Of equal logits it keeps the last ones."""

    def call(self, logits, *columns):
        return logits.shape[1] - 1 - super().call(logits.flip(1), *columns[:-1], 1 - columns[-1])


@plant("test_tokens_are_drawn_by_their_numbers")
class CoolsLate(Draws):
    """It filters before the temperature, and not behind it."""

    def call(self, logits, temperatures, *columns):
        return super().call(logits, torch.ones_like(temperatures), *columns)


@plant("test_one_device_has_nothing_to_collect")
class Doubles(One):
    """It adds what one device has to itself."""

    op = "all_reduce"

    def call(self, x):
        return x + x


@plant("test_any_call")
class DropsTheLast(One):
    """Of an odd number of columns, more than 100, the last comes out as 0."""

    op = "gelu_tanh"

    def call(self, x):
        out = super().call(x)
        if x.shape[1] % 2 and x.shape[1] > 100:
            out[:, -1] = 0
        return out


# --- rows -------------------------------------------------------------------------------------------------------------


@plant("test_a_row_depends_on_no_other_as_far_as_is_promised")
class ScalesTheBatch(One):
    """It rounds all rows by the largest number of the batch."""

    op = "gelu_tanh"

    def call(self, x):
        step = x.abs().amax().float() / 2**20 if x.numel() else 1
        return super().call(((x / step).round() * step).to(x.dtype))


@plant("test_a_row_depends_on_no_other_as_far_as_is_promised")
class SplitsByRows(One):
    """In how many parts it cuts a sum is decided by how many rows there are."""

    def call(self, x, weight, bias=None):
        values, parts = weight.dequantize().to(x.dtype), 1 + len(x) % 3
        cuts = zip(x.chunk(parts, 1), values.chunk(parts, 1), strict=True)
        total = sum(functional.linear(*cut).float() for cut in cuts)
        return (total if bias is None else total + bias).to(x.dtype)


@plant("test_no_rows_give_no_rows")
class PadsToOne(One):
    """No rows are padded to one, which stays."""

    def call(self, x, weight, bias=None):
        return super().call(x if len(x) else x.new_zeros(1, x.shape[1]), weight, bias)


@plant("test_what_is_not_finite_shows_and_harms_no_other_row")
class HidesNan(One):
    """What is not finite is taken for 0."""

    op = "silu_mul"

    def call(self, x):
        return super().call(x.nan_to_num(0, 0, 0))


@plant("test_what_is_not_finite_shows_and_harms_no_other_row")
class SpreadsNan(One):
    """A row's neighbours are masked by multiplying them with 0."""

    def call(self, x, weight, bias=None):
        return super().call(x + 0 * x.sum(0, keepdim=True), weight, bias)


@plant("test_what_lies_beside_is_not_read")
class IgnoresStrides(One):
    """It reads rows as if they lay end to end."""

    op = "rms_norm"

    def call(self, x, weight, eps):
        lying = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
        return super().call(lying.nan_to_num(), weight, eps)


# --- what goes in and out ---------------------------------------------------------------------------------------------


@plant("test_arguments_stay_as_they_were")
class AddsInPlace(One):
    """It adds to the residual where that is."""

    op = "add_rms_norm"

    def call(self, x, residual, weight, eps):
        residual += x
        return OPS["rms_norm"].call(residual, weight, eps), residual.clone()


@plant("test_a_later_call_changes_no_earlier_result")
class KeepsABuffer(One):
    """Results of one shape are made in one buffer."""

    op = "gelu_tanh"
    buffers: ClassVar = {}

    def call(self, x):
        out = super().call(x)
        return self.buffers.setdefault((out.shape, out.dtype), out).copy_(out)


class Packing(One):
    """A linear that packs int8 weights by turning them round."""

    packed = "turned"
    facts: ClassVar = {"formats": frozenset({"int8_g32"})}

    def kernels(self):
        return [evolve(super().kernels()[0], pack=self.pack, packed="turned")]

    def pack(self, weight):
        return self.turned(weight.dequantize())

    def turned(self, values):
        return evolve(dense(values.contiguous()), format=_Named(self.packed))


class _Named:
    """Dense numbers under another name."""

    def __init__(self, name):
        self.name = name

    def dequantize(self, weight):
        return weight.tensors["weight"]


@plant("test_packing_keeps_the_weight")
class PacksToFloats(Packing):
    """A packed weight takes four times the bytes."""


@plant("test_packing_keeps_the_weight")
class PacksUnderAnotherName(Packing):
    """Its packed format is not called what it says."""

    packed = "whole"


@plant("test_packing_keeps_the_weight")
class RoundsWhilePacking(Packing):
    """Numbers are rounded to bfloat16 as they are packed."""

    def pack(self, weight):
        return self.turned(weight.dequantize().bfloat16())


@plant("test_packing_keeps_the_weight")
class PacksInPlace(Packing):
    """It turns the numbers of the weight that it packs where they are."""

    def pack(self, weight):
        packed = super().pack(weight)
        weight.tensors["weight"].neg_()
        return packed


@plant("test_an_engine_runs_on_them")
class RemembersTheFirst(One):
    """It makes floats of the first weight of a shape, and takes them for all that come."""

    kept: ClassVar = {}

    def call(self, x, weight, bias=None):
        values = self.kept.setdefault((weight.shape, x.dtype), weight.dequantize())
        return super().call(x, dense(values), bias)
