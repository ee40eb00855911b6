"""The verbs of the protocol: who says them, and what is in their bodies. The table behind parsing and its checks."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

from attrs import Factory, field, frozen

from intarsia.errors import IntarsiaError, InvalidRequestError

Sender: TypeAlias = Literal["client", "server"]

#: What a field may be -> (whether a value is it, how a message calls it). By the exact type: true is no number.
_TESTS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "str": (lambda v: type(v) is str, "a text"),
    "int": (lambda v: type(v) is int, "a whole number"),
    "count": (lambda v: type(v) is int and v >= 0, "a whole number from 0"),
    "float": (lambda v: type(v) in (int, float), "a number"),
    "bool": (lambda v: type(v) is bool, "true or false"),
    "bin": (lambda v: type(v) is bytes, "bytes"),
    "map": (lambda v: type(v) is dict, "a map"),
    "array": (lambda v: type(v) is list, "an array"),
    "ids": (lambda v: _is_ids(v), "an array or blob of token ids"),
    "nil": (lambda v: v is None, "nil"),
    "any": (lambda _: True, "anything"),
}
_SURE: Mapping[str, type] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "bin": bytes,
    "map": dict,
    "array": list,
}


@frozen
class Field:
    """One field of a body: the types that it may have, and whether it has to be there."""

    types: tuple[str, ...]
    required: bool = False
    #: Python's types of which every value is right: most values need no more than a look at these
    surely: frozenset[type] = field(
        default=Factory(lambda self: frozenset(_SURE[each] for each in self.types if each in _SURE), takes_self=True),
        init=False,
        repr=False,
    )

    def takes(self, value: Any) -> bool:
        """Whether a value has one of the types."""
        return type(value) in self.surely or any(_TESTS[each][0](value) for each in self.types)

    @property
    def text(self) -> str:
        """The types in words."""
        return " or ".join(_TESTS[each][1] for each in self.types)


@frozen
class Verb:
    """A kind of message: its sender, and the fields of its body by name, in the order in which they are written."""

    sender: Sender
    fields: Mapping[str, Field]
    #: the names of those that have to be there
    required: tuple[str, ...] = ()


def _verb(sender: Sender, **fields: str) -> Verb:
    """Make a verb. A field is its types with `|` between them; `!` at the end is one that has to be there."""
    made = {
        name.rstrip("_"): Field(tuple(text.rstrip("!").split("|")), text.endswith("!")) for name, text in fields.items()
    }
    return Verb(sender, made, tuple(name for name, one in made.items() if one.required))


VERBS: Mapping[str, Verb] = {
    "hello": _verb("client", versions="array!", client="map", token="bin|nil", received="map"),  # noqa: S106
    "welcome": _verb(
        "server",
        version="int!",
        server="map",
        model="map!",
        composition="map",
        limits="map!",
        heartbeat_s="float!",
        grace_s="float!",
        credit="count!",
        token="bin!",  # noqa: S106
        resumed="bool!",
        requests="array!",
    ),
    "ping": _verb("client"),
    "pong": _verb("server", echo="map", step_age_s="float|nil", state="str!"),
    "bye": _verb("client"),
    "generate": _verb(
        "client",
        prompt="str|ids|map!",
        sampling="map",
        stream="bool",
        priority="int",
        cache_salt="str",
        deadline_s="float|nil",
        credit="count|nil",
    ),
    "delta": _verb(
        "server",
        choice="count",
        text="str",
        token_ids="ids",  # noqa: S106
        logprobs="array|map",
        prompt_logprobs="array|map",
        finish_reason="str",
    ),
    "done": _verb("server", choices="array!", prompt_logprobs="array|map", usage="map!", timings="map!", seed="count!"),
    "error": _verb("server", code="str!", field="str|nil", message="str!", retry_after_s="float|nil"),
    "cancel": _verb("client"),
    "credit": _verb("client", received="count", upto="count"),
    "tokenize": _verb("client", text="str", messages="array"),
    "tokens": _verb("server", token_ids="ids!"),  # noqa: S106
    "detokenize": _verb("client", token_ids="ids!", skip_special_tokens="bool"),  # noqa: S106
    "text": _verb("server", text="str!"),
    "models": _verb("client", models="array"),  # the server's answer has the field
    "explain": _verb("client"),
    "explained": _verb("server"),
    "stats": _verb("client"),
    "figures": _verb("server", engine="map", server="map"),
    "replay": _verb("client", from_="count!"),
    "events": _verb("server", events="array!", first="count!"),
    "batch": _verb("server", messages="array!"),
}
#: The one kind that both sides say: a question without fields, and its answer.
BOTH = frozenset(("models",))


def says(kind: str, sender: Sender) -> bool:
    """Whether this side says messages of this kind."""
    return kind in VERBS and (VERBS[kind].sender == sender or kind in BOTH)


def checked(kind: str, body: Mapping[str, Any], error: type[IntarsiaError] = InvalidRequestError) -> Mapping[str, Any]:
    """Return the body if its fields have the types that the verb gives them. Unknown ones are let be.

    Raises:
        error: names the field, the value and what would be right.
    """
    verb = VERBS[kind]
    for name, value in body.items():
        one = verb.fields.get(name)
        if one is not None and type(value) not in one.surely and not one.takes(value):
            raise wrong(name, value, one.text, error)
    for name in verb.required:
        if name not in body:
            raise error(f"{name}: missing in {kind!r}; it has to be {verb.fields[name].text}", field=name)
    return body


def wrong(path: str, value: object, right: str, error: type[IntarsiaError] = InvalidRequestError) -> IntarsiaError:
    """Return an error that says what a value is not."""
    text = repr(value) if isinstance(value, str | int | float | bool | type(None)) else f"a {type(value).__name__}"
    shown = text if len(text) <= 80 else f"{text[:77]}..."
    return error(f"{path}: {shown} is not {right}", field=path)


def _is_ids(value: Any) -> bool:
    if type(value) is array:
        return value.typecode == "i" and (not value or min(value) >= 0)
    if type(value) is not list:
        return False
    if len(value) == 1:  # a delta of one token, which most are
        return type(value[0]) is int and 0 <= value[0] < 1 << 31
    return set(map(type, value)) <= {int} and (not value or (min(value) >= 0 and max(value) < 1 << 31))
