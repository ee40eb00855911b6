"""The engine's own, mutable record of one choice of a request: tokens, text, limits, times."""

from __future__ import annotations

import secrets

from attrs import define, field

from intarsia.text import TextStream
from intarsia.types import (
    Entered,
    FinishReason,
    Output,
    Request,
    Row,
    RowResult,
    SamplingParams,
    SequenceId,
    Timings,
    TokenLogprobs,
    Usage,
)


@define(eq=False)
class Sequence:
    """One choice of a request, from its arrival to its last output. Schedulers see it as a `SequenceView`.

    Attributes:
        sequence_id: request id and choice.
        token_ids: prompt and accepted tokens.
        max_total: the most tokens it can hold.
        stop_ids: ids that end it.
        text: None where the model has no tokenizer.
        salt: whose cached prefixes it may share. Where the prompt is scored it is no one's: what is found cached is not
            run, and has no logits.
        num_scored: tokens of the prompt whose log-probabilities were put out; a preempted prompt is scored again.
        arrived, started, first_token: seconds of the engine's clock.
    """

    request: Request
    choice: int
    token_ids: list[int]
    num_prompt: int
    max_total: int
    seed: int
    stop_ids: frozenset[int]
    text: TextStream | None
    arrived: float
    sequence_id: SequenceId = field(init=False)
    salt: str = field(init=False)
    num_computed: int = field(default=0, init=False)
    num_scored: int = field(default=0, init=False)
    cached_tokens: int = field(default=0, init=False)
    started: float | None = field(default=None, init=False)
    first_token: float | None = field(default=None, init=False)
    finish_reason: FinishReason | None = field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        self.sequence_id = self.request.request_id, self.choice
        is_scored = self.params.prompt_logprobs is not None and self.choice == 0
        self.salt = secrets.token_hex(16) if is_scored else self.request.cache_salt

    @property
    def params(self) -> SamplingParams:
        """What was asked."""
        return self.request.params

    @property
    def priority(self) -> int:
        """Higher runs first."""
        return self.request.priority

    def entered(self) -> Entered:
        """Return what an executor is told of it."""
        return Entered(
            sequence_id=self.sequence_id,
            params=self.params,
            seed=self.seed,
            token_ids=tuple(self.token_ids),
            num_prompt=self.num_prompt,
            stop_ids=self.stop_ids,
            salt=self.salt,
        )

    def begin(self, row: Row, now: float) -> None:
        """Note that the first step with a row of it is about to run."""
        self.started = now
        self.cached_tokens = row.start

    def accept(self, row: Row, result: RowResult, now: float) -> Output | None:
        """Take what a step chose, cut at limits and stops; None where it brought nothing to tell."""
        scores = self._new_scores(row, result) if result.prompt_logprobs else ()
        if result.error is not None:
            return self.finish("error", now, error=result.error, prompt_logprobs=scores)
        if not result.token_ids:
            self.num_computed = row.start + len(row.token_ids)
            return self._output(prompt_logprobs=scores) if scores else None
        tokens = result.token_ids[: self.max_total - len(self.token_ids)]
        reason: FinishReason | None = None
        if not self.stop_ids.isdisjoint(tokens):
            stop = next(i for i, token in enumerate(tokens) if token in self.stop_ids)
            tokens, reason = tokens[: stop + 1], "stop"
        text = ""
        if self.text is not None:
            shown = tokens if reason is None or self.params.include_stop else tokens[:-1]
            text, kept = self.text.push(shown)
            if kept is not None:
                tokens, reason = tokens[:kept], "stop"
        self.token_ids += tokens
        # The last token was chosen, not run: its key and value come with the next step.
        self.num_computed = len(self.token_ids) - 1
        if self.first_token is None:
            self.first_token = now
        if reason is None and len(self.token_ids) >= self.max_total:
            reason = "length"
        logprobs = result.logprobs[: len(tokens)] if result.logprobs else ()
        if reason is not None:
            return self.finish(reason, now, text=text, token_ids=tokens, logprobs=logprobs, prompt_logprobs=scores)
        return self._output(text=text, token_ids=tokens, logprobs=logprobs, prompt_logprobs=scores)

    def _new_scores(self, row: Row, result: RowResult) -> tuple[TokenLogprobs, ...]:
        """Return those log-probabilities of the prompt that were not put out yet."""
        assert row.start <= self.num_scored, "the prompt's tokens run in order, and none is found in a cache"
        scores = result.prompt_logprobs[self.num_scored - row.start :]
        self.num_scored += len(scores)
        return scores

    def finish(self, reason: FinishReason, now: float, *, text: str = "", **more: object) -> Output:
        """End it, and give the text that was held back."""
        if self.text is not None and reason != "abort":
            text += self.text.finish()
            if self.text.stopped and reason == "length":
                reason = "stop"
        self.finish_reason = reason
        started = self.started if self.started is not None else now
        first_token = self.first_token if self.first_token is not None else now
        return self._output(
            text=text,
            finish_reason=reason,
            usage=Usage(self.num_prompt, len(self.token_ids) - self.num_prompt, self.cached_tokens),
            timings=Timings(started - self.arrived, first_token - self.arrived, now - self.arrived),
            **more,
        )

    def _output(self, **facts: object) -> Output:
        return Output(
            request_id=self.request.request_id,
            choice=self.choice,
            seed=self.seed,
            **facts,  # type: ignore[arg-type]
        )
