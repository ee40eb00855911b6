"""How an attention backend's contract runs it: for which layers, dtypes, rows and caches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from attrs import evolve, frozen

from intarsia.protocols import AttentionBackend, PartContext
from intarsia.testing.attention_rows import ROUNDING, AttentionRow, check_row
from intarsia.testing.attention_step import Placement, attend
from intarsia.testing.claims import settle, unclaimed
from intarsia.types import (
    AttentionSpec,
    DecoderSpec,
    EngineOptions,
    Fit,
    Invariance,
    LayerSpec,
    MlpSpec,
    NormSpec,
    Provider,
    Unfit,
)

__all__ = ["ENTRIES", "ORDERS", "ROWS", "AttentionCase", "Trial"]

#: What the suite can lay a cache out in.
ORDERS = ("PSKD", "PKSD")
ENTRIES = ("float32", "float16", "bfloat16", "int8")
#: (start, length): prompts, chunks behind others, single tokens, drafts to verify, at the edges of pages and tiles.
ROWS: tuple[tuple[int, int], ...] = (
    (0, 1),
    (0, 2),
    (0, 16),
    (0, 37),
    (1, 1),
    (15, 1),
    (16, 1),
    (63, 1),
    (64, 4),
    (5, 12),
    (16, 16),
    (40, 3),
    (127, 2),
    (130, 1),
    (50, 70),
)


@frozen
class Trial:
    """A backend that fits, and what for.

    Attributes:
        part: the backend, built for a model of this layer in this dtype.
        spec: the layer's attention.
        dtype: of queries.
        device: where it runs.
        rounding: what results may be off by.
    """

    part: AttentionBackend
    spec: AttentionSpec
    dtype: str
    device: str
    rounding: float

    @property
    def orders(self) -> list[str]:
        """Cache orders that it reads."""
        return [order for order in self.part.orders if order in ORDERS]

    @property
    def entries(self) -> list[str]:
        """Entry formats that it reads."""
        return [entry for entry in self.part.formats if entry in ENTRIES]

    def rows(self, shapes: Sequence[tuple[int, int]], seed: int = 0) -> list[AttentionRow]:
        """Return rows of random numbers, given as (start, length)."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return [AttentionRow.random(self.spec, *shape, seed + i, dtype) for i, shape in enumerate(shapes)]

    def placement(self, **facts: Any) -> Placement:
        """Return a placement in the order that it reads best, in entries of the queries' dtype if it reads those."""
        assert self.orders, f"it reads caches in the orders {tuple(self.part.orders)}; {' and '.join(ORDERS)} there are"
        assert self.entries, f"it reads entries in {tuple(self.part.formats)}; the suite writes {', '.join(ENTRIES)}"
        entry = self.dtype if self.dtype in self.entries else self.entries[0]
        return Placement(**{"order": self.orders[0], "entry": entry} | facts)

    def attend(self, rows: Sequence[AttentionRow], **facts: Any) -> list[torch.Tensor]:
        """Return what it gives each row, in a placement of these facts."""
        return attend(self.part, self.spec, rows, self.placement(**facts), device=self.device)

    def check(self, rows: Sequence[AttentionRow], **facts: Any) -> None:
        """Compare what it gives each row with float64."""
        self.check_outs(self.attend(rows, **facts), rows, **facts)

    def check_outs(self, outs: Sequence[torch.Tensor], rows: Sequence[AttentionRow], **facts: Any) -> None:
        """Compare results with float64."""
        placed = self.placement(**facts)
        for out, row in zip(outs, rows, strict=True):
            try:
                check_row(out, row, self.spec, placed.entry, self.rounding)
            except AssertionError as error:
                raise AssertionError(f"{error}; cache {placed.order}, pages of {placed.page_size} slots") from None


