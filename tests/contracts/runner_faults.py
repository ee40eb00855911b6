"""Broken runners, around the eager one."""

import torch
from attrs import evolve

from contracts.planted import offering, planting
from intarsia.defaults import provide_runners
from intarsia.models.eager import EagerRunner
from intarsia.sampling.arithmetic import likeliest_ids
from intarsia.testing.runners import RunnerContract

FAULTS = []
plant = planting(FAULTS)


def contract(part):
    """Return the contract for a broken runner."""

    class Broken(RunnerContract):
        def provider(self):
            return offering(provide_runners()[0], part.build)

    return Broken


class Broken(EagerRunner):
    """A base of those that change what they are given or give."""

    def sees(self, batch):
        return batch

    def gives(self, hidden, batch, cache, layers):
        return hidden

    def run(self, batch, cache, layers, hidden_TE=None):
        seen = self.sees(batch)
        if seen is not batch:
            seen = evolve(seen, attention=self.attention.prepare(seen, self.layout))
        return self.gives(super().run(seen, cache, layers, hidden_TE), batch, cache, layers)


def slots_of(batch, layout):
    """Return (page, slot) of the batch's tokens."""
    slots = batch.slots_T[0]
    return slots.div(layout.page_size, rounding_mode="floor"), slots % layout.page_size


def at(pages, slots, order):
    """Return an index of these slots of a cache tensor."""
    return (pages, slots) if order == "PSKD" else (pages, slice(None), slots)


def evolve_frozen(runner, **changes):
    """Change a runner's fields where they are."""
    for name, value in changes.items():
        object.__setattr__(runner, name, value)
    return runner


# --- results ----------------------------------------------------------------------------------------------------------


@plant("test_logits_equal_those_of_the_ops")
class ForgetsTheLastNorm(Broken):
    """It leaves out the last norm where its weight is 1."""

    def logits(self, hidden_TE, rows_L):
        return self.head(self.ops, hidden_TE[rows_L]).float()


@plant("test_logits_equal_those_of_the_ops")
class DropsBiases(Broken):
    """It leaves out the bias of the output projection."""

    @classmethod
    def build(cls, context):
        weights = {name: w for name, w in context.weights.items() if not name.endswith("out.bias")}
        return super().build(evolve(context, weights=weights))


@plant("test_logits_equal_those_of_the_ops")
class SharesHeadsWrongly(Broken):
    """Of several heads of keys all queries see the first."""

    @classmethod
    def build(cls, context):
        made = super().build(context)
        attention = made.attention

        class First:
            prepare = attention.prepare

            def attend(self, q, layer, spec, group, batch):
                order = context.layout.order
                axis = order.index("K")
                keys, values = (t.narrow(axis, 0, 1).expand(t.shape).contiguous() for t in (layer.keys, layer.values))
                return attention.attend(q, evolve(layer, keys=keys, values=values), spec, group, batch)

        return evolve_frozen(made, attention=First())


@plant("test_rows_of_all_kinds_run_side_by_side")
class CountsPositionsOn(Broken):
    """Positions of a batch of several rows count on from row to row."""

    def sees(self, batch):
        if batch.num_rows == 1:
            return batch
        return evolve(batch, positions_T=torch.arange(len(batch.ids_T)).clamp(max=60))


