"""What the sampler knows of one sequence, and the rows of logits that are its own in a step.

Shape legend: N ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from attrs import define, frozen

from intarsia.protocols import LogitsProcessor, SequenceProcessor
from intarsia.sampling.history import History
from intarsia.sampling.settings import Settings
from intarsia.sampling.words import Words
from intarsia.types import Entered, Row, SamplingParams, SequenceId


def known_ids(token_ids: Iterable[int], num_ids: int) -> np.ndarray:
    """Return ids (N,), int64, rising, each once, without those that no token has: they have no logits to change."""
    return np.array(sorted({token for token in token_ids if 0 <= token < num_ids}), dtype=np.int64)


@define(kw_only=True)
class State:
    """One sequence: its numbers, what it holds so far, what is forbidden in it.

    Attributes:
        bias_ids_N, biases_N: what is added to which logits.
        banned_N: ids that are never chosen.
        stops_N: ids that are not chosen before `min_tokens`.
        words: texts that the answer never holds; None where there are none.
        processors: those that it asked for, opened.
        num_scored: how many first tokens of the prompt have logits that are scored.
        edits: whether anything changes its logits before a token is chosen.
        is_plain: whether the likeliest id of its logits is all that is needed of them. Both are settled by `complete`.
        error: what failed before its first token.
    """

    params: SamplingParams
    settings: Settings
    seed: int
    choice: int
    history: History
    bias_ids_N: np.ndarray
    biases_N: np.ndarray
    banned_N: np.ndarray
    stops_N: np.ndarray
    words: Words | None = None
    processors: tuple[tuple[LogitsProcessor, SequenceProcessor], ...] = ()
    num_scored: int = 0
    edits: bool = True
    is_plain: bool = False
    error: str | None = None

    @classmethod
    def of(cls, entered: Entered, num_ids: int) -> State:
        """Take a sequence; ids that no token has are left out."""
        params = entered.params
        settings = Settings.of(params)
        bias_ids_N = known_ids(params.logit_bias, num_ids)
        is_scored = params.prompt_logprobs is not None and entered.sequence_id[1] == 0
        return cls(
            params=params,
            settings=settings,
            seed=entered.seed,
            choice=entered.sequence_id[1],
            history=History(list(entered.token_ids), entered.num_prompt, settings.penalises, num_ids),
            bias_ids_N=bias_ids_N,
            biases_N=np.array([params.logit_bias[token] for token in bias_ids_N.tolist()], dtype=np.float64),
            banned_N=known_ids(params.banned_token_ids, num_ids),
            stops_N=known_ids(entered.stop_ids if params.min_tokens else (), num_ids),
            num_scored=max(0, entered.num_prompt - 1) if is_scored else 0,
        )

    def complete(self) -> None:
        """Take note that its words and processors are known."""
        static = len(self.bias_ids_N) + len(self.banned_N) + len(self.stops_N) > 0
        self.edits = static or self.settings.penalises or self.words is not None or bool(self.processors)
        self.is_plain = self.settings.is_greedy and not self.edits and self.params.logprobs is None

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take what was chosen."""
        self.history.extend(token_ids)
        if self.words is not None:
            self.words.extend(token_ids)


@frozen(eq=False)
class Task:
    """Positions of one sequence after which tokens are chosen, and the rows of logits that are their own.

    Attributes:
        sequence_id: whose.
        state: what is known of it.
        span: the rows of logits.
        drafts: guesses that follow what is known.
        before: how many of them come before the first of the positions.
    """

    sequence_id: SequenceId
    state: State
    span: range
    drafts: tuple[int, ...] = ()
    before: int = 0

    @classmethod
    def of(cls, row: Row, state: State, first: int) -> Task:
        """Take a row that wants tokens; its own rows of logits begin at `first`."""
        drafts = row.token_ids[len(row.token_ids) - row.num_drafts :]
        return cls(row.sequence_id, state, range(first, first + row.num_drafts + 1), drafts)

    @property
    def first_position(self) -> int:
        """Position of the token that is chosen first."""
        return len(self.state.history.token_ids) + self.before

    def positions(self) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield each row of logits, with the drafts before it."""
        for depth, index in enumerate(self.span, start=self.before):
            yield index, self.drafts[:depth]
