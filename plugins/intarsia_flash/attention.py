"""The attention backend `flash`: Triton kernels on GPUs, the same algorithm in torch ops elsewhere.

Shape legend: T tokens, H heads, K kv heads, D head dim, G query heads a kv head, P pages, S slots a page.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from intarsia.protocols import LayerCache, PartContext
from intarsia.types import AttentionSpec, CacheGroup, CacheLayout, Fit, ForwardBatch, Invariance, Unfit
from intarsia_flash.online import OnlineAttention
from intarsia_flash.work import Ints, Room, Rows, Splits, Tables, packed, whole_rows

if TYPE_CHECKING:
    from intarsia_flash.kernels import Kind

#: The least compute capability: asynchronous copies and bf16 tensor cores.
_CAPABILITY = (8, 0)
#: Heads are read in pieces of so many dimensions, up to so many.
_PIECE, _MAX_HEAD_DIM = 8, 256
#: The window of those that see everything: further than any position.
_FAR = 1 << 30


@frozen(eq=False)
class Work:
    """What one cache group's rows ask for, on the device; int32.

    Attributes:
        pages: all rows' page tables, end to end.
        whole: records of rows whose keys are taken at once.
        splits: records of rows whose keys are split.
        merges: records of tokens whose splits are merged.
        partials: (K, slots, M, D) fp32, for partial results.
        sums: (K, slots, M, 2) fp32, for their peaks and sums.
    """

    pages: torch.Tensor
    whole: torch.Tensor
    splits: torch.Tensor
    merges: torch.Tensor
    partials: torch.Tensor
    sums: torch.Tensor


@frozen(eq=False)
class Prepared:
    """A step's work.

    Attributes:
        numbers: all its records and page tables, in one int32 tensor; the others are views of it.
        work: by cache group and query heads a kv head.
    """

    numbers: torch.Tensor
    work: Mapping[tuple[int, int], Work]
    order: str
    page_size: int

    @property
    def grids(self) -> tuple[tuple[int, ...], ...]:
        """Sizes of all that is launched: steps of equal grids can take one another's place in a CUDA graph."""
        return tuple(
            (len(one.pages), len(one.whole), len(one.splits), len(one.merges), one.sums.shape[1])
            for one in self.work.values()
        )

    def refill(self, other: Prepared) -> None:
        """Take another step's numbers, of equal grids, into these tensors: what a captured graph reads."""
        assert self.grids == other.grids and (self.order, self.page_size) == (other.order, other.page_size)
        self.numbers.copy_(other.numbers, non_blocking=True)


