"""`intarsia chat`: a conversation, on a terminal or line by line through a pipe."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING

import click
from attrs import define, evolve, field

from intarsia.cli.answers import Printer
from intarsia.cli.loading import opened
from intarsia.cli.options import config_options, sampling_options
from intarsia.cli.outcomes import FAILED, MENDABLE
from intarsia.cli.signals import Signals
from intarsia.cli.terminal import fail, is_terminal, note, write
from intarsia.errors import InvalidRequestError, did_you_mean
from intarsia.types import EngineConfig, Message, Output, SamplingParams

if TYPE_CHECKING:
    from intarsia.engine import Engine

_COMMANDS = ("/exit", "/reset")
#: Where neither the model's files nor the user say one: a conversation wants fewer surprises than the bare model has.
_TEMPERATURE = 0.7


@click.command()
@config_options
@sampling_options(max_tokens=512, temperature=_TEMPERATURE)
@click.pass_obj
def chat(signals: Signals, *, config: EngineConfig, params: SamplingParams) -> None:
    """Talk to a model; it remembers what was said.

    Ctrl-C stops an answer, /reset forgets the conversation, /exit or Ctrl-D ends it. Where stdin is not a terminal,
    each line of it is a message.
    """
    is_interactive = is_terminal(sys.stdin)
    with opened(config, signals) as engine:
        if is_interactive:
            note(f"{config.model.use}. /reset forgets the conversation, /exit ends it, Ctrl-C stops an answer.")
        session = _Session(engine, _with_temperature(params, engine), signals, is_interactive)
        session.run()
    if session.exit_code:
        raise click.exceptions.Exit(session.exit_code)


def _with_temperature(params: SamplingParams, engine: Engine) -> SamplingParams:
    recommends = "temperature" in engine.explain()["sampling"]["recommended"]
    return params if params.temperature is not None or recommends else evolve(params, temperature=_TEMPERATURE)


@define
class _Session:
    """A conversation.

    Attributes:
        history: what was said, both sides.
        exit_code: in a pipe, of the first message that failed; at a terminal a person has seen it.
    """

    engine: Engine
    params: SamplingParams
    signals: Signals
    is_interactive: bool
    history: list[Message] = field(factory=list, init=False)
    exit_code: int = field(default=0, init=False)

    def run(self) -> None:
        """Answer messages until there are no more."""
        with contextlib.suppress(EOFError):
            while (text := self._read()) != "/exit":
                if text == "/reset":
                    self.history.clear()
                    note("The conversation is forgotten.")
                elif re.fullmatch("/[a-z]+", text):
                    self._fail(f"no command {text!r}.{did_you_mean(text, _COMMANDS)}", MENDABLE)
                elif text:
                    self._answer(text)
            return
        if self.is_interactive:
            write("\n")  # after Ctrl-D

    def _read(self) -> str:
        """Return the next message; EOFError at the end."""
        if self.is_interactive:
            return _ask().strip()
        line = sys.stdin.readline() if sys.stdin is not None else ""
        if not line:
            raise EOFError
        return line.strip()

    def _answer(self, text: str) -> None:
        message = {"role": "user", "content": text}
        try:
            outputs = self.engine.stream([*self.history, message], self.params)
        except InvalidRequestError as error:
            hint = "; /reset forgets the conversation" if self.history else ""
            self._fail(f"{error}{hint}", MENDABLE)
            return
        said: list[str] = []
        last = Output(request_id="")
        printer = Printer(1, has_text=True)
        with self.signals.held(), contextlib.closing(outputs):
            for last in outputs:
                said.append(last.text)
                printer.show(last)
                if self.signals.pending is not None:
                    break
            stopped = self.signals.take_interrupt()
        self._close(last, stopped=stopped)
        if last.error is None and (said := [piece for piece in said if piece]):
            # What was stopped was said up to there.
            self.history += [message, {"role": "assistant", "content": "".join(said)}]

    def _close(self, last: Output, *, stopped: bool) -> None:
        """Say how an answer ended, where it is not plain to see."""
        if last.error is not None:
            self._fail(f"the answer ended with an error: {last.error}", FAILED)
        elif stopped and last.finish_reason is None:
            write("\n")
            note("(stopped)")
        elif last.finish_reason == "length":
            note("(cut at the limit of tokens)")

    def _fail(self, message: str, exit_code: int) -> None:
        fail(message)
        if not self.is_interactive:
            self.exit_code = self.exit_code or exit_code


def _ask() -> str:
    """Ask a person for a line, with the line editing of readline where there is one."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - `input` uses it
    # \1 and \2 tell readline which characters take no room.
    prompt = "\1\033[1m\2> \1\033[0m\2" if is_terminal(sys.stdout) and "readline" in sys.modules else "> "
    return input(prompt)
