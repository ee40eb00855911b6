"""`intarsia client`: ask a server, and print its answer as it comes."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import attrs
import click
from attrs import define, field

from intarsia.errors import ExecutionError
from intarsia.types import Completion, CompletionChoice, Output, Prompt, SamplingParams
from intarsia_zmq.client import DEFAULT_ADDRESS, Client

T = TypeVar("T")

#: Fields of SamplingParams that are options by the same name: name, type, metavar, help.
_SAMPLING: tuple[tuple[str, type, str, str], ...] = (
    ("max_tokens", int, "N", "Tokens to generate at most. [default: all that fit]"),
    ("temperature", float, "T", "Divides the logits; 0 is greedy. [default: the model's]"),
    ("top_k", int, "K", "Keep the K likeliest tokens; 0 keeps all."),
    ("top_p", float, "P", "Keep the likeliest of probability P."),
    ("min_p", float, "P", "Keep tokens at least P times as likely as the likeliest."),
    ("typical_p", float, "P", "Keep the most typical of probability P."),
    ("repetition_penalty", float, "R", "Divides logits of tokens that prompt or answer hold."),
    ("presence_penalty", float, "X", "Taken off the logits of tokens that the answer holds."),
    ("frequency_penalty", float, "X", "The same for each time that the answer holds them."),
    ("min_tokens", int, "N", "Tokens before which nothing ends the answer."),
    ("seed", int, "N", "Repeat an answer."),
)
_TEXTS = (
    ("--stop", "stop", "End before this text. Repeatable."),
    ("--banned-word", "banned_words", "A text that the answer never holds. Repeatable."),
)
#: Characters that move a terminal's cursor or change its state; line breaks and tabs are text.
_CONTROLS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def connection_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add what says where a server is, as arguments of `Client` under `connection`."""

    @click.option("--address", default=DEFAULT_ADDRESS, show_default=True, metavar="URL", help="The server's address.")
    @click.option("--server-key", metavar="KEY", help="The server's public CURVE key, or the file of it.")
    @click.option("--key", metavar="FILE", help="The file of this client's secret CURVE key.")
    @click.option(
        "--timeout",
        "timeout_s",
        type=float,
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="How long to wait for a server that is out of reach.",
    )
    @functools.wraps(command)
    def call(*, address: str, server_key: str | None, key: str | None, timeout_s: float, **rest: Any) -> T:
        connection = {"address": address, "server_key": server_key, "key": key, "timeout_s": timeout_s}
        return command(connection=connection, **rest)

    return call


def _sampling_options(command: Callable[..., T]) -> Callable[..., T]:
    """Add the options that choose tokens and end an answer, as `params`."""

    @functools.wraps(command)
    def call(**rest: Any) -> T:
        names = [*(name for name, *_ in _SAMPLING), *(name for _, name, _ in _TEXTS), "logits_processors", "n"]
        given = {name: value for name in names if (value := rest.pop(name)) not in (None, ())}
        return command(params=SamplingParams(**given), **rest)

    options = [
        *(
            click.option(f"--{name.replace('_', '-')}", name, type=kind, metavar=metavar, help=text)
            for name, kind, metavar, text in _SAMPLING
        ),
        *(click.option(flag, name, multiple=True, metavar="TEXT", help=text) for flag, name, text in _TEXTS),
        click.option(
            "--logits-processor",
            "logits_processors",
            multiple=True,
            callback=_read_processors,
            metavar="KEY.OPTION=VALUE",
            help="Set an option of one of the server's logits processors, as JSON or text. Repeatable.",
        ),
        click.option("-n", type=int, default=1, metavar="N", help="Independent answers. [default: 1]"),
    ]
    for option in reversed(options):
        call = option(call)
    return call


def _read_processors(_context: click.Context, _option: click.Parameter, texts: tuple[str, ...]) -> dict[str, Any]:
    """Read each KEY.OPTION=VALUE, as `intarsia generate` does: JSON, or else a text."""
    made: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        key, dot, option = path.partition(".")
        if not (equals and key and dot and option):
            raise click.BadParameter(f"{text[:40]!r} is not KEY.OPTION=VALUE, such as structured_output.regex=[a-z]+")
        if option in made.setdefault(key, {}):
            raise click.BadParameter(f"{path} is given twice")
        try:
            made[key][option] = json.loads(value)
        except (ValueError, RecursionError):
            made[key][option] = value
    return made