def reciprocal(page_size: int) -> tuple[int, int]:
    """Return (magic, shift): x // page_size is `umulhi(2 * x, magic) >> shift` for x below 2**31.

    Granlund and Montgomery 1994, Division by invariant integers using multiplication. The magic number is between 2**31
    and 2**32, given as the int32 of the same bits.
    """
    shift = (page_size - 1).bit_length()
    return -(-(1 << (31 + shift)) // page_size) - (1 << 32), shift


@frozen(eq=False)
class FlashAttention:
    """Triton kernels over the paged cache: one launch a layer for rows in prefill, two for rows that decode.

    Attributes:
        dtype: of the queries, by torch's name.
        layers: the attention of the model's layers: cache groups do not say how many query heads there are.
        splits: whether rows that decode are split. Without, one form computes all rows: how a prompt is cut into chunks
            then shows in no bit, and a long row does not fill a GPU.
        roomy: whether the device has the shared memory of large tiles.
    """

    dtype: str
    layers: tuple[AttentionSpec, ...]
    splits: bool = True
    roomy: bool = True
    orders: tuple[str, ...] = ("PKSD", "PSKD")
    #: memory for partial results of steps over fixed buffers, by the width of a result
    _shared: dict[int, torch.Tensor] = field(factory=dict, init=False, repr=False)

    @property
    def formats(self) -> tuple[str, ...]:
        """The engine's dtype; int8 where it has tensor cores."""
        return (self.dtype,) if self.dtype == "float32" else (self.dtype, "int8")

    def invariance(self, dtype: str) -> Invariance:
        """A row's own length decides which form runs it, and every form gives a query the same bits in any company.

        Without splits chunks show in no bit either, as far as a device's matrix products give a row the same bits in
        whatever place of a tile it stands. That is how tensor cores are taken to work; no GPU has been asked yet.
        """
        del dtype
        return "neighbours" if self.splits else "bitwise"

    def _group_sizes(self, group: CacheGroup) -> list[int]:
        """Return the query heads a kv head of a group's layers."""
        kind = (group.num_kv_heads, group.head_dim, group.window)
        mine = [one for one in self.layers if (one.num_kv_heads, one.head_dim, one.window) == kind]
        return sorted({one.num_heads // one.num_kv_heads for one in mine})

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> Prepared:
        """Lay the step's work out: one copy to the device, and nothing waits for it."""
        return self._lay_out(batch, layout, None)

    def prepare_fixed(self, batch: ForwardBatch, layout: CacheLayout, max_len: int) -> Prepared:
        """Lay rows of one token each out, with room for all the work that rows of `max_len` tokens can be.

        Partial results share their memory with those of every such step, one of which runs at a time.
        """
        return self._lay_out(batch, layout, max_len)

    def _lay_out(self, batch: ForwardBatch, layout: CacheLayout, max_len: int | None) -> Prepared:
        rows, device = Rows.of(batch.bounds, batch.starts), batch.ids_T.device
        rooms: dict[tuple[int, int], Room] = {}
        parts: list[Any] = []
        for index, (group, pages) in enumerate(zip(layout.groups, batch.pages, strict=True)):
            # A row can hold pages for tokens to come: of unknown number, and not read.
            needed = pages if max_len is None else _read(pages, batch.starts, layout.page_size)
            tables = Tables.of(needed)
            for group_size in self._group_sizes(group):
                whole, found = self._cut(rows, tables, group, group_size)
                parts += [tables.pages, whole, found.items, found.merges]
                if max_len is None:
                    rooms[index, group_size] = Room.around(tables, whole, found)
                else:
                    rooms[index, group_size] = self._most(batch.num_rows, group, group_size, max_len, layout.page_size)
        counts = [(room.pages, room.whole, room.items, room.merges) for room in rooms.values()]
        flat, spans = packed(parts, list(chain.from_iterable(counts)))
        numbers = _on_device(torch.from_numpy(flat), device)
        work = {}
        for at, (key, room) in enumerate(rooms.items()):
            views = [numbers[begin:stop] for begin, stop in spans[4 * at : 4 * at + 4]]
            partial = self._partial(layout.groups[key[0]], room.slots, device, shared=max_len is not None)
            records = [view.view(-1, 8) for view in views[1:]]
            work[key] = Work(views[0], records[0], records[1], records[2], *partial)
        return Prepared(numbers, work, layout.order, layout.page_size)

    def _most(self, num_rows: int, group: CacheGroup, group_size: int, max_len: int, page_size: int) -> Room:
        """Return room for rows of one token and up to `max_len` keys each."""
        from intarsia_flash.kernels import DECODED_TILE, SPLIT, tile_for

        queries = DECODED_TILE
        if not self.splits:
            queries = tile_for("prefill", self.dtype, self.dtype, group.head_dim, roomy=self.roomy).queries
        splits = -(-max_len // SPLIT)
        if group.window is not None:
            splits = min(splits, -(-group.window // SPLIT) + 1)
        tiles = -(-group_size // queries)
        return Room.of_decoding(num_rows, -(-max_len // page_size), tiles, splits if self.splits else 0)

    def _partial(
        self, group: CacheGroup, num_slots: int, device: torch.device, *, shared: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return memory for partial results and their sums."""
        from intarsia_flash.kernels import DECODED_TILE

        found = []
        for width in (group.head_dim, 2):
            size = (group.num_kv_heads, num_slots, DECODED_TILE, width)
            if not shared:
                found.append(torch.empty(size, dtype=torch.float32, device=device))
                continue
            count = math.prod(size)
            if (room := self._shared.get(width)) is None or len(room) < count:
                room = self._shared[width] = torch.empty(count, dtype=torch.float32, device=device)
            found.append(room[:count].view(size))
        return found[0], found[1]

    def _cut(self, rows: Rows, tables: Tables, group: CacheGroup, group_size: int) -> tuple[Ints, Splits]:
        """Return the records of whole rows and of split ones."""
        from intarsia_flash.kernels import DECODED_TILE, SPLIT, tile_for

        decoded = rows.decoded(group_size) & self.splits
        # Of the entries, which the cache alone knows, it does not depend.
        tile = tile_for("prefill", self.dtype, self.dtype, group.head_dim, roomy=self.roomy)
        whole = whole_rows(rows, tables, ~decoded, group_size, tile.queries)
        return whole, Splits.of(rows, tables, decoded, group_size, DECODED_TILE, SPLIT, group.window)

    def attend(
        self, q_THD: torch.Tensor, cache: LayerCache, spec: AttentionSpec, group: int, batch: ForwardBatch
    ) -> torch.Tensor:
        """Return (T, H, D). Of the cache, only slots that the row has written are read."""
        from intarsia_flash.kernels import FORMS, MERGED_DIMS, MERGES, tile_for

        prepared: Prepared = batch.attention
        work = prepared.work[group, spec.num_heads // spec.num_kv_heads]
        q_THD = _readable(q_THD)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        numbers = _numbers(q_THD, out_THD, cache, spec, prepared, work)
        entry = str(cache.keys.dtype).removeprefix("torch.")
        kinds: tuple[tuple[Kind, torch.Tensor], ...] = (("prefill", work.whole), ("decode", work.splits))
        for kind, items in kinds:
            if len(items):
                form = FORMS[tile_for(kind, self.dtype, entry, spec.head_dim, roomy=self.roomy)]
                given = numbers | {"items": items}
                form.launch((len(items), spec.num_kv_heads), *(given[name] for name in form.signature))
        if len(work.merges):
            form = MERGES[self.dtype]
            given = numbers | {"items": work.merges}
            grid = (len(work.merges), spec.num_heads, -(-spec.head_dim // MERGED_DIMS))
            form.launch(grid, *(given[name] for name in form.signature))
        return out_THD


def _read(tables: Sequence[Sequence[int]], starts: Sequence[int], page_size: int) -> list[Sequence[int]]:
    """Return the page tables of rows of one token each, as far as they are read."""
    return [table[: start // page_size + 1] for table, start in zip(tables, starts, strict=True)]


def _on_device(numbers: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy to the device without waiting for it."""
    if device.type != "cuda":
        return numbers.to(device)
    return numbers.pin_memory().to(device, non_blocking=True)


def _readable(q_THD: torch.Tensor) -> torch.Tensor:
    """Return queries whose rows begin at multiples of 16 bytes, as the kernels read them: nearly always as they are."""
    token, head, last = q_THD.stride()
    if last != 1 or token % _PIECE or head % _PIECE or q_THD.data_ptr() % 16:
        return q_THD.clone(memory_format=torch.contiguous_format)
    return q_THD


def _numbers(
    q_THD: torch.Tensor,
    out_THD: torch.Tensor,
    cache: LayerCache,
    spec: AttentionSpec,
    prepared: Prepared,
    work: Work,
) -> dict[str, Any]:
    """Return what the kernels are given, by their arguments' names. Strides are in pieces, those of scales are not."""
    slot, head = (1, 2) if prepared.order == "PSKD" else (2, 1)
    keys, scales = cache.keys, cache.key_scales
    strides = keys.stride()
    assert strides == cache.values.stride() and strides[-1] == 1 and not any(n % _PIECE for n in strides[:-1]), strides
    assert scales is None or (cache.value_scales is not None and scales.stride() == cache.value_scales.stride())
    scale_strides = (0, 0, 0) if scales is None else scales.stride()
    magic, shift = reciprocal(prepared.page_size)
    assert spec.scale > 0, spec.scale
    cap = spec.soft_cap
    return {
        "queries": q_THD,
        "out": out_THD,
        "keys": keys,
        "values": cache.values,
        "key_scales": scales,
        "value_scales": cache.value_scales,
        "pages": work.pages,
        "partials": work.partials,
        "sums": work.sums,
        "query_token": q_THD.stride(0) // _PIECE,
        "query_head": q_THD.stride(1) // _PIECE,
        "out_token": out_THD.stride(0) // _PIECE,
        "out_head": out_THD.stride(1) // _PIECE,
        "page_stride": strides[0] // _PIECE,
        "kv_head_stride": strides[head] // _PIECE,
        "slot_stride": strides[slot] // _PIECE,
        "scale_page": scale_strides[0],
        "scale_head": scale_strides[head],
        "scale_slot": scale_strides[slot],
        "group_size": spec.num_heads // spec.num_kv_heads,
        "head_pieces": spec.head_dim // _PIECE,
        "page_size": prepared.page_size,
        "page_magic": magic,
        "page_shift": shift,
        "window": _FAR if spec.window is None else spec.window,
        "num_slots": work.sums.shape[1],
        # exp2 in place of exp: its factor goes into the scores'.
        "factor": (spec.scale if cap is None else cap) * math.log2(math.e),
        "bend": 0.0 if cap is None else spec.scale / cap,
    }


def fit(context: PartContext) -> Fit | Unfit:
    """GPUs from compute capability 8.0 on, heads of up to 256 dimensions in eights; on CPUs the algorithm alone."""
    engine = context.engine
    if not engine.device.startswith("cuda"):
        return Fit(15, "the kernels' algorithm in torch ops")
    if importlib.util.find_spec("triton") is None:
        return Unfit("its kernels are in Triton, which is not installed")
    capability = torch.cuda.get_device_capability(torch.device(engine.device))
    if capability < _CAPABILITY:
        have, need = (".".join(map(str, one)) for one in (capability, _CAPABILITY))
        return Unfit(f"its kernels need compute capability {need}, and {engine.device} has {have}")
    for index, layer in enumerate(context.spec.layers):
        head_dim = layer.attention.head_dim
        if head_dim % _PIECE or head_dim > _MAX_HEAD_DIM:
            return Unfit(
                f"its kernels read heads of up to {_MAX_HEAD_DIM} dimensions, a multiple of {_PIECE}, and those of "
                f"layer {index} have {head_dim}"
            )
    return Fit(90, "flash attention over pages; long rows are split, at fixed keys")


def build(context: PartContext) -> FlashAttention | OnlineAttention:
    """Make the backend of the engine's device."""
    engine = context.engine
    if not engine.device.startswith("cuda"):
        return OnlineAttention()
    layers = tuple(dict.fromkeys(layer.attention for layer in context.spec.layers))
    roomy = _is_roomy(torch.device(engine.device))
    return FlashAttention(engine.dtype, layers, splits=engine.invariance != "bitwise", roomy=roomy)


def _is_roomy(device: torch.device) -> bool:
    """Whether a block has the shared memory of large tiles, and the tensor cores of capability 9.0 that read it."""
    from intarsia_flash.kernels import ROOM

    facts = torch.cuda.get_device_properties(device)
    # What a block can have on request; torch names it from some version on.
    shared = getattr(facts, "shared_memory_per_block_optin", facts.shared_memory_per_multiprocessor)
    return bool(facts.major >= 9 and shared >= ROOM)
