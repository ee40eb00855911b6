"""What a request asks of `structured_output`, checked."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from attrs import frozen

from intarsia.errors import InvalidRequestError, did_you_mean
from intarsia.types import SamplingParams

#: The processor's key, in configs and in requests.
KEY = "structured_output"
_WHERE = f"sampling.logits_processors.{KEY}"

Kind: TypeAlias = Literal["json_schema", "regex", "grammar", "choice"]

#: Keywords of llguidance's own that a schema may hold at its top. The others would let whitespace, or what is no JSON,
#: into the answer.
_GUIDANCE = ("coerce_one_of", "lenient")


@frozen
class Constraint:
    """What an answer must follow: equal ones are compiled once.

    Attributes:
        kind: how `source` is read. "Any JSON object" is a schema.
        source: a JSON schema or a list of choices as JSON text; a regex; a grammar in Lark's or GBNF's syntax.
        key: what the request called it, for messages.
    """

    kind: Kind
    source: str
    key: str

    @property
    def field(self) -> str:
        """The path of the request's field."""
        return f"{_WHERE}.{self.key}"

    def refused(self, why: str) -> InvalidRequestError:
        """Return the error for a constraint that cannot be compiled."""
        return InvalidRequestError(f"{self.field}: {_shown(self.source)} {why}", field=self.field)


def constraint_of(params: SamplingParams, max_bytes: int) -> Constraint | None:
    """Return what a request asks for; None where it asks for nothing.

    Raises:
        InvalidRequestError: it does not ask for exactly one known thing, that is of a wrong type or longer than
            `max_bytes`, or it would go on after the structure is complete.
    """
    if KEY not in params.logits_processors:
        return None
    asked = params.logits_processors[KEY]
    if not isinstance(asked, Mapping):
        raise _wrong("", asked, 'an object such as {"json_schema": {...}}')
    for key in asked:
        if key not in _READERS:
            raise InvalidRequestError(
                f"{_WHERE}.{_plain(key)}: unknown option.{did_you_mean(_plain(key), _READERS)}",
                field=f"{_WHERE}.{_plain(key)}",
            )
    if len(asked) != 1:
        said = f"{' and '.join(map(repr, asked))} together" if asked else "nothing"
        raise InvalidRequestError(f"{_WHERE}: {said}; it takes exactly one of {', '.join(_READERS)}", field=_WHERE)
    ((key, value),) = asked.items()
    constraint = _READERS[key](key, value)
    _check_size(constraint, max_bytes)
    if params.ignore_eos:
        raise InvalidRequestError(
            f"sampling.ignore_eos: true cannot go with {_WHERE}: nothing may follow a complete structure; leave it out",
            field="sampling.ignore_eos",
        )
    return constraint


def _read_schema(key: str, value: object) -> Constraint:
    """Take a schema as an object, as true or false, or as the JSON text of one."""
    right = "a JSON schema: an object, true or false, or the JSON text of one"
    if isinstance(value, str):
        try:
            schema = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise _wrong(key, value, f"{right}; {_first_line(error)}") from None
    else:
        schema = value
    if not isinstance(schema, Mapping | bool):
        raise _wrong(key, value, right)
    if isinstance(schema, Mapping) and "x-guidance" in schema:
        _check_guidance(key, schema["x-guidance"])
    try:
        source = json.dumps(_as_dict(schema), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise _wrong(key, value, f"{right}; {_first_line(error)}") from None
    return Constraint("json_schema", source, key)


def _as_dict(schema: Mapping[str, Any] | bool) -> object:
    return schema if isinstance(schema, bool) else dict(schema)


def _check_guidance(key: str, value: object) -> None:
    for name in value if isinstance(value, Mapping) else ():
        if name not in _GUIDANCE:
            raise InvalidRequestError(
                f"{_WHERE}.{key}.x-guidance.{_plain(name)}: unknown option.{did_you_mean(_plain(name), _GUIDANCE)}",
                field=f"{_WHERE}.{key}.x-guidance",
            )
    if not isinstance(value, Mapping) or not all(isinstance(each, bool) for each in value.values()):
        raise _wrong(f"{key}.x-guidance", value, "an object of flags")


def _read_text(key: str, value: object) -> Constraint:
    right = {"regex": "a regular expression, a text", "grammar": "a grammar in Lark's or GBNF's syntax, a text"}[key]
    if not isinstance(value, str) or not value.strip():
        raise _wrong(key, value, f"{right} that is not empty")
    return Constraint("regex" if key == "regex" else "grammar", value, key)


def _read_any_json(key: str, value: object) -> Constraint:
    if value is not True:
        raise _wrong(key, value, "true, which asks for any JSON object")
    return Constraint("json_schema", '{"type":"object"}', key)


def _read_choice(key: str, value: object) -> Constraint:
    right = "a list of texts of at least one character each"
    if not isinstance(value, list | tuple) or not value:
        raise _wrong(key, value, right)
    for each in value:
        if not isinstance(each, str) or not each:
            raise _wrong(key, each, right)
    return Constraint("choice", json.dumps(list(dict.fromkeys(value)), ensure_ascii=False), key)


#: What a request can ask for -> how it is read.
_READERS: Mapping[str, Callable[[str, object], Constraint]] = {
    "json_schema": _read_schema,
    "regex": _read_text,
    "grammar": _read_text,
    "json": _read_any_json,
    "choice": _read_choice,
}


def _check_size(constraint: Constraint, max_bytes: int) -> None:
    try:
        size = len(constraint.source.encode())
    except UnicodeEncodeError:
        raise _wrong(constraint.key, constraint.source, "valid Unicode: it holds half of a surrogate pair") from None
    if size > max_bytes:
        raise InvalidRequestError(
            f"{constraint.field}: {size} bytes; at most {max_bytes} are taken (logits_processors.max_schema_bytes)",
            field=constraint.field,
        )


def _wrong(key: str, value: object, right: str) -> InvalidRequestError:
    where = f"{_WHERE}.{key}" if key else _WHERE
    return InvalidRequestError(f"{where}: {_shown(value)} is not {right}", field=where)


def _shown(value: object) -> str:
    """Return a value for a message, cut where it is long."""
    try:
        text = repr(value)
    except Exception:  # someone else's object, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _plain(key: object) -> str:
    text = str(key)
    return text if len(text) <= 64 else f"{text[:61]}..."


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:120]
