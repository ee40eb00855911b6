"""How a quantizer's contract makes weights: of which numbers, with which options, and what they may be off by."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch

from intarsia.errors import CheckpointError
from intarsia.protocols import Divisible, PartContext, Quantizer
from intarsia.testing.caches import tiny_spec
from intarsia.testing.claims import settle, unclaimed
from intarsia.testing.quantizer_bounds import bound, share_of_largest
from intarsia.types import Dtype, EngineOptions, Provider, Unfit, Weight, dense

__all__ = ["SHAPES", "QuantizerCase", "drawn", "odd_rows", "refusal"]

#: Of weights (N, C): one number, ragged groups, whole ones, more rows than columns.
SHAPES: tuple[tuple[int, int], ...] = ((1, 1), (3, 7), (5, 64), (7, 130), (33, 48), (16, 256), (2, 577), (70, 33))
#: A weight so large that what a format adds to its numbers is little beside them.
_LARGE = (256, 4096)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Return normal numbers, of the size that models' weights have."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def odd_rows(columns: int) -> tuple[tuple[str, torch.Tensor], ...]:
    """Return rows (C,) that formats stumble over, by what is odd about them."""
    plain = drawn(columns, seed=1)
    outlier = plain.clone()
    outlier[columns // 2] = 1e4
    alone = torch.zeros(columns)
    alone[-1] = -0.25
    ends = plain.clone()
    ends[0], ends[-1] = -1.0, 1.0
    return (
        ("an ordinary row", plain),
        ("zeros", torch.zeros(columns)),
        ("ones", torch.ones(columns)),
        ("one negative number", torch.full((columns,), -0.3)),
        ("numbers of 1e-6", plain * 1e-6),
        ("numbers of 1e-36", plain * 1e-35),
        ("numbers below the smallest normal float", plain * 1e-38),
        ("numbers of 1e36", plain * 1e37),
        ("the largest floats of both signs", torch.full((columns,), 3e38) * (-1) ** torch.arange(columns)),
        ("an outlier", outlier),
        ("one number alone", alone),
        ("positive numbers", plain.abs()),
        ("negative numbers", -plain.abs()),
        ("both ends as large", ends),
    )


def refusal(call: Callable[[], object]) -> str | None:
    """Return what a call is refused with, as CheckpointError; None where it is not."""
    try:
        call()
    except CheckpointError as error:
        return str(error)
    return None


class QuantizerCase:
    """A quantizer on trial: subclasses say whose provider it is, and what its format promises otherwise.

    Attributes:
        options: the quantizer's own, as a config has them.
        dtype: of the engine: what weights are read in, and products are taken in.
        name: canonical name of a weight that it takes.
        max_error: of a number, as a share of the largest magnitude in its group; None is what its bits give, see
            `intarsia.testing.quantizer_bounds`.
        rounds_to_nearest: each number is within that bound. Where scales or roundings are chosen for the least error of
            many numbers, each row's mean square is.
        keeps_zeros: a number that is 0 comes out as 0, whatever is beside it.
        examples: random matrices that `test_any_matrix` tries.
        derandomize: whether it tries the same ones each time.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    dtype: ClassVar[Dtype] = "float32"
    name: ClassVar[str] = "layers.0.out.weight"
    max_error: ClassVar[float | None] = None
    rounds_to_nearest: ClassVar[bool] = True
    keeps_zeros: ClassVar[bool] = True
    examples: ClassVar[int] = 40
    derandomize: ClassVar[bool] = False

    def provider(self) -> Provider:
        """Return the quantizer's provider."""
        raise NotImplementedError("return the quantizer's provider: my_plugin.provide_quantizers()[0]")

    def build(self, **options: Any) -> Quantizer:
        """Return a new quantizer; these options go over those of the class."""
        provider = self.provider()
        engine = EngineOptions(max_model_len=64, device="cpu", dtype=self.dtype, threads=1)
        context = PartContext(options=self.settled(**options), engine=engine, spec=tiny_spec(2), num_ids=64)
        if isinstance(fit := provider.fit(context), Unfit):
            unclaimed(f"it does not fit an engine of {self.dtype} on a CPU: {fit.reason}")
        quantizer: Quantizer = provider.build(context)
        return quantizer

    def settled(self, **options: Any) -> Any:
        """Return the options that `build` gives it, of its own class."""
        return settle(self.provider(), "quantizer", {**self.options, **options})

    def made(self, numbers_NC: torch.Tensor, quantizer: Quantizer | None = None, name: str = "") -> Weight | None:
        """Return a matrix in the format; None where the quantizer does not take one of this shape.

        It can say so in `accepts`, or in a CheckpointError that names the weight and the columns that it has.
        """
        quantizer, name, shape = quantizer or self.build(), name or self.name, tuple(numbers_NC.shape)
        if not quantizer.accepts(name, shape):
            return None
        message = ""
        try:
            return quantizer.quantize(name, dense(numbers_NC))
        except CheckpointError as error:
            message = str(error)
        assert name in message and str(shape[1]) in message, f"a weight of {shape} is refused without a word: {message}"
        return None

    def each(self, shapes: Sequence[tuple[int, int]] = SHAPES) -> Iterator[tuple[torch.Tensor, Weight]]:
        """Yield random matrices of shapes that it takes, and what it makes of them."""
        taken = 0
        for seed, shape in enumerate(shapes):
            numbers = drawn(*shape, seed=seed)
            if (made := self.made(numbers)) is not None:
                taken += 1
                yield numbers, made
        assert taken, f"it takes no matrix {self.name!r} of any of the shapes {shapes}"

    def step(self) -> int:
        """Return how many columns it says stay together."""
        quantizer = self.build()
        return quantizer.column_step if isinstance(quantizer, Divisible) else 1

    def bound(self, exact_NC: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return how far each number may be off, (N, C) in float64.

        Args:
            exact_NC: the numbers that the weight was made of, in float64.
            weight: what was made.
        """
        known = bound(exact_NC, weight) if self.max_error is None else None
        if known is not None:
            return known
        bits = self.build().num_bytes(self.name, _LARGE) * 8 // (_LARGE[0] * _LARGE[1])
        share = 4 / 2**bits if self.max_error is None else self.max_error
        return share_of_largest(exact_NC, share, self.step() if self.step() > 1 else None)

    def check(self, numbers_NC: torch.Tensor, weight: Weight, said: str = "a random matrix") -> None:
        """Raise AssertionError where a number is further off than it may be."""
        exact, found = numbers_NC.double(), weight.dequantize().double()
        assert bool(found.isfinite().all()), f"{said}: what comes out is not finite"
        off, limit = (found - exact).abs(), self.bound(exact, weight)
        if not self.rounds_to_nearest:
            off, limit = (each.square().mean(1, keepdim=True).sqrt() for each in (off, limit))
        if bool((off <= limit).all()):
            return
        worst = int(((off - limit) / limit).argmax())
        row, column = divmod(worst, off.shape[1])
        raise AssertionError(
            f"{said}, {tuple(exact.shape)}: row {row}, column {column} is {exact[row, column]:.6g} and became "
            f"{found[row, column]:.6g}; {weight.format.name} gives an error of {limit[row, column]:.3g}, "
            f"and it is {off[row, column]:.3g}"
        )
