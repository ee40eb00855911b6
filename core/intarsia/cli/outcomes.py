"""How a command that did not end well is told: one message on stderr, and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback

import click

from intarsia.cli.signals import Signals, Terminated
from intarsia.cli.terminal import debugging, fail, silence_stdout
from intarsia.errors import IntarsiaError
from intarsia.saying import said

FAILED = 1
MENDABLE = 2
#: Codes of errors that the user can mend; a plugin's own codes are failures.
_MENDABLE_CODES = frozenset(
    {"invalid", "config", "composition", "plugin", "model_not_found", "checkpoint", "malformed", "unsupported"}
)
_SIGNALLED = 128


def report(error: BaseException, signals: Signals) -> int:
    """Tell what ended a command, and return its exit code."""
    if isinstance(error, SystemExit):
        return _system_exit(error)
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, BrokenPipeError):
        # Whoever read the output has enough of it, as `head` does.
        silence_stdout()
        return _SIGNALLED + signal.SIGPIPE
    if isinstance(error, KeyboardInterrupt | Terminated | click.Abort) or signals.received is not None:
        # A signal can surface as another error, such as an import that was broken off.
        if sys.stderr is not None and sys.stderr.isatty():
            click.echo(err=True)  # the shell's prompt begins on a line of its own
        return _SIGNALLED + (signals.received or signal.SIGINT)
    return _failure(error)


def _failure(error: BaseException) -> int:
    if debugging() and not isinstance(error, click.ClickException):
        traceback.print_exception(error)
    if isinstance(error, click.ClickException):
        fail(_usage(error))
        return error.exit_code
    if isinstance(error, IntarsiaError):
        fail(str(error))
        return MENDABLE if error.code in _MENDABLE_CODES else FAILED
    if isinstance(error, MemoryError):
        fail(f"out of memory{f': {error}' if str(error) else ''}")
    elif isinstance(error, OSError):
        silence_stdout()
        fail(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error))
        return MENDABLE if error.filename else FAILED
    else:
        hint = "" if debugging() else " (a fault of the program or of a plugin; INTARSIA_DEBUG=1 shows where)"
        fail(f"{said(error)}{hint}")
    return FAILED


def _usage(error: click.ClickException) -> str:
    """Return click's message in our form: a small first letter, and where to read more."""
    message = error.format_message().rstrip(".")
    if not message[:2].isupper():  # PROMPT is a name
        message = message[:1].lower() + message[1:]
    context = getattr(error, "ctx", None)
    if context is None:
        return message
    help_command = f"'{context.command_path} --help'"
    return f"{message} See {help_command}." if message.endswith("?") else f"{message}; see {help_command}"


def _system_exit(error: SystemExit) -> int:
    if error.code is None or isinstance(error.code, int):
        return error.code or os.EX_OK
    fail(str(error.code))
    return FAILED
