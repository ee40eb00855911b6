"""A chat as a prompt: what a model's chat template may see."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from attrs import Attribute, Factory, field, frozen

from intarsia.errors import InvalidRequestError

#: One turn of a chat: `{"role": "user", "content": "Hi"}`.
Message: TypeAlias = Mapping[str, Any]

#: What a template gets under these names is the chat's own.
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message")


_REPR = reprlib.Repr()
_REPR.maxlevel, _REPR.maxstring, _REPR.maxother = 3, 66, 66


def shown(value: object) -> str:
    """Return a value as an error names it: short, however long, deep or wide it is."""
    try:
        text = _REPR.repr(value)
    except Exception:  # Python spells no number of many thousand digits, and a third party's `__repr__` may fail
        return f"this {type(value).__name__}"
    return text if len(text) <= 64 else f"{text[:64]}..."


def _listed(value: Any) -> Any:
    """Keep a tuple, so that nobody changes the list later. None is for JSON's null: not given."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _messages(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _mappings(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, tuple):
        raise InvalidRequestError(
            f"{attribute.name}: {type(value).__name__} is not a list of objects", field=attribute.name
        )
    for index, one in enumerate(value):
        if not isinstance(one, Mapping):
            path = f"{attribute.name}[{index}]"
            raise InvalidRequestError(f"{path}: {shown(one)} is not an object, such as a JSON schema's", field=path)


def _flag(_: object, attribute: Attribute[Any], value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{attribute.name}: {shown(value)} is not true or false", field=attribute.name)


@frozen
class Chat:
    """The messages of a chat with what else its model's template takes; a prompt wherever messages are one.

    Messages, tools, documents and variables hold what JSON can say. The template reads them when the prompt is encoded.

    Attributes:
        messages: at least one. Of an assistant, `content` may be null or missing, and `tool_calls` may give `arguments`
            as an object or as JSON text.
        tools: what the model may call, each as the JSON schema of a function:
            `{"type": "function", "function": {"name": ..., "description": ..., "parameters": {...}}}`.
        documents: what the model may cite, such as `{"title": ..., "text": ...}`.
        continue_final_message: leave the last message's content open, for the model to go on with it.
        add_generation_prompt: end with the beginning of an answer; unless said otherwise, where no message goes on.
        variables: other names that templates read, such as `enable_thinking`.

    Raises:
        InvalidRequestError: names the field, the value and what would be right.
    """

    messages: Sequence[Message] = field(converter=_messages)
    tools: Sequence[Mapping[str, Any]] = field(default=(), converter=_listed, validator=_mappings, kw_only=True)
    documents: Sequence[Mapping[str, Any]] = field(default=(), converter=_listed, validator=_mappings, kw_only=True)
    continue_final_message: bool = field(default=False, validator=_flag, kw_only=True)
    add_generation_prompt: bool = field(
        default=Factory(lambda self: not self.continue_final_message, takes_self=True), validator=_flag, kw_only=True
    )
    variables: Mapping[str, Any] = field(factory=dict, kw_only=True)

    @messages.validator
    def _(self, _: Attribute[Any], value: object) -> None:
        if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not value:
            shown = "an empty list" if isinstance(value, tuple) else type(value).__name__
            raise InvalidRequestError(f"messages: {shown} is not a list of at least one message", field="messages")

    @variables.validator
    def _(self, _: Attribute[Any], value: object) -> None:
        if not isinstance(value, Mapping):
            raise InvalidRequestError(
                f"variables: {type(value).__name__} is not an object of name -> value", field="variables"
            )
        for name in value:
            if not isinstance(name, str) or not name.isidentifier():
                raise InvalidRequestError(f"variables: {shown(name)} is not a name of a variable", field="variables")
            if name in _RESERVED:
                raise InvalidRequestError(
                    f"variables: {name!r} is a field of its own; give Chat({name}=...)", field=f"variables.{name}"
                )

    def __attrs_post_init__(self) -> None:
        if self.add_generation_prompt and self.continue_final_message:
            raise InvalidRequestError(
                "add_generation_prompt: true does not go with continue_final_message: the model begins an answer or "
                "goes on with the last message; leave one of them out",
                field="add_generation_prompt",
            )
