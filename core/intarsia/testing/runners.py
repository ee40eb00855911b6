"""The contract of runners, as tests to inherit.

::

    from intarsia.testing.runners import RunnerContract

    class TestMine(RunnerContract):
        def provider(self):
            return my_plugin.provide_runners()[0]

pytest runs the inherited tests. They build the runner around tiny random models, give it batches that are laid out by
hand over cache tensors of their own, and compare logits and cache contents with the torch ops, run one by one in fp32.

Shape legend: T tokens, L rows of logits, E embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from intarsia.errors import IntarsiaError
from intarsia.protocols import LikeliestRunner
from intarsia.testing.claims import unclaimed
from intarsia.testing.runner_case import LENGTHS, RunnerCase, RunnerTrial
from intarsia.types import INVARIANCE_ORDER, Invariance

if TYPE_CHECKING:
    import torch

__all__ = ["RunnerContract"]

#: What a config may ask of a runner. It refuses what it cannot do; what it takes, it does as the ops do.
_VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("even", {"engine": {"dtype": "bfloat16"}}),
    ("odd", {"engine": {"dtype": "bfloat16"}}),
    ("even", {"engine": {"dtype": "float16"}}),
    ("even", {"cache": {"format": "bfloat16"}}),
    ("grouped", {"cache": {"format": "int8"}}),
    ("grouped", {"cache": {"page_size": 1}}),
    ("odd", {"cache": {"page_size": 3}}),
    ("window", {"cache": {"page_size": 4}}),
    ("even", {"quantizer": "int8"}),
)


def _ragged(trial: RunnerTrial) -> list[torch.Tensor]:
    """Run sequences side by side: whole prompts and chunks, then chunks and single tokens, then single tokens."""
    first = [trial.row(i, 0, max(1, n - i % 3)) for i, n in enumerate(LENGTHS)]
    second = [trial.row(i, max(1, n - i % 3), n + 1 + i % 2) for i, n in enumerate(LENGTHS)]
    third = [trial.row(i, n + 1 + i % 2, n + 2 + i % 2) for i, n in enumerate(LENGTHS)]
    return [trial.step(*first), trial.step(*second), trial.step(*third[::-1])]


class RunnerContract(RunnerCase):
    """What every runner keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `sections = {"attention": "mine"}`, is in `RunnerCase`.
    """

    def _models(self) -> Iterator[tuple[str, RunnerTrial]]:
        """Yield the suite's models that it runs."""
        refused = {}
        for name in self.models:
            try:
                parts = self.compose(name)
            except IntarsiaError as error:
                refused[name] = error
            else:
                yield name, RunnerTrial.of(parts)
        if len(refused) == len(self.models):
            raise AssertionError(f"it refuses every model of the suite, such as: {next(iter(refused.values()))}")

    # --- results ----------------------------------------------------------------------------------------------------

    def test_logits_equal_those_of_the_ops(self) -> None:
        """A prompt's logits, after each of its tokens, are those of the ops run one by one, up to rounding."""
        for name, trial in self._models():
            reference = self.reference(name)
            for number, length in enumerate((40, *LENGTHS)):
                found, wanted = (each.step(each.row(number, 0, length)) for each in (trial, reference))
                self.check_near(found, wanted, f"model {name!r}, a prompt of {length} tokens")

    def test_rows_of_all_kinds_run_side_by_side(self) -> None:
        """Prompts, chunks, runs of a few tokens and single ones are one batch, and each row is its own."""
        for name, trial in self._models():
            pairs = zip(_ragged(trial), _ragged(self.reference(name)), strict=True)
            for step, (found, wanted) in enumerate(pairs):
                self.check_near(found, wanted, f"model {name!r}, step {step} of a mixed batch")

    def test_chunks_continue_where_the_last_ended(self) -> None:
        """A prompt in chunks of any size has the logits that it has in one piece."""
        for name, trial in self._models():
            reference = self.reference(name)
            for number, size in enumerate((1, 7, 17) if name == "even" else (6, 16)):
                wanted = reference.step(reference.row(number, 0, 37))
                for start in range(0, 37, size):
                    stop = min(37, start + size)
                    what = f"model {name!r}, tokens {start} to {stop} of a prompt in chunks of {size}"
                    self.check_near(trial.step(trial.row(number, start, stop)), wanted[start:stop], what)

    def test_many_rows_decode_together(self) -> None:
        """So do more rows of one token than any plan of buffers may have had in mind, wherever they are."""
        trial, reference = self.trial(), self.reference()
        for count in (1, 3, 8, 33):
            for each in (trial, reference):
                each.forget()
                each.step(*(each.row(i, 0, 4 + i % 7) for i in range(count)))
            for _ in range(2):
                found, wanted = (
                    each.step(*(each.row(i, 4 + i % 7, 5 + i % 7) for i in range(count))) for each in (trial, reference)
                )
                self.check_near(found, wanted, f"{count} rows of one token")

    def test_the_cache_holds_what_the_ops_write(self) -> None:
        """Behind a step every token's keys and values are in its slots, for whoever reads them next."""
        if self.orders_slots:
            unclaimed("it brings its own attention, which alone reads what it writes")
        for name, trial in self._models():
            reference = self.reference(name)
            _ragged(trial)
            _ragged(reference)
            for number, length in enumerate(LENGTHS):
                pairs = zip(*(each.entries(number, length + 2) for each in (trial, reference)), strict=True)
                for layer, (found, wanted) in enumerate(pairs):
                    self.check_near(found, wanted, f"model {name!r}, layer {layer}, keys and values of {length} tokens")

    def test_layer_ranges_make_up_the_whole(self) -> None:
        """Ranges laid end to end give what all layers give together, and leave what they are handed as it was."""
        import torch

        trial, reference = self.trial(), self.reference()
        for number, (start, stop) in enumerate(((0, 20), (0, 1), (20, 21))):
            sequence = 0 if start else number
            wanted = reference.step(reference.row(sequence, start, stop))
            batch, count = trial.batch([trial.row(sequence, start, stop)]), trial.num_layers
            whole = trial.logits(trial.run(batch), range(stop - start))
            self.check_near(whole, wanted, "all layers")
            cuts = [[0, cut, count] for cut in range(1, count)] + [list(range(count + 1))]
            for edges in cuts:
                hidden = trial.run(batch, range(edges[1]))
                for first, last in pairwise(edges[1:]):
                    before = hidden.clone()
                    after = trial.run(batch, range(first, last), hidden)
                    assert torch.equal(hidden, before), f"layers {first} to {last} changed what they were handed"
                    hidden = after
                found = trial.logits(hidden, range(stop - start))
                self.check_near(found, wanted, f"layers in ranges that begin at {edges[:-1]}")

    def test_logits_are_those_that_are_asked_for(self) -> None:
        """`logits` returns fp32 rows of the whole vocabulary, for the tokens named, in their order, for none too."""
        import torch

        trial = self.trial()
        hidden = trial.run(trial.batch([trial.row(0, 0, 9), trial.row(1, 0, 5)]))
        whole = trial.logits(hidden, range(14))
        assert whole.shape == (14, trial.parts.spec.vocab_size), f"14 tokens have logits of {tuple(whole.shape)}"
        for wanted in ([13], [3, 8], [8, 3, 3, 12], []):
            found = trial.logits(hidden, wanted)
            assert found.dtype == torch.float32, f"logits are {found.dtype}, not float32"
            assert len(found) == len(wanted), f"{len(wanted)} rows of logits are wanted, and {len(found)} came"
            if wanted:
                self.check_near(found, whole[wanted], f"logits of tokens {wanted}")

    def test_likeliest_ids_are_those_of_the_logits(self) -> None:
        """Where it finds likeliest ids, they and their logits are those of `logits`, whatever follows the last id."""
        import torch

        from intarsia.sampling.arithmetic import likeliest_ids

        trial = self.trial()
        if not isinstance(trial.runner, LikeliestRunner):
            unclaimed("it finds no likeliest ids: it is no `LikeliestRunner`")
        vocab_size = trial.parts.spec.vocab_size
        hidden = trial.run(trial.batch([trial.row(0, 0, 9), trial.row(1, 0, 5)])).clone()
        hidden[2], hidden[5] = float("nan"), 0  # whose logits are equal, mostly
        for wanted in (range(14), [13], [8, 3, 3, 5, 2]):
            rows_L = torch.tensor(list(wanted))
            for num_ids in (vocab_size, vocab_size - 3, 1):
                found = trial.runner.likeliest(hidden, rows_L, num_ids)
                expected = likeliest_ids(trial.logits(hidden, wanted)[:, :num_ids])
                for what, one, other in zip(("ids", "logits"), found, expected, strict=True):
                    same = torch.equal(one.double().nan_to_num(nan=1e9), other.double().nan_to_num(nan=1e9))
                    assert same, f"likeliest {what} of tokens {list(wanted)} among {num_ids} ids are {one}, not {other}"

    def test_tokens_that_are_not_read_may_be_left(self) -> None:
        """Tokens that a batch names as read have the logits that they have where all are; all have keys and values."""
        trial, reference = self.trial(), self.reference()
        shapes = [(0, 0, 40), (1, 0, 1), (2, 0, 36), (3, 0, 5)]
        for reads in ([39, 40, 76, 81], [40], [], [0, 1, 2, 38, 39, 41, 50, 77, 78, 79, 80, 81], range(10, 82)):
            for each in (trial, reference):
                each.forget()
            wanted = reference.step(*(reference.row(*shape) for shape in shapes))
            hidden = trial.run(trial.batch([trial.row(*shape) for shape in shapes], reads=reads))
            if reads:
                self.check_near(trial.logits(hidden, reads), wanted[list(reads)], f"tokens {list(reads)}, read alone")
            found, wanted = (
                each.step(*(each.row(number, stop, stop + 1) for number, _, stop in shapes))
                for each in (trial, reference)
            )
            self.check_near(found, wanted, f"the step behind one of which tokens {list(reads)} were read")

    # --- slots ------------------------------------------------------------------------------------------------------

    def test_slots_without_a_token_are_not_read(self) -> None:
        """Whatever lies in slots that hold no token of a row, NaN included, does not reach it."""
        trial, reference = self.trial(), self.reference()
        for value in (float("nan"), 1e30):
            for each in (trial, reference):
                each.forget()
            trial.cache.fill(value)
            for step, (found, wanted) in enumerate(zip(_ragged(trial), _ragged(reference), strict=True)):
                self.check_near(found, wanted, f"step {step} over a cache of {value}")

    def test_no_slot_is_written_but_the_tokens_own(self) -> None:
        """A step changes the slots of its tokens, and no others: they are other sequences'."""
        trial = self.trial()
        for step in ([(0, 0, 13), (1, 0, 1), (2, 0, 16)], [(0, 13, 14), (1, 1, 3), (2, 16, 17)], [(1, 3, 4)]):
            before, rows = trial.snapshot(), [trial.row(*row) for row in step]
            trial.step(*rows)
            self.check_changed(trial, before, rows)

    def test_padding_harms_nobody(self) -> None:
        """A token of slot -1 is written nowhere, and the rows beside it are what they are without it."""
        trial, reference = self.trial(), self.reference()
        for num_padding in (1, 5):
            for each in (trial, reference):
                each.forget()
            trial.step(trial.row(0, 0, 5), trial.row(1, 0, 15))
            reference.step(reference.row(0, 0, 5), reference.row(1, 0, 15))
            before, rows = trial.snapshot(), [trial.row(0, 5, 6), trial.row(1, 15, 16)]
            found = trial.step(*rows, num_padding=num_padding)
            wanted = reference.step(reference.row(0, 5, 6), reference.row(1, 15, 16))
            self.check_near(found, wanted, f"two rows beside {num_padding} of padding")
            self.check_changed(trial, before, rows)

    def test_pages_behind_a_window_may_be_gone(self) -> None:
        """Where all layers see a window, page tables hold -1 for what lies behind it, and nobody looks there."""
        if "window" not in self.models:
            unclaimed("it runs no model with windows")
        sections = {"cache": {"page_size": 4}}
        try:
            trial = self.trial("window", **sections)
        except IntarsiaError as error:
            unclaimed(f"it refuses windows: {error}")
        reference = self.reference("window", **sections)
        for each in (trial, reference):
            each.step(each.row(0, 0, 20), each.row(1, 0, 3))
        for start in range(20, 26):
            found = trial.step(
                trial.row(0, start, start + 1, behind=(start - 5) // 4), trial.row(1, start - 17, start - 16)
            )
            wanted = reference.step(reference.row(0, start, start + 1), reference.row(1, start - 17, start - 16))
            self.check_near(found, wanted, f"position {start}, without the pages behind a window of 6 tokens")

    # --- bits -------------------------------------------------------------------------------------------------------

    def _kept(self, trial: RunnerTrial, level: Invariance) -> None:
        """Skip the claim where less than a level is promised."""
        promised = trial.parts.invariance
        if INVARIANCE_ORDER.index(promised) < INVARIANCE_ORDER.index(level):
            unclaimed(f"with the parts beside it, it promises {promised!r}, not {level!r}")

    def test_a_row_has_the_same_bits_in_any_company(self) -> None:
        """At the level `neighbours` and above a row's bits depend on its own tokens and chunks, run twice or once."""
        import torch

        trial = self.trial()
        self._kept(trial, "neighbours")
        shapes = [(0, 0, 5), (1, 0, 40), (2, 0, 1), (3, 0, 17), (4, 0, 3), (5, 0, 16)]
        for rows in (shapes, [(number, stop, stop + 1) for number, _, stop in shapes]):
            made = [trial.row(*row) for row in rows]
            alone = [trial.step(row) for row in made]
            for order in (list(range(6)), [5, 3, 1, 0, 2, 4], [1], [4, 2]):
                found = trial.step(*(made[i] for i in order))
                parts = torch.split(found, [len(made[i].token_ids) for i in order])
                for index, part in zip(order, parts, strict=True):
                    assert torch.equal(part, alone[index]), (
                        f"a row of {len(made[index].token_ids)} tokens has other bits beside {len(order) - 1} others"
                    )

    def test_a_row_has_the_same_bits_in_any_chunks_and_pages(self) -> None:
        """At the level `bitwise` they do not depend on chunks either, nor on where the pages are."""
        import torch

        trial = self.trial()
        self._kept(trial, "bitwise")
        whole = trial.step(trial.row(0, 0, 37))
        for size in (1, 5, 16, 36):
            trial.forget()
            trial.step(trial.row(1, 0, 20))  # has the pages that the other had
            pieces = []
            for start in range(0, 37, size):
                neighbour = trial.row(1, 20 + start // size % 2, 21 + start // size % 2)
                stop = min(37, start + size)
                pieces.append(trial.step(trial.row(0, start, stop), neighbour)[: stop - start])
            assert torch.equal(torch.cat(pieces), whole), f"in chunks of {size} a prompt has other bits than whole"

    # --- what it takes and refuses ----------------------------------------------------------------------------------

    def test_what_it_takes_it_runs_as_the_ops_do(self) -> None:
        """Of dtypes, cache formats, page sizes and quantized weights it refuses some, with its reason; others it runs.

        Its error against fp32 is then not much more than that of the ops in the same dtype and formats.
        """
        for name, sections in _VARIANTS:
            if name not in self.models:
                continue
            try:
                parts = self.compose(name, **sections)
            except IntarsiaError as error:
                assert len(str(error)) > 20, f"it refuses {sections} with the words {str(error)!r} alone"
                continue
            exact, ops = _ragged(self.reference(name)), _ragged(self.reference(name, **sections))
            for found, same, wanted in zip(_ragged(RunnerTrial.of(parts)), ops, exact, strict=True):
                assert bool(found.isfinite().all()), f"model {name!r} with {sections}: logits are not finite"
                ours, theirs = (float((one - wanted).abs().mean()) for one in (found, same))
                bound = 2 * theirs + self.tolerance * float(wanted.abs().max())
                assert ours <= bound, f"model {name!r} with {sections}: off by {ours:.3g}, and the ops by {theirs:.3g}"
