"""One step of attention as an engine makes it: rows laid end to end, their pages, and the cache that they lie in.

What holds no token of a row holds what `Placement.rest` says, NaN unless another is given.

Shape legend: T tokens, n tokens of one row, H heads, K kv heads, D head dim, P pages, S slots a page.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import evolve, frozen

from intarsia.models.cache import LayerTensors
from intarsia.protocols import AttentionBackend
from intarsia.testing.attention_rows import AttentionRow, int8_numbers, name_of
from intarsia.types import AttentionSpec, CacheGroup, CacheLayout, ForwardBatch

__all__ = ["AttentionStep", "Placement", "StepLayer", "attend", "contents"]


@frozen(kw_only=True)
class Placement:
    """Where a step's keys and values lie.

    Attributes:
        order: of the cache's axes.
        page_size: slots a page.
        entry: format of the entries; empty is the queries' dtype.
        scatter: seed by which pages are drawn; None lays each row's side by side.
        rest: what lies in all slots that hold no token of a row.
        padding: rows of padding behind the others: a token at position 0 of the spare page, written to slot -1.
        shared: tokens that all rows begin with and have in the first row's pages, in whole pages; their keys and values
            are equal.
    """

    order: str = "PSKD"
    page_size: int = 16
    entry: str = ""
    scatter: int | None = None
    rest: float = torch.nan
    padding: int = 0
    shared: int = 0


@frozen(eq=False)
class StepLayer:
    """One layer of a step.

    Attributes:
        spec: its attention.
        rows: what it is given, row by row.
        group: index of its cache group.
        cache: its entries.
        queries_THD: of all rows, a part of a wider tensor.
    """

    spec: AttentionSpec
    rows: Sequence[AttentionRow]
    group: int
    cache: LayerTensors
    queries_THD: torch.Tensor


@frozen(eq=False)
class AttentionStep:
    """A step through some layers, whose rows have equal starts and lengths in each.

    Attributes:
        layers: those that have attention.
        batch: the rows; complete once `prepare` has run.
        layout: of the cache: layers of equal kv heads and window share page tables.
    """

    layers: Sequence[StepLayer]
    batch: ForwardBatch
    layout: CacheLayout

    @classmethod
    def of(
        cls,
        layers: Sequence[tuple[AttentionSpec, Sequence[AttentionRow]]],
        placement: Placement,
        device: str = "cpu",
    ) -> AttentionStep:
        """Lay rows out, and write all of their keys and values into the cache, as the runner does before it attends."""
        rows = layers[0][1]
        entry = placement.entry or name_of(rows[0].queries.dtype)
        layout = _layout([spec for spec, _ in layers], placement, entry)
        tables, num_pages = _tables(rows, layout, placement)
        group_of = {index: number for number, group in enumerate(layout.groups) for index in group.layers}
        made = []
        for index, (spec, given) in enumerate(layers):
            group = group_of[index]
            cache = _written(given, tables[group], num_pages, layout, spec, placement.rest, device)
            queries = _laid_out(given, spec, placement.padding, device)
            made.append(StepLayer(spec, given, group, cache, queries))
        return cls(made, _batch(rows, tables, num_pages, layout, placement, device), layout)

    def prepare(self, part: AttentionBackend) -> AttentionStep:
        """Return the step with a backend's metadata."""
        with torch.inference_mode():
            return evolve(self, batch=evolve(self.batch, attention=part.prepare(self.batch, self.layout)))

    def attend(self, part: AttentionBackend, index: int = 0) -> list[torch.Tensor]:
        """Return what a layer gives each row, (n, H, D), on the CPU.

        Raises:
            AssertionError: it has another shape or dtype than the queries.
        """
        layer = self.layers[index]
        given = layer.queries_THD
        with torch.inference_mode():
            out = part.attend(given, layer.cache, layer.spec, layer.group, self.batch)
        asked, got = ((tuple(x.shape), name_of(x.dtype), x.device.type) for x in (given, out))
        assert got == asked, f"queries of {_worded(*asked)} give {_worded(*got)}"
        # A copy: what it returned may be memory that it writes to again.
        out = out.cpu().clone()
        return [out[first:stop] for first, stop in pairwise(self.batch.bounds[: len(layer.rows) + 1])]


def _worded(shape: tuple[int, ...], dtype: str, device: str) -> str:
    return f"shape {shape}, {dtype}, on {device}"


def _layout(specs: Sequence[AttentionSpec], placement: Placement, entry: str) -> CacheLayout:
    groups: dict[tuple[int, int, int | None], list[int]] = {}
    for index, spec in enumerate(specs):
        groups.setdefault((spec.num_kv_heads, spec.head_dim, spec.window), []).append(index)
    dtype: torch.dtype = getattr(torch, entry)
    return CacheLayout(
        order=placement.order,
        format=entry,
        entry_bytes=dtype.itemsize,
        scale_bytes=4 if entry == "int8" else 0,
        page_size=placement.page_size,
        groups=tuple(
            CacheGroup(
                kind="full" if window is None else "window",
                layers=tuple(layers),
                num_kv_heads=kv_heads,
                head_dim=head_dim,
                window=window,
            )
            for (kv_heads, head_dim, window), layers in groups.items()
        ),
    )


