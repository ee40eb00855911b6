"""What torchrun runs on every rank: `torchrun --nproc-per-node 3 -m intarsia_parallel.rank serve -c engine.toml`.

Rank 0 becomes `intarsia` with these arguments, every other rank `intarsia follow`, which takes its config from rank 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence


def command_of(args: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the arguments of the `intarsia` that this rank becomes."""
    return list(args) if environment.get("RANK", "0") == "0" else ["follow"]


if __name__ == "__main__":
    # The same process, so that torchrun goes on looking after it.
    os.execv(sys.executable, [sys.executable, "-m", "intarsia", *command_of(sys.argv[1:], os.environ)])  # noqa: S606 - this interpreter
