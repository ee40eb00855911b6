"""The named ops between matrix products and attention, each in one native call, bitwise the same in any batch.

Shape legend: T tokens, E embed, H heads, K kv heads, D head dim, h half of the rotated dims, F ffn, L rows of logits,
V vocab.
"""

from __future__ import annotations

import ctypes
from typing import Any, ClassVar

import torch
from attrs import field, frozen

from intarsia.protocols import Kernel, LayerCache
from intarsia.types import Invariance, Weight
from intarsia_cpu.build import load
from intarsia_cpu.entries import ENTRIES, Scales, entry_of

_NAMES = ("float32", "bfloat16")
_SILU, _GELU_TANH, _SOFT_CAP = range(3)
#: Numbers from which an op is worth a second thread.
_GRAIN = 1 << 13


def _fields(pointers: str, numbers: str, floats: str, flags: str) -> list[tuple[str, Any]]:
    kinds = ((pointers, ctypes.c_void_p), (numbers, ctypes.c_int64), (floats, ctypes.c_float), (flags, ctypes.c_int32))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Struct(ctypes.Structure):
    """A structure of `src/rows.h`, field by field; `op` is the native function that reads it."""

    op: ClassVar[str]


class _Norm(_Struct):
    op = "norm"
    _fields_ = _fields(
        "x weight bias out", "outer inner outer_stride inner_stride width", "eps", "x_bf16 weight_bf16 centred"
    )


class _AddNorm(_Struct):
    op = "add_norm"
    _fields_ = _fields(
        "x residual weight out total", "num_rows x_stride residual_stride width", "eps", "x_bf16 weight_bf16"
    )


class _Rope(_Struct):
    op = "rope"
    _fields_ = _fields(
        "x cos sin out", "num_tokens num_heads token_stride head_stride head_dim half", "", "x_bf16 angles_bf16"
    )


class _Activate(_Struct):
    op = "activate"
    _fields_ = (
        *_fields("x out", "num_rows stride width", "", "activation"),
        *_fields("", "", "cap", "gated x_bf16"),
    )


class _Embedding(_Struct):
    op = "embedding"
    _fields_ = _fields("ids table out", "num_tokens num_ids width", "", "table_bf16 out_bf16")


class _Argmax(_Struct):
    op = "argmax"
    _fields_ = _fields("x out", "num_rows stride width", "", "")


class _CacheWrite(_Struct):
    op = "cache_write"
    _fields_ = _fields(
        "keys values key_pages value_pages key_scales value_scales slots",
        "key_token_stride key_head_stride value_token_stride value_head_stride page_stride kv_head_stride slot_stride "
        "scale_page_stride scale_head_stride scale_slot_stride "
        "num_tokens num_kv_heads head_dim page_size",
        "",
        "x_bf16 entry",
    )


_STRUCTS = (_Norm, _AddNorm, _Rope, _Activate, _Embedding, _Argmax, _CacheWrite)


def _bf16(tensor: torch.Tensor) -> bool:
    assert tensor.dtype in (torch.float32, torch.bfloat16), tensor.dtype
    return tensor.dtype == torch.bfloat16