class AttentionCase:
    """An attention backend on trial: subclasses say whose provider it is, and where it runs.

    It is built for models of one layer and more, as a composition would build it, and is held to what its `fit` takes.

    Attributes:
        options: the backend's own, as a config has them.
        device: where it runs.
        dtypes: of queries, that its `fit` is asked about.
        heads: (query heads, kv heads) that its `fit` is asked about.
        head_dims: likewise.
        page_sizes: slots a page that it is tried with.
        rows: (start, length) of the rows of a mixed batch.
        chunks: tokens of the chunks that a prompt is cut into.
        long: keys of a long row.
        rounding: by dtype, what results may be off by where that is other than in `ROUNDING`.
        examples: random batches that `test_any_batch_equals_float64` tries.
        derandomize: whether it tries the same ones each time.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")
    heads: ClassVar[Sequence[tuple[int, int]]] = ((4, 4), (6, 2), (5, 1))
    head_dims: ClassVar[Sequence[int]] = (16, 20, 64, 128)
    page_sizes: ClassVar[Sequence[int]] = (1, 3, 16, 64)
    rows: ClassVar[Sequence[tuple[int, int]]] = ROWS
    chunks: ClassVar[Sequence[int]] = (1, 3, 8, 37, 64, 127, 129, 256)
    long: ClassVar[int] = 1500
    rounding: ClassVar[Mapping[str, float]] = {}
    examples: ClassVar[int] = 40
    derandomize: ClassVar[bool] = False

    def provider(self) -> Provider:
        """Return the backend's provider."""
        raise NotImplementedError("return the provider of the attention backend that is on trial")

    def context(self, dtype: str, *specs: AttentionSpec, demanded: Invariance = "numeric") -> PartContext:
        """Return what a backend is built from, for a model of these layers."""
        provider = self.provider()
        engine = EngineOptions(
            max_model_len=4096,
            device=self.device,
            dtype=dtype,  # type: ignore[arg-type]  # a subclass's own list
            threads=torch.get_num_threads(),
            invariance=demanded,
        )
        layers = tuple(LayerSpec(spec, MlpSpec(8, "silu")) for spec in specs)
        model = DecoderSpec("llama", 64, 8, 4096, NormSpec(), True, layers)
        options = settle(provider, "attention", dict(self.options))
        return PartContext(options=options, engine=engine, spec=model, num_ids=64)

    def fit(self, dtype: str, *specs: AttentionSpec) -> Fit | Unfit:
        """Return what the backend says of a model of these layers."""
        said = self.provider().fit(self.context(dtype, *specs))
        assert isinstance(said, Fit | Unfit), f"fit returns {said!r}, which is neither Fit nor Unfit"
        assert isinstance(said, Fit) or said.reason.strip(), "fit refuses and gives no reason"
        return said

    def build(self, dtype: str, *specs: AttentionSpec, demanded: Invariance = "numeric") -> AttentionBackend:
        """Return the backend for a model of these layers."""
        part: AttentionBackend = self.provider().build(self.context(dtype, *specs, demanded=demanded))
        return part

    def trial(self, dtype: str, spec: AttentionSpec, demanded: Invariance = "numeric") -> Trial:
        """Return the backend for one layer, whatever its `fit` says."""
        part = self.build(dtype, spec, demanded=demanded)
        return Trial(part, spec, dtype, self.device, self.rounding.get(dtype, ROUNDING[dtype]))

    def fitting(self, *specs: AttentionSpec) -> Iterator[Trial]:
        """Yield the backend for each layer and dtype that its `fit` takes; where it takes none, nothing is claimed."""
        refused = ""
        taken = False
        for spec in specs:
            for dtype in self.dtypes:
                said = self.fit(dtype, spec)
                if isinstance(said, Unfit):
                    refused = said.reason
                    continue
                taken = True
                yield self.trial(dtype, spec)
        if not taken:
            unclaimed(f"its fit refuses: {refused}")

    def promising(self, spec: AttentionSpec, *levels: Invariance) -> Iterator[Trial]:
        """Yield the backend for each dtype in which it promises one of these levels of invariance for a layer.

        It is asked as a composition builds it that demands nothing, and as one that demands bitwise.
        """
        promised = set()
        for trial in self.fitting(spec):
            demanding = self.trial(trial.dtype, spec, "bitwise")
            found = [(each.part.invariance(each.dtype), each) for each in (trial, demanding)]
            for level, each in dict(reversed(found)).items():
                assert level in ("bitwise", "neighbours", "numeric"), f"invariance says {level!r}, which is no level"
                promised.add(level)
                if level in levels:
                    yield each
        if promised.isdisjoint(levels):
            unclaimed(f"it promises {' and '.join(sorted(promised))}")


def grown(row: AttentionRow, where: slice, factor: float) -> AttentionRow:
    """Return a row with these tokens' keys and values multiplied: whoever sees them shows it."""
    keys, values = row.keys.clone(), row.values.clone()
    keys[where] *= factor
    values[where] *= factor
    return evolve(row, keys=keys, values=values)
