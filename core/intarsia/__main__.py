"""`python -m intarsia`: the command line."""

from __future__ import annotations

from intarsia.cli import main

if __name__ == "__main__":
    main()