def _dense_rows(tensor: torch.Tensor) -> torch.Tensor:
    """With its last axis in one piece."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()


@frozen(eq=False)
class RowOps:
    """The ops over one compiled library, with the signatures of `intarsia.ops`."""

    library: ctypes.CDLL = field(factory=load, repr=False)

    def __attrs_post_init__(self) -> None:
        for struct in _STRUCTS:
            assert getattr(self.library, f"intarsia_{struct.op}_bytes")() == ctypes.sizeof(struct), struct

    def _run(self, args: _Struct, size: int) -> None:
        """Run over `size` numbers, in as many threads as that is worth. No bit of a result depends on it."""
        num_threads = min(torch.get_num_threads(), 1 + size // _GRAIN)
        getattr(self.library, f"intarsia_{args.op}")(ctypes.byref(args), num_threads)

    def rms_norm(self, x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
        """Return x / rms(x) * weight; an axis of heads may stand before the last."""
        return self._norm(x_TE, weight_E, None, eps, centred=False)

    def layer_norm(
        self, x_TE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Return (x - mean) / deviation * weight + bias."""
        return self._norm(x_TE, weight_E, bias_E, eps, centred=True)

    def _norm(
        self, x: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor | None, eps: float, *, centred: bool
    ) -> torch.Tensor:
        out = torch.empty(x.shape, dtype=x.dtype)
        x_THE = _dense_rows(x if x.dim() == 3 else x.reshape(-1, 1, x.shape[-1]))
        weight_E = weight_E.contiguous()
        bias_E = None if bias_E is None else bias_E.to(weight_E.dtype).contiguous()
        args = _Norm(
            x=x_THE.data_ptr(),
            weight=weight_E.data_ptr(),
            bias=None if bias_E is None else bias_E.data_ptr(),
            out=out.data_ptr(),
            outer=x_THE.shape[0],
            inner=x_THE.shape[1],
            outer_stride=x_THE.stride(0),
            inner_stride=x_THE.stride(1),
            width=x_THE.shape[2],
            eps=eps,
            x_bf16=_bf16(x_THE),
            weight_bf16=_bf16(weight_E),
            centred=centred,
        )
        self._run(args, x.numel())
        return out

    def add_rms_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual and return (its norm, the sum)."""
        x_TE, residual_TE, weight_E = _dense_rows(x_TE), _dense_rows(residual_TE), weight_E.contiguous()
        out, total = (torch.empty(x_TE.shape, dtype=x_TE.dtype) for _ in range(2))
        assert x_TE.dim() == 2 and residual_TE.shape == x_TE.shape and residual_TE.dtype == x_TE.dtype
        args = _AddNorm(
            x=x_TE.data_ptr(),
            residual=residual_TE.data_ptr(),
            weight=weight_E.data_ptr(),
            out=out.data_ptr(),
            total=total.data_ptr(),
            num_rows=x_TE.shape[0],
            x_stride=x_TE.stride(0),
            residual_stride=residual_TE.stride(0),
            width=x_TE.shape[1],
            eps=eps,
            x_bf16=_bf16(x_TE),
            weight_bf16=_bf16(weight_E),
        )
        self._run(args, x_TE.numel())
        return out, total

    def rope(self, x_THD: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
        """Rotate the pairs (i, i + h) of the first 2h dimensions; the others pass."""
        x_THD, cos_T1h, sin_T1h = _dense_rows(x_THD), cos_T1h.contiguous(), sin_T1h.contiguous()
        out = torch.empty(x_THD.shape, dtype=x_THD.dtype)
        assert cos_T1h.dtype == sin_T1h.dtype and 2 * cos_T1h.shape[-1] <= x_THD.shape[2]
        args = _Rope(
            x=x_THD.data_ptr(),
            cos=cos_T1h.data_ptr(),
            sin=sin_T1h.data_ptr(),
            out=out.data_ptr(),
            num_tokens=x_THD.shape[0],
            num_heads=x_THD.shape[1],
            token_stride=x_THD.stride(0),
            head_stride=x_THD.stride(1),
            head_dim=x_THD.shape[2],
            half=cos_T1h.shape[-1],
            x_bf16=_bf16(x_THD),
            angles_bf16=_bf16(cos_T1h),
        )
        self._run(args, x_THD.numel())
        return out

    def silu_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """Return silu(gate) * up, where gate is the first half of the features and up the second."""
        return self._activate(gate_up_T2F, _SILU, gated=True)

    def gelu_tanh_mul(self, gate_up_T2F: torch.Tensor) -> torch.Tensor:
        """Return gelu(gate) * up, as `silu_mul`."""
        return self._activate(gate_up_T2F, _GELU_TANH, gated=True)

    def gelu_tanh(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Return gelu(x) in its tanh form."""
        return self._activate(x_TF, _GELU_TANH)

    def soft_cap(self, x_LV: torch.Tensor, cap: float) -> torch.Tensor:
        """Return cap * tanh(x / cap)."""
        return self._activate(x_LV, _SOFT_CAP, cap=cap)

    def _activate(self, x_TF: torch.Tensor, activation: int, *, gated: bool = False, cap: float = 1.0) -> torch.Tensor:
        x_TF = _dense_rows(x_TF)
        width = x_TF.shape[1] // 2 if gated else x_TF.shape[1]
        out = torch.empty((x_TF.shape[0], width), dtype=x_TF.dtype)
        args = _Activate(
            x=x_TF.data_ptr(),
            out=out.data_ptr(),
            num_rows=x_TF.shape[0],
            stride=x_TF.stride(0),
            width=width,
            activation=activation,
            cap=cap,
            gated=gated,
            x_bf16=_bf16(x_TF),
        )
        self._run(args, 4 * x_TF.numel())
        return out

    def embedding(self, ids_T: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        """Return rows (T, E) of a dense (V, E) weight; raise IndexError for an id that it does not have."""
        table_VE, ids_T = weight.tensors["weight"].contiguous(), ids_T.to(torch.int64).contiguous()
        num_ids = table_VE.shape[0]
        if ids_T.numel() and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < num_ids:
            raise IndexError(f"a token id is not in 0..{num_ids - 1}")
        out = torch.empty((len(ids_T), table_VE.shape[1]), dtype=dtype)
        args = _Embedding(
            ids=ids_T.data_ptr(),
            table=table_VE.data_ptr(),
            out=out.data_ptr(),
            num_tokens=len(ids_T),
            num_ids=num_ids,
            width=table_VE.shape[1],
            table_bf16=_bf16(table_VE),
            out_bf16=_bf16(out),
        )
        self._run(args, out.numel())
        return out

    def argmax(self, logits_LV: torch.Tensor) -> torch.Tensor:
        """Return the (L,) indices of each row's largest fp32 logit, the first of equals; of the first NaN, if any."""
        logits_LV = _dense_rows(logits_LV)
        assert logits_LV.dtype == torch.float32
        out = torch.empty(len(logits_LV), dtype=torch.int64)
        args = _Argmax(
            x=logits_LV.data_ptr(),
            out=out.data_ptr(),
            num_rows=len(logits_LV),
            stride=logits_LV.stride(0),
            width=logits_LV.shape[1],
        )
        self._run(args, logits_LV.numel())
        return out

    def cache_write(
        self,
        keys_TKD: torch.Tensor,
        values_TKD: torch.Tensor,
        cache: LayerCache,
        slots_T: torch.Tensor,
        order: str,
    ) -> None:
        """Write each token's key and value to its slot, rounded to the cache's format; slot -1 is written nowhere."""
        keys_TKD, values_TKD, slots_T = _dense_rows(keys_TKD), _dense_rows(values_TKD), slots_T.contiguous()
        stored, (slot, head) = cache.keys, ((1, 2) if order == "PSKD" else (2, 1))
        assert stored.stride() == cache.values.stride() and stored.stride(-1) == 1
        assert keys_TKD.dtype == values_TKD.dtype
        scales = Scales.of(cache)
        args = _CacheWrite(
            keys=keys_TKD.data_ptr(),
            values=values_TKD.data_ptr(),
            key_pages=stored.data_ptr(),
            value_pages=cache.values.data_ptr(),
            key_scales=scales.keys,
            value_scales=scales.values,
            slots=slots_T.data_ptr(),
            key_token_stride=keys_TKD.stride(0),
            key_head_stride=keys_TKD.stride(1),
            value_token_stride=values_TKD.stride(0),
            value_head_stride=values_TKD.stride(1),
            page_stride=stored.stride(0),
            kv_head_stride=stored.stride(head),
            slot_stride=stored.stride(slot),
            scale_page_stride=scales.strides[0],
            scale_head_stride=scales.strides[head],
            scale_slot_stride=scales.strides[slot],
            num_tokens=keys_TKD.shape[0],
            num_kv_heads=keys_TKD.shape[1],
            head_dim=keys_TKD.shape[2],
            page_size=stored.shape[slot],
            x_bf16=_bf16(keys_TKD),
            entry=entry_of(stored),
        )
        self._run(args, 2 * keys_TKD.numel())


def row_kernels(ops: RowOps) -> list[Kernel]:
    """The ops as kernels of the names that models call."""
    promised: dict[str, Invariance] = dict.fromkeys(_NAMES, "bitwise")
    facts: dict[str, dict[str, Any]] = {"embedding": {"formats": frozenset({"dense"})}}
    facts["cache_write"] = {"orders": frozenset({"PKSD", "PSKD"}), "formats": frozenset(ENTRIES)}
    names = ("rms_norm", "add_rms_norm", "layer_norm", "rope", "silu_mul", "gelu_tanh_mul", "gelu_tanh", "soft_cap")
    return [
        Kernel(op=name, call=getattr(ops, name), dtypes=frozenset(_NAMES), invariance=promised, **facts.get(name, {}))
        for name in (*names, "embedding", "cache_write")
    ]
