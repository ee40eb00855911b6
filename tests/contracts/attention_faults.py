"""Broken attention backends, around the oracle of the core.

Shape legend: n tokens of one row, H heads, K kv heads, G query heads a kv head, D head dim, M keys.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch
from attrs import evolve

from contracts.planted import offering, planting
from fixed_attention import FixedAttention, Tables
from intarsia.defaults import provide_attention_backends
from intarsia.defaults.attention import RowByRowAttention, eager_row, visible
from intarsia.defaults.tiled import tiled_row
from intarsia.testing.attention_backends import AttentionContract
from intarsia.types import Fit, Unfit

FAULTS = []
plant = planting(FAULTS)
EAGER = next(p for p in provide_attention_backends() if p.key == "eager")


class Oracle(RowByRowAttention):
    """The oracle: broken ones change what it does with a row."""

    def __init__(self, levels=None):
        super().__init__(self.row, levels or {})

    def row(self, q, keys, values, start, first, spec):
        return eager_row(q, keys, values, start, first, spec)


def contract(part):
    """Return the contract for a broken backend."""

    class Broken(AttentionContract):
        derandomize = True
        examples = 20

        def provider(self):
            return evolve(offering(EAGER, lambda context: part()), fit=getattr(part, "fit", EAGER.fit))

    return Broken


def softmax_row(q, keys, values, start, first, spec, *, hide=-torch.inf, peak=True, total=torch.matmul):
    """Return what `eager_row` does, in pieces that can be broken one by one."""
    grouped = q.float().view(len(q), spec.num_kv_heads, -1, spec.head_dim).permute(1, 2, 0, 3)
    scores = grouped @ keys.float().permute(1, 2, 0).unsqueeze(1) * spec.scale
    hidden = ~visible(len(q), len(keys), start - first, spec.window, q.device)
    scores = scores.masked_fill(hidden, hide)
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True) if peak else scores)
    mixed = total(weights / weights.sum(dim=-1, keepdim=True), values.float().transpose(0, 1).unsqueeze(1))
    return mixed.permute(2, 0, 1, 3).reshape(q.shape).to(q.dtype)


def in_parts(length, dtype=torch.float32):
    """Return a product of weights and values that takes so many keys at a time, and adds up in a dtype."""

    def total(weights, values):
        pairs = zip(weights.split(length, -1), values.split(length, -2), strict=True)
        return sum((w @ v).to(dtype) for w, v in pairs)

    return total


# --- numbers ----------------------------------------------------------------------------------------------------------


@plant("test_rows_of_every_kind_equal_float64")
class DealsHeadsOut(Oracle):
    """Query heads take kv heads in turn, and not in groups side by side."""

    def row(self, q, keys, values, start, first, spec):
        dealt = q.unflatten(1, (-1, spec.num_kv_heads)).transpose(1, 2).flatten(1, 2)
        out = eager_row(dealt, keys, values, start, first, spec)
        return out.unflatten(1, (spec.num_kv_heads, -1)).transpose(1, 2).flatten(1, 2)


@plant("test_rows_of_every_kind_equal_float64")
class OverlooksItself(Oracle):
    """A query does not see its own token's key, unless there is no other."""

    def row(self, q, keys, values, start, first, spec):
        if start == first:
            return eager_row(q, keys, values, start, first, spec)
        return eager_row(q, keys[:-1], values[:-1], start - 1, first, spec)


@plant("test_rows_of_every_kind_equal_float64")
class ReturnsFloats(Oracle):
    """Its result is in fp32, whatever the queries are in."""

    def row(self, q, keys, values, start, first, spec):
        return eager_row(q.float(), keys, values, start, first, spec)


@plant("test_rows_of_every_kind_equal_float64")
class ScoresInBf16(Oracle):
    """It multiplies queries by keys in bf16, in fp32 too."""

    def row(self, q, keys, values, start, first, spec):
        return eager_row(q.bfloat16().to(q.dtype), keys, values, start, first, spec)


@plant("test_pages_of_any_size_can_lie_anywhere")
class SwapsKeysAndValues(Oracle):
    """In the order PKSD it takes keys for values."""

    def attend(self, q_THD, cache, spec, group, batch):
        if batch.attention.order == "PKSD":
            cache = SimpleNamespace(
                keys=cache.values, values=cache.keys, key_scales=cache.value_scales, value_scales=cache.key_scales
            )
        return super().attend(q_THD, cache, spec, group, batch)


