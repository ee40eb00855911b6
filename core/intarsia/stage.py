"""One rank's part of a model: weights, cache tensors and the runner around them. On one device, the whole model.

Shape legend: T tokens, R rows, L rows of logits, E embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from attrs import define, evolve, field

from intarsia.errors import ExecutionError, PluginError
from intarsia.models.cache import TensorCache
from intarsia.models.weights import Weights, load_weights
from intarsia.owners import Naming, Owned, kernels_of, owned_by
from intarsia.protocols import (
    CacheStorage,
    ExecutorContext,
    LikeliestRunner,
    PreparingRunner,
    Progress,
    Runner,
    SwappingStorage,
)
from intarsia.types import CacheLayout, CacheMove, ForwardBatch, Row, Want


def forward_batch(
    rows: Sequence[Row], ids: Sequence[Sequence[int]], layout: CacheLayout, device: torch.device
) -> ForwardBatch:
    """Lay the rows of a plan end to end as tensors.

    Args:
        rows: the plan's.
        ids: their token ids, none of them pending.
        layout: gives the page size, and how many groups of page tables a row has.
        device: where the tensors go.
    """
    bounds, end = [0], 0
    tokens: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    slots: list[list[int]] = [[] for _ in layout.groups]
    size = layout.page_size
    for row, row_ids in zip(rows, ids, strict=True):
        start, count = row.start, len(row_ids)
        tokens += row_ids
        if count == 1:  # as most rows
            positions.append(start)
            page, offset = divmod(start, size)
            for group, pages in zip(slots, row.pages, strict=True):
                group.append(pages[page] * size + offset)
        else:
            span = range(start, start + count)
            positions += span
            for group, pages in zip(slots, row.pages, strict=True):
                group += [pages[position // size] * size + position % size for position in span]
        end += count
        bounds.append(end)
        if row.want is Want.LAST:
            wanted += range(end - row.num_drafts - 1, end)

    def tensor(values: Sequence[int]) -> torch.Tensor:
        made = torch.from_numpy(np.array(values, dtype=np.int64))
        return made if device.type == "cpu" else made.to(device)

    return ForwardBatch(
        ids_T=tensor(tokens),
        positions_T=tensor(positions),
        slots_T=tuple(tensor(group) for group in slots),
        bounds=tuple(bounds),
        starts=tuple([row.start for row in rows]),
        pages=tuple([tuple([row.pages[g] for row in rows]) for g in range(len(layout.groups))]),
        logits_L=tensor(wanted),
    )


@define
class ModelStage:
    """What `intarsia.protocols.Stage` asks for, around the runner that composition chose.

    A part that fails here is named, on whatever rank that is, and what it takes is counted in the context's times.

    Attributes:
        device: where its tensors are.
    """

    context: ExecutorContext
    device: torch.device = field(init=False)
    _runner: Runner | None = field(default=None, init=False)
    _cache: CacheStorage | None = field(default=None, init=False)
    # What the two can do besides, asked once: a step has no time for it.
    _preparing: PreparingRunner | None = field(default=None, init=False)
    _finding: LikeliestRunner | None = field(default=None, init=False)
    _swapping: SwappingStorage | None = field(default=None, init=False)
    _names: dict[str, str] = field(init=False)
    _loading: Naming = field(init=False)
    _running: Naming = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.device = torch.device(self.context.engine.device)
        chosen = {selection.slot: selection.name for selection in self.context.selections}
        self._names = {slot: chosen.get(slot, slot) for slot in ("attention", "runner")}
        # Where ranks share the model, torch's own errors can be the fault of a neighbour: the executor tells.
        passing = () if self.context.partition is None else (RuntimeError,)
        self._loading = Naming(self._owned, PluginError, passing)
        self._running = Naming(self._owned, ExecutionError, passing)

    @property
    def num_layers(self) -> int:
        """Layers that it has."""
        return self.context.spec.num_layers

    @property
    def finds_likeliest(self) -> bool:
        """Whether its runner is a `LikeliestRunner`."""
        return self._finding is not None

    @property
    def is_allocated(self) -> bool:
        """Whether its cache is there."""
        return self._cache is not None

    def load(self, progress: Progress) -> None:
        """Load the weights, and build the runner around them."""
        context, engine = self.context, self.context.engine
        if engine.threads is not None:
            torch.set_num_threads(engine.threads)
        with self._loading:
            weights = load_weights(
                context.checkpoint,
                context.weight_map,
                dtype=getattr(torch, engine.dtype),
                device=self.device,
                quantizers=context.quantizers,
                ops=context.ops,
                progress=progress,
            )
        self._runner = context.build_runner(self._renumbered(weights))
        self._preparing = self._runner if isinstance(self._runner, PreparingRunner) else None
        self._finding = self._runner if isinstance(self._runner, LikeliestRunner) else None

    def _owned(self) -> list[Owned]:
        context = self.context
        made = {"cache": self._cache} if context.make_storage is not None else {}
        return owned_by(
            context.selections,
            loader=context.checkpoint,
            quantizer=context.quantizers,
            attention=context.attention,
            runner=self._runner,
            **made,
        ) + kernels_of(context.selections, context.ops)

    def _renumbered(self, weights: Weights) -> Weights:
        """Number the layers as the runner does, from 0; quantizers and messages know them by the whole model's."""
        partition = self.context.partition
        if partition is None:
            return weights
        return {partition.share.local_name(name): weight for name, weight in weights.items()}

    def allocate(self, num_scratch: int = 0) -> None:
        """Make the cache, with pages behind the pool that no sequence holds."""
        context = self.context
        make = context.make_storage or partial(
            TensorCache.allocate, context.layout, num_host_pages=context.num_host_pages
        )
        with self._loading:
            self._cache = make(context.num_pages + num_scratch, self.device)
        self._swapping = self._cache if isinstance(self._cache, SwappingStorage) else None

    def batch(self, rows: Sequence[Row], ids: Sequence[Sequence[int]], *, reads_all: bool = True) -> ForwardBatch:
        """Lay rows with these ids out, and let the attention backend prepare for them.

        Args:
            rows: the plan's.
            ids: their token ids, none of them pending.
            reads_all: whether the residual stream of every token will be read, and not only of those after which one is
                chosen.
        """
        context = self.context
        batch = forward_batch(rows, ids, context.layout, self.device)
        slot, preparing = ("attention", context.attention) if self._preparing is None else ("runner", self._preparing)
        with self._running, context.times.at(self._names[slot]):
            attention = preparing.prepare(batch, context.layout)
        return evolve(batch, attention=attention, read_L=None if reads_all else batch.logits_L)

    def run(
        self, batch: ForwardBatch, hidden_TE: torch.Tensor | None = None, num_layers: int | None = None
    ) -> torch.Tensor:
        """Run the first layers, or all; return the residual stream (T, E)."""
        assert self._runner is not None and self._cache is not None, "load() and allocate() come first"
        with self._running, self.context.times.at(self._names["runner"]):
            return self._runner.run(batch, self._cache, range(num_layers or self.num_layers), hidden_TE)

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor | Sequence[int]) -> torch.Tensor:
        """Return fp32 logits (L, V) of the ids that are here."""
        assert self._runner is not None, "load() comes first"
        indices_L = torch.as_tensor(rows_L, dtype=torch.int64, device=self.device)
        with self._running, self.context.times.at(self._names["runner"]):
            return self._runner.logits(hidden_TE, indices_L)

    def likeliest(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest ids (L,) and their logits (L,), see `LikeliestRunner`."""
        assert self._finding is not None, "only where `finds_likeliest` says so"
        with self._running, self.context.times.at(self._names["runner"]):
            return self._finding.likeliest(hidden_TE, rows_L, self.context.num_ids)

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Do a plan's cache work."""
        assert self._cache is not None, "allocate() comes first"
        if not moves:
            return
        with self._running:
            self._cache.move(moves)

    def take_swapped(self) -> tuple[int, float]:
        """Return bytes copied between device and host since this was asked last, and the seconds that took."""
        return (0, 0.0) if self._swapping is None else self._swapping.take_swapped()

    def fill(self, value: float) -> None:
        """Set every entry of the cache, for tests: what holds no token must not be read."""
        assert self._cache is not None, "allocate() comes first"
        self._cache.fill(value)

    def stop(self) -> None:
        """Drop weights and cache."""
        self._runner = self._preparing = self._finding = None
        if self._cache is not None:
            self._cache.close()
        self._cache = self._swapping = None


def build_stage(context: ExecutorContext) -> ModelStage:
    """Make the stage; nothing is loaded yet."""
    return ModelStage(context)
