"""`python -m intarsia`: the command line."""

from __future__ import annotations

from intarsia.cli import main

main()