@plant("test_pages_of_any_size_can_lie_anywhere")
class ReadsOn(Oracle):
    """It reads on behind a row's first page, wherever the next one lies."""

    def prepare(self, batch, layout):
        straight = tuple(
            tuple(tuple(range(table[0], table[0] + len(table))) if table[0] >= 0 else table for table in tables)
            for tables in batch.pages
        )
        return super().prepare(evolve(batch, pages=straight), layout)


@plant("test_rows_can_share_their_first_pages")
class FollowsTheFirst(Oracle):
    """Of rows that begin in the same page all read on in the first one's pages."""

    def prepare(self, batch, layout):
        followed = []
        for tables in batch.pages:
            longest = {}
            for table in tables:
                longest.setdefault(table[0], table)
            followed.append(
                tuple(longest[table[0]][: len(table)] + table[len(longest[table[0]]) :] for table in tables)
            )
        return super().prepare(evolve(batch, pages=tuple(followed)), layout)


@plant("test_rows_can_share_their_first_pages")
class KnowsRowsByTheirFirstPage(Oracle):
    """It takes rows whose first page is the same for the same row, as far as that goes."""

    def prepare(self, batch, layout):
        met = {}
        pages = []
        for group, tables in enumerate(batch.pages):
            known = [met.setdefault((group, table[0]), table) if table[0] >= 0 else table for table in tables]
            pages.append(tuple(one + table[len(one) :] for one, table in zip(known, tables, strict=True)))
        return super().prepare(evolve(batch, pages=tuple(pages)), layout)


@plant("test_entries_of_every_format_are_read_as_what_they_stand_for")
class IgnoresScales(Oracle):
    """It takes the numbers of int8 entries without their scales."""

    def attend(self, q_THD, cache, spec, group, batch):
        return super().attend(q_THD, evolve(cache, key_scales=None, value_scales=None), spec, group, batch)


@plant("test_entries_of_every_format_are_read_as_what_they_stand_for")
class SwapsScales(Oracle):
    """It multiplies the values of int8 entries by the keys' scales."""

    def attend(self, q_THD, cache, spec, group, batch):
        return super().attend(q_THD, evolve(cache, value_scales=cache.key_scales), spec, group, batch)


@plant("test_scores_are_multiplied_by_the_scale")
class HasItsOwnScale(Oracle):
    """It divides scores by the root of the head dim, whatever the layer says."""

    def row(self, q, keys, values, start, first, spec):
        return super().row(q, keys, values, start, first, evolve(spec, scale=spec.head_dim**-0.5))


@plant("test_soft_caps_bend_scaled_scores")
class CapsBeforeTheScale(Oracle):
    """It bends scores before they are scaled."""

    def row(self, q, keys, values, start, first, spec):
        # scale * cap * tanh(s / cap), of scores s that are not scaled, is another cap of those that are.
        cap = None if spec.soft_cap is None else spec.soft_cap * spec.scale
        return super().row(q, keys, values, start, first, evolve(spec, soft_cap=cap))


@plant("test_soft_caps_bend_scaled_scores")
class IgnoresCaps(Oracle):
    """It fits layers with a soft cap, and leaves it out."""

    def row(self, q, keys, values, start, first, spec):
        return super().row(q, keys, values, start, first, evolve(spec, soft_cap=None))


@plant("test_a_query_sees_the_last_keys_of_its_window")
class IgnoresWindows(Oracle):
    """It fits layers with a window, and sees all that is left in the row's pages."""

    def row(self, q, keys, values, start, first, spec):
        return super().row(q, keys, values, start, first, evolve(spec, window=None))


@plant("test_a_query_sees_the_last_keys_of_its_window")
class CutsWindowsShort(Oracle):
    """A window holds a key too few."""

    def row(self, q, keys, values, start, first, spec):
        window = None if spec.window is None else max(1, spec.window - 1)
        return super().row(q, keys, values, start, first, evolve(spec, window=window))


@plant("test_large_scores_do_not_overflow")
class TakesNoPeak(Oracle):
    """It takes exponentials of scores as they are."""

    def row(self, q, keys, values, start, first, spec):
        return softmax_row(q, keys, values, start, first, spec, peak=False)


