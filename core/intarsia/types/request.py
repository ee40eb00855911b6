"""What is asked and what is answered. Everything here is validated at birth and never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from attrs import Attribute, field, frozen

from intarsia.errors import InvalidRequestError

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
#: One turn of a chat: `{"role": "user", "content": "Hi"}`.
Message: TypeAlias = Mapping[str, Any]
#: Text, token ids, or the messages of a chat.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


def _reject(name: str, value: object, right: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling.{name}: {value!r} is not {right}", field=f"sampling.{name}")


def _as_plain(value: Any) -> Any:
    """Make numpy's numbers plain; what is no number goes to the validator as it is."""
    if isinstance(value, int | float):
        return value
    return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value


def _number(default: float | None, low: float, high: float, right: str, *, whole: bool = False) -> Any:
    """A field for a finite number from `low` to `high`, both included, or None where that is the default."""

    def check(_: object, attribute: Attribute[Any], value: object) -> None:
        if value is None and default is None:
            return
        known = isinstance(value, Integral if whole else Real) and not isinstance(value, bool)
        # NaN fails every comparison, and whole numbers of any size compare with inf.
        if not known or not low <= value <= high or value == math.inf:  # type: ignore[operator]
            raise _reject(attribute.name, value, right)

    return field(default=default, converter=_as_plain, validator=check)


def _flag(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise _reject(attribute.name, value, "true or false")


def _texts(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    for text in value:
        if not isinstance(text, str) or not text:
            raise _reject(attribute.name, text, "a text of at least one character")


def _ids(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise _reject(attribute.name, token, "a token id, a whole number from 0")


def _as_tuple(value: Any) -> Any:
    """One text or id is short for a list of one; what is neither goes to the validator as it is."""
    if isinstance(value, str | Real):
        return (value,)
    return tuple(value) if isinstance(value, Sequence | set | frozenset) or hasattr(value, "tolist") else (value,)


def _as_ids(value: Any) -> Any:
    return tuple(_as_plain(token) for token in _as_tuple(value))


@frozen(kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    Attributes:
        max_tokens: tokens to generate at most; None is until the end of the context.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k likeliest tokens, and those tied with the last of them; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to at least this (Holtzman et al. 2020); the likeliest
            is always kept, so 0 is greedy.
        seed: a whole number below 2**64; None takes one from the operating system, reported in the answer.
        n: independent choices; choice i of a seed is always the same.
        stop: texts that end the answer and are cut from it.
        stop_token_ids: ids that end the answer, besides the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        include_stop: leave the stop text, or the text of the stop token, in the answer.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: report the log-probability of each chosen token and of this many likeliest; None reports nothing.
            They are of the raw distribution, before temperature and filters.

    Raises:
        InvalidRequestError: a value is out of range; names the field, the value and what would be right.
    """

    max_tokens: int | None = _number(None, 1, math.inf, "a whole number from 1", whole=True)
    temperature: float = _number(1.0, 0, 1e4, "a finite number from 0 to 10000")
    top_k: int = _number(0, 0, math.inf, "a whole number from 0; 0 keeps all", whole=True)
    top_p: float = _number(1.0, 0, 1, "a number from 0 to 1")
    seed: int | None = _number(None, 0, 2**64 - 1, "a whole number from 0, below 2**64", whole=True)
    n: int = _number(1, 1, 128, "a whole number from 1 to 128", whole=True)
    stop: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_texts)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_as_ids, validator=_ids)
    ignore_eos: bool = field(default=False, validator=_flag)
    include_stop: bool = field(default=False, validator=_flag)
    skip_special_tokens: bool = field(default=True, validator=_flag)
    logprobs: int | None = _number(None, 0, 1000, "a whole number from 0 to 1000", whole=True)


@frozen(kw_only=True)
class Request:
    """One thing to generate. Ids are the client's own and are free again once the request is finished.

    Attributes:
        prompt: text, token ids, or chat messages.
        priority: higher runs first.
        cache_salt: its cached prefixes are shared with requests of an equal salt alone.
    """

    request_id: str = field()
    prompt: Prompt
    params: SamplingParams = field(factory=SamplingParams)
    priority: int = field(default=0)
    cache_salt: str = field(default="")

    @request_id.validator
    def _(self, _: Attribute[str], value: object) -> None:
        if not isinstance(value, str) or not 0 < len(value) <= 256 or not value.isprintable():
            shown = repr(value if not isinstance(value, str) or len(value) <= 64 else value[:64] + "...")
            raise InvalidRequestError(f"request_id: {shown} is not 1 to 256 printable characters", field="request_id")

    @params.validator
    def _(self, _: Attribute[SamplingParams], value: object) -> None:
        if not isinstance(value, SamplingParams):
            raise InvalidRequestError(
                f"params: a {type(value).__name__} is not SamplingParams, such as SamplingParams(max_tokens=32)",
                field="params",
            )

    @priority.validator
    def _(self, _: Attribute[int], value: object) -> None:
        if not isinstance(value, int) or isinstance(value, bool):
            raise InvalidRequestError(f"priority: {value!r} is not a whole number", field="priority")

    @cache_salt.validator
    def _(self, _: Attribute[str], value: object) -> None:
        if not isinstance(value, str) or len(value) > 256:
            raise InvalidRequestError(
                f"cache_salt: {str(value)[:64]!r} is not a text of at most 256 characters", field="cache_salt"
            )


@frozen
class TokenLogprobs:
    """Log-probabilities at one position, of the raw distribution.

    Attributes:
        token_id: the chosen token.
        logprob: its log-probability, natural logarithm.
        top: (token id, log-probability) of the likeliest, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@frozen
class Usage:
    """Tokens counted. `cached_tokens` of the prompt were taken from the cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


@frozen
class Timings:
    """Seconds since the request arrived.

    Attributes:
        queued_s: until its first step was planned.
        first_token_s: until its first token was accepted.
        total_s: until it was finished.
    """

    queued_s: float
    first_token_s: float
    total_s: float


@frozen(kw_only=True)
class Output:
    """What one step brought for one choice of a request: the delta of a stream.

    Attributes:
        text: new text, safe to show: never half a character, never the start of a stop string.
        token_ids: newly accepted ids; text can lag behind them.
        finish_reason: set on the last output of a choice.
        error: what went wrong, where finish_reason is `error`.
        usage, timings: set on the last output of a choice, counted for that choice.
        seed: the seed in force, given or drawn.
    """

    request_id: str
    choice: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    seed: int = 0


@frozen(kw_only=True)
class CompletionChoice:
    """One finished choice of a request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str | None = None


@frozen(kw_only=True)
class Completion:
    """A finished request; `text`, `token_ids`, `finish_reason`, `logprobs` and `error` are those of choice 0."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletionChoice, ...]
    usage: Usage
    timings: Timings
    seed: int

    @property
    def text(self) -> str:
        """Text of choice 0."""
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Generated ids of choice 0."""
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        """Why choice 0 ended."""
        return self.choices[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """Log-probabilities of choice 0, where they were asked for."""
        return self.choices[0].logprobs

    @property
    def error(self) -> str | None:
        """What went wrong with choice 0, if anything."""
        return self.choices[0].error
