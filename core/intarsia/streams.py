"""The stream of one request's outputs."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

from attrs import define

from intarsia.types import Output


@define(eq=False)
class Stream:
    """The outputs of one request, as they come: an iterator, to be closed or used as a context manager."""

    _next: Callable[[], Output]
    _cancel: Callable[[], None]
    _num_open: int

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Output:
        if not self._num_open:
            self.close()
            raise StopIteration
        output = self._next()
        self._num_open -= output.finish_reason is not None
        return output

    def close(self) -> None:
        """Cancel what is not finished. Safe to call twice."""
        self._num_open = 0
        self._cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