@plant("test_many_keys_add_up")
class AddsInTheQueriesDtype(Oracle):
    """It adds weighted values up in the queries' dtype."""

    def row(self, q, keys, values, start, first, spec):
        return softmax_row(q, keys, values, start, first, spec, total=in_parts(16, q.dtype))


@plant("test_what_fits_is_right_and_the_rest_is_refused")
class FitsTooMuch(Oracle):
    """It fits heads of any width, and reads the first 128 dimensions."""

    def row(self, q, keys, values, start, first, spec):
        out = eager_row(q[..., :128], keys[..., :128], values[..., :128], start, first, spec)
        return torch.nn.functional.pad(out, (0, q.shape[-1] - out.shape[-1]))


@plant("test_what_fits_is_right_and_the_rest_is_refused")
class RefusesWithoutReason(Oracle):
    """It refuses wide heads, and does not say why."""

    @staticmethod
    def fit(context):
        return Unfit("") if any(layer.attention.head_dim > 128 for layer in context.spec.layers) else Fit(1)


@plant("test_every_layer_is_looked_at")
class LooksAtTheFirstLayer(Oracle):
    """It refuses a soft cap in the first layer, and in no other."""

    @staticmethod
    def fit(context):
        return Unfit("no soft caps") if context.spec.layers[0].attention.soft_cap else Fit(1)


@plant("test_any_batch_equals_float64")
class LeavesOddDimsOut(Oracle):
    """It leaves the last of an odd number of head dimensions out of the scores."""

    def row(self, q, keys, values, start, first, spec):
        whole = spec.head_dim // 2 * 2 or 1
        return eager_row(q, torch.where(torch.arange(spec.head_dim) < whole, keys, 0), values, start, first, spec)


# --- what is seen -----------------------------------------------------------------------------------------------------


