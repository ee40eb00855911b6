"""What a step runs through: attention, the cache's tensors, the runner.

Shape legend: T tokens, L rows of logits, H heads, D head dim, E embed, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from intarsia.types import AttentionSpec, CacheLayout, CacheMove, ForwardBatch, Invariance

if TYPE_CHECKING:
    import torch


class AttentionBackend(Protocol):
    """Attention over the cache. Prepares once a step, attends once a layer."""

    @property
    def orders(self) -> Sequence[str]:
        """Cache axis orders that it reads, best first."""
        ...

    @property
    def formats(self) -> Sequence[str]:
        """Cache entry formats that it reads: dtype names, or a quantized format's."""
        ...

    def invariance(self, dtype: str) -> Invariance:
        """What it promises of a row's result when the batch around the row, or its chunking, changes."""
        ...

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Any:
        """Return metadata for the step, handed to every `attend` of it in `batch.attention`. No side effects."""
        ...

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D): each token over the keys of its row up to itself. Keys of this step are written already.

        Reads no slot past a row's last token: what lies there can be anything, NaN included.
        """
        ...


@runtime_checkable
class FixedAttention(Protocol):
    """What an attention backend can do besides, so that a CUDA graph can hold it: decode over fixed buffers."""

    def prepare_fixed(self, batch: ForwardBatch, layout: CacheLayout, max_len: int) -> Any:
        """Prepare rows of one token each, as `prepare` does, so that steps differ only in what tensors hold.

        Shapes, and all that is no tensor, depend on the number of rows, the layout and `max_len` alone. With such
        metadata `attend` launches the same kernels with the same arguments each time, and the host waits for nothing.
        The metadata has a method `refill(other)`, which takes the numbers of a later step's into its own tensors: those
        that the graph reads. `attend` may read the batch's tensors too, and nothing else of it.

        Args:
            batch: rows of one token each. Some may be padding, of position 0 in the spare page.
            layout: of the cache.
            max_len: no row has more tokens, its own included.
        """
        ...


class LayerCache(Protocol):
    """One layer's tensors of the cache, in the layout's order.

    In the entry format `int8` a key or value is its numbers times its scale: the dequantized entry (see
    `intarsia.ops.int8_entries`). A scale of NaN says that what was written was not finite. None of the tensors need be
    contiguous; the last axis of keys and values is.
    """

    @property
    def keys(self) -> torch.Tensor:
        """Keys of all pages."""
        ...

    @property
    def values(self) -> torch.Tensor:
        """Values of all pages."""
        ...

    @property
    def key_scales(self) -> torch.Tensor | None:
        """fp32 scales of the keys, with the keys' axes but the last; None where the entry format has none."""
        ...

    @property
    def value_scales(self) -> torch.Tensor | None:
        """fp32 scales of the values, likewise."""
        ...


class CacheStorage(Protocol):
    """One rank's tensors of the cache."""

    def layer(self, index: int) -> LayerCache:
        """Return the tensors of one layer."""
        ...

    def move(self, moves: Sequence[CacheMove]) -> None:
        """Do a plan's cache work, in order."""
        ...

    def fill(self, value: float) -> None:
        """Set every entry that has memory: of quantized ones the scale, to a number of 1. For tests."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes it holds."""
        ...

    def close(self) -> None:
        """Give the memory back; nothing reads it any more. Safe to call twice."""
        ...


@runtime_checkable
class SwappingStorage(Protocol):
    """What a `CacheStorage` can do besides: copy pages to host memory and back, as `swap_out` and `swap_in` say.

    The copies of a plan are done in order with its other moves: a page that is swapped out can be written to by a move
    behind that and by the step's rows, and a page that is swapped in is there for them.
    """

    def take_swapped(self) -> tuple[int, float]:
        """Return how many bytes were copied, and the seconds that took, of copies that are over; forget them."""
        ...


class Runner(Protocol):
    """Runs a range of layers on a ForwardBatch. The ops are the meaning: every runner equals them."""

    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a range of layers, writing their keys and values into the cache; return the residual stream (T, E).

        Where `batch.read_L` names tokens, what is returned of the others may be anything. Without `hidden_TE` the
        range starts at 0, and the batch's ids are embedded. Ranges serve layer skipping, and stages of a pipeline,
        whose layers are numbered from 0.
        """
        ...

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of the tokens at these indices of the residual stream."""
        ...


@runtime_checkable
class LikeliestRunner(Protocol):
    """What a runner can do besides: find the likeliest ids of tokens, so that nobody reads their logits.

    Asked in the place of `Runner.logits` where no row of a step asks for more: all are greedy, none reports
    log-probabilities, and nothing changes their logits.
    """

    def likeliest(
        self, hidden_TE: torch.Tensor, rows_L: torch.Tensor, num_ids: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the id of each token's highest logit (L,), int64, and that logit (L,), fp32.

        They are those of `logits(hidden_TE, rows_L)[:, :num_ids]`, bit for bit: of equal logits the lowest id. Where a
        logit of these is NaN, so is the logit that is returned; where it is that or infinite, the id is -1.

        Args:
            hidden_TE: the residual stream.
            rows_L: indices into it, at least one.
            num_ids: ids from here on have logits in a padded vocabulary and no token.
        """
        ...


@runtime_checkable
class PreparingRunner(Protocol):
    """What a runner can do besides: decide what is prepared for a step, in the attention backend's place."""

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Any:
        """Return what the batch of the next `run` holds in `attention`."""
        ...
