"""How an executor's contract runs it: over a tiny model, against the local executor that computes all anew, alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, ClassVar

from attrs import define, field

from intarsia.protocols import Executor, Parts
from intarsia.testing.claims import unclaimed
from intarsia.testing.composing import BAD_ID, KEY, composed, spoiled_model
from intarsia.testing.planned import PlannedSequence, Trial
from intarsia.types import Provider, SamplingParams

__all__ = ["GREEDY", "PROMPTS", "REQUESTS", "SEEDED", "ExecutorCase", "Solo"]

#: What is drawn is never the id that fails.
_SAFE = {BAD_ID: -100.0}
GREEDY = SamplingParams(temperature=0, logprobs=2)
SEEDED = SamplingParams(temperature=0.9, logprobs=1, logit_bias=_SAFE)
#: Of lengths that fill pages and that do not.
PROMPTS: tuple[tuple[int, ...], ...] = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3),
    (7,),
    tuple(range(20, 33)),
    (8, 8, 8, 8),
    (40, 41, 40, 41, 40),
)
#: Requests of every kind, for a batch: prompt, params, choice, seed.
REQUESTS: tuple[tuple[tuple[int, ...], SamplingParams, int, int], ...] = (
    (PROMPTS[0], GREEDY, 0, 0),
    (PROMPTS[1], SEEDED, 0, 11),
    (
        PROMPTS[2],
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.6, presence_penalty=0.5),
        0,
        0,
    ),
    (PROMPTS[3], SamplingParams(temperature=1.1, top_k=12, top_p=0.9, logit_bias=_SAFE), 0, 5),
    (PROMPTS[3], SamplingParams(temperature=1.1, top_k=12, top_p=0.9, logit_bias=_SAFE), 1, 5),
    (PROMPTS[4], SamplingParams(temperature=0), 0, 0),
    (PROMPTS[2], SamplingParams(temperature=0, prompt_logprobs=1, logprobs=0), 0, 0),
)


@define(eq=False)
class Solo:
    """What a sequence says alone: each token from a whole run of all before it, by the local executor.

    Nothing of one token's run serves another's: no cache, no batch, no chunk, no draft.
    """

    _trial: Trial
    _tokens: dict[Any, tuple[int, float | None]] = field(factory=dict, init=False)
    _scores: dict[Any, list[tuple[int, float]]] = field(factory=dict, init=False)
    _names: Iterator[int] = field(factory=itertools.count, init=False)

    def answer(self, sequence: PlannedSequence, num_tokens: int) -> tuple[list[int], list[float | None]]:
        """Return the first tokens that it says, and their log-probabilities where it asks for these."""
        ids, logprobs = list(sequence.prompt), list[float | None]()
        for _ in range(num_tokens):
            token, logprob = self._next(sequence, ids)
            ids.append(token)
            logprobs.append(logprob)
        return ids[len(sequence.prompt) :], logprobs

    def scores(self, sequence: PlannedSequence) -> list[tuple[int, float]]:
        """Return the ids of its prompt from the second on, with their log-probabilities."""
        self._next(sequence, list(sequence.prompt))
        return self._scores[self._key(sequence, sequence.prompt)]

    def _key(self, sequence: PlannedSequence, ids: Sequence[int]) -> Any:
        asked = (str(sequence.params), sequence.sequence_id[1], sequence.seed)
        return (*asked, sequence.prompt, tuple(ids))

    def _next(self, sequence: PlannedSequence, ids: list[int]) -> tuple[int, float | None]:
        key = self._key(sequence, ids)
        if key not in self._tokens:
            trial, choice = self._trial, sequence.sequence_id[1]
            name = str(next(self._names))
            copy = trial.add(name, sequence.prompt, sequence.params, choice=choice, seed=sequence.seed)
            copy.token_ids = list(ids)
            trial.step(trial.row(copy))
            assert copy.error is None, f"the suite's request fails alone: {copy.error}"
            logprob = copy.logprobs[0][1] if copy.logprobs else None
            self._tokens[key], self._scores[key] = (copy.token_ids[-1], logprob), copy.prompt_logprobs
            trial.leave(copy)
        return self._tokens[key]


@cache
def _solo() -> Solo:
    _, parts = composed(spoiled_model(), {"executor": "local"})
    trial = Trial(parts, parts.executor)
    trial.start()
    return Solo(trial)


class ExecutorCase:
    """An executor on trial: subclasses say whose provider it is, and what it need not promise.

    Attributes:
        options: the executor's own, as a config has them.
        sections: of a config, besides those of the suite: what this executor needs of other parts.
        in_process: whether all that an engine is made of is in this process. Where not, drafters and logits processors
            of the suite reach no other process, and what is claimed of these is not tried.
        reuse: whether claims share an executor that has started, as long as nothing went wrong: for those that take
            long to start.
        tolerance: how far log-probabilities may be from those of the local executor.
        patience_s: how long threads and processes may take to end.
        lives: random lives that `test_any_life` tries.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    sections: ClassVar[Mapping[str, Any]] = {}
    in_process: ClassVar[bool] = True
    reuse: ClassVar[bool] = False
    tolerance: ClassVar[float] = 1e-3
    patience_s: ClassVar[float] = 10.0
    lives: ClassVar[int] = 12
    _kept: ClassVar[dict[type, Trial]] = {}

    def provider(self) -> Provider:
        """Return the executor's provider."""
        raise NotImplementedError("provider() must return the executor's provider")

    def compose(self, *plugins: object, **sections: Any) -> Parts:
        """Return the parts of an engine with this executor, which has not started."""
        mine = {"executor": {"use": KEY, **self.options}}
        return composed(spoiled_model(), {**self.sections, **sections, **mine}, plugins, executor=self.provider())[1]

    @contextmanager
    def trial(self, *plugins: object, **sections: Any) -> Iterator[Trial]:
        """Start an executor, and stop it."""
        own = bool(plugins or sections) or not self.reuse
        trial = None if own else self._kept.pop(type(self), None)
        if trial is None:
            parts = self.compose(*plugins, **sections)
            trial = Trial(parts, parts.executor)
            try:
                trial.start()
            except BaseException:
                _quietly_stop(trial.executor)
                raise
        try:
            yield trial
            trial.leave_all()
        except BaseException:
            own = True
            raise
        finally:
            if own:
                _quietly_stop(trial.executor)
            else:
                self._kept[type(self)] = trial

    @classmethod
    def teardown_class(cls) -> None:
        """Stop what claims share. pytest calls this."""
        trial = cls._kept.pop(cls, None)
        if trial is not None:
            trial.executor.stop()

    @property
    def solo(self) -> Solo:
        """What sequences say alone."""
        return _solo()

    def check(self, *sequences: PlannedSequence) -> None:
        """Raise AssertionError unless each sequence said so far what it says alone."""
        for sequence in sequences:
            who = f"{sequence.sequence_id}"
            assert sequence.error is None, f"{who} failed: {sequence.error}"
            ids, logprobs = self.solo.answer(sequence, len(sequence.answer))
            assert sequence.answer == ids, f"{who} says {sequence.answer}, and alone {ids}"
            if sequence.params.logprobs is not None:
                told = [token for token, _ in sequence.logprobs]
                assert told == ids, f"{who} says {ids}, and has log-probabilities of {told}"
                self._check_near(who, [value for _, value in sequence.logprobs], [v or 0.0 for v in logprobs])
            scored = sequence.params.prompt_logprobs is not None and sequence.sequence_id[1] == 0
            self._check_scores(who, sequence, self.solo.scores(sequence)[: sequence.num_run] if scored else [])

    def _check_scores(self, who: str, sequence: PlannedSequence, wanted: list[tuple[int, float]]) -> None:
        scored, right = ([token for token, _ in entries] for entries in (sequence.prompt_logprobs, wanted))
        assert scored == right, f"{who}: its prompt's {len(right)} tokens are scored as {scored}"
        self._check_near(who, [v for _, v in sequence.prompt_logprobs], [v for _, v in wanted])

    def _check_near(self, who: str, found: Sequence[float], wanted: Sequence[float]) -> None:
        off = max((abs(one - other) for one, other in zip(found, wanted, strict=True)), default=0.0)
        assert off <= self.tolerance, f"{who}: a log-probability is off by {off:.3g}"

    def needs_this_process(self) -> None:
        """Skip a claim about what only this process has."""
        if not self.in_process:
            unclaimed("in_process = False: parts of the suite do not reach its other processes")


def _quietly_stop(executor: Executor) -> None:
    with suppress(Exception):
        executor.stop()
