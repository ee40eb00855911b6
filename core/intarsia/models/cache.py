"""The cache's tensors on one device. The books are the allocator's.

Shape legend: P pages, S slots a page, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen

from intarsia.types import CacheLayout, CacheMove


@frozen(eq=False)
class LayerTensors:
    """Keys and values of one layer, (P, S, K, D) or (P, K, S, D) as the layout's order says; not always contiguous."""

    keys: torch.Tensor
    values: torch.Tensor

    @classmethod
    def empty(cls, order: str, size: dict[str, int], dtype: torch.dtype, device: torch.device) -> LayerTensors:
        """Reserve memory for one layer; `size` says how long each axis is.

        In the order PKSD, keys and values of a page and head lie side by side, in one tensor (P, K, 2, S, D): attention
        reads a head at a time, and a long run of memory is read faster than two short ones.
        """
        shape = [size[axis] for axis in order]
        if order != "PKSD":
            return cls(*(torch.empty(shape, dtype=dtype, device=device) for _ in range(2)))
        both = torch.empty([*shape[:2], 2, *shape[2:]], dtype=dtype, device=device)
        return cls(both[:, :, 0], both[:, :, 1])


@frozen(eq=False)
class TensorCache:
    """Keys and values of every layer, and one spare page behind the pool, where padded tokens write."""

    layers: tuple[LayerTensors, ...]
    group_of: tuple[int, ...]

    @classmethod
    def allocate(cls, layout: CacheLayout, num_pages: int, device: torch.device) -> TensorCache:
        """Reserve memory for `num_pages`; untouched pages stay unbacked where the system allows."""
        dtype = getattr(torch, layout.format)
        layers: dict[int, LayerTensors] = {}
        group_of: dict[int, int] = {}
        for index, group in enumerate(layout.groups):
            size = {"P": num_pages + 1, "S": layout.page_size, "K": group.num_kv_heads, "D": group.head_dim}
            for layer in group.layers:
                layers[layer], group_of[layer] = LayerTensors.empty(layout.order, size, dtype, device), index
        order = range(len(layers))
        return cls(tuple(layers[i] for i in order), tuple(group_of[i] for i in order))

    def layer(self, index: int) -> LayerTensors:
        """Return the tensors of one layer."""
        return self.layers[index]

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Copy or zero pages, in order."""
        for move in moves:
            assert move.kind in ("copy", "zero"), f"this storage cannot {move.kind}"
            for layer, group in zip(self.layers, self.group_of, strict=True):
                if group != move.group:
                    continue
                for tensor in (layer.keys, layer.values):
                    if move.kind == "zero":
                        tensor[move.target].zero_()
                    else:
                        tensor[move.target].copy_(tensor[move.source])

    def fill(self, value: float) -> None:
        """Set every number of every page."""
        for layer in self.layers:
            layer.keys.fill_(value)
            layer.values.fill_(value)

    @property
    def num_bytes(self) -> int:
        """Bytes reserved."""
        return sum(2 * layer.keys.numel() * layer.keys.element_size() for layer in self.layers)