@plant("test_chunks_continue_where_the_last_ended")
class BeginsAnew(Broken):
    """A chunk of several tokens sees no token before it."""

    def sees(self, batch):
        if batch.num_rows > 1 or len(batch.ids_T) == 1 or not batch.starts[0]:
            return batch
        size, start = self.layout.page_size, batch.starts[0]
        pages = tuple(tuple(table[start // size :] for table in group) for group in batch.pages)
        return evolve(batch, starts=(start % size,), pages=pages)


@plant("test_many_rows_decode_together")
class DecodesThirtyTwo(Broken):
    """Of more than 32 rows it runs the first 32."""

    def gives(self, hidden, batch, cache, layers):
        return torch.cat([hidden[:32], torch.zeros_like(hidden[32:])]) if batch.num_rows > 32 else hidden


@plant("test_the_cache_holds_what_the_ops_write")
class WritesValuesLarge(Broken):
    """Once a step is over it makes its values in the cache a thousandth larger."""

    def gives(self, hidden, batch, cache, layers):
        place = at(*slots_of(batch, self.layout), self.layout.order)
        for index in layers:
            cache.layer(index).values[place] *= 1.001
        return hidden


@plant("test_layer_ranges_make_up_the_whole")
class CountsLayersFromZero(Broken):
    """It runs as many layers as it is told, always from the first on."""

    def run(self, batch, cache, layers, hidden_TE=None):
        return super().run(batch, cache, range(len(layers)), hidden_TE)


@plant("test_layer_ranges_make_up_the_whole")
class WorksInPlace(Broken):
    """It works in the tensor that it is handed."""

    def run(self, batch, cache, layers, hidden_TE=None):
        found = super().run(batch, cache, layers, hidden_TE)
        return found if hidden_TE is None else hidden_TE.copy_(found)


class Finds(Broken):
    """A base of those that find likeliest ids."""

    def likeliest(self, hidden_TE, rows_L, num_ids):
        return likeliest_ids(self.logits(hidden_TE, rows_L)[:, :num_ids])


@plant("test_likeliest_ids_are_those_of_the_logits")
class FindsIdsOfThePadding(Finds):
    """Its likeliest ids can lie behind the last."""

    def likeliest(self, hidden_TE, rows_L, num_ids):
        return super().likeliest(hidden_TE, rows_L, self.spec.vocab_size)


@plant("test_likeliest_ids_are_those_of_the_logits")
class OverlooksNan(Finds):
    """Of logits that are no numbers it finds the first."""

    def likeliest(self, hidden_TE, rows_L, num_ids):
        ids_L, best_L = super().likeliest(hidden_TE, rows_L, num_ids)
        return ids_L.clamp(min=0), best_L


@plant("test_likeliest_ids_are_those_of_the_logits")
class FindsTheLastOfEquals(Finds):
    """Of equal logits it takes the highest id."""

    def likeliest(self, hidden_TE, rows_L, num_ids):
        logits_LV = self.logits(hidden_TE, rows_L)[:, :num_ids]
        ids_L, best_L = likeliest_ids(logits_LV)
        last_L = num_ids - 1 - logits_LV.flip(1).argmax(dim=1)
        return torch.where(ids_L < 0, ids_L, last_L), best_L


@plant("test_logits_are_those_that_are_asked_for")
class SortsLogits(Broken):
    """Its logits are in the order of the tokens, whatever order is asked for."""

    def logits(self, hidden_TE, rows_L):
        return super().logits(hidden_TE, rows_L.sort().values)


@plant("test_logits_are_those_that_are_asked_for")
class ReturnsHalfs(Broken):
    """Its logits are bf16."""

    def logits(self, hidden_TE, rows_L):
        return super().logits(hidden_TE, rows_L).bfloat16()


@plant("test_tokens_that_are_not_read_may_be_left")
class LeavesKeysUnwritten(Broken):
    """Of tokens that are not read it leaves the last layer's keys at 0."""

    def gives(self, hidden, batch, cache, layers):
        if batch.read_L is not None:
            pages, slots = slots_of(batch, self.layout)
            unread = torch.ones(len(hidden), dtype=torch.bool).index_fill(0, batch.read_L, False)
            cache.layer(layers[-1]).keys[at(pages[unread], slots[unread], self.layout.order)] = 0
        return hidden


@plant("test_tokens_that_are_not_read_may_be_left")
class RunsNothingForNobody(Broken):
    """Where no token is read it does nothing."""

    def run(self, batch, cache, layers, hidden_TE=None):
        if batch.read_L is not None and not len(batch.read_L):
            return torch.zeros(len(batch.ids_T), self.spec.embed_dim)
        return super().run(batch, cache, layers, hidden_TE)


@plant("test_tokens_that_are_not_read_may_be_left")
class PacksWhatIsRead(Broken):
    """It returns tokens that are read end to end, and not where they stood."""

    def gives(self, hidden, batch, cache, layers):
        if batch.read_L is None:
            return hidden
        return torch.cat([hidden[batch.read_L], torch.zeros_like(hidden[len(batch.read_L) :])])


@plant("test_tokens_that_are_not_read_may_be_left")
class ReadsOneTokenARow(Broken):
    """Of a row's tokens that are read it goes on with the last alone."""

    def gives(self, hidden, batch, cache, layers):
        if batch.read_L is None:
            return hidden
        row_L = torch.searchsorted(torch.tensor(batch.bounds), batch.read_L, right=True)
        return hidden.index_fill(0, batch.read_L[:-1][row_L.diff() == 0], 0.0)


# --- slots ------------------------------------------------------------------------------------------------------------


@plant("test_slots_without_a_token_are_not_read")
class ReadsTheNextSlot(Broken):
    """It reads one slot too many, and multiplies what is there by 0."""

    def gives(self, hidden, batch, cache, layers):
        pages, slots = slots_of(batch, self.layout)
        keys = cache.layer(0).keys[at(pages, (slots + 1) % self.layout.page_size, self.layout.order)]
        return hidden + 0 * keys.reshape(len(hidden), -1).sum(-1, keepdim=True)


@plant("test_no_slot_is_written_but_the_tokens_own")
class WritesTheNextSlot(Broken):
    """It clears the slot behind the last token."""

    def gives(self, hidden, batch, cache, layers):
        pages, slots = slots_of(batch, self.layout)
        free = slots < self.layout.page_size - 1
        for index in layers:
            cache.layer(index).keys[at(pages[free][-1:], slots[free][-1:] + 1, self.layout.order)] = 0
        return hidden


@plant("test_padding_harms_nobody")
class WritesPaddingSomewhere(Broken):
    """It writes padding to the first slot of the first page."""

    def sees(self, batch):
        return evolve(batch, slots_T=tuple(group.clamp(min=0) for group in batch.slots_T))


@plant("test_pages_behind_a_window_may_be_gone")
class LooksBehindWindows(Broken):
    """It reads the first page of a row, whatever its window."""

    def gives(self, hidden, batch, cache, layers):
        for table in batch.pages[0]:
            hidden = hidden + (0.0 if table[0] >= 0 else 1.0)
        return hidden


# --- bits -------------------------------------------------------------------------------------------------------------


@plant("test_a_row_has_the_same_bits_in_any_company")
class LeansOnItsNeighbours(Broken):
    """The last bits of a row depend on how many tokens run with it."""

    def gives(self, hidden, batch, cache, layers):
        return hidden * (1 + 1e-6 * len(hidden))


@plant("test_a_row_has_the_same_bits_in_any_chunks_and_pages")
class LeansOnItsChunk(Broken):
    """The last bits of a token depend on where its chunk began."""

    def gives(self, hidden, batch, cache, layers):
        lengths = torch.tensor(batch.bounds).diff()
        return hidden * (1 + 1e-6 * torch.tensor(batch.starts).repeat_interleave(lengths).unsqueeze(1))


# --- what it takes ----------------------------------------------------------------------------------------------------


@plant("test_what_it_takes_it_runs_as_the_ops_do")
class KnowsOnePageSize(Broken):
    """It takes pages of 3 tokens, and finds no more than the first in each."""

    def sees(self, batch):
        if self.layout.page_size != 3:
            return batch
        return evolve(batch, slots_T=tuple(group - group % 3 for group in batch.slots_T))


@plant("test_what_it_takes_it_runs_as_the_ops_do")
class RoundsRoughly(Broken):
    """In bf16 it keeps 4 bits of the residual stream."""

    def gives(self, hidden, batch, cache, layers):
        if hidden.dtype != torch.bfloat16:
            return hidden
        return (hidden.view(torch.int16) & -16).view(torch.bfloat16)
