"""The longest suffix that came before, here or in earlier answers, and what most often followed it.

After SuffixDecoding (Oliaro et al. 2024, "SuffixDecoding: A Model-Free Approach to Speeding Up Large Language Model
Inference"), with suffix automata in place of trees, and one draft in place of a tree of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from intarsia.protocols import Drafter, DraftRequest, PartContext
from intarsia.types import Draft, Entered, SequenceId
from intarsia_speculative.automaton import END, ROOT, Automaton
from intarsia_speculative.control import controlled
from intarsia_speculative.memory import Memory
from intarsia_speculative.options import SuffixOptions

#: Tokens at the end that are looked for in answers which were remembered while this one ran.
_LOOK_BACK = 64


@define(eq=False)
class _Text:
    """One sequence: its own automaton, and its longest matches in earlier answers."""

    salt: str
    num_prompt: int
    ids: list[int] = field(factory=list, init=False)
    own: Automaton = field(factory=Automaton, init=False)
    matches: dict[Automaton, tuple[int, int]] = field(factory=dict, init=False)
    matched: int = field(default=0, init=False)

    def extend(self, token_ids: Sequence[int], earlier: Sequence[Automaton]) -> None:
        """Take in the tokens after those that are known."""
        known = len(self.ids)
        new = token_ids[known:]
        self.own.extend(new)
        self.ids += new
        matches = {}
        for automaton in earlier:
            match = self.matches.get(automaton)
            state, length = (ROOT, 0) if match is None else match
            for token in self.ids[-_LOOK_BACK:] if match is None else self.ids[known:]:
                state, length = automaton.follow(state, length, token)
            matches[automaton] = state, length
        self.matches = matches

    def longest(self) -> tuple[Automaton, int, int]:
        """Return the longest match: (automaton, state, length); of equals its own, then the latest answers'."""
        best = self.own, *self.own.repeated()
        for automaton, match in reversed(self.matches.items()):
            state, length = automaton.settle(*match)
            if length > best[2]:
                best = automaton, state, length
        return best


@define(eq=False)
class SuffixDrafter(Drafter):
    """Keeps an automaton for each sequence, and one or more for the earlier answers of each salt."""

    options: SuffixOptions
    memory: Memory = field(init=False)
    _texts: dict[SequenceId, _Text] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.memory = Memory(self.options.memory_tokens)

    def enter(self, entered: Entered) -> None:
        """Read the prompt; after a preemption what was read is known still."""
        text = self._texts.get(entered.sequence_id)
        if text is None or tuple(text.ids) != entered.token_ids[: len(text.ids)]:
            text = self._texts[entered.sequence_id] = _Text(entered.salt, entered.num_prompt)
        text.extend(entered.token_ids, self.memory.of(text.salt))

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Return the likeliest continuations, each as long as it is likely enough."""
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        text = self._texts.get(request.sequence_id)
        if text is None:
            return Draft()
        text.extend(request.token_ids, self.memory.of(text.salt))
        automaton, state, length = text.longest()
        text.matched = length
        return Draft(self._walk(automaton, state, length, request.wanted))

    def _walk(self, automaton: Automaton, state: int, length: int, wanted: int) -> tuple[int, ...]:
        guesses: list[int] = []
        probability = 1.0
        while len(guesses) < wanted and length >= self.options.min_match:
            found = automaton.likeliest(state)
            if found is None:
                # The end of what is known: a shorter match may have come elsewhere, as in what repeats itself.
                state, length = automaton.shorter(state)
                continue
            token, part, state = found
            length += 1
            probability *= part
            if token == END or probability < self.options.min_probability:
                break
            guesses.append(token)
        return tuple(guesses)

    def grade(self, sequence_id: SequenceId) -> int:
        """Return the grade of the last guess: how often the matching tokens can be halved."""
        text = self._texts.get(sequence_id)
        return 0 if text is None else min(text.matched, 63).bit_length()

    def forget(self, sequence_id: SequenceId) -> None:
        """Remember the answer, for sequences of an equal salt, and drop the rest."""
        text = self._texts.pop(sequence_id, None)
        if text is not None:
            self.memory.add(text.salt, text.ids[text.num_prompt :])

    def stats(self) -> Mapping[str, Any]:
        """Return how many tokens of earlier answers are kept."""
        return {"memory_tokens": self.memory.num_tokens}


def build(context: PartContext) -> Drafter:
    """Make the drafter."""
    options: SuffixOptions = context.options
    drafter = SuffixDrafter(options)
    return controlled(drafter, k=options.k, adaptive=options.adaptive, is_cheap=True, grade=drafter.grade)
