"""Chats to text, by the model's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template
from jinja2.exceptions import SecurityError

from intarsia.errors import CheckpointError, InvalidRequestError
from intarsia.text.conventions import Conventions
from intarsia.text.messages import PlainCopy, read_message, read_tool
from intarsia.text.sandbox import BoundExceeded, Sandbox, TemplateRefusal
from intarsia.types import Chat, Message

# Put behind the last message's content to find where it ends in the rendered text. A template that trims content
# takes the space off. Of the private use area, so that no text holds it by chance.
_MARK = "\ue0d7continue\ue0d7 "


class ChatTemplate:
    """A chat template, compiled once. It runs in a bounded sandbox and sees what Hugging Face's would show it."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile the template; an error in it is kept for `render`, as the model can still take plain prompts."""
        self._special_tokens = dict(special_tokens)
        self._sandbox = Sandbox()
        self._template: Template | None = None
        self._error = ""
        self._conventions = Conventions()
        try:
            tree = self._sandbox.parse(source)
            self._conventions = Conventions.of(tree)
            self._template = self._sandbox.compile_bounded(tree)
        except Exception as error:  # Jinja and Python's compiler have many ways to say no
            self._error = f"{type(error).__name__}: {error}"

    def render(self, chat: Chat | Sequence[Message]) -> str:
        """Return the text of a chat; of messages alone, up to where the assistant's turn begins.

        What differs between templates is put into the form that this one takes. Content that is a list of text parts
        goes to templates that loop over content as it is; for others its texts are joined with newlines. Arguments of
        tool calls are objects, but JSON text for templates that put them between other text as they are. Content that
        is null is no key, but none for templates that ask for none.

        Raises:
            InvalidRequestError: the chat is malformed, or the template refuses it, fails on it, takes too much, or
                reaches for what the sandbox keeps from it.
            CheckpointError: the template is malformed.
        """
        chat = chat if isinstance(chat, Chat) else Chat(chat)
        variables = self._variables(chat)
        if self._template is None:
            raise CheckpointError(
                f"tokenizer.chat_template: it does not compile ({self._error}); plain prompts work",
                field="tokenizer.chat_template",
            )
        if not chat.continue_final_message:
            return self._run(self._template, variables)
        end = _mark_end(variables["messages"][-1])
        return _cut(self._run(self._template, variables), end)

    def _variables(self, chat: Chat) -> dict[str, Any]:
        """Return what the template sees. As in Hugging Face's, a variable takes the place of a special token."""
        copy = PlainCopy()
        turns = [
            read_message(message, f"messages[{index}]", self._conventions, copy)
            for index, message in enumerate(chat.messages)
        ]
        tools = [read_tool(tool, f"tools[{index}]", copy) for index, tool in enumerate(chat.tools)]
        return {
            **self._special_tokens,
            **{name: copy.of(value, f"variables.{name}") for name, value in chat.variables.items()},
            "messages": turns,
            "tools": tools or None,
            "documents": copy.of(chat.documents, "documents") or None,
            "add_generation_prompt": chat.add_generation_prompt,
        }

    def _run(self, template: Template, variables: Mapping[str, Any]) -> str:
        try:
            return self._sandbox.run(template, variables)
        except TemplateRefusal as refusal:
            problem = f"refuses these messages: {refusal}"
        except BoundExceeded as error:
            problem = f"is stopped: {error}"
        except SecurityError as error:
            problem = f"is stopped by the sandbox: {error}"
        except Exception as error:  # a template is a program and can fail in any way
            problem = f"fails on these messages: {type(error).__name__}: {error}"
        raise InvalidRequestError(f"messages: the model's chat template {problem}", field="messages")


# --- going on with the last message -----------------------------------------------------------------------------------


def _mark_end(turn: dict[str, Any]) -> str:
    """Put the mark behind a message's content; return the text that it is put behind."""
    content = turn.get("content")
    if isinstance(content, str):
        turn["content"] = content + _MARK
        return content
    if content:  # parts
        last: str = content[-1]["text"]
        content[-1]["text"] = last + _MARK
        return last
    raise InvalidRequestError(
        "continue_final_message: the last message has no content to go on with", field="continue_final_message"
    )


def _cut(rendered: str, end: str) -> str:
    """Return the rendered chat up to the mark."""
    found = rendered.rfind(_MARK.strip())
    if found < 0 or end.strip() not in rendered:
        raise InvalidRequestError(
            "continue_final_message: the model's chat template changes or leaves out the last message's content, so "
            "the model cannot go on with it",
            field="continue_final_message",
        )
    text = rendered[:found]
    return text if rendered.startswith(_MARK, found) else text.rstrip()
