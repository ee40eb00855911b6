"""What the contract of executors is told of `parallel`; `intarsia plugins check parallel` runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from intarsia.testing.executors import ExecutorContract
from intarsia.types import Provider
from intarsia_parallel import provide_executors


class ParallelContract(ExecutorContract):
    """Two ranks with a slice of every layer each, in processes of their own, which take long to start."""

    options: ClassVar[Mapping[str, Any]] = {"tp": 2, "check_every": 1, "timeout_s": 10.0}
    in_process: ClassVar[bool] = False
    reuse: ClassVar[bool] = True
    lives: ClassVar[int] = 3

    def provider(self) -> Provider:
        return provide_executors()[0]
