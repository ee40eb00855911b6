"""The runner `cpu_fused`: a layer range in one native call with one parallel region.

Shape legend: T tokens, R rows, L rows of logits, E embed, V vocab.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import Any

import torch
from attrs import define, field

from intarsia.protocols import CacheStorage, LayerCache, RunnerContext
from intarsia.types import CacheLayout, DecoderSpec, Fit, ForwardBatch, MoeSpec, Unfit
from intarsia_cpu.build import compiler, load, unavailable
from intarsia_cpu.entries import Scales
from intarsia_cpu.linears import FORMATS, FORMATS_READ
from intarsia_cpu.plan import DTYPES, MIRRORS, Batch, Cache, Plan, plan

_ORDER = "PKSD"
#: What a step's time goes to, in the order of `step::Phase`.
PHASES = ("embed", "norm", "qkv", "place", "attention", "convert", "out", "up", "down", "residual", "head")
_MAX_HEAD_DIM = 256


def _load() -> ctypes.CDLL:
    """Return the native step; raise PluginError where it cannot be had."""
    library = load()
    sizes = (ctypes.c_int64 * len(MIRRORS))()
    library.intarsia_step_sizes(sizes)
    assert list(sizes) == [ctypes.sizeof(mirror) for mirror in MIRRORS]
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    for name, arguments, result in (
        ("bytes", (pointer, number, number, number), number),
        ("head_bytes", (pointer, number), number),
        ("run", (pointer, pointer, number, number, pointer, pointer, number, pointer), None),
        ("logits", (pointer, pointer, pointer, number, pointer, pointer, number, pointer), None),
        ("likeliest_bytes", (pointer, number, number), number),
        (
            "likeliest",
            (pointer, pointer, pointer, number, number, pointer, pointer, pointer, number, pointer),
            None,
        ),
    ):
        function = getattr(library, f"intarsia_step_{name}")
        function.argtypes, function.restype = arguments, result
    return library


def _address(numbers: array[int]) -> int:
    return numbers.buffer_info()[0]


@define(eq=False)
class FusedRunner:
    """Runs layers by the native step. The residual stream is fp32, whatever the dtype of activations.

    Not for several threads at once: its work memory is reused from step to step.
    """

    spec: DecoderSpec
    layout: CacheLayout
    plan: Plan = field(repr=False)
    num_threads: int
    _library: ctypes.CDLL = field(factory=_load, repr=False)
    _memory: torch.Tensor = field(factory=lambda: torch.empty(0, dtype=torch.uint8), init=False, repr=False)
    _cache: CacheStorage | None = field(default=None, init=False, repr=False)
    _caches: Any = field(default=None, init=False, repr=False)
    _seconds: Any = field(default=None, init=False, repr=False)

    @classmethod
    def build(cls, context: RunnerContext) -> FusedRunner:
        """Lay the loaded weights out."""
        engine = context.engine
        assert engine.max_model_len is not None
        made = plan(context.spec, context.layout, context.weights, engine.dtype, engine.max_model_len)
        return cls(context.spec, context.layout, made, engine.threads or torch.get_num_threads())

    def prepare(self, batch: ForwardBatch, layout: CacheLayout) -> None:
        """Prepare nothing, in the attention backend's place: the native step lays its attention out itself."""

    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a range of layers from the embedding (range starts at 0) or from `hidden_TE`; return fp32 (T, E).

        In the last of them only tokens that are read go on behind their keys and values.
        """
        num_tokens = len(batch.positions_T)
        if hidden_TE is None:
            assert layers.start == 0
            hidden_TE = torch.empty(num_tokens, self.spec.embed_dim)
            ids = batch.ids_T.data_ptr()
        else:
            hidden_TE, ids = hidden_TE.to(torch.float32, copy=True).contiguous(), None
        if not num_tokens:
            return hidden_TE
        native, kept = self._native(batch, ids, cache)
        model = ctypes.addressof(self.plan.model)
        memory = self._work(self._library.intarsia_step_bytes(model, num_tokens, native.num_reads, self.num_threads))
        self._library.intarsia_step_run(
            model,
            ctypes.addressof(native),
            layers.start,
            layers.stop,
            hidden_TE.data_ptr(),
            memory,
            self.num_threads,
            self._seconds,
        )
        del kept
        return hidden_TE

    def _native(self, batch: ForwardBatch, ids: int | None, cache: CacheStorage) -> tuple[Batch, Any]:
        """Return a batch as the native step reads it, and what must live as long."""
        bounds, starts = array("i", batch.bounds), array("i", batch.starts)
        tables = [array("i", chain.from_iterable(group)) for group in batch.pages]
        limits = [array("i", accumulate(map(len, group), initial=0)) for group in batch.pages]
        slots = _pointers(slots.data_ptr() for slots in batch.slots_T)
        pages, page_bounds = _pointers(map(_address, tables)), _pointers(map(_address, limits))
        native = Batch(
            ids=ids,
            positions=batch.positions_T.data_ptr(),
            slots=ctypes.addressof(slots),
            bounds=_address(bounds),
            starts=_address(starts),
            pages=ctypes.addressof(pages),
            page_bounds=ctypes.addressof(page_bounds),
            caches=self._cache_of(cache),
            reads=None if batch.read_L is None else batch.read_L.data_ptr(),
            num_tokens=len(batch.positions_T),
            num_rows=batch.num_rows,
            num_reads=len(batch.positions_T if batch.read_L is None else batch.read_L),
        )
        return native, (bounds, starts, tables, limits, slots, pages, page_bounds)

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of some tokens."""
        hidden_TE, rows_L = hidden_TE.float().contiguous(), rows_L.contiguous()
        found = torch.empty(len(rows_L), self.spec.vocab_size)
        model = ctypes.addressof(self.plan.model)
        memory = self._work(self._library.intarsia_step_head_bytes(model, len(rows_L)))
        self._library.intarsia_step_logits(
            model,
            hidden_TE.data_ptr(),
            rows_L.data_ptr(),
            len(rows_L),
            found.data_ptr(),
            memory,
            self.num_threads,
            self._seconds,
        )
        return found

    def likeliest(
        self, hidden_TE: torch.Tensor, rows_L: torch.Tensor, num_ids: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ids (L,) of some tokens' highest logits, and these (L,); see `LikeliestRunner`."""
        hidden_TE, rows_L = hidden_TE.float().contiguous(), rows_L.contiguous()
        ids_L, best_L = torch.empty(len(rows_L), dtype=torch.int64), torch.empty(len(rows_L))
        model = ctypes.addressof(self.plan.model)
        memory = self._work(self._library.intarsia_step_likeliest_bytes(model, len(rows_L), self.num_threads))
        self._library.intarsia_step_likeliest(
            model,
            hidden_TE.data_ptr(),
            rows_L.data_ptr(),
            len(rows_L),
            num_ids,
            ids_L.data_ptr(),
            best_L.data_ptr(),
            memory,
            self.num_threads,
            self._seconds,
        )
        return ids_L, best_L

    def measure(self) -> Mapping[str, float]:
        """Return the seconds that each phase took since the last call, waits included; from the first call on."""
        found = dict(zip(PHASES, self._seconds or (), strict=False))
        self._seconds = (ctypes.c_double * len(PHASES))()
        return found

    def _work(self, num_bytes: int) -> int:
        """Return the address, at a cache line, of so many bytes."""
        if self._memory.numel() < num_bytes + 64:
            self._memory = torch.empty(num_bytes + 64, dtype=torch.uint8)
        return -(-self._memory.data_ptr() // 64) * 64

    def _cache_of(self, cache: CacheStorage) -> int:
        """Return the address of the layers' tensors, looked up once a cache."""
        if cache is not self._cache:
            layers = [cache.layer(index) for index in range(self.spec.num_layers)]
            self._caches = (Cache * len(layers))(*map(_cache, layers))
            self._cache = cache
        return ctypes.addressof(self._caches)


def _cache(layer: LayerCache) -> Cache:
    """Return a layer's tensors, in the order PKSD, as the native step reads them."""
    scales = Scales.of(layer)
    page_stride, head_stride, slot_stride, _ = layer.keys.stride()
    return Cache(
        keys=layer.keys.data_ptr(),
        values=layer.values.data_ptr(),
        key_scales=scales.keys,
        value_scales=scales.values,
        page_stride=page_stride,
        head_stride=head_stride,
        slot_stride=slot_stride,
        scale_page_stride=scales.strides[0],
        scale_head_stride=scales.strides[1],
        scale_slot_stride=scales.strides[2],
    )


def _pointers(addresses: Iterable[int]) -> ctypes.Array[ctypes.c_void_p]:
    listed = list(addresses)
    return (ctypes.c_void_p * len(listed))(*listed)


def fit(context: RunnerContext) -> Fit | Unfit:
    """Dense models in fp32 and bf16 on CPUs with a compiler, over a cache that it reads."""
    reason = _refusal(context)
    return Unfit(reason) if reason else Fit(90, "a whole step in one native call; bitwise whatever the batch")


def _refusal(context: RunnerContext) -> str | None:
    engine, layout = context.engine, context.layout
    if engine.device != "cpu":
        return f"it is for CPUs, and the engine runs on {engine.device}"
    if engine.dtype not in DTYPES:
        return f"it computes in {' or '.join(DTYPES)}, and the engine runs {engine.dtype}"
    # Kernels pack what they read; what they read is what counts.
    formats = {name[len("linear[") : -1] for name in context.ops.choices if name.startswith("linear[")}
    if unread := sorted(formats - FORMATS):
        return f"it does not read weights in the format {', '.join(unread)}; it reads {FORMATS_READ}"
    for index, layer in enumerate(context.spec.layers):
        if isinstance(layer.mlp, MoeSpec):
            return f"layer {index} is a mixture of {layer.mlp.num_experts} experts, and it runs dense layers"
        if layer.attention.head_dim > _MAX_HEAD_DIM:
            return f"layer {index} has heads of {layer.attention.head_dim}, and it runs up to {_MAX_HEAD_DIM}"
    # Composition tries several caches and tells the first refusal; and what is refused need not be compiled.
    if compiler() is None:
        return unavailable()
    if layout.order != _ORDER:
        return f"it reads caches in the order {_ORDER}, not {layout.order}"
    if layout.format not in (engine.dtype, "int8"):
        return f"it reads caches in int8 or the engine's dtype, {engine.dtype}, not in {layout.format}"
    return unavailable()


def build(context: RunnerContext) -> FusedRunner:
    """Make the runner around loaded weights."""
    return FusedRunner.build(context)
