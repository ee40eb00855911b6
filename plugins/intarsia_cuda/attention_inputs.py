"""What lies between the product for queries, keys and values and attention, in one kernel: QK norm, RoPE, cache write.

A program takes a few heads, of one token or several: queries, keys and values are read once; queries are written to a
tensor of their own, keys and values to their slots. `rope` and `cache_write` are the same kernel without the rest.

A head is two halves, whose numbers rotate in pairs, and what is behind them and does not. Between what are two ops of
torch, numbers are rounded to their dtype, as torch rounds them. A head's bits depend on nothing but the head.

Shape legend: T tokens, H heads, K kv heads, N = H + 2 K heads, D head dim, h half of the rotated dims, P pages,
S slots a page.
"""

# Triton has no type hints.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from intarsia.gpu_kernels import Specialisation, table
from intarsia.protocols import LayerCache
from intarsia_cuda.forms import DTYPES, dense_rows, form, name_of, pointer
from intarsia_cuda.rounding import int8_numbers, int8_scale, magnitudes, rounded

#: Largest half that a form holds, with twice as much behind the halves -> heads a program.
_ROWS = {64: 8, 128: 4}
#: The largest head dim.
MAX_HEAD_DIM = 2 * max(_ROWS)


@triton.jit
def _loaded(
    q_at: tl.tensor, k_at: tl.tensor, v_at: tl.tensor, is_q: tl.tensor, is_k: tl.tensor, is_v: tl.tensor
) -> tl.tensor:
    """Return what lies behind the pointers of each row's kind, in the dtype it has; 0 where a row is of none.

    A load a kind, each masked: of pointers that are selected Triton does not know how they are aligned, and would load
    number by number.
    """
    q = tl.load(q_at, mask=is_q, other=0.0)
    k = tl.load(k_at, mask=is_k, other=0.0)
    v = tl.load(v_at, mask=is_v, other=0.0)
    return tl.where(is_q, q, tl.where(is_k, k, v))


