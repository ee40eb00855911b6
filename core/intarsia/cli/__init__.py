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
    # Threads that wait for each other give up their core instead of spinning: where others want the cores too, torch's
    # own default makes a token take many times as long. OpenMP reads this once, when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
