"""Host memory for pages of the cache, and the copies there and back.

Pages that lie scattered on the device are gathered into a staging buffer there, which one copy, or a few, take to the
host; and the other way round. So a layer takes a handful of launches however many pages move. Gathering and scattering
run with the steps, the copies beside them: pages that are swapped out can be written to as soon as they are gathered,
while their copy goes on beside the step. There are two staging buffers, used in turn.

Shape legend: P pages of the device, H pages of the host, N pages of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from attrs import define, field, frozen

from intarsia.models.device_streams import DeviceStreams, Queue
from intarsia.types import CacheLayout, CacheMove

#: Bytes of a staging buffer, where a page of a layer is not larger.
_STAGING = 8 << 20
_NUM_BUFFERS = 2
#: Numbers are copied as whole words of the widest kind that fits: the fewer, the faster.
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
#: Tensors in host memory begin at multiples of this, in bytes.
_ALIGNED = 64


def staging_bytes(layout: CacheLayout) -> int:
    """Return what the staging buffers take on the device."""
    largest = max(layout.layer_token_bytes(group) for group in layout.groups) * layout.page_size
    return _NUM_BUFFERS * _aligned(max(_STAGING, largest))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNED) * _ALIGNED


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """Look at a tensor as words, as wide as its last axis, strides and begin allow; what they say is not looked at."""
    size = tensor.element_size()
    strides = (step for length, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if length > 1)
    places = [size * number for number in (tensor.shape[-1], tensor.storage_offset(), *strides)]
    return tensor.view(next(word for word in _WORDS if not any(place % word.itemsize for place in places)))


@define(eq=False)
class _Buffer:
    """A staging buffer; `free` comes when what was last in it has been read."""

    memory: torch.Tensor
    free: Any = None

    def rows(self, count: int, like: torch.Tensor) -> torch.Tensor:
        """Look at it as so many pages of a tensor (P, ...)."""
        num_bytes = count * like[0].numel() * like.element_size()
        return self.memory[:num_bytes].view(like.dtype).view(count, *like.shape[1:])


@frozen(eq=False)
class _Copied:
    """A copy on its way: events, and its bytes."""

    begin: Any
    end: Any
    num_bytes: int


@define(eq=False)
class HostPages:
    """Pages of every layer in host memory: of each group as many, numbered from 0.

    Attributes:
        streams: the device's queues.
        device: of each group, the tensors of its layers as words (P, ...).
        host: the same in host memory (H, ...).
    """

    streams: DeviceStreams
    device: tuple[tuple[torch.Tensor, ...], ...]
    host: tuple[tuple[torch.Tensor, ...], ...]
    _buffers: tuple[_Buffer, ...]
    _turn: int = field(default=0, init=False)
    _copies: list[_Copied] = field(factory=list, init=False)

    @classmethod
    def allocate(
        cls, groups: Sequence[Sequence[torch.Tensor]], num_pages: int, staging: int, streams: DeviceStreams
    ) -> HostPages:
        """Take host memory, and staging buffers on the device.

        Args:
            groups: of each group, the tensors (P, ...) of which pages move, on the device.
            num_pages: host pages of each group.
            staging: bytes of all staging buffers; one holds a page of every tensor.
            streams: the device's queues.

        Raises:
            ExecutionError: there is not as much host memory.
        """
        device = tuple(tuple(as_words(tensor) for tensor in tensors) for tensors in groups)
        sizes = [_aligned(num_pages * _page_bytes(tensor)) for tensors in device for tensor in tensors]
        memory = iter(torch.split(streams.host_memory(sum(sizes)), sizes))
        host = tuple(tuple(_carve(next(memory), num_pages, tensor) for tensor in tensors) for tensors in device)
        where = next(tensor.device for tensors in device for tensor in tensors)
        buffers = torch.empty(staging, dtype=torch.uint8, device=where).chunk(_NUM_BUFFERS)
        return cls(streams, device, host, tuple(map(_Buffer, buffers)))

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Swap pages, in order."""
        for batch in batches(moves):
            first = batch[0]
            swap = self._swap_out if first.kind == "swap_out" else self._swap_in
            inside = [move.source if first.kind == "swap_out" else move.target for move in batch]
            outside = [move.target if first.kind == "swap_out" else move.source for move in batch]
            index_N = _on_device(inside, self._buffers[0].memory.device)
            for device, host in zip(self.device[first.group], self.host[first.group], strict=True):
                step = self._buffers[0].memory.numel() // _page_bytes(device)
                for begin in range(0, len(batch), step):
                    part = slice(begin, begin + step)
                    swap(device, index_N[part], host, outside[part])

    def _swap_out(self, device: torch.Tensor, index_N: torch.Tensor, host: torch.Tensor, pages: list[int]) -> None:
        streams, buffer = self.streams, self._next_buffer()
        staged = buffer.rows(len(pages), device)
        if buffer.free is not None:
            streams.wait(Queue.COMPUTE, buffer.free)
        streams.launch(Queue.COMPUTE, lambda: torch.index_select(device, 0, index_N, out=staged))
        streams.wait(Queue.COPY, streams.record(Queue.COMPUTE))

        def copy() -> None:
            for part, run in runs(pages):
                host[run].copy_(staged[part], non_blocking=True)

        buffer.free = self._copy(copy, staged)

    def _swap_in(self, device: torch.Tensor, index_N: torch.Tensor, host: torch.Tensor, pages: list[int]) -> None:
        streams, buffer = self.streams, self._next_buffer()
        staged = buffer.rows(len(pages), device)

        def copy() -> None:
            for part, run in runs(pages):
                staged[part].copy_(host[run], non_blocking=True)

        if buffer.free is not None:
            streams.wait(Queue.COPY, buffer.free)
        streams.wait(Queue.COMPUTE, self._copy(copy, staged))
        streams.launch(Queue.COMPUTE, lambda: device.index_copy_(0, index_N, staged))
        buffer.free = streams.record(Queue.COMPUTE)

    def _next_buffer(self) -> _Buffer:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]

    def _copy(self, copy: Callable[[], None], staged: torch.Tensor) -> Any:
        """Launch a copy, and keep its time; return the event that comes when it is over."""
        begin = self.streams.record(Queue.COPY)
        self.streams.launch(Queue.COPY, copy)
        end = self.streams.record(Queue.COPY)
        self._copies.append(_Copied(begin, end, staged.numel() * staged.element_size()))
        return end

    def take_swapped(self) -> tuple[int, float]:
        """Return bytes and seconds of the copies that are over."""
        num_bytes, seconds, going = 0, 0.0, []
        for copied in self._copies:
            took = self.streams.seconds(copied.begin, copied.end)
            if took is None:
                going.append(copied)
            else:
                num_bytes, seconds = num_bytes + copied.num_bytes, seconds + took
        self._copies = going
        return num_bytes, seconds

    def close(self) -> None:
        """Wait for the copies, and give the memory back."""
        self.streams.close()
        self.device = self.host = ()
        self._buffers = ()


