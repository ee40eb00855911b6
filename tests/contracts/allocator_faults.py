"""Broken cache allocators, around the paged one. None of them finds its own fault: `check_integrity` is silent."""

from attrs import evolve

from contracts.planted import offering, planting
from intarsia.testing.allocators import AllocatorContract
from intarsia_paged import hashing, provide_cache_allocators
from intarsia_paged.allocator import PagedAllocator

FAULTS = []
plant = planting(FAULTS)


class Silent(PagedAllocator):
    def check_integrity(self):
        pass


def contract(part):
    """Return the contract for a broken allocator."""

    def build(context):
        return part(context.options, context.layout, context.num_pages, context.num_host_pages)

    class Broken(AllocatorContract):
        derandomize = True

        def provider(self):
            return offering(provide_cache_allocators()[0], build)

    return Broken


# --- pages ------------------------------------------------------------------------------------------------------------


@plant("test_no_page_is_lost")
class LeaksAPage(Silent):
    """It loses the last page of a sequence that leaves with rejected or unrun tokens."""

    def release(self, sequence_id):
        held = self._held.get(sequence_id)
        if held is not None and len(held.tables[0]) * self._size > held.num_computed + self._size:
            held.tables[0].pop()
        super().release(sequence_id)


@plant("test_no_page_is_lost")
class ForgetsRefused(Silent):
    """Pages that it took before it found no room stay taken."""

    def _admit(self, sequence_id, token_ids, num_tokens, salt):
        found = super()._admit(sequence_id, token_ids, num_tokens, salt)
        if found is None and self._pools[0].num_available:
            self._pools[0].take()
        return found


@plant("test_no_page_is_given_to_two")
class GivesAPageToTwo(Silent):
    """It gives the first page of one sequence to the next one too."""

    def _admit(self, sequence_id, token_ids, num_tokens, salt):
        found = super()._admit(sequence_id, token_ids, num_tokens, salt)
        if found == 0 and len(self._held) > 1:
            first = next(iter(self._held.values()))
            self._held[sequence_id].tables[0][0] = first.tables[0][0]
        return found


@plant("test_tokens_are_in_their_slots_as_sequences_grow")
class SwapsPages(Silent):
    """As a table grows its first two pages change places."""

    def reserve(self, sequence_id, token_ids, num_tokens, salt=""):
        found = super().reserve(sequence_id, token_ids, num_tokens, salt)
        if found:
            table = self._held[sequence_id].tables[0]
            table[:2] = table[1::-1] if len(table) > 1 else table[:2]
        return found


@plant("test_tokens_are_in_their_slots_as_sequences_grow")
class DropsWindowsEarly(Silent):
    """It gives a window's pages back one token too early."""

    def _first_visible(self, group, position):
        window = self.layout.groups[group].window
        return 0 if window is None else max(0, position - window + 2) // self._size