@triton.jit
def _normed(
    x: tl.tensor,
    factor: tl.tensor,
    q_weight_at: tl.tensor,
    k_weight_at: tl.tensor,
    is_q: tl.tensor,
    is_k: tl.tensor,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Return queries and keys * factor * weight with the reference's roundings, and values as they are."""
    q_weight = tl.load(q_weight_at, mask=is_q, other=0.0)
    weight = tl.where(is_q, q_weight, tl.load(k_weight_at, mask=is_k, other=0.0))
    product = rounded(rounded(x * factor, weight.dtype) * weight.to(tl.float32), weight.dtype)
    return tl.where(is_q | is_k, rounded(product, dtype), x)


@triton.jit
def _store(
    at: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    rest: tl.tensor,
    lows: tl.tensor,
    rests: tl.tensor,
    half: tl.tensor,
    num_rest: tl.tensor,
    mask: tl.tensor,
    kind: tl.constexpr,
) -> None:
    """Write the parts of some heads behind their pointers."""
    tl.store(at + lows, first.to(kind), mask=mask & (lows < half))
    tl.store(at + half + lows, second.to(kind), mask=mask & (lows < half))
    if num_rest > 0:
        tl.store(at + 2 * half + rests, rest.to(kind), mask=mask & (rests < num_rest))


@triton.jit(
    do_not_specialize=[
        *("scale_page_stride", "scale_slot_stride", "scale_head_stride"),
        *("num_tokens", "num_heads", "num_kv_heads", "num_rest", "page_size", "norms", "rotates"),
    ]
)
def attention_inputs_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    out_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    key_scales_ptr: tl.tensor,
    value_scales_ptr: tl.tensor,
    q_token_stride: tl.tensor,
    q_head_stride: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    page_stride: tl.tensor,
    slot_stride: tl.tensor,
    kv_head_stride: tl.tensor,
    scale_page_stride: tl.tensor,
    scale_slot_stride: tl.tensor,
    scale_head_stride: tl.tensor,
    num_tokens: tl.tensor,
    num_heads: tl.tensor,
    num_kv_heads: tl.tensor,
    half: tl.tensor,
    num_rest: tl.tensor,
    page_size: tl.tensor,
    eps: tl.tensor,
    norms: tl.tensor,
    rotates: tl.tensor,
    INT8: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Treat `ROWS` heads, counted through a token's queries, keys and values and then through tokens."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, head = rows // (num_heads + 2 * num_kv_heads), rows % (num_heads + 2 * num_kv_heads)
    is_there = token < num_tokens
    is_q = (is_there & (head < num_heads))[:, None]
    is_k = (is_there & (head >= num_heads) & (head < num_heads + num_kv_heads))[:, None]
    is_v = (is_there & (head >= num_heads + num_kv_heads))[:, None]
    key_head, value_head = head - num_heads, head - num_heads - num_kv_heads
    lows, rests = tl.arange(0, BLOCK)[None, :], tl.arange(0, 2 * BLOCK)[None, :]
    in_half, in_rest = lows < half, rests < num_rest

    q_at = q_ptr + (token * q_token_stride + head * q_head_stride)[:, None]
    k_at = k_ptr + (token * k_token_stride + key_head * k_head_stride)[:, None]
    v_at = v_ptr + (token * v_token_stride + value_head * v_head_stride)[:, None]
    kinds = (is_q & in_half, is_k & in_half, is_v & in_half)
    first = _loaded(q_at + lows, k_at + lows, v_at + lows, kinds[0], kinds[1], kinds[2]).to(tl.float32)
    highs = half + lows
    second = _loaded(q_at + highs, k_at + highs, v_at + highs, kinds[0], kinds[1], kinds[2]).to(tl.float32)
    rest = tl.zeros((ROWS, 2 * BLOCK), tl.float32)
    if num_rest > 0:
        at = 2 * half + rests
        rest = _loaded(q_at + at, k_at + at, v_at + at, is_q & in_rest, is_k & in_rest, is_v & in_rest).to(tl.float32)

    if norms != 0:
        squares = tl.sum(first * first + second * second, 1) + tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / (2 * half + num_rest) + eps)[:, None]
        first = _normed(first, factor, q_weight_ptr + lows, k_weight_ptr + lows, kinds[0], kinds[1], dtype)
        second = _normed(second, factor, q_weight_ptr + highs, k_weight_ptr + highs, kinds[0], kinds[1], dtype)
        if num_rest > 0:
            q_rest, k_rest = q_weight_ptr + 2 * half + rests, k_weight_ptr + 2 * half + rests
            rest = _normed(rest, factor, q_rest, k_rest, is_q & in_rest, is_k & in_rest, dtype)
    if rotates != 0:
        turns = (is_q | is_k) & in_half
        angles = (token * half)[:, None] + lows
        cos = tl.load(cos_ptr + angles, mask=turns, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=turns, other=0.0).to(tl.float32)
        low = rounded(rounded(first * cos, dtype) - rounded(second * sin, dtype), dtype)
        high = rounded(rounded(second * cos, dtype) + rounded(first * sin, dtype), dtype)
        # Values are as they were: endless ones times a sine of 0 are none.
        first = tl.where(turns, low, first)
        second = tl.where(turns, high, second)

    out_at = out_ptr + ((token * num_heads + head) * (2 * half + num_rest))[:, None]
    _store(out_at, first, second, rest, lows, rests, half, num_rest, is_q, dtype)
    # A padded token's slot is -1: nothing is written.
    slot = tl.load(slots_ptr + token, mask=is_there & (head >= num_heads), other=-1)
    is_k, is_v = is_k & (slot >= 0)[:, None], is_v & (slot >= 0)[:, None]
    page, offset = slot // page_size, slot % page_size
    place = page * page_stride + offset * slot_stride
    key_at = keys_ptr + (place + key_head * kv_head_stride)[:, None]
    value_at = values_ptr + (place + value_head * kv_head_stride)[:, None]
    if INT8:
        largest = tl.max(tl.maximum(magnitudes(first), magnitudes(second)), 1)
        scale = int8_scale(tl.maximum(largest, tl.max(magnitudes(rest), 1)))[:, None]
        place = page * scale_page_stride + offset * scale_slot_stride
        tl.store(key_scales_ptr + (place + key_head * scale_head_stride)[:, None], scale, mask=is_k)
        tl.store(value_scales_ptr + (place + value_head * scale_head_stride)[:, None], scale, mask=is_v)
        first, second, rest = int8_numbers(first, scale), int8_numbers(second, scale), int8_numbers(rest, scale)
    kind: tl.constexpr = keys_ptr.dtype.element_ty
    _store(key_at, first, second, rest, lows, rests, half, num_rest, is_k, kind)
    _store(value_at, first, second, rest, lows, rests, half, num_rest, is_v, kind)


# --- every form that is launched --------------------------------------------------------------------------------------

_ALIGNED = (
    *("q_token_stride", "q_head_stride", "k_token_stride", "k_head_stride", "v_token_stride", "v_head_stride"),
    *("page_stride", "slot_stride", "kv_head_stride"),
)
_LOOSE = (
    *("scale_page_stride", "scale_slot_stride", "scale_head_stride"),
    *("num_tokens", "num_heads", "num_kv_heads", "num_rest", "page_size", "norms", "rotates"),
)


def _name(dtype: str, weight: str, block: int, *, int8: bool) -> str:
    return f"attention_inputs[{dtype}, weight {weight}, half {block}{', int8 entries' if int8 else ''}]"


def _form(dtype: str, weight: str, block: int, *, int8: bool) -> Specialisation:
    x, entry = pointer(dtype), "*i8" if int8 else pointer(dtype)
    order = attention_inputs_kernel.arg_names
    kinds = {
        **dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr", "cos_ptr", "sin_ptr"), x),
        **dict.fromkeys(("q_weight_ptr", "k_weight_ptr"), pointer(weight)),
        **dict.fromkeys(("keys_ptr", "values_ptr"), entry),
        **dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32"),
        **dict.fromkeys((*_ALIGNED, *_LOOSE, "half"), "i32"),
        "slots_ptr": "*i64",
        "eps": "fp32",
    }
    return form(
        _name(dtype, weight, block, int8=int8),
        attention_inputs_kernel,
        {name: kinds[name] for name in order if name in kinds},
        {"INT8": int8, "ROWS": _ROWS[block], "BLOCK": block},
        loose=_LOOSE,
        everywhere=(dtype, weight, block) == ("bfloat16", "bfloat16", 64),
    )


