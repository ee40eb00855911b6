"""The contract of logits processors, as tests to inherit.

::

    from intarsia.testing.logits_processors import LogitsProcessorContract

    class TestMine(LogitsProcessorContract):
        asked = ({"words": ["never"]},)
        refused = ({"words": 3},)

        def provider(self):
            return my_plugin.provide_logits_processors()[0]

pytest runs the inherited tests. `asked` lists what requests say under the processor's key; one that applies to every
request needs no list. Rows are those of a small vocabulary whose tokens are bytes.

Shape legend: V ids that can be chosen.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from attrs import evolve

from intarsia.protocols import LogitsProcessor
from intarsia.testing.engines import unharmed
from intarsia.testing.processor_case import GARBAGE, NUM_LOGITS, PROMPT, outcome, refusal, row_at
from intarsia.testing.processor_serving import ServingClaims
from intarsia.testing.reach import num_held
from intarsia.testing.tiny_tokenizer import NUM_TOKENS
from intarsia.types import SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = ["LogitsProcessorContract"]

#: Characters of a message: what a request said is cut in it.
_MAX_MESSAGE = 2000


class LogitsProcessorContract(ServingClaims):
    """What every logits processor keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `asked`, is in `ProcessorCase`.
    """

    # --- requests ---------------------------------------------------------------------------------------------------

    def test_whether_it_applies_follows_from_the_request_alone(self) -> None:
        """It says true or false, the same each time; what a request asks of other processors is not its business."""
        part, other = self.build(), self.build()
        nothing = SamplingParams()
        elsewhere = SamplingParams(logits_processors={"another": {"step": 1}})
        for params in (*self.requests(part), nothing, elsewhere):
            said = [unharmed("applies", one.applies, params) for one in (part, other, part, part)]
            assert all(type(one) is bool for one in said), f"applies returned {said[0]!r}, not true or false"
            assert len(set(said)) == 1, f"asked of one request again it says {said}"
        assert part.applies(nothing) == part.applies(elsewhere), "what is asked of another processor makes it apply"

    def test_what_is_malformed_is_refused_by_its_field(self) -> None:
        """What a request says under its key is taken or refused, when it comes or once it is prepared, by its field."""
        part = self.build()
        for says in (*self.refused, *GARBAGE):
            error = refusal(self._try, part, says)
            if error is not None:
                field = error.field or ""
                assert field.startswith("sampling."), f"{str(error)[:200]!r} names {field!r}, no path in sampling"
                assert field.split("[")[0] in str(error), f"{str(error)[:200]!r} does not name its field, {field!r}"
                assert len(str(error)) <= _MAX_MESSAGE, f"a message of {len(str(error))} characters: cut what was said"
            assert error is not None or says not in self.refused, f"{says!r:.200} is not refused"

    def _try(self, part: LogitsProcessor, says: Any) -> None:
        params = self.request(says)
        if part.applies(params):
            self.prepared(part, params)
            part.open(params, len(PROMPT))

    def test_requests_are_prepared_in_time_and_more_than_once(self) -> None:
        """`prepare` returns None or a future that is soon done; equal requests can come again, and open again."""
        part = self.build()
        for params in self.requests(part):
            for seed in range(3):
                self.opened(part, evolve(params, seed=seed))
            again = unharmed("open", part.open, params, len(PROMPT))
            assert outcome(again, PROMPT) == outcome(self.opened(part, params), PROMPT)

    # --- a pure function --------------------------------------------------------------------------------------------

    def test_equal_ids_bring_equal_logits(self) -> None:
        """Logits follow from the ids before them alone: in any order, after drafts that were rejected, opened anew."""
        part, other = self.build(), self.build()
        for number, params in enumerate(self.requests(part)):
            answer = self.answer(part, params, number)
            kept, draws = self.opened(part, params), random.Random(number)
            for _ in range(20):
                strays = [draws.randrange(NUM_TOKENS) for _ in range(draws.choice((0, 0, 1, 3)))]
                ids = [*PROMPT, *answer[: draws.randrange(len(answer) + 1)], *strays]
                found = outcome(kept, ids)
                assert outcome(kept, ids) == found, f"asked again after {ids} it says something else"
                for one in (part, other):
                    fresh = outcome(self.opened(one, params), ids)
                    assert fresh == found, f"opened anew it says something else after {ids}"

    def test_sequences_do_not_meet(self) -> None:
        """Sequences of equal and other requests, processed in turns, each get what they get alone."""
        part, other = self.build(), self.build()
        requests = [params for params in self.requests(part) for _ in range(3)]
        answers, alone = [], []
        for seed, params in enumerate(requests):
            # Sequences of one request are most likely to share something: each of the first has a processor to itself.
            lonely = self.build() if seed < 3 else other
            answers.append(self.answer(lonely, params, seed))
            sequence = self.opened(lonely, params)
            alone.append([outcome(sequence, [*PROMPT, *answers[-1][:length]]) for length in range(len(answers[-1]))])
        sequences = [self.opened(part, params) for params in requests]
        for length in range(max(map(len, answers))):
            for number, (sequence, answer) in enumerate(zip(sequences, answers, strict=True)):
                if length < len(answer):
                    found = outcome(sequence, [*PROMPT, *answer[:length]])
                    assert found == alone[number][length], "what one sequence gets depends on another"

    def test_prompts_of_any_length_are_taken(self) -> None:
        """Prompts can be empty, long, or of any ids; an answer begins where `open` says."""
        part = self.build()
        for params in self.requests(part):
            for prompt in ([], [0], [NUM_TOKENS - 1] * 3, list(range(NUM_TOKENS)) * 4):
                sequence = self.opened(part, params, len(prompt))
                row_V = row_at(0)
                unharmed("process", sequence.process, list(prompt), row_V)
                _check_row(row_V, f"after a prompt of {len(prompt)} ids")

    # --- rows -------------------------------------------------------------------------------------------------------

    def test_only_its_own_row_is_changed(self) -> None:
        """It changes the row that it is given, in place; not rows beside it, a padded vocabulary's rest, or the ids."""
        import torch

        part = self.build()
        for params in self.requests(part):
            sequence, answer = self.opened(part, params), self.answer(part, params, 1)
            for length in range(len(answer)):
                rows_3L = torch.randn((3, NUM_LOGITS), generator=torch.Generator().manual_seed(length))
                before, ids = rows_3L.clone(), [*PROMPT, *answer[:length]]
                given, row_V = list(ids), rows_3L[1, :NUM_TOKENS]
                returned = unharmed("process", sequence.process, given, row_V)
                assert returned is None, f"process returned {returned!r}: it changes the row in place"
                assert row_V.shape == (NUM_TOKENS,) and row_V.dtype == torch.float32, "it is another row"
                assert given == ids, "it changed the list of ids"
                rows_3L[1, :NUM_TOKENS] = before[1, :NUM_TOKENS]
                assert torch.equal(rows_3L, before), "it changed what is not its row"

    def test_something_may_follow(self) -> None:
        """Whatever it lets through leads to positions where it lets something through, and no logit is NaN."""
        part = self.build()
        for params in self.requests(part):
            for seed in range(6):
                answer = self.answer(part, params, seed, most=48)
                sequence = self.opened(part, params)
                for length in range(len(answer)):
                    row_V = row_at(length, seed)
                    unharmed("process", sequence.process, [*PROMPT, *answer[:length]], row_V)
                    _check_row(row_V, f"after {answer[:length]}")

    def test_rows_of_any_numbers_are_taken(self) -> None:
        """Logits of any size bring no NaN and no error, and what another processor has forbidden stays so."""
        part = self.build()
        for params in self.requests(part):
            sequence, answer = self.opened(part, params), self.answer(part, params, 2)
            for length in (0, len(answer) // 2):
                for name, row_V in _rows():
                    forbidden_V = row_V == float("-inf")
                    ids = [*PROMPT, *answer[:length]]
                    unharmed(f"process, {name}", sequence.process, ids, row_V)
                    assert not row_V.isnan().any(), f"{name} become NaN"
                    assert (row_V[forbidden_V] == float("-inf")).all(), f"{name}: what was forbidden is allowed again"

    # --- leaving ----------------------------------------------------------------------------------------------------

    def test_it_forgets_sequences_that_left(self) -> None:
        """However many sequences came and left, it holds no more than after the first ones."""
        part = self.build()
        sizes = []
        for turn in range(3):
            for params in self.requests(part):
                answer = self.answer(part, params, 7, most=8)
                for seed in range(12):
                    sequence = self.opened(part, evolve(params, seed=100 * turn + seed))
                    for length in range(len(answer)):
                        outcome(sequence, [*PROMPT, *answer[:length]])
                    del sequence
            sizes.append(num_held(part))
        assert sizes[2] - sizes[1] < 12, f"it holds {sizes[1]} objects, and after 12 more sequences {sizes[2]}"


def _check_row(row_V: torch.Tensor, where: str) -> None:
    assert not row_V.isnan().any(), f"{where} a logit is NaN"
    assert not (row_V == float("inf")).any(), f"{where} a logit is infinite"
    assert row_V.isfinite().any(), f"{where} no token is allowed"


def _rows() -> list[tuple[str, torch.Tensor]]:
    """Return rows of numbers that a model or another processor can bring."""
    import torch

    random_V = row_at(0)
    half_V = random_V.clone()
    half_V[::2] = float("-inf")
    one_V = torch.full_like(random_V, float("-inf"))
    one_V[5] = 1.0
    return [
        ("equal logits", torch.zeros_like(random_V)),
        ("large logits", random_V * 1e30),
        ("tiny logits", random_V * 1e-30),
        ("logits half of which are -inf", half_V),
        ("logits of which one is not -inf", one_V),
    ]