def _tables(
    rows: Sequence[AttentionRow], layout: CacheLayout, placement: Placement
) -> tuple[list[list[tuple[int, ...]]], int]:
    """Return page tables by group and row, and how many pages there are without the spare one.

    Each row has a page more than it needs: allocators can reserve ahead. Pages that a window has left behind are -1.
    """
    size = layout.page_size
    counts = [-(-row.stop // size) + 1 for row in rows]
    num_pages = sum(counts) + 3
    tables: list[list[tuple[int, ...]]] = []
    for number, group in enumerate(layout.groups):
        # Each group has other pages for the same row.
        pool = [(page + number) % num_pages for page in range(num_pages)]
        if placement.scatter is not None:
            random.Random(placement.scatter + 1000 * number).shuffle(pool)
        mine: list[tuple[int, ...]] = []
        leading: tuple[int, ...] = ()  # the first row's pages, those that a window has left behind too
        for row, count in zip(rows, counts, strict=True):
            gone = 0 if group.window is None else max(0, row.start - group.window + 1) // size
            pages = leading[: min(placement.shared, row.start) // size]
            pages += tuple(pool[len(pages) : count])
            leading = leading or pages
            mine.append((-1,) * gone + pages[gone:])
            del pool[:count]
        tables.append(mine)
    return tables, num_pages


def _written(
    rows: Sequence[AttentionRow],
    tables: Sequence[tuple[int, ...]],
    num_pages: int,
    layout: CacheLayout,
    spec: AttentionSpec,
    rest: float,
    device: str,
) -> LayerTensors:
    """Return a layer's entries, with each row's keys and values in the row's pages."""
    size = {"P": num_pages + 1, "S": layout.page_size, "K": spec.num_kv_heads, "D": spec.head_dim}
    dtype, scaled = getattr(torch, layout.format), layout.scale_bytes > 0
    cache = LayerTensors.empty(layout.order, size, dtype, torch.device(device), scaled=scaled)
    cache.fill(rest)
    axes = [layout.order.index(axis) for axis in "PSKD"]
    without = layout.order.replace("D", "")
    for row, table in zip(rows, tables, strict=True):
        positions = torch.arange(row.stop)
        pages = torch.tensor(table)[positions // layout.page_size]
        there = pages >= 0
        place = (pages[there].to(device), (positions[there] % layout.page_size).to(device))
        for new, stored, scales in (
            (row.keys, cache.keys, cache.key_scales),
            (row.values, cache.values, cache.value_scales),
        ):
            entries = stored.permute(axes)
            if scales is None:
                entries[place] = new[there].to(dtype).to(device)
                continue
            numbers, factors = int8_numbers(new[there])
            entries[place] = numbers.to(device)
            scales.permute([without.index(axis) for axis in "PSK"])[place] = factors.to(device)
    return cache


def _laid_out(rows: Sequence[AttentionRow], spec: AttentionSpec, padding: int, device: str) -> torch.Tensor:
    """Return the queries of all rows as the runner has them: what lies between tokens is not theirs."""
    total = sum(row.length for row in rows)
    size = (total + padding, spec.num_heads + spec.num_kv_heads, spec.head_dim)
    wide = torch.full(size, torch.nan, dtype=rows[0].queries.dtype, device=device)
    wide[:total, : spec.num_heads] = torch.cat([row.queries for row in rows]).to(device)
    return wide[:, : spec.num_heads]


def _batch(
    rows: Sequence[AttentionRow],
    tables: Sequence[Sequence[tuple[int, ...]]],
    num_pages: int,
    layout: CacheLayout,
    placement: Placement,
    device: str,
) -> ForwardBatch:
    bounds, padding, size = [0], placement.padding, layout.page_size
    for length in [row.length for row in rows] + [1] * padding:
        bounds.append(bounds[-1] + length)
    spans = [range(row.start, row.stop) for row in rows]

    def tensor(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    slots = [
        [table[at // size] * size + at % size for table, span in zip(mine, spans, strict=True) for at in span]
        for mine in tables
    ]
    return ForwardBatch(
        ids_T=tensor([at % 7 for span in spans for at in span] + [0] * padding),
        positions_T=tensor([at for span in spans for at in span] + [0] * padding),
        slots_T=tuple(tensor(each + [-1] * padding) for each in slots),
        bounds=tuple(bounds),
        starts=tuple(row.start for row in rows) + (0,) * padding,
        pages=tuple((*mine, *[(num_pages,)] * padding) for mine in tables),
        logits_L=tensor([stop - 1 for stop in bounds[1 : len(rows) + 1]]),
    )


def contents(step: AttentionStep) -> Mapping[str, torch.Tensor]:
    """Return copies of all tensors that a backend is given, by name, as bytes."""
    found: dict[str, torch.Tensor] = {"ids": step.batch.ids_T, "positions": step.batch.positions_T}
    found["logits"] = step.batch.logits_L
    found |= {f"slots of group {i}": slots for i, slots in enumerate(step.batch.slots_T)}
    for index, layer in enumerate(step.layers):
        names = ("keys", "values", "key scales", "value scales")
        found |= {f"{name} of layer {index}": x for name, x in zip(names, layer.cache.tensors, strict=False)}
        found[f"queries of layer {index}"] = layer.queries_THD
    return {name: x.detach().cpu().contiguous().clone().view(torch.uint8) for name, x in found.items()}


def attend(
    part: AttentionBackend,
    spec: AttentionSpec,
    rows: Sequence[AttentionRow],
    placement: Placement = Placement(),
    *,
    device: str = "cpu",
    ready: Callable[[Any], Any] | None = None,
) -> list[torch.Tensor]:
    """Return what one layer gives each row, (n, H, D).

    Args:
        part: the backend.
        spec: the layer's.
        rows: of the step.
        placement: of their keys and values.
        device: where the step runs.
        ready: changes what was prepared, before it is used.
    """
    step = AttentionStep.of([(spec, rows)], placement, device).prepare(part)
    if ready is not None:
        step = evolve(step, batch=evolve(step.batch, attention=ready(step.batch.attention)))
    return step.attend(part)
