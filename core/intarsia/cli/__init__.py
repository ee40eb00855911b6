"""The command line: `intarsia generate`, `chat`, `plugins`, `explain`, and the commands that plugins bring.

Exit codes: 0; 1 where a run failed; 2 where the user can mend it (config, composition, plugin, model, request, usage);
130 and 143 after Ctrl-C and SIGTERM; 141 where the reader of the output went away.

Nothing here imports torch before a command needs it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from intarsia.cli.signals import Signals

__all__ = ["main", "run"]


def main() -> NoReturn:
    """Run the command line of this process, and end it."""
    code = run(sys.argv[1:])
    # From here on a second Ctrl-C ends the process at once, without Python's own words about it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)


def run(args: Sequence[str]) -> int:
    """Run one command and return its exit code. What goes wrong is told on stderr, never raised."""
    # How long threads that wait for each other spin before they give up their core. libgomp's own default is
    # very long: where others want the cores too, a token takes 40 times as long. Not to spin at all costs a third of
    # the speed on idle cores; this costs 6%. Read once, when torch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with Signals.installed() as signals:
        try:
            with signals.held():
                from intarsia.cli.program import program
                from intarsia.cli.terminal import flush, quiet
            with quiet():
                if "_INTARSIA_COMPLETE" in os.environ:  # the shell asks for completions
                    program.main(list(args), prog_name="intarsia")
                with program.make_context("intarsia", list(args), obj=signals) as context:
                    program.invoke(context)
            flush()
        except BaseException as error:
            from intarsia.cli.outcomes import report

            return report(error, signals)
    return 0
