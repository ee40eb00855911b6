"""The drafter: it learns each accepted token once, and walks the chain for guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import define, field

from intarsia.protocols import Drafter, DraftRequest, PartContext
from intarsia.types import Draft, Entered, SequenceId
from intarsia_markov.chain import Chain
from intarsia_markov.options import MarkovOptions


@define
class _Text:
    """How far one sequence has been learned from: `learned` tokens, the prompt's among them."""

    salt: str
    learned: int


@define(eq=False)
class MarkovDrafter(Drafter):
    """Learns from the answers of all requests, those of each salt apart. Prompts are read and not learned."""

    options: MarkovOptions
    chain: Chain = field(init=False)
    _texts: dict[SequenceId, _Text] = field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        options = self.options
        self.chain = Chain(options.order, options.max_contexts, options.halve_at)

    def enter(self, entered: Entered) -> None:
        """Learn from here on; after a preemption what was learned is not learned again."""
        known = self._texts.get(entered.sequence_id)
        if known is None or known.salt != entered.salt or known.learned > len(entered.token_ids):
            self._texts[entered.sequence_id] = _Text(entered.salt, entered.num_prompt)

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Draft]:
        """Learn what was accepted since, of all of them, and return guesses."""
        for request in requests:
            if text := self._texts.get(request.sequence_id):
                self.chain.learn(text.salt, request.token_ids, text.learned)
                text.learned = len(request.token_ids)
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft:
        text = self._texts.get(request.sequence_id)
        if text is None:
            return Draft()
        guesses: list[int] = []
        context = list(request.token_ids[-self.options.order :])
        probability = 1.0
        while len(guesses) < min(self.options.k, request.wanted):
            found = self.chain.likeliest(text.salt, context)
            if found is None:
                break
            token, part = found
            probability *= part
            if probability < self.options.min_probability:
                break
            guesses.append(token)
            context = [*context, token][-self.options.order :]
        return Draft(tuple(guesses))

    def forget(self, sequence_id: SequenceId) -> None:
        """Drop what is kept of a sequence; what was learned from it stays."""
        self._texts.pop(sequence_id, None)

    def stats(self) -> Mapping[str, Any]:
        """Return how many contexts are kept."""
        return {"contexts": len(self.chain)}


def build(context: PartContext) -> MarkovDrafter:
    """Make the drafter."""
    return MarkovDrafter(context.options)
