"""Calls of kernels as values: what goes in, which of it has a row a token, and how what comes out is judged.

Results are judged in float64. A bound names what may go wrong: sums in float32, the functions of activations, and each
place where the op's reference rounds to the dtype.

Shape legend: T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from unittest import mock

import torch
from attrs import evolve, frozen

from intarsia.protocols import Kernel
from intarsia.types import Weight

__all__ = ["SUM", "TINY", "UNIT", "Call", "Draw", "Judge", "near", "normal", "on_device"]

#: Half a unit in the last place: the error of one rounding, as a share of the number.
UNIT = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
#: What is below it may be rounded to steps of its own, or be 0.
TINY = {torch.float32: 2.0**-126, torch.float16: 2.0**-24, torch.bfloat16: 2.0**-126}
#: A rounding of float32, in which sums are kept.
SUM = UNIT[torch.float32]

#: (what went in, what came out): raises AssertionError where it is wrong.
Judge: TypeAlias = Callable[[tuple[Any, ...], tuple[torch.Tensor, ...]], None]
#: (number of rows, width, dtype, seed) -> arguments.
Draw: TypeAlias = Callable[[int, int, torch.dtype, int], tuple[Any, ...]]


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return normal numbers in a dtype."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def on_device(value: Any, device: str) -> Any:
    """Return an argument on a device: tensors, weights, and tuples of them."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, Weight):
        return evolve(value, tensors={key: tensor.to(device) for key, tensor in value.tensors.items()})
    return tuple(on_device(each, device) for each in value) if isinstance(value, tuple) else value


@frozen(eq=False)
class Call:
    """One call of a kernel.

    Attributes:
        kernel: whose it is.
        said: what is special about it, for messages.
        arguments: on the host.
        rows: places of the arguments that have a row a token; the others are of all rows.
        judge: says whether results are right.
        call: takes arguments on the device; returns tensors with a row a token.
        device: where it runs.
    """

    kernel: Kernel
    said: str
    arguments: tuple[Any, ...]
    rows: tuple[int, ...]
    judge: Judge
    call: Callable[..., Any]
    device: str = "cpu"

    @property
    def num_rows(self) -> int:
        """How many tokens."""
        return len(self.arguments[self.rows[0]])

    @property
    def name(self) -> str:
        """The op and what is special about the call."""
        return f"{self.kernel.op} ({self.said})"

    def run(self) -> tuple[torch.Tensor, ...]:
        """Return the results, on the host; memory that is new is full of NaN, or of 77, before it is written."""
        with _poisoned():
            found = self.call(*on_device(self.arguments, self.device))
        results = found if isinstance(found, tuple) else (found,)
        return tuple(result.cpu() for result in results)

    def check(self) -> None:
        """Run it, and raise AssertionError where a result is wrong."""
        self.judge(self.arguments, self.run())

    def some(self, index: slice | torch.Tensor) -> Call:
        """Return the call for some of the rows."""
        return self.having({place: self.arguments[place][index] for place in self.rows})

    def having(self, others: dict[int, Any]) -> Call:
        """Return the call with other arguments in some places."""
        arguments = tuple(others.get(place, value) for place, value in enumerate(self.arguments))
        return evolve(self, arguments=arguments)


@contextmanager
def _poisoned() -> Iterator[None]:
    empty, empty_like = torch.empty, torch.empty_like

    def spoilt(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else 77)

    with (
        mock.patch.object(torch, "empty", lambda *size, **facts: spoilt(empty(*size, **facts))),
        mock.patch.object(torch, "empty_like", lambda *like, **facts: spoilt(empty_like(*like, **facts))),
    ):
        yield


def near(
    found: torch.Tensor, right: torch.Tensor, limit: torch.Tensor | float, dtype: torch.dtype, said: str = "the result"
) -> None:
    """Raise AssertionError unless a result has this dtype, the right shape, and no number further off than it may be.

    Args:
        found: the result.
        right: what it would be, in float64.
        limit: how far off each number may be.
        dtype: of the result.
        said: which result.
    """
    assert found.dtype == dtype, f"{said} is in {found.dtype}, and not in {dtype}"
    assert found.shape == right.shape, f"{said} has the shape {tuple(found.shape)}, and not {tuple(right.shape)}"
    off = (found.double() - right).abs()
    limits = torch.as_tensor(limit, dtype=torch.float64).expand_as(off)
    wrong = ~(off <= limits)
    if bool(wrong.any()):
        place = tuple(int(i) for i in torch.nonzero(wrong)[0])
        raise AssertionError(
            f"{said} is {float(found[place]):.6g} at {place} of {tuple(found.shape)}, and would be "
            f"{float(right[place]):.6g}, give or take {float(limits[place]):.2g}; {int(wrong.sum())} numbers are wrong"
        )
