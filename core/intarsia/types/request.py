"""What is asked and what is answered. Everything here is validated at birth and never changed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias

from attrs import Attribute, evolve, field, fields, frozen

from intarsia.errors import InvalidRequestError
from intarsia.types.chat import Chat, Message, shown

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error", "deadline"]
#: Text, token ids, or the messages of a chat, alone or with its tools and template variables.
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Chat


def _reject(name: str, value: object, right: str) -> InvalidRequestError:
    return InvalidRequestError(f"sampling.{name}: {shown(value)} is not {right}", field=f"sampling.{name}")


def _as_plain(value: Any) -> Any:
    """Make numpy's numbers plain; what is no number, or none that fits a float, goes to the validator as it is."""
    if isinstance(value, int | float):
        return value
    try:
        return int(value) if isinstance(value, Integral) else float(value) if isinstance(value, Real) else value
    except OverflowError:
        return value


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


#: Of texts to stop at or to ban: each is looked for at every token.
_MAX_TEXTS, _MAX_TEXT = 256, 1024


def _texts(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    if len(value) > _MAX_TEXTS:
        raise _reject(attribute.name, f"{len(value)} texts", f"a list of at most {_MAX_TEXTS}")
    for text in value:
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_TEXT:
            raise _reject(attribute.name, text, f"a text of 1 to {_MAX_TEXT} characters")


def _ids(_: object, attribute: Attribute[Any], value: tuple[object, ...]) -> None:
    for token in value:
        if not isinstance(token, int) or isinstance(token, bool) or token < 0:
            raise _reject(attribute.name, token, "a token id, a whole number from 0")


def _as_tuple(value: Any) -> Any:
    """One text or id is short for a list of one; what is neither goes to the validator as it is."""
    if isinstance(value, str | Real):
        return (value,)
    if hasattr(value, "tolist"):  # arrays and tensors, of no dimensions too
        value = value.tolist()
    return tuple(value) if isinstance(value, Sequence | set | frozenset) else (value,)


def _as_ids(value: Any) -> Any:
    return tuple(_as_plain(token) for token in _as_tuple(value))


#: Of an id that is written as a text.
_MAX_DIGITS = 20
#: Further than this, a bias decides alone, and sums with it lose the logits' own bits.
_MAX_BIAS = 1e4


def _as_biases(value: Any) -> Any:
    """Take ids that are texts too: JSON's objects have no other keys."""
    if not isinstance(value, Mapping):
        return value
    return {
        int(token)
        if isinstance(token, str) and token.isdecimal() and len(token) < _MAX_DIGITS
        else _as_plain(token): _as_plain(bias)
        for token, bias in value.items()
    }


def _biases(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping):
        raise _reject(attribute.name, value, "an object of token id -> bias")
    _ids(None, attribute, tuple(value))
    for token, bias in value.items():
        if not isinstance(bias, int | float) or isinstance(bias, bool) or not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise _reject(attribute.name, {token: bias}, f"a number from {-_MAX_BIAS:g} to {_MAX_BIAS:g} for the id")


def _options(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _reject(attribute.name, value, "an object of processor key -> its options")


@frozen(kw_only=True)
class SamplingDefaults:
    """What a request that does not say takes, as a model recommends it."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0


@frozen(kw_only=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    At each position the logits go through, in this order: repetition_penalty, presence_penalty and frequency_penalty,
    logit_bias, the engine's logits processors; then what is banned is forbidden. A token is drawn from the rest by
    temperature, top_k, top_p, min_p and typical_p, each over what those before it left. Of these, and of
    repetition_penalty, None is the model's own default (`SamplingDefaults`).

    Attributes:
        max_tokens: tokens to generate at most; None is until the end of the context. 0 scores a prompt and generates
            nothing; it needs prompt_logprobs.
        min_tokens: what would end the answer is forbidden, and stop texts are let pass, before so many tokens. Where
            nothing else may follow, such as after a complete grammar, the answer ends all the same.
        temperature: divides the logits; 0 is greedy.
        top_k: keep the k likeliest tokens, and those tied with the last of them; 0 keeps all.
        top_p: keep the likeliest tokens whose probabilities sum to at least this (Holtzman et al. 2020); the likeliest
            is always kept, so 0 is greedy.
        min_p: keep tokens at least this many times as likely as the likeliest (Nguyen et al. 2024).
        typical_p: keep the tokens whose information is nearest to what is expected, up to this probability (Meister et
            al. 2022); 1 keeps all.
        repetition_penalty: logits of tokens that prompt or answer hold are divided by it where positive, else
            multiplied (Keskar et al. 2019); 1 changes nothing.
        presence_penalty: taken off the logits of tokens that the answer holds.
        frequency_penalty: taken off the logits of tokens, once for each time that the answer holds them.
        logit_bias: token id -> what is added to its logit.
        banned_token_ids: ids that are never chosen.
        banned_words: texts that the answer never holds, however they are cut into tokens. Special tokens have no text
            here; ban their ids.
        seed: a whole number below 2**64; None takes one from the operating system, reported in the answer.
        n: independent choices; choice i of a seed is always the same.
        stop: texts that end the answer and are cut from it.
        stop_token_ids: ids that end the answer, besides the model's own end-of-sequence ids.
        ignore_eos: go on past the model's end-of-sequence ids.
        include_stop: leave the stop text, or the text of the stop token, in the answer.
        skip_special_tokens: leave special tokens out of the text.
        logprobs: report the log-probability of each chosen token and of this many likeliest; None reports nothing.
            They are of the raw distribution, before everything above.
        prompt_logprobs: the same for each token of the prompt, given those before it.
        logits_processors: key -> options, for those of the engine's logits processors that take options of a request.

    Raises:
        InvalidRequestError: a value is out of range; names the field, the value and what would be right.
    """

    max_tokens: int | None = _number(None, 0, math.inf, "a whole number from 1", whole=True)
    min_tokens: int = _number(0, 0, math.inf, "a whole number from 0", whole=True)
    temperature: float | None = _number(None, 0, 1e4, "a finite number from 0 to 10000")
    top_k: int | None = _number(None, 0, math.inf, "a whole number from 0; 0 keeps all", whole=True)
    top_p: float | None = _number(None, 0, 1, "a number from 0 to 1")
    min_p: float | None = _number(None, 0, 1, "a number from 0 to 1")
    typical_p: float | None = _number(None, 0, 1, "a number from 0 to 1")
    repetition_penalty: float | None = _number(None, 0.01, 100, "a number from 0.01 to 100; 1 changes nothing")
    presence_penalty: float = _number(0.0, -2, 2, "a number from -2 to 2")
    frequency_penalty: float = _number(0.0, -2, 2, "a number from -2 to 2")
    logit_bias: Mapping[int, float] = field(factory=dict, converter=_as_biases, validator=_biases)
    banned_token_ids: tuple[int, ...] = field(default=(), converter=_as_ids, validator=_ids)
    banned_words: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_texts)
    seed: int | None = _number(None, 0, 2**64 - 1, "a whole number from 0, below 2**64", whole=True)
    n: int = _number(1, 1, 128, "a whole number from 1 to 128", whole=True)
    stop: tuple[str, ...] = field(default=(), converter=_as_tuple, validator=_texts)
    stop_token_ids: tuple[int, ...] = field(default=(), converter=_as_ids, validator=_ids)
    ignore_eos: bool = field(default=False, validator=_flag)
    include_stop: bool = field(default=False, validator=_flag)
    skip_special_tokens: bool = field(default=True, validator=_flag)
    logprobs: int | None = _number(None, 0, 1000, "a whole number from 0 to 1000", whole=True)
    prompt_logprobs: int | None = _number(None, 0, 1000, "a whole number from 0 to 1000", whole=True)
    logits_processors: Mapping[str, Any] = field(factory=dict, validator=_options)

    def __attrs_post_init__(self) -> None:
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise _reject(
                "max_tokens", 0, "a whole number from 1; 0, which only scores a prompt, needs prompt_logprobs"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _reject("min_tokens", self.min_tokens, f"at most max_tokens, which is {shown(self.max_tokens)}")

    def filled(self, defaults: SamplingDefaults) -> SamplingParams:
        """Return these parameters with the defaults where nothing is said."""
        missing = {f.name: getattr(defaults, f.name) for f in fields(SamplingDefaults) if getattr(self, f.name) is None}
        return evolve(self, **missing) if missing else self


@frozen(kw_only=True)
class Request:
    """One thing to generate. Ids are the client's own and are free again once the request is finished.

    Attributes:
        prompt: text, token ids, chat messages, or a `Chat`.
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
        prompt_logprobs: of the prompt's tokens from the second on, in order, on choice 0, where asked for.
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
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
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
    """A finished request; `text`, `token_ids`, `finish_reason`, `logprobs` and `error` are those of choice 0.

    Attributes:
        prompt_logprobs: one for each token of the prompt, where asked for; None for the first, which follows nothing.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    choices: tuple[CompletionChoice, ...]
    usage: Usage
    timings: Timings
    seed: int
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None

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