#: (activations, weight) of the norms: in some models these stay in float32.
_PAIRS = [*((dtype, dtype) for dtype in DTYPES), ("bfloat16", "float32"), ("float16", "float32")]


def specialisations() -> list[Specialisation]:
    """Return every form of the kernel."""
    return [_form(*pair, block, int8=int8) for pair in _PAIRS for block in _ROWS for int8 in (False, True)]


_FORMS = table(specialisations())


# --- the ops ----------------------------------------------------------------------------------------------------------


def attention_inputs(
    qkv_TND: torch.Tensor,
    num_heads: int,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
    cache: LayerCache,
    slots_T: torch.Tensor,
    order: str,
) -> torch.Tensor:
    """Norm and rotate queries and keys, write keys and values to their slots, and return the queries (T, H, D)."""
    qkv = dense_rows(qkv_TND)
    first_value = (num_heads + qkv.shape[1]) // 2
    q, k, v = qkv[:, :num_heads], qkv[:, num_heads:first_value], qkv[:, first_value:]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    _run(q, k, v, out, norms=norms, eps=eps, angles=angles, cache=cache, slots_T=slots_T, order=order)
    return out


def rope(x_THD: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + h) of the first 2h dimensions; the others pass."""
    x = dense_rows(x_THD)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _run(x, x[:, :0], x[:, :0], out, angles=(cos_T1h, sin_T1h))
    return out


def cache_write(
    keys_TKD: torch.Tensor, values_TKD: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, order: str
) -> None:
    """Write each token's key and value to its slot, or with its scale where entries are int8; slot -1 is nowhere."""
    k, v = dense_rows(keys_TKD), dense_rows(values_TKD)
    _run(k[:, :0], k, v, k, cache=cache, slots_T=slots_T, order=order)


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    *,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    angles: tuple[torch.Tensor, torch.Tensor] | None = None,
    cache: LayerCache | None = None,
    slots_T: torch.Tensor | None = None,
    order: str = "PSKD",
) -> None:
    """Launch over all heads; what is not asked for is any tensor of its type."""
    num_tokens, head_dim = q.shape[0], q.shape[2]
    num_rows = num_tokens * (q.shape[1] + k.shape[1] + v.shape[1])
    half = head_dim // 2 if angles is None else angles[0].shape[-1]
    num_rest = head_dim - 2 * half
    block = next(block for block in _ROWS if half <= block and num_rest <= 2 * block)
    assert k.dtype == v.dtype == q.dtype and k.shape == v.shape and num_rest >= 0
    if not num_rows:
        return
    weights = (q, q) if norms is None else (norms[0].contiguous(), norms[1].contiguous())
    turns = (q, q) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
    assert all(angle.dtype == q.dtype for angle in turns), "angles are in the dtype of what they turn"
    assert norms is None or all(weight.shape == (head_dim,) for weight in weights)
    name = _name(name_of(q), name_of(weights[0]), block, int8=cache is not None and cache.key_scales is not None)
    _FORMS[name].launch(
        (triton.cdiv(num_rows, _ROWS[block]),),
        *(q, k, v, out, *weights, *turns),
        *_places(q, cache, slots_T),
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
        *_strides(cache, order),
        *(num_tokens, q.shape[1], k.shape[1], half, num_rest),
        1 if cache is None else cache.keys.shape[order.index("S")],
        *(float(eps), int(norms is not None), int(angles is not None)),
    )


def _places(q: torch.Tensor, cache: LayerCache | None, slots_T: torch.Tensor | None) -> list[torch.Tensor]:
    """Return slots, keys, values and their scales."""
    unused = torch.empty(0, dtype=torch.float32, device=q.device)
    if cache is None or slots_T is None:
        return [torch.empty(0, dtype=torch.int64, device=q.device), q, q, unused, unused]
    scales = (cache.key_scales, cache.value_scales)
    assert cache.keys.stride() == cache.values.stride() and cache.keys.stride(-1) == 1
    assert cache.keys.dtype in (q.dtype, torch.int8), f"entries are {cache.keys.dtype}"
    return [slots_T.contiguous(), cache.keys, cache.values, *(unused if s is None else s for s in scales)]


def _strides(cache: LayerCache | None, order: str) -> list[int]:
    """Return how far apart pages, slots and heads are: of entries, then of scales."""
    axes = [order.index(axis) for axis in "PSK"]
    found: list[Any] = [None, None] if cache is None else [cache.keys, cache.key_scales]
    return [0 if tensor is None else int(tensor.stride(axis)) for tensor in found for axis in axes]
