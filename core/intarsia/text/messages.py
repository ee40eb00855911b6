"""Messages, tools and documents as a template may see them: checked, copied, in the form that it takes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from attrs import define

from intarsia.errors import InvalidRequestError
from intarsia.text.conventions import Conventions
from intarsia.types.chat import shown

_MAX_DEPTH = 64
_MAX_VALUES = 1_000_000
# Names under which clients send a model's reasoning; templates read the first, those of gpt-oss the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


@define
class PlainCopy:
    """Copies what JSON can say, of one chat; anything else has methods that a template should not reach."""

    _left: int = _MAX_VALUES

    def of(self, value: Any, path: str) -> Any:
        """Return the copy; raise InvalidRequestError where it is no JSON, too deep or too much."""
        return self._of(value, (path,))

    def _of(self, value: Any, where: tuple[Any, ...], depth: int = 0) -> Any:
        """Copy what lies at `where`: (path,), or (where it lies, its key or index). It is spelled out for errors."""
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            most = f"deeper than {_MAX_DEPTH}" if depth > _MAX_DEPTH else f"more than {_MAX_VALUES} values"
            field = _spelled(where).split("[")[0]
            raise InvalidRequestError(f"{field}: it is nested {most}", field=field)
        if value is None or type(value) in (str, int, float, bool):
            return value
        # Enums and numpy's numbers, without what they add.
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int | float):
            return int(value) if isinstance(value, int) else float(value)
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                malformed(_spelled(where), value, "a mapping whose keys are texts")
            return {str.__str__(key): self._of(item, (where, key), depth + 1) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._of(item, (where, index), depth + 1) for index, item in enumerate(value)]
        return malformed(_spelled(where), value, "a text, number, list, mapping, true, false or null")


def _spelled(where: tuple[Any, ...]) -> str:
    if len(where) == 1:
        return str(where[0])
    inside, key = where
    return f"{_spelled(inside)}[{key}]" if isinstance(key, int) else f"{_spelled(inside)}.{key}"


def malformed(path: str, value: object, right: str) -> NoReturn:
    """Raise InvalidRequestError: the value at `path` is not what would be right."""
    raise InvalidRequestError(f"{path}: {shown(value)} is not {right}", field=path)


def read_message(message: Any, path: str, conventions: Conventions, copy: PlainCopy) -> dict[str, Any]:
    """Return a copy of a message as the template takes it.

    Keys of null are left out, as clients send them for "not given"; so is an empty `tool_calls`. Reasoning goes by each
    name that templates know.
    """
    if not isinstance(message, Mapping):
        malformed(path, message, "a mapping with role and content")
    if not isinstance(message.get("role"), str):
        malformed(f"{path}.role", message.get("role"), "a text")
    turn: dict[str, Any] = copy.of({key: value for key, value in message.items() if value is not None}, path)
    _read_content(turn, message, path, conventions)
    if "tool_calls" in turn and not turn["tool_calls"]:
        del turn["tool_calls"]
    elif "tool_calls" in turn:
        _read_tool_calls(turn["tool_calls"], f"{path}.tool_calls", conventions)
    reasoning = next((turn[name] for name in _REASONING if name in turn), None)
    return turn if reasoning is None else {"thinking": reasoning, **turn, "reasoning_content": reasoning}


def _read_content(turn: dict[str, Any], message: Mapping[str, Any], path: str, conventions: Conventions) -> None:
    """Put content into the form that the template takes. An assistant that calls tools may say nothing."""
    if "content" not in turn:
        if turn["role"] != "assistant":
            if "content" in message:
                malformed(f"{path}.content", None, "a text or a list of text parts; only an assistant's may be null")
            raise InvalidRequestError(f"{path}.content: it is missing", field=f"{path}.content")
        if conventions.asks_for_null:
            turn["content"] = None
        return
    content = turn["content"]
    if isinstance(content, list):
        texts = [_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
        if not conventions.takes_parts:
            turn["content"] = "\n".join(texts)
    elif not isinstance(content, str):
        malformed(f"{path}.content", content, "a text, a list of text parts or null")


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        malformed(path, part, 'a part such as {"type": "text", "text": "Hi"}; this model takes text only')
    text: str = part["text"]
    return text


# --- tools ------------------------------------------------------------------------------------------------------------


def _read_tool_calls(calls: Any, path: str, conventions: Conventions) -> None:
    """Put each call's arguments into the form that the template takes."""
    if not isinstance(calls, list):
        malformed(path, calls, "a list of tool calls")
    for index, call in enumerate(calls):
        at = f"{path}[{index}]"
        if not isinstance(call, dict):
            malformed(at, call, 'a call such as {"type": "function", "function": {"name": "f", "arguments": {}}}')
        function = call
        if "function" in call:
            function, at = call["function"], f"{at}.function"
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            malformed(at, function, 'a function call such as {"name": "f", "arguments": {}}')
        if function.get("arguments") is not None:
            function["arguments"] = _arguments(function["arguments"], f"{at}.arguments", conventions)


def _arguments(value: Any, path: str, conventions: Conventions) -> Any:
    """Return a call's arguments as an object or as JSON text, whichever the template takes; no text is no arguments."""
    known = value
    if isinstance(value, str):
        try:
            known = json.loads(value or "{}", parse_constant=_no_constant)
        except (ValueError, RecursionError):
            known = None
    if not isinstance(known, dict):
        malformed(path, value, "a JSON object, as an object or as its text")
    if not conventions.takes_argument_texts:
        return PlainCopy().of(known, path)
    return value if isinstance(value, str) else json.dumps(known, ensure_ascii=False)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def read_tool(tool: Mapping[str, Any], path: str, copy: PlainCopy) -> Any:
    """Return a copy of the JSON schema of a function."""
    plain = copy.of(tool, path)
    function = plain.get("function", plain)
    if "function" in plain and (not isinstance(function, dict) or not isinstance(function.get("name"), str)):
        malformed(f"{path}.function", function, 'an object with a name, such as {"name": "f", "parameters": {}}')
    return plain
