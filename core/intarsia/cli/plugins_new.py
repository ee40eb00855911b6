"""`intarsia plugins new`: a package to begin with, that passes its own tests."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

import click

from intarsia.cli.plugins_names import name_package
from intarsia.cli.plugins_template import write_package
from intarsia.cli.terminal import note, write
from intarsia.errors import ConfigError, did_you_mean
from intarsia.hookspecs import KINDS, Kind, kind_of

_SLOTS = tuple(kind.slot for kind in KINDS)


@click.command()
@click.argument("name")
@click.option("--kind", "slot", required=True, metavar="KIND", help=f"Of part: {', '.join(_SLOTS)}.")
@click.option("--key", metavar="KEY", help="What configs call the part. [default: NAME, without 'intarsia-']")
@click.option(
    "--into",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The folder to write, which must not be there. [default: NAME]",
)
def new(*, name: str, slot: str, key: str | None, into: Path | None) -> None:
    """Write a plugin to begin with: a package with one part that works.

    NAME is the distribution's, such as my-scheduler. The package has the entry points, a minimal part with comments on
    what to change, its contract as a test, a README and a CI file; it passes its own tests as written.
    """
    kind = _kind(slot)
    with contextlib.redirect_stdout(sys.stderr):
        names = name_package(name, key, kind)
    folder = into if into is not None else Path(name)
    files = write_package(folder, names, kind)
    for path in files:
        write(f"{path}\n")
    check = f"intarsia plugins check {names.key}"
    note(f"next: cd {shlex.quote(str(folder))} && pip install -e '.[test]' && pytest && {check}")


def _kind(slot: str) -> Kind:
    """Return a kind by its slot, however its words are joined, in the singular or the plural."""
    word = slot.lower().replace("-", "_")
    for known in (word, f"{word}s", word.removesuffix("s")):
        if known in _SLOTS:
            return kind_of(known)
    raise ConfigError(f"--kind: no kind of part is called {slot!r}.{did_you_mean(word, _SLOTS)}", field="kind")
