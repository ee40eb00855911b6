"""Answers as they are shown: text as it comes, JSON, and the figures of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import attrs
from attrs import define, field, frozen

from intarsia.cli.terminal import write
from intarsia.types import Completion, Output, TokenLogprobs


@define
class Printer:
    """Writes a request's choices one after the other: the first as it comes, the others once it is their turn.

    Attributes:
        num_choices: more than one get a header each.
        has_text: a model without a tokenizer shows its token ids.
        last: the last output of each choice that is finished.
    """

    num_choices: int
    has_text: bool
    last: list[Output] = field(factory=list, init=False)
    _current: int = field(default=-1, init=False)
    _waiting: dict[int, list[Output]] = field(factory=dict, init=False)
    _line_is_open: bool = field(default=False, init=False)
    _is_empty: bool = field(default=True, init=False)

    def show(self, output: Output) -> None:
        """Take the next output of whatever choice."""
        if self._current < 0:
            self._begin(0)
        if output.finish_reason is not None:
            self.last.append(output)
        self._waiting.setdefault(output.choice, []).append(output)
        while arrived := self._waiting.pop(self._current, None):
            for one in arrived:
                self._write(self._piece(one))
                if one.finish_reason is not None:
                    self._end()

    def _begin(self, choice: int) -> None:
        self._current, self._line_is_open, self._is_empty = choice, True, True
        if self.num_choices > 1 and choice < self.num_choices:
            write(f"--- choice {choice}\n")

    def _end(self) -> None:
        if self._line_is_open:
            write("\n")
        self._begin(self._current + 1)

    def _piece(self, output: Output) -> str:
        if self.has_text:
            return output.text
        separator = "" if self._is_empty or not output.token_ids else ","
        return separator + ",".join(map(str, output.token_ids))

    def _write(self, text: str) -> None:
        if text:
            write(text)
            self._line_is_open, self._is_empty = not text.endswith("\n"), False


@frozen
class Figures:
    """What a run took. A speed counts the tokens after each choice's first, whose time is the prompt's."""

    prompt_tokens: int
    completion_tokens: int
    num_choices: int
    first_token_s: float
    total_s: float

    @classmethod
    def of_completion(cls, completion: Completion) -> Self:
        """Return the figures of a finished request."""
        usage, timings = completion.usage, completion.timings
        return cls(
            usage.prompt_tokens,
            usage.completion_tokens,
            len(completion.choices),
            timings.first_token_s,
            timings.total_s,
        )

    @classmethod
    def of_outputs(cls, last: Sequence[Output]) -> Self:
        """Return the figures of a stream, given the last output of each choice."""
        usages = [output.usage for output in last if output.usage is not None]
        timings = [output.timings for output in last if output.timings is not None]
        return cls(
            usages[0].prompt_tokens,
            sum(usage.completion_tokens for usage in usages),
            len(last),
            min(t.first_token_s for t in timings),
            max(t.total_s for t in timings),
        )

    def __str__(self) -> str:
        seconds, tokens = self.total_s - self.first_token_s, self.completion_tokens - self.num_choices
        speed = f"{tokens / seconds:.1f} tokens/s" if tokens > 0 and seconds > 0 else "too few tokens for a speed"
        return (
            f"{self.completion_tokens} tokens after a prompt of {self.prompt_tokens}, "
            f"first token in {self.first_token_s:.3f} s, then {speed}"
        )


def as_json(completion: Completion) -> dict[str, Any]:
    """Return a completion as the object that `--json` prints."""
    data: dict[str, Any] = {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_token_ids": list(completion.prompt_token_ids),
        "finish_reason": completion.finish_reason,
        "usage": attrs.asdict(completion.usage),
        "timings": attrs.asdict(completion.timings),
        "seed": completion.seed,
    }
    if completion.logprobs is not None:
        data["logprobs"] = _logprobs(completion.logprobs)
    if completion.prompt_logprobs is not None:
        scored = [entry for entry in completion.prompt_logprobs if entry is not None]
        # Nothing comes before the first token.
        data["prompt_logprobs"] = [None, *_logprobs(scored)]
    if completion.error is not None:
        data["error"] = completion.error
    if len(completion.choices) > 1:
        data["choices"] = [
            {
                "text": choice.text,
                "token_ids": list(choice.token_ids),
                "finish_reason": choice.finish_reason,
                **({} if choice.logprobs is None else {"logprobs": _logprobs(choice.logprobs)}),
                **({} if choice.error is None else {"error": choice.error}),
            }
            for choice in completion.choices
        ]
    return data


def _logprobs(entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
    """Return log-probabilities as plain data; JSON has no -inf, so a token that cannot come has null."""
    return [
        {
            "token_id": entry.token_id,
            "logprob": _finite(entry.logprob),
            "top": [[token, _finite(logprob)] for token, logprob in entry.top],
        }
        for entry in entries
    ]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
