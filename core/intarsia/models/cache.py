"""The cache's tensors on one device. The books are the allocator's.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

import torch
from attrs import frozen

from intarsia.models.device_streams import DeviceStreams, streams_of
from intarsia.models.swapping import HostPages, staging_bytes
from intarsia.types import CacheLayout, CacheMove


@frozen(eq=False)
class LayerTensors:
    """Keys and values of one layer, (P, S, K, D) or (P, K, S, D) as the layout's order says; not always contiguous.

    Of quantized entries, scales (P, S, K) or (P, K, S) lie beside them.
    """

    keys: torch.Tensor
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    value_scales: torch.Tensor | None = None

    @classmethod
    def empty(
        cls, order: str, size: dict[str, int], dtype: torch.dtype, device: torch.device, *, scaled: bool = False
    ) -> LayerTensors:
        """Reserve memory for one layer; `size` says how long each axis is, `scaled` whether entries have scales.

        In the order PKSD, keys and values of a page and head lie side by side, in one tensor (P, K, 2, S, D): attention
        reads a head at a time, and a long run of memory is read faster than two short ones.
        """
        if scaled:
            return cls._with_scales(order, size, dtype, device)
        shape = [size[axis] for axis in order]
        if order != "PKSD":
            return cls(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
        both = torch.empty([*shape[:2], 2, *shape[2:]], dtype=dtype, device=device)
        return cls(both[:, :, 0], both[:, :, 1])

    @classmethod
    def _with_scales(cls, order: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> LayerTensors:
        """Reserve runs of (key scales, value scales, keys, values): a page's, or in the order PKSD a page and head's.

        What is read together lies together; and a run of 16 slots is whole cache lines.
        """
        axis = order.index("S")
        runs, inner = [size[a] for a in order[:axis]], [size[a] for a in order[axis:]]
        num_scales, num_bytes = math.prod(inner[:-1]), math.prod(inner) * dtype.itemsize
        # A whole number of floats: where slots x head dim is odd, two bytes a run are of no use.
        length = -(-2 * (4 * num_scales + num_bytes) // 4) * 4
        memory = torch.empty([*runs, length], dtype=torch.uint8, device=device)
        scales = memory[..., : 8 * num_scales].view(torch.float32)
        numbers = memory[..., 8 * num_scales : 8 * num_scales + 2 * num_bytes].view(dtype)
        keys, values = (half.view([*runs, *inner]) for half in numbers.chunk(2, dim=-1))
        key_scales, value_scales = (half.view([*runs, *inner[:-1]]) for half in scales.chunk(2, dim=-1))
        return cls(keys, values, key_scales, value_scales)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them: what a page takes along when it moves."""
        scales = (self.key_scales, self.value_scales)
        return (self.keys, self.values, *(tensor for tensor in scales if tensor is not None))

    def fill(self, value: float) -> None:
        """Set every entry: of quantized ones the scale, to a number of 1."""
        for numbers, scales in ((self.keys, self.key_scales), (self.values, self.value_scales)):
            numbers.fill_(value if scales is None else 1)
            if scales is not None:
                scales.fill_(value)


@frozen(eq=False)
class TensorCache:
    """Keys and values of every layer, and one spare page behind the pool, where padded tokens write.

    Attributes:
        host: pages in host memory; None where nothing is swapped.
    """

    layers: tuple[LayerTensors, ...]
    group_of: tuple[int, ...]
    host: HostPages | None = None

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        num_pages: int,
        device: torch.device,
        num_host_pages: int = 0,
        streams: DeviceStreams | None = None,
    ) -> TensorCache:
        """Reserve memory for `num_pages`; untouched pages stay unbacked where the system allows.

        Args:
            layout: of the cache.
            num_pages: on the device, without the spare one.
            device: where they are.
            num_host_pages: of each group in host memory; 0 where nothing is swapped.
            streams: the device's queues; None is those that it has.

        Raises:
            ExecutionError: there is not as much host memory.
        """
        dtype, scaled = getattr(torch, layout.format), layout.scale_bytes > 0
        layers: dict[int, LayerTensors] = {}
        group_of: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            size = {"P": num_pages + 1, "S": layout.page_size, "K": group.num_kv_heads, "D": group.head_dim}
            for layer in group.layers:
                layers[layer] = LayerTensors.empty(layout.order, size, dtype, device, scaled=scaled)
                group_of[layer] = index
        order = range(len(layers))
        host = None
        if num_host_pages:
            groups = [[t for layer in group.layers for t in layers[layer].tensors] for group in layout.groups]
            queues = streams if streams is not None else streams_of(device)
            host = HostPages.allocate(groups, num_host_pages, staging_bytes(layout), queues)
        return cls(tuple(layers[i] for i in order), tuple(group_of[i] for i in order), host)

    def layer(self, index: int) -> LayerTensors:
        """Return the tensors of one layer."""
        return self.layers[index]

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Copy, zero or swap pages, in order."""
        for swaps, stretch in groupby(moves, lambda move: move.kind in ("swap_out", "swap_in")):
            if swaps and self.host is not None:
                self.host.move(list(stretch))
                continue
            for move in stretch:
                self._move(move)

    def _move(self, move: CacheMove) -> None:
        assert move.kind in ("copy", "zero"), f"this storage cannot {move.kind}"
        for layer, group in zip(self.layers, self.group_of, strict=True):
            if group != move.group:
                continue
            for tensor in layer.tensors:
                if move.kind == "zero":
                    tensor[move.target].zero_()
                else:
                    tensor[move.target].copy_(tensor[move.source])

    def take_swapped(self) -> tuple[int, float]:
        """Return bytes and seconds of the copies between device and host that are over; forget them."""
        return (0, 0.0) if self.host is None else self.host.take_swapped()

    def fill(self, value: float) -> None:
        """Set every entry of every page."""
        for layer in self.layers:
            layer.fill(value)

    def close(self) -> None:
        """Give host memory back; the device's goes with the tensors."""
        if self.host is not None:
            self.host.close()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(tensor.numel() * tensor.element_size() for layer in self.layers for tensor in layer.tensors)