class WholePages(Oracle):
    """It reads the rest of a row's last page, too."""

    def prepare(self, batch, layout):
        ready = super().prepare(batch, layout)
        size = layout.page_size
        whole = tuple(tuple(evolve(k, count=-(-k.count // size) * size) for k in rows) for rows in ready.keys)
        return evolve(ready, keys=whole)


@plant("test_unused_slots_and_pages_are_not_read")
class WeighsUnusedSlots(WholePages):
    """It gives slots that hold no token a weight of zero."""


@plant("test_unused_slots_and_pages_are_not_read")
class SeesWhatIsLeftBehind(WholePages):
    """A row's last query sees what an earlier row left in the slot behind it, unless that is NaN."""

    def row(self, q, keys, values, start, first, spec):
        count = start + len(q) - first
        if len(keys) > count and keys[count].isfinite().all():
            count += 1
        keys, values = keys[:count], values[:count]
        last = eager_row(q[-1:], keys, values, first + count - 1, first, spec)
        if len(q) == 1:
            return last
        before = eager_row(q[:-1], keys[: count - 1], values[: count - 1], start, first, spec)
        return torch.cat([before, last])


@plant("test_no_query_sees_a_later_token")
class SeesOneTooMany(Oracle):
    """A query sees the key behind its own."""

    def row(self, q, keys, values, start, first, spec):
        return super().row(q, keys, values, start + 1, first, spec)


@plant("test_no_query_sees_a_later_token")
class HidesByAScore(Oracle):
    """It hides later tokens by a score of -30, which large ones outweigh."""

    def row(self, q, keys, values, start, first, spec):
        return softmax_row(q, keys, values, start, first, spec, hide=-30.0)


@plant("test_no_query_sees_a_key_behind_its_window")
class SeesBehindItsWindow(Oracle):
    """A window holds a key too many."""

    def row(self, q, keys, values, start, first, spec):
        window = None if spec.window is None else spec.window + 1
        return super().row(q, keys, values, start, first, evolve(spec, window=window))


@plant("test_a_key_that_is_not_seen_weighs_nothing")
class LeavesTheUnseenALittle(Oracle):
    """Keys that a query does not see weigh as little as an exponential of -80."""

    def row(self, q, keys, values, start, first, spec):
        return softmax_row(q, keys, values, start, first, spec, hide=-80.0)


@plant("test_what_is_cached_counts_like_what_is_new")
class ForgetsTheStart(Oracle):
    """It takes a chunk's first token for the first of its prompt."""

    def row(self, q, keys, values, start, first, spec):
        return super().row(q, keys, values, first if len(q) > 1 else start, first, spec)


@plant("test_what_is_cached_counts_like_what_is_new")
class SeesNewTokensAlone(Oracle):
    """A chunk's queries see the chunk's own keys, and none before them."""

    def row(self, q, keys, values, start, first, spec):
        own = start - first if len(q) > 1 else 0
        return super().row(q, keys[own:], values[own:], start, first + own, spec)


@plant("test_padding_changes_no_row")
class ScalesByTheLargest(Oracle):
    """It divides queries by the largest of the batch, padding's included."""

    def attend(self, q_THD, cache, spec, group, batch):
        largest = q_THD.float().abs().amax()
        scaled = (q_THD.float() / largest).to(q_THD.dtype)
        return super().attend(scaled, cache, evolve(spec, scale=spec.scale * float(largest)), group, batch)


@plant("test_what_is_not_a_number_shows_in_its_row_alone")
class HidesNaN(Oracle):
    """It makes zeros of results that are not numbers."""

    def attend(self, q_THD, cache, spec, group, batch):
        return super().attend(q_THD, cache, spec, group, batch).nan_to_num(0.0)


@plant("test_what_is_not_a_number_shows_in_its_row_alone")
class SpreadsNaN(Oracle):
    """It checks the batch at once: NaN in one row's result makes NaN of all."""

    def attend(self, q_THD, cache, spec, group, batch):
        out = super().attend(q_THD, cache, spec, group, batch)
        return out + 0 * out.sum()


# --- steps and layers -------------------------------------------------------------------------------------------------


@plant("test_layers_of_all_groups_share_a_preparation")
class KnowsOneGroup(Oracle):
    """It takes the first group's pages for every layer."""

    def attend(self, q_THD, cache, spec, group, batch):
        return super().attend(q_THD, cache, spec, 0, batch)


@plant("test_layers_of_all_groups_share_a_preparation")
class KnowsOneLayer(Oracle):
    """It keeps the scale of the first layer that it meets."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "scale", [])

    def attend(self, q_THD, cache, spec, group, batch):
        self.scale.append(spec.scale)
        return super().attend(q_THD, cache, evolve(spec, scale=self.scale[0]), group, batch)


@plant("test_a_step_owes_nothing_to_another")
class PreparesOnce(Oracle):
    """It prepares nothing anew where a step has the rows of the one before."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "kept", {})

    def prepare(self, batch, layout):
        rows = (batch.bounds, batch.starts)
        if rows not in self.kept:
            self.kept.clear()
            self.kept[rows] = super().prepare(batch, layout)
        return self.kept[rows]


@plant("test_a_step_owes_nothing_to_another")
class KnowsTheLastStep(Oracle):
    """Of steps with rows of equal lengths it knows what it prepared last."""

    def __init__(self):
        super().__init__()
        object.__setattr__(self, "last", {})

    def prepare(self, batch, layout):
        self.last[batch.bounds] = super().prepare(batch, layout)
        return self.last[batch.bounds]

    def attend(self, q_THD, cache, spec, group, batch):
        return super().attend(q_THD, cache, spec, group, evolve(batch, attention=self.last[batch.bounds]))


@plant("test_nothing_that_it_is_given_is_written_to")
class ScalesInPlace(Oracle):
    """It multiplies the queries by the scale where they are."""

    def attend(self, q_THD, cache, spec, group, batch):
        return super().attend(q_THD.mul_(spec.scale), cache, evolve(spec, scale=1.0), group, batch)


@plant("test_nothing_that_it_is_given_is_written_to")
class ClearsTheCache(Oracle):
    """It makes zeros of the NaN in the cache."""

    def attend(self, q_THD, cache, spec, group, batch):
        cache.keys.nan_to_num_(0.0)
        return super().attend(q_THD, cache, spec, group, batch)


class KeepsTables(Tables):
    """Metadata of a first step that takes the rows of later ones, and not their pages."""

    def refill(self, other):
        self.lengths_R.copy_(other.lengths_R)


class FixedOracle(FixedAttention):
    """Attention over fixed buffers: broken ones change what these hold."""

    def __init__(self):
        super().__init__(eager_row)


@plant("test_fixed_metadata_serves_later_steps")
class RefillsHalf(FixedOracle):
    """Its fixed metadata keeps the pages of the first step."""

    def prepare_fixed(self, batch, layout, max_len):
        ready = super().prepare_fixed(batch, layout, max_len)
        return KeepsTables(ready.pages, ready.lengths_R, ready.host)


# --- bits -------------------------------------------------------------------------------------------------------------


@plant("test_its_neighbours_show_in_no_bit")
class SplitsByCompany(Oracle):
    """It splits a row's keys into as many parts as the batch has rows."""

    def attend(self, q_THD, cache, spec, group, batch):
        ready, outs = batch.attention, []
        rows = zip(batch.starts, pairwise(batch.bounds), ready.keys[group], strict=True)
        for start, (begin, stop), found in rows:
            keys, values = found.read(cache, ready.order)
            total = in_parts(-(-len(keys) // batch.num_rows))
            outs.append(softmax_row(q_THD[begin:stop], keys, values, start, found.first, spec, total=total))
        return torch.cat(outs)


@plant("test_where_its_pages_lie_shows_in_no_bit")
class AddsInTheOrderOfPages(Oracle):
    """It adds a single token's values up in the order of the numbers of their pages."""

    def attend(self, q_THD, cache, spec, group, batch):
        ready, outs = batch.attention, []
        rows = zip(batch.starts, pairwise(batch.bounds), ready.keys[group], strict=True)
        for start, (begin, stop), found in rows:
            keys, values = found.read(cache, ready.order)
            if stop - begin == 1 and spec.window is None and isinstance(found.pages, torch.Tensor):
                size = cache.keys.shape[ready.order.index("S")]
                parts = torch.arange(len(keys)).split(size)
                order = torch.cat([parts[i] for i in found.pages.argsort().tolist()])
                keys, values = keys[order], values[order]
            outs.append(eager_row(q_THD[begin:stop], keys, values, start, found.first, spec))
        return torch.cat(outs)


@plant("test_pages_that_it_shares_show_in_no_bit")
class MergesParts(Oracle):
    """It attends to the pages that all rows share first, and adds what it makes of the others."""

    def attend(self, q_THD, cache, spec, group, batch):
        ready, outs = batch.attention, []
        tables = batch.pages[group]
        shared = sum(len(set(pages)) == 1 for pages in zip(*tables, strict=False)) if len(tables) > 1 else 0
        size = cache.keys.shape[ready.order.index("S")]
        rows = zip(batch.starts, pairwise(batch.bounds), ready.keys[group], strict=True)
        for start, (begin, stop), found in rows:
            keys, values = found.read(cache, ready.order)
            total = in_parts(shared * size or len(keys))
            outs.append(softmax_row(q_THD[begin:stop], keys, values, start, found.first, spec, total=total))
        return torch.cat(outs)


@plant("test_pages_that_it_shares_show_in_no_bit")
class AddsSharedPagesApart(Oracle):
    """It adds the values of pages that a row shares with others up apart from the rest."""

    def attend(self, q_THD, cache, spec, group, batch):
        ready, outs = batch.attention, []
        size = cache.keys.shape[ready.order.index("S")]
        tables = batch.pages[group]
        rows = zip(batch.starts, pairwise(batch.bounds), ready.keys[group], tables, strict=True)
        for start, (begin, stop), found, table in rows:
            shared = max((common(table, other) for other in tables if other is not table), default=0)
            split = max(0, shared * size - found.first)

            def total(weights, values, split=split):
                return weights[..., :split] @ values[..., :split, :] + weights[..., split:] @ values[..., split:, :]

            keys, values = found.read(cache, ready.order)
            outs.append(softmax_row(q_THD[begin:stop], keys, values, start, found.first, spec, total=total))
        return torch.cat(outs)


def common(table, other):
    """Return how many pages two tables begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(table, other, strict=False)) if a != b), min(len(table), len(other)))


BITWISE = dict.fromkeys(("float32", "bfloat16", "float16"), "bitwise")


@plant("test_its_chunks_show_in_no_bit")
class PromisesTooMuch(Oracle):
    """It promises bitwise, and leaves the order of sums to matrix products of any shape."""

    def __init__(self):
        super().__init__(BITWISE)


@plant("test_its_chunks_show_in_no_bit")
class BeginsTilesAnywhere(Oracle):
    """It promises bitwise, and its tiles begin with the first page that a window has left."""

    def __init__(self):
        super().__init__(BITWISE)

    def row(self, q, keys, values, start, first, spec):
        return tiled_row(q, keys, values, start - first, 0, spec)
