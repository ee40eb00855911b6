"""Chats to text, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError

from intarsia.errors import CheckpointError, InvalidRequestError
from intarsia.text.sandbox import BoundExceeded, Sandbox, TemplateRefusal
from intarsia.types import Chat, Message

_MAX_DEPTH = 32


class ChatTemplate:
    """A chat template, compiled once. It runs in a bounded sandbox and sees what Hugging Face's would show it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; an error in it is kept for `render`, as the model can still take plain prompts."""
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox()
        self._template: Template | None = None
        self._error = ""
        self._takes_parts = False
        try:
            tree = self._sandbox.parse(source)
            self._takes_parts = _loops_over_content(tree)
            self._template = self._sandbox.compile_bounded(tree)
        except Exception as error:  # Jinja and Python's compiler have many ways to say no
            self._error = f"{type(error).__name__}: {error}"

    def render(self, chat: Chat | Sequence[Message]) -> str:
        """Return the text of a chat, up to where the assistant's turn begins.

        Content that is a list of text parts goes to templates that loop over content as it is; for others its texts are
        joined with newlines.

        Raises:
            InvalidRequestError: the messages are malformed, or the template refuses them, fails on them, takes too
                much, or reaches for what the sandbox keeps from it.
            CheckpointError: the template is malformed.
        """
        chat = chat if isinstance(chat, Chat) else Chat(chat)
        messages = enumerate(chat.messages)
        turns = [_turn(message, f"messages[{index}]", self._takes_parts) for index, message in messages]
        if self._template is None:
            raise CheckpointError(
                f"tokenizer.chat_template: it does not compile ({self._error}); plain prompts work",
                field="tokenizer.chat_template",
            )
        variables = {
            **self._special_tokens,
            "messages": turns,
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            return self._sandbox.run(self._template, variables)
        except TemplateRefusal as refusal:
            problem = f"refuses these messages: {refusal}"
        except BoundExceeded as error:
            problem = f"is stopped: {error}"
        except SecurityError as error:
            problem = f"is stopped by the sandbox: {error}"
        except Exception as error:  # a template is a program and can fail in any way
            problem = f"fails on these messages: {type(error).__name__}: {error}"
        raise InvalidRequestError(f"messages: the model's chat template {problem}", field="messages")


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template has a loop over a message's content, and so takes lists of parts."""
    return any(_is_content(expression) for loop in tree.find_all(nodes.For) for expression in _within(loop.iter))


def _within(expression: nodes.Node) -> Sequence[nodes.Node]:
    # A filter or a slice around it is still a loop over it: `message.content | selectattr(...)`, `content[1:]`.
    if isinstance(expression, nodes.Filter) and expression.node is not None:
        return [expression, *_within(expression.node)]
    if isinstance(expression, nodes.Getitem) and isinstance(expression.arg, nodes.Slice):
        return [expression, *_within(expression.node)]
    return [expression]


def _is_content(expression: nodes.Node) -> bool:
    match expression:
        case nodes.Name(name="content") | nodes.Getattr(attr="content"):
            return True
        case nodes.Getitem(arg=nodes.Const(value="content")):
            return True
    return False


def _turn(message: Any, path: str, takes_parts: bool) -> dict[str, Any]:
    """Return a copy of a message that a template may see."""
    if not isinstance(message, Mapping):
        raise _malformed(path, message, "a mapping with role and content")
    if not isinstance(message.get("role"), str):
        raise _malformed(f"{path}.role", message.get("role"), "a text")
    if "content" not in message:
        raise InvalidRequestError(f"{path}.content: it is missing", field=f"{path}.content")
    turn = {key: _plain(value, f"{path}.{key}") for key, value in message.items()}
    content = turn["content"]
    if isinstance(content, list):
        texts = [_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
        if not takes_parts:
            turn["content"] = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise _malformed(f"{path}.content", content, "a text, a list of text parts or null")
    return turn


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        raise _malformed(path, part, 'a part such as {"type": "text", "text": "Hi"}; this model takes text only')
    text: str = part["text"]
    return text


def _plain(value: Any, path: str, depth: int = 0) -> Any:
    """Copy what JSON can say; anything else has methods that a template should not reach."""
    if depth > _MAX_DEPTH:
        raise InvalidRequestError(f"{path.split('[')[0]}: it is nested deeper than {_MAX_DEPTH}", field=path)
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        if not all(type(key) is str for key in value):
            raise _malformed(path, value, "a mapping whose keys are texts")
        return {key: _plain(item, f"{path}.{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise _malformed(path, value, "a text, number, list, mapping, true, false or null")


def _malformed(path: str, value: object, right: str) -> InvalidRequestError:
    shown = repr(value)
    shown = shown if len(shown) <= 64 else f"{shown[:64]}..."
    return InvalidRequestError(f"{path}: {shown} is not {right}", field=path)