@click.command()
@click.argument("prompt", required=False)
@connection_options
@click.option("--chat", is_flag=True, help="The prompt is a user's message, and the answer the assistant's.")
@_sampling_options
@click.option("--priority", type=int, default=0, metavar="N", help="Higher first, among one client's. [default: 0]")
@click.option("--deadline", "deadline_s", type=float, metavar="SECONDS", help="End after this with what there is.")
@click.option("--json", "wants_json", is_flag=True, help="Print one JSON object instead of text.")
def client(
    *,
    prompt: str | None,
    connection: dict[str, Any],
    chat: bool,
    params: SamplingParams,
    priority: int,
    deadline_s: float | None,
    wants_json: bool,
) -> None:
    """Have a server answer PROMPT, or the text on stdin.

    The answer is written as it comes. Ctrl-C cancels it.
    """
    text = _read_stdin() if prompt is None else prompt
    asked: Prompt = [{"role": "user", "content": text}] if chat else text
    with Client(**connection) as server:
        if wants_json:
            completion = server.generate(asked, params, priority=priority, deadline_s=deadline_s)
            _write(json.dumps(as_json(completion), allow_nan=False) + "\n")
            errors = [choice.error for choice in completion.choices if choice.finish_reason == "error"]
        else:
            printer = _Printer(params.n)
            with server.stream(asked, params, priority=priority, deadline_s=deadline_s) as outputs:
                for output in outputs:
                    printer.show(output)
            errors = printer.errors
    if errors:
        raise ExecutionError(f"the answer ended with an error: {'; '.join(map(str, errors))}")


@define
class _Printer:
    """Writes choices one after the other: the first as it comes, the others once it is their turn."""

    num_choices: int
    errors: list[str | None] = field(factory=list, init=False)
    _current: int = field(default=0, init=False)
    _began: bool = field(default=False, init=False)
    _line_is_open: bool = field(default=True, init=False)
    _waiting: dict[int, list[Output]] = field(factory=dict, init=False)

    def show(self, output: Output) -> None:
        """Take the next output of whatever choice."""
        self._waiting.setdefault(output.choice, []).append(output)
        while arrived := self._waiting.pop(self._current, None):
            for one in arrived:
                self._print(one)

    def _print(self, output: Output) -> None:
        if not self._began:
            self._began, self._line_is_open = True, True
            if self.num_choices > 1:
                _write(f"--- choice {self._current}\n")
        if output.text:
            _write(output.text)
            self._line_is_open = not output.text.endswith("\n")
        if output.finish_reason is not None:
            if self._line_is_open:
                _write("\n")
            if output.finish_reason == "error":
                self.errors.append(output.error)
            self._current, self._began = self._current + 1, False


def as_json(completion: Completion) -> dict[str, Any]:
    """Return a completion as the object that `--json` prints."""
    first, *others = completion.choices
    data = {
        **_choice(first),
        "usage": attrs.asdict(completion.usage),
        "timings": attrs.asdict(completion.timings),
        "seed": completion.seed,
    }
    if others:
        data["choices"] = [_choice(choice) for choice in completion.choices]
    return data


def _choice(choice: CompletionChoice) -> dict[str, Any]:
    said: dict[str, Any] = {
        "text": choice.text,
        "token_ids": list(choice.token_ids),
        "finish_reason": choice.finish_reason,
    }
    return said if choice.error is None else said | {"error": choice.error}


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise click.UsageError("no prompt is given: name PROMPT, or write it to stdin")
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"the prompt on stdin is not UTF-8 text: {error}") from None
    # The line's end is the shell's, not the prompt's.
    return text.removesuffix("\n").removesuffix("\r")


def _write(text: str) -> None:
    """Write to stdout at once. A terminal gets no control characters that a model may have written."""
    sys.stdout.write(text.translate(_CONTROLS) if sys.stdout.isatty() else text)
    sys.stdout.flush()
