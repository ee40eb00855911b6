"""`python -m intarsia_bench.gpu check` runs all; `part NAME` runs one part here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from intarsia.errors import IntarsiaError
from intarsia_bench.gpu.check import BUDGET_S, check
from intarsia_bench.gpu.parts import PARTS, run_here


def main(arguments: list[str] | None = None) -> int:
    """Run what the arguments ask for; 1 where a part failed, 2 where there is no CUDA device."""
    parser = argparse.ArgumentParser(prog="python -m intarsia_bench.gpu", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    whole = commands.add_parser("check", help="tests and benchmark, one JSON and one table")
    whole.add_argument("--tests", type=Path, default=Path("tests/gpu"), help="folder of the tests")
    whole.add_argument("--out", type=Path, default=Path("gpu-results"), help="folder of the report")
    whole.add_argument("--budget-s", type=float, default=BUDGET_S, help="seconds for all parts together")
    whole.add_argument("--called", default="make gpu-check", help="the command that the report names")
    one = commands.add_parser("part", help="one part, in this process")
    one.add_argument("name", choices=[part.name for part in PARTS if part.where])
    one.add_argument("--out", type=Path, required=True, help="file that its figures are appended to")
    options = parser.parse_args(arguments)
    if options.command == "part":
        run_here(options.name, options.out)
        return 0
    try:
        run = check(options.tests.resolve(), options.out, command=options.called, budget_s=options.budget_s)
    except IntarsiaError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 2
    print((options.out / "gpu.md").read_text())  # noqa: T201
    return 0 if all(part.status == "ok" for part in run.parts) else 1


if __name__ == "__main__":
    sys.exit(main())
