"""The tensors of the cache `vmm`: a range of addresses a group, and memory where moves have mapped it.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from attrs import define, field, frozen

from intarsia.types import CacheLayout, CacheMove
from intarsia_cuda.driver import VirtualMemory
from intarsia_cuda.pages import GroupPages, Regions, Runs


@frozen(eq=False)
class LayerView:
    """Keys and values of one layer of all pages, (P, S, K, D) or (P, K, S, D), with scales where entries have them."""

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @classmethod
    def of(cls, pages_PB: torch.Tensor, runs: Runs, index: int, dtype: torch.dtype) -> LayerView:
        """Look at the `index`-th layer of pages (P, B bytes)."""
        begin, num_runs = index * runs.layer_bytes, math.prod(runs.outer)
        memory = pages_PB[:, begin : begin + num_runs * runs.length].view(-1, *runs.outer, runs.length)
        first, stop = 8 * runs.num_scales, 8 * runs.num_scales + 2 * runs.num_bytes
        numbers = memory[..., first:stop].view(dtype)
        keys, values = (half.view(-1, *runs.outer, *runs.inner) for half in numbers.chunk(2, dim=-1))
        if not runs.num_scales:
            return cls(keys, values)
        scales = memory[..., :first].view(torch.float32)
        key_scales, value_scales = (half.view(-1, *runs.outer, *runs.inner[:-1]) for half in scales.chunk(2, dim=-1))
        return cls(keys, values, key_scales, value_scales)

    def fill(self, value: float, pages: slice) -> None:
        """Set every entry of some pages: of quantized ones the scale, to a number of 1."""
        for numbers, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            numbers[pages].fill_(value if scales is None else 1)
            if scales is not None:
                scales[pages].fill_(value)


@define(eq=False)
class MappedRange:
    """The addresses of one group's pages.

    Attributes:
        size: bytes of addresses.
        pages_PB: all pages, (P, bytes a page); what has no memory must not be touched.
        handles: granule -> the memory behind it.
    """

    memory: VirtualMemory
    pages: GroupPages
    address: int
    size: int
    pages_PB: torch.Tensor
    handles: dict[int, int]

    @classmethod
    def open(cls, memory: VirtualMemory, pages: GroupPages, num_pages: int) -> MappedRange:
        """Reserve addresses for so many pages."""
        size = len(pages.granules(range(num_pages))) * pages.granule
        opened = cls(memory, pages, memory.reserve(size), size, torch.empty(0), {})
        try:
            opened.handles[0] = memory.create(pages.granule)
            memory.map(opened.address, pages.granule, opened.handles[0])
        except BaseException:
            opened.abandon()
            raise
        try:
            opened.allow([0])
            tensor = memory.tensor(opened.address, size)
        except BaseException:
            opened.close()
            raise
        memory.unmap(opened.address, pages.granule)
        memory.release(opened.handles.pop(0))
        opened.pages_PB = tensor[: num_pages * pages.page_bytes].view(num_pages, pages.page_bytes)
        return opened

    def abandon(self) -> None:
        """Give addresses and memory back that were never brought together."""
        for handle in self.handles.values():
            self.memory.release(handle)
        self.memory.free(self.address, self.size)

    def at(self, granule: int) -> int:
        """Return where a granule begins."""
        return self.address + granule * self.pages.granule

    def allow(self, granules: Sequence[int]) -> None:
        """Let the device access memory that was just mapped, neighbours by one call."""
        for stretch in stretches(granules):
            self.memory.set_access(self.at(stretch.start), len(stretch) * self.pages.granule)

    def close(self) -> None:
        """Give memory and addresses back."""
        for granule, handle in self.handles.items():
            self.memory.unmap(self.at(granule), self.pages.granule)
            self.memory.release(handle)
        self.handles.clear()
        if self.size:
            self.memory.free(self.address, self.size)
            self.size = 0


@define(eq=False)
class VmmStorage:
    """The `CacheStorage` of the cache `vmm`: pages beyond those of regions, the spare one too, always have memory."""

    memory: VirtualMemory
    ranges: list[MappedRange]
    layers: tuple[LayerView, ...]
    group_of: tuple[int, ...]
    _mapped: dict[int, list[int]] = field(factory=dict, init=False)
    _unused: list[int] = field(factory=list, init=False)

    @classmethod
    def open(
        cls, layout: CacheLayout, regions: Regions, num_pages: int, memory: VirtualMemory, device: torch.device
    ) -> VmmStorage:
        """Reserve addresses of `num_pages` and the spare page, and map what is no region's."""
        assert num_pages >= regions.num_pages
        del device  # the memory's own
        ranges: list[MappedRange] = []
        storage = cls(memory, ranges, (), ())
        try:
            for pages in regions.groups:
                # One at a time: what is open is closed if the next fails.
                ranges.append(MappedRange.open(memory, pages, num_pages + 1))  # noqa: PERF401
            always = range(regions.num_pages, num_pages + 1)
            storage.move(
                [
                    CacheMove("map", granule, group=group)
                    for group, pages in enumerate(regions.groups)
                    for granule in pages.granules(always)
                ]
            )
        except BaseException:
            storage.close()
            raise
        dtype: torch.dtype = getattr(torch, layout.format)
        found = {
            layer: (group, LayerView.of(ranges[group].pages_PB, ranges[group].pages.runs, index, dtype))
            for group, members in enumerate(layout.groups)
            for index, layer in enumerate(members.layers)
        }
        storage.layers = tuple(found[layer][1] for layer in range(len(found)))
        storage.group_of = tuple(found[layer][0] for layer in range(len(found)))
        # A page that nothing has written to holds anything, and padded tokens read what they have not written.
        storage.move([CacheMove("zero", num_pages, group=group) for group in range(len(ranges))])
        return storage

    def layer(self, index: int) -> LayerView:
        """Return the tensors of one layer."""
        return self.layers[index]

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Map, unmap, copy and zero, in order. Memory that is unmapped is mapped elsewhere before more is made.

        Raises:
            ExecutionError: the device refuses.
        """
        before = ""
        try:
            for move in moves:
                if move.kind == "unmap" != before:
                    self._allow()
                    self.memory.synchronize()  # a step or a copy that reads it may still run
                self._move(move)
                before = move.kind
        finally:
            while self._unused:
                self.memory.release(self._unused.pop())
            self._allow()

    def _move(self, move: CacheMove) -> None:
        held, target = self.ranges[move.group], move.target
        granule = held.pages.granule
        if move.kind == "map":
            assert target not in held.handles, f"granule {target} of group {move.group} has memory already"
            handle = self._unused.pop() if self._unused else self.memory.create(granule)
            try:
                self.memory.map(held.at(target), granule, handle)
            except BaseException:
                self._unused.append(handle)
                raise
            held.handles[target] = handle
            self._mapped.setdefault(move.group, []).append(target)
            return
        self._allow()
        if move.kind == "unmap":
            self.memory.unmap(held.at(target), granule)
            self._unused.append(held.handles.pop(target))
        elif move.kind == "zero":
            held.pages_PB[target].zero_()
        else:
            assert move.kind == "copy", f"this storage cannot {move.kind}"
            held.pages_PB[target].copy_(held.pages_PB[move.source])

    def _allow(self) -> None:
        """Set the access of what was mapped since the last time."""
        for group, granules in self._mapped.items():
            self.ranges[group].allow(granules)
        self._mapped.clear()

    def fill(self, value: float) -> None:
        """Set every entry of the pages that have memory."""
        for layer, group in zip(self.layers, self.group_of, strict=True):
            held = self.ranges[group]
            for pages in (held.pages.whole_pages(granules) for granules in stretches(held.handles)):
                layer.fill(value, slice(pages.start, min(pages.stop, len(held.pages_PB))))

    @property
    def num_bytes(self) -> int:
        """Bytes that have memory."""
        return sum(len(held.handles) * held.pages.granule for held in self.ranges)

    def close(self) -> None:
        """Give all memory and addresses back."""
        if self.ranges:
            self.memory.synchronize()
        self.layers = ()
        while self.ranges:
            self.ranges.pop().close()


def stretches(granules: Iterable[int]) -> list[range]:
    """Return numbers as ranges that are not next to each other."""
    found: list[range] = []
    for granule in sorted(granules):
        if found and found[-1].stop == granule:
            found[-1] = range(found[-1].start, granule + 1)
        else:
            found.append(range(granule, granule + 1))
    return found
