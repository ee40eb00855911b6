"""Which forms of the Triton programs are launched: one table, which is compiled ahead of time too.

Tiles are chosen by device, dtype and head dim alone, never by a batch, whose rows would then change each other's bits.
Head dims between those of the table run in the next larger one, its loads masked: no more memory is read.

Stages are many, since a page's number is loaded before the page: Triton shares them out between the two. With 3, keys
and values of the next tile would be on their way while this one is computed; with 5, those of the next two.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Literal, TypeAlias

from attrs import evolve, frozen

from intarsia.gpu_kernels import TYPES, Specialisation, table
from intarsia_flash.programs import attend_tile, merge_splits

Kind: TypeAlias = Literal["prefill", "decode"]
#: Keys of a split. A row's bits rest on it, so it is no option; small enough for one row of some thousand keys to fill
#: a GPU, large enough for partial results to be a few hundredths of what is read.
SPLIT = 256
#: Packed queries of a tile that decodes: the least that tensor cores take.
DECODED_TILE = 16
#: Splits, and dimensions, that `merge_splits` takes at a time.
MERGED_SPLITS, MERGED_DIMS = 16, 64
#: Bytes of shared memory of a block that forms take at most: on roomy devices, and on all from capability 8.0 on.
ROOM, LEAST_ROOM = 160 << 10, 99 << 10

#: Arguments of the programs, in the order of launches. Pointers to queries and to entries differ from form to form.
_POINTERS = {"queries": "query", "out": "query", "keys": "entry", "values": "entry", "key_scales": "fp32"}
_POINTERS |= {"value_scales": "fp32", "pages": "i32", "items": "i32", "partials": "fp32", "sums": "fp32"}
_STRIDES = ("query_token", "query_head", "out_token", "out_head", "page_stride", "kv_head_stride", "slot_stride")
_SCALE_STRIDES = ("scale_page", "scale_head", "scale_slot")
_COUNTS = ("group_size", "head_pieces", "page_size", "page_magic", "page_shift", "window", "num_slots")
_FACTORS = ("factor", "bend")
_MERGED = ("out", "items", "partials", "sums", "out_token", "out_head", "group_size", "head_pieces", "num_slots")


def _signature(dtype: str, entry: str) -> dict[str, str]:
    """Return argument -> type."""
    stand = {"query": dtype, "entry": entry}
    return {
        **{name: f"*{stand.get(kind, kind)}" for name, kind in _POINTERS.items()},
        **dict.fromkeys((*_STRIDES, *_SCALE_STRIDES, *_COUNTS), "i32"),
        **dict.fromkeys(_FACTORS, "fp32"),
    }


@frozen(kw_only=True)
class Tile:
    """How `attend_tile` is launched for some heads.

    Attributes:
        kind: `prefill` takes a row's keys at once, `decode` in splits.
        dtype: of queries, in Triton's word.
        entry: of the cache's numbers.
        head_dim: the widest head that it takes.
        queries, keys: packed queries and keys of a tile.
        roomy: whether it is for devices with ROOM; the others are for those without.
    """

    kind: Kind
    dtype: str
    entry: str
    head_dim: int
    queries: int
    keys: int
    num_warps: int
    num_stages: int
    roomy: bool

    def form(self) -> Specialisation:
        """Return what is compiled and launched."""
        entry = [] if self.entry == self.dtype else [self.entry]
        names = [self.dtype, *entry, f"d{self.head_dim}", f"{self.queries}x{self.keys}", f"s{self.num_stages}"]
        types = _signature(self.dtype, self.entry)
        absent = [] if self.entry == "i8" else ["key_scales", "value_scales"]
        absent += [] if self.kind == "decode" else ["partials", "sums"]
        for name in absent:
            del types[name]
        return Specialisation(
            name=f"{self.kind}[{', '.join(names)}]",
            kernel=attend_tile,
            signature=types,
            constants={
                **dict.fromkeys(absent),
                "M": self.queries,
                "N": self.keys,
                "D": self.head_dim,
                "SPLIT": SPLIT if self.kind == "decode" else 0,
            },
            aligned=tuple(n for n, t in types.items() if t.startswith("*") and not n.endswith("_scales")),
            num_warps=self.num_warps,
            num_stages=self.num_stages,
            capabilities=(90, 100) if self.roomy else (80,),
        )


_Size: TypeAlias = tuple[int, int, int, int, int]
#: (kind, entry) -> (head dim, packed queries, keys, warps, stages), for devices without ROOM and with it. Entries of 16
#: bits are those of bf16 and fp16 alike. fp32 is multiplied in registers, by the plain units.
_SIZES: Mapping[tuple[Kind, str], tuple[list[_Size], list[_Size]]] = {
    ("prefill", "16 bits"): (
        [(64, 128, 64, 8, 3), (128, 128, 32, 8, 5), (256, 64, 32, 8, 3)],
        [(64, 128, 64, 8, 5), (128, 128, 64, 8, 5), (256, 64, 32, 8, 5)],
    ),
    ("prefill", "i8"): (
        [(128, 128, 16, 8, 3), (256, 64, 16, 8, 3)],
        [(128, 128, 32, 8, 5), (256, 64, 32, 8, 5)],
    ),
    ("prefill", "fp32"): ([(128, 16, 16, 4, 3), (256, 16, 16, 4, 2)],) * 2,
    ("decode", "16 bits"): ([(128, 16, 32, 4, 7), (256, 16, 32, 4, 5)],) * 2,
    ("decode", "i8"): ([(128, 16, 32, 4, 5), (256, 16, 16, 4, 5)],) * 2,
    ("decode", "fp32"): ([(128, 16, 32, 4, 2), (256, 16, 16, 4, 2)],) * 2,
}
#: What queries are computed in, and what entries each reads.
ENTRIES: Mapping[str, tuple[str, ...]] = {"bf16": ("bf16", "i8"), "fp16": ("fp16", "i8"), "fp32": ("fp32",)}


def _tiles() -> list[Tile]:
    return [
        Tile(
            kind=kind,
            dtype=dtype,
            entry=entry,
            head_dim=head_dim,
            queries=queries,
            keys=keys,
            num_warps=num_warps,
            num_stages=num_stages,
            roomy=roomy,
        )
        for dtype, entries in ENTRIES.items()
        for entry in entries
        for (kind, width), by_room in _SIZES.items()
        if width == (entry if entry in ("i8", "fp32") else "16 bits")
        for roomy, sizes in zip((False, True), by_room, strict=True)
        for head_dim, queries, keys, num_warps, num_stages in sizes
    ]


TILES: tuple[Tile, ...] = tuple(_tiles())


def _forms() -> dict[Tile, Specialisation]:
    """Tiles of either kind of device that are alike share a form."""
    forms: dict[str, Specialisation] = {}
    for form in (tile.form() for tile in TILES):
        known = forms.get(form.name)
        both = form.capabilities if known is None else (*known.capabilities, *form.capabilities)
        forms[form.name] = evolve(form, capabilities=both)
    return {tile: forms[tile.form().name] for tile in TILES}


FORMS: Mapping[Tile, Specialisation] = _forms()


def _merge(dtype: str) -> Specialisation:
    every = _signature(dtype, dtype)
    types = {name: every[name] for name in _MERGED}
    return Specialisation(
        name=f"merge[{dtype}]",
        kernel=merge_splits,
        signature=types,
        constants={"M": DECODED_TILE, "D": MERGED_DIMS, "S": MERGED_SPLITS},
        aligned=tuple(name for name, kind in types.items() if kind.startswith("*")),
    )


#: By torch's name of the dtype.
MERGES: Mapping[str, Specialisation] = {name: _merge(TYPES[name]) for name in ("bfloat16", "float16", "float32")}


def specialisations() -> list[Specialisation]:
    """Return every form that is launched."""
    distinct = {form.name: form for form in FORMS.values()}
    return list(table([*distinct.values(), *MERGES.values()]).values())


@cache
def tile_for(kind: Kind, dtype: str, entry: str, head_dim: int, *, roomy: bool) -> Tile:
    """Return the tile for heads of a model on a device; dtypes are torch's names. There must be one."""
    wanted = (kind, TYPES[dtype], TYPES[entry], roomy)
    fitting = [
        tile
        for tile in TILES
        if (tile.kind, tile.dtype, tile.entry, tile.roomy) == wanted and tile.head_dim >= head_dim
    ]
    return min(fitting, key=lambda tile: tile.head_dim)