@plant("test_page_tables_hold_what_was_reserved")
class RoundsDown(Silent):
    """It reserves whole pages alone: of the last one nothing."""

    def _pages_for(self, num_tokens):
        return max(1, num_tokens // self._size)


@plant("test_what_capacity_promises_fits")
class PromisesTooMuch(Silent):
    """`capacity` counts a page that a sequence fills in part as half a page."""

    def capacity(self, max_tokens):
        return self.num_pages * self._size // max(1, max_tokens)


@plant("test_a_full_cache_says_so_and_nothing_has_changed")
class GrowsHalfway(Silent):
    """Where there is no room for all pages, it takes those that there are, and says None."""

    def reserve(self, sequence_id, token_ids, num_tokens, salt=""):
        found = super().reserve(sequence_id, token_ids, num_tokens, salt)
        held = self._held.get(sequence_id)
        if found is None and held is not None and self._pools[0].num_available:
            self._grow(self._pools[0], held.tables[0], len(held.tables[0]) * self._size + 1)
        return found


@plant("test_a_full_cache_says_so_and_nothing_has_changed")
class KeepsTheRefused(Silent):
    """Of a sequence that it refuses it revives cached pages first."""

    def _admit(self, sequence_id, token_ids, num_tokens, salt):
        for pool in self._pools:
            if num_tokens > 3000 and pool._cached:
                pool.take()
            elif num_tokens > 3000:
                pool._names.clear()
                pool._by_name.clear()
        return super()._admit(sequence_id, token_ids, num_tokens, salt)


@plant("test_release_ignores_what_is_gone")
class ReleasesTwice(Silent):
    """Releasing what is gone frees the pages of another."""

    def release(self, sequence_id):
        if sequence_id not in self._held and self._held:
            other = next(iter(self._held.values()))
            self._pools[0].drop(other.tables[0].pop())
        super().release(sequence_id)


# --- prefixes ---------------------------------------------------------------------------------------------------------


@plant("test_an_equal_prefix_is_found_but_for_the_last_token")
class FindsTheWholePrompt(Silent):
    """It finds a whole prompt cached, the last token too."""

    def _find(self, token_ids, salt):
        return super()._find([*token_ids, 0], salt)


@plant("test_an_equal_prefix_is_found_but_for_the_last_token")
class PromisesOnePage(Silent):
    """`lookup` promises a page more than `reserve` finds."""

    def lookup(self, token_ids, salt=""):
        found = super().lookup(token_ids, salt)
        return found + self._size if found else 0


@plant("test_an_equal_prefix_is_found_but_for_the_last_token")
class SharesNothing(Silent):
    """It says that it shares prefixes, and never does."""

    def _find(self, token_ids, salt):
        return []


@plant("test_different_prefixes_never_meet")
class AddsTokensUp(Silent):
    """It names pages by the sum of their tokens."""

    def _find(self, token_ids, salt):
        return super()._find(self._weak(token_ids), salt)

    def _name_full(self, held, token_ids):
        super()._name_full(held, self._weak(token_ids))

    def _weak(self, token_ids):
        size = self._size
        return [sum(token_ids[i - i % size : i - i % size + size]) for i in range(len(token_ids))]


@plant("test_different_prefixes_never_meet")
class ForgetsParents(Silent):
    """It names pages by their own tokens, whatever came before."""

    def _find(self, token_ids, salt):
        size, chain = self._size, []
        for stop in range(size, len(token_ids), size):
            name = hashing.extend(hashing.root(salt), token_ids[stop - size : stop])
            if any(pool.find(name) is None for pool in self._pools):
                break
            chain.append(name)
        return chain

    def _name_full(self, held, token_ids):
        size = self._size
        for index in range(len(held.chain), held.num_computed // size):
            name = hashing.extend(hashing.root(held.salt), token_ids[index * size : (index + 1) * size])
            held.chain.append(name)
            for pool, table in zip(self._pools, held.tables, strict=True):
                pool.name(table[index], name)


@plant("test_salts_keep_equal_prefixes_apart")
class IgnoresSalts(Silent):
    """It finds prefixes of any salt."""

    def _find(self, token_ids, salt):
        return super()._find(token_ids, "")

    def _admit(self, sequence_id, token_ids, num_tokens, salt):
        return super()._admit(sequence_id, token_ids, num_tokens, "")


@plant("test_salts_keep_equal_prefixes_apart")
class CutsSalts(Silent):
    """It reads salts up to their first NUL."""

    def _find(self, token_ids, salt):
        return super()._find(token_ids, salt.split("\0")[0])

    def _admit(self, sequence_id, token_ids, num_tokens, salt):
        return super()._admit(sequence_id, token_ids, num_tokens, salt.split("\0")[0])


@plant("test_only_computed_tokens_are_found")
class NamesWhatIsReserved(Silent):
    """It names full pages as soon as their tokens are known, run or not."""

    def _name_full(self, held, token_ids):
        known = evolve(held, num_computed=len(token_ids) // self._size * self._size)
        known = evolve(known, num_computed=min(known.num_computed, len(held.tables[0]) * self._size))
        super()._name_full(known, token_ids)
        held.chain[:] = known.chain


@plant("test_rejected_drafts_are_found_by_nobody")
class CountsRejected(Silent):
    """It counts drafts that were run and rejected as computed."""

    def reserve(self, sequence_id, token_ids, num_tokens, salt=""):
        self.written = num_tokens
        return super().reserve(sequence_id, token_ids, num_tokens, salt)

    def commit(self, sequence_id, token_ids, num_computed):
        super().commit(sequence_id, token_ids, num_computed)
        self._held[sequence_id].num_computed = self.written

    def rewind(self, sequence_id, num_tokens):
        pass


@plant("test_what_is_named_is_not_written_over")
class WritesOverNames(Silent):
    """After a rewind it writes over a page that others find by its name."""

    def _must_copy(self, group, held):
        index = held.num_computed // self._size
        table = held.tables[group]
        return index < len(table) and self._pools[group]._references[table[index]] > 1


# --- rewinding and forks ----------------------------------------------------------------------------------------------


@plant("test_rewinding_forgets_what_is_behind_and_nothing_else")
class RewindsToAPage(Silent):
    """It rewinds to the beginning of a page."""

    def rewind(self, sequence_id, num_tokens):
        super().rewind(sequence_id, num_tokens // self._size * self._size)


@plant("test_rewinding_forgets_what_is_behind_and_nothing_else")
class RewindsForward(Silent):
    """Rewinding behind the last token makes tokens of nothing."""

    def rewind(self, sequence_id, num_tokens):
        self._held[sequence_id].num_computed = num_tokens


@plant("test_drafts_can_be_rejected_without_a_rewind")
class CountsOnlyUp(Silent):
    """It takes no smaller number of computed tokens than there were written."""

    def commit(self, sequence_id, token_ids, num_computed):
        held = self._held[sequence_id]
        written = min(len(held.tables[0]) * self._size, num_computed + 3)
        super().commit(sequence_id, token_ids, num_computed)
        held.num_computed = max(num_computed, written if len(token_ids) > 10 else 0)


@plant("test_forks_start_with_their_parents_tokens_and_part")
class NeverCopies(Silent):
    """Parent and fork write to one page."""

    def _must_copy(self, group, held):
        return False


@plant("test_forks_start_with_their_parents_tokens_and_part")
class ForgetsTheCopy(Silent):
    """A fork gets a page of its own, and not what was in it."""

    def take_moves(self):
        super().take_moves()
        return ()


@plant("test_forks_start_with_their_parents_tokens_and_part")
class ForksEverything(Silent):
    """A fork after fewer tokens than the parent has gets them all."""

    def fork(self, parent, child, num_tokens):
        return super().fork(parent, child, self._held[parent].num_computed)


@plant("test_a_fork_without_room_changes_nothing")
class ForksWhatIsGone(Silent):
    """Where a window has left the tokens behind, a refused fork leaves the child's name."""

    def fork(self, parent, child, num_tokens):
        forked = super().fork(parent, child, num_tokens)
        if not forked:
            self._pools[0].share(self._held[parent].tables[0][0])
        return forked


@plant("test_moves_are_told_once")
class TellsMovesTwice(Silent):
    """`take_moves` returns a copy again, after the page has been written to."""

    def take_moves(self):
        return tuple(self._moves)


# --- swapping ---------------------------------------------------------------------------------------------------------


@plant("test_swapped_sequences_come_back_with_their_tokens")
class ForgetsToSwap(Silent):
    """It gives the pages back and copies nothing out."""

    def take_moves(self):
        return tuple(move for move in super().take_moves() if move.kind != "swap_out")


@plant("test_swapped_sequences_come_back_with_their_tokens")
class SwapsInLate(Silent):
    """What comes back is in the moves of the step after."""

    def take_moves(self):
        late = getattr(self, "_late", ())
        moves = super().take_moves()
        self._late = tuple(move for move in moves if move.kind == "swap_in")
        return (*(move for move in moves if move.kind != "swap_in"), *late)


@plant("test_swapped_sequences_come_back_with_their_tokens")
class LeaksHostPages(Silent):
    """Host pages of a sequence that came back are lost."""

    def _swap_in(self, sequence_id, swapped, num_tokens):
        for pool, table in zip(self._host._pools, swapped.tables, strict=True):
            for page in table:
                if page >= 0:
                    pool.share(page)
        return super()._swap_in(sequence_id, swapped, num_tokens)


@plant("test_a_swapped_sequence_waits_for_room")
class LosesTheSwapped(Silent):
    """Where there is no room for a swapped sequence it is forgotten."""

    def _swap_in(self, sequence_id, swapped, num_tokens):
        found = super()._swap_in(sequence_id, swapped, num_tokens)
        if found is None:
            self._host.drop(sequence_id)
        return found


@plant("test_full_host_memory_refuses_and_changes_nothing")
class GivesUpPages(Silent):
    """Where host memory is full it gives the sequence's pages back all the same."""

    def swap_out(self, sequence_id):
        swapped = super().swap_out(sequence_id)
        if not swapped:
            self._pools[0].drop(self._held[sequence_id].tables[0].pop())
        return swapped


# --- figures ----------------------------------------------------------------------------------------------------------


@plant("test_figures_add_up")
class CountsCachedTwice(Silent):
    """Its figures count cached pages as free too."""

    def stats(self):
        stats = super().stats()
        return evolve(stats, free=stats.free + stats.cached)


@plant("test_any_life")
class RewindsToNothing(Silent):
    """It loses the pages of a sequence that is rewound to nothing."""

    def rewind(self, sequence_id, num_tokens):
        held = self._held[sequence_id]
        if not num_tokens:
            held.tables = [[] for _ in held.tables]
        super().rewind(sequence_id, num_tokens)
