"""Writing to the terminal and to pipes: text on stdout, everything else on stderr."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

import click

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

#: Characters that move a terminal's cursor or change its state; line breaks and tabs are text.
_CONTROLS = {code: "�" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
#: Columns of a table that goes to a pipe: lines are not broken there.
_PIPE_WIDTH = 1000


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person looks at a stream; None is one that was closed before the start."""
    return stream is not None and not stream.closed and stream.isatty()


def write(text: str) -> None:
    """Write to stdout at once. A terminal gets no control characters that a model may have written."""
    if sys.stdout is None:
        return
    sys.stdout.write(text.translate(_CONTROLS) if is_terminal(sys.stdout) else text)
    sys.stdout.flush()


def note(text: str) -> None:
    """Write a line about the run to stderr."""
    _tell(_styled(text, dim=True))


def warn(message: str) -> None:
    """Write one line on what is wrong and stops nothing."""
    _tell(f"{_styled('intarsia: warning:', fg='yellow', bold=True)} {one_line(message)}")


def fail(message: str) -> None:
    """Write the one line on what went wrong."""
    _tell(f"{_styled('intarsia: error:', fg='red', bold=True)} {one_line(message)}")


def one_line(message: str) -> str:
    """Return a message on one line, with what cannot be printed spelt out."""
    joined = " ".join(line.strip() for line in message.splitlines() if line.strip())
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in joined)


def flush() -> None:
    """Write out what stdout still holds, so that a failure is met here and not while Python ends."""
    if sys.stdout is not None:
        sys.stdout.flush()


def silence_stdout() -> None:
    """Let what stdout still holds go nowhere: Python would fail on it once more when it ends."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or no real file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def table(*titles: str, whole: tuple[str, ...] = ()) -> Table:
    """Return an empty table of rich's with these columns; those in `whole` are never broken over lines."""
    from rich.table import Table

    empty = Table(box=None, padding=(0, 2, 0, 0), header_style="bold underline")
    for title in titles:
        empty.add_column(title, overflow="fold", no_wrap=title in whole)
    return empty


def show(renderable: RenderableType) -> None:
    """Write a table of rich's to stdout; in a pipe plain, wide, and without spaces at the ends of lines."""
    from rich.console import Console

    if is_terminal(sys.stdout):
        Console(highlight=False).print(renderable)
        return
    console = Console(file=io.StringIO(), width=_PIPE_WIDTH, highlight=False)
    with console.capture() as capture:
        console.print(renderable)
    write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def debugging() -> bool:
    """Whether errors show their traceback: `--debug` or INTARSIA_DEBUG=1."""
    return os.environ.get("INTARSIA_DEBUG", "") not in ("", "0")


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads stderr: then the exit code says it alone
        click.echo(line, err=True)


def _styled(text: str, **style: object) -> str:
    """Style a text; click drops the codes again where stderr is no terminal."""
    return text if os.environ.get("NO_COLOR") else click.style(text, **style)  # type: ignore[arg-type]


class _LogFormatter(logging.Formatter):
    """A log record as one of our lines, without tracebacks unless they are asked for."""

    def format(self, record: logging.LogRecord) -> str:
        line = one_line(f"intarsia: {record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info is None or record.exc_info[1] is None:
            return line
        error = record.exc_info[1]
        more = f"\n{self.formatException(record.exc_info)}" if debugging() else ""
        return f"{line}: {one_line(f'{type(error).__name__}: {error}')}{more}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep stderr for our own lines: log records in our form, no Python warnings, no words of the libraries."""
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    if not is_terminal(sys.stderr):
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    handler = logging.StreamHandler()
    handler.setFormatter(_LogFormatter())
    logger = logging.getLogger("intarsia")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions and not debugging():
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