def _on_device(pages: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return numbers as a tensor, for which the host does not wait while the device is at work."""
    return torch.tensor(pages, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _page_bytes(tensor: torch.Tensor) -> int:
    return tensor[0].numel() * tensor.element_size()


def _carve(memory: torch.Tensor, num_pages: int, like: torch.Tensor) -> torch.Tensor:
    """Look at bytes as pages (H, ...) such as those of a tensor (P, ...)."""
    used = memory[: num_pages * _page_bytes(like)]
    return used.view(like.dtype).view(num_pages, *like.shape[1:])


def batches(moves: Sequence[CacheMove]) -> Iterator[list[CacheMove]]:
    """Yield moves that can be done at once, in order: of one kind and group, no two to the same page."""
    batch: list[CacheMove] = []
    targets: set[int] = set()
    for move in moves:
        if batch and ((move.kind, move.group) != (batch[0].kind, batch[0].group) or move.target in targets):
            yield batch
            batch, targets = [], set()
        batch.append(move)
        targets.add(move.target)
    if batch:
        yield batch


def runs(pages: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """Yield stretches of pages that follow one another: where they are in the list, and which pages."""
    breaks = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
    for begin, stop in pairwise((0, *breaks, len(pages))):
        yield slice(begin, stop), slice(pages[begin], pages[begin] + stop - begin)
