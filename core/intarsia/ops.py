"""The named ops that models call, each with its torch reference: what every kernel must equal, up to rounding.

Shape legend: T tokens, C in features, N out features, E embed, F ffn, H heads (query and key ones alike), K kv heads,
D head dim, P pages, S slots a page, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, field, frozen
from torch.nn import functional

from intarsia.deprecations import old_name
from intarsia.errors import PluginError, did_you_mean
from intarsia.protocols import Kernel, LayerCache
from intarsia.types import Invariance, Weight

#: A kernel that reads every weight format, through `Weight.dequantize`.
ANY_FORMAT = "*"


def embedding(ids_T: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """Return rows (T, E) of a (V, E) weight."""
    return weight.rows(ids_T).dequantize().to(dtype)


#: fp32 matrix products of 8 rows or a multiple give each row the same bits whatever the other rows are; at 1 to 3, 5
#: to 7 and 9 to 11 rows, CPU BLAS takes other paths. Measured with MKL; tests hold it.
_ROWS = 8


def linear(x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Return x @ weight.T + bias, (T, N). In fp32 on CPUs a row's bits do not depend on the rows beside it."""
    dense = weight.dequantize().to(x_TC.dtype)
    num_rows = x_TC.shape[0]
    padding = -num_rows % _ROWS
    if padding and x_TC.dtype == torch.float32 and x_TC.device.type == "cpu":
        padded = functional.pad(x_TC, (0, 0, 0, padding))
        return functional.linear(padded, dense, bias_N)[:num_rows]
    return functional.linear(x_TC, dense, bias_N)


def rms_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight, the mean of squares in fp32 (Zhang and Sennrich 2019).

    The product is rounded to x's dtype; it is taken in the weight's, so that a weight in fp32 loses nothing.
    """
    x = x_TE.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (weight_E * x.to(weight_E.dtype)).to(x_TE.dtype)


def add_rms_norm(
    x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add x to the residual and return (its norm, the sum)."""
    total = residual_TE + x_TE
    return rms_norm(total, weight_E, eps), total


def layer_norm(x_TE: torch.Tensor, weight_E: torch.Tensor, bias_E: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Return (x - mean) / deviation * weight + bias, in fp32 (Ba et al. 2016)."""
    bias = None if bias_E is None else bias_E.float()
    return functional.layer_norm(x_TE.float(), x_TE.shape[-1:], weight_E.float(), bias, eps).to(x_TE.dtype)


def rope(x_THD: torch.Tensor, cos_T1h: torch.Tensor, sin_T1h: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + h) of the first 2h dimensions (Su et al. 2021); the others pass."""
    half = cos_T1h.shape[-1]
    first, second, rest = x_THD[..., :half], x_THD[..., half : 2 * half], x_THD[..., 2 * half :]
    rotated = (first * cos_T1h - second * sin_T1h, second * cos_T1h + first * sin_T1h, rest)
    return torch.cat(rotated, dim=-1)


#: Torch cuts CPU loops of so many numbers between threads, in the middle of a row too, and those of gelu sooner.
#: Around a cut, exp and tanh are computed by scalar code that rounds otherwise than vector code.
_GRAIN, _GELU_GRAIN = 32768, 16384
#: So is what is left of a loop behind its last whole step, of two vectors of 512 bits; and rows that lie end to end are
#: one loop.
_STEP = 64


def _activate(
    x_TF: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor], grain: int = _GRAIN
) -> torch.Tensor:
    """Return a new tensor of a function's values, of whole steps and of pieces so small that torch cuts none."""
    if x_TF.device.type != "cpu":
        return function(x_TF)
    padding = -x_TF.shape[1] % _STEP
    if padding:
        return _activate(functional.pad(x_TF, (0, padding)), function, grain)[:, :-padding].contiguous()
    num_rows = max(1, (grain - 1) // x_TF.shape[1])
    pieces = [function(part) for part in torch.split(x_TF, num_rows)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, where gate is the first half of the features and up the second."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return _activate(gate, functional.silu).mul_(up)


def gelu_tanh_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """Return gelu(gate) * up, as `silu_mul`, with the tanh form of gelu (Hendrycks and Gimpel 2016)."""
    gate, up = gate_up_T2F.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def gelu_tanh(x_TF: torch.Tensor) -> torch.Tensor:
    """Return gelu(x) in its tanh form (Hendrycks and Gimpel 2016)."""
    return _activate(x_TF, lambda part: functional.gelu(part, approximate="tanh"), _GELU_GRAIN)


def soft_cap(x_LV: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap) (Gemma 2)."""
    return _activate(x_LV, lambda part: torch.tanh(part / cap)).mul_(cap)


def int8_entries(x_TKD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 numbers (T, K, D) and fp32 scales (T, K) whose product is nearest to x: the cache's format `int8`.

    scale = max|x| / 127 and number = round(x / scale), ties to even, all in fp32, so that an entry is off by half a
    scale at most; a token, head and tensor at a time, so that it depends on nothing else. A zero vector has scale 0.
    One that is not finite has scale NaN and numbers 0: whatever reads it shows it.
    """
    x = x_TKD.float()
    largest_TK = x.abs().amax(dim=-1)
    # A product, which is the same on every device: not every one divides by a constant.
    scales_TK = torch.where(largest_TK.isfinite(), largest_TK * (1 / 127), torch.nan)
    scales = scales_TK.unsqueeze(-1)
    # Scales of the smallest floats are rounded themselves, so that a quotient can pass 127.
    numbers = torch.where(scales > 0, x / scales, 0).round().clamp(-127, 127)
    return numbers.to(torch.int8), scales_TK


def cache_write(
    keys_TKD: torch.Tensor, values_TKD: torch.Tensor, cache: LayerCache, slots_T: torch.Tensor, order: str
) -> None:
    """Write each token's key and value to its slot, rounded to the cache's dtype, or with its scale where that is int8.

    Slot -1 is the last of the spare page, which nothing reads.
    """
    page_size = cache.keys.shape[order.index("S")]
    pages_T, slots_T = slots_T.div(page_size, rounding_mode="floor"), slots_T.remainder(page_size)
    place = (pages_T, slots_T) if order == "PSKD" else (pages_T, slice(None), slots_T)
    for new, stored, scales in (
        (keys_TKD, cache.keys, cache.key_scales),
        (values_TKD, cache.values, cache.value_scales),
    ):
        if scales is None:
            stored[place] = new.to(stored.dtype)
        else:
            stored[place], scales[place] = int8_entries(new)


def all_reduce(x_TE: torch.Tensor) -> torch.Tensor:
    """Sum over the ranks that hold parts of it: on one device, the identity.

    It ends what ranks compute in slices: attention, a feed-forward. Where activations between these are sharded along
    tokens (sequence parallelism, Korthikanti et al. 2022), each rank is left with the sum of its own tokens.
    """
    return x_TE


def all_gather(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Lay the ranks' parts end to end along `dim`: on one device, the identity."""
    del dim
    return x


def gather_tokens(x_TE: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the activations of all tokens, (num_tokens, E), before ranks compute on them in slices.

    The identity, but where activations are sharded along tokens.
    """
    del num_tokens
    return x_TE


def gather_rows(x_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
    """Return the activations of some tokens, (L, E), by their numbers in the step."""
    return x_TE[rows_L]


def own_tokens(x_T: torch.Tensor) -> torch.Tensor:
    """Return what belongs to the tokens of this rank: all, but where activations are sharded along tokens."""
    return x_T


def look_up(ids_T: torch.Tensor, rows: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return the embeddings of token ids (T, E), where `rows` gives those of the vocabulary that is here.

    Where ranks hold parts of the vocabulary, `rows` is asked with numbers of the part, and the ranks' rows are summed
    as by `all_reduce`.
    """
    return rows(ids_T)


def rms_norm_over_ranks(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `rms_norm` over features of which each rank holds a part: on one device, `rms_norm` itself."""
    return rms_norm(x_TE, weight_E, eps)


_FLOATS = frozenset({"float32", "float16", "bfloat16"})


def _reference(op: str, call: Callable[..., Any], **facts: Any) -> Kernel:
    # A row of these comes from that row alone, by the same instructions in any batch (below 32768 features: a longer
    # row that is alone is summed by several threads).
    alone: dict[str, Invariance] = dict.fromkeys(sorted(_FLOATS), "bitwise")
    return Kernel(op=op, call=call, **({"invariance": alone} | facts))


#: op name -> its torch reference. Of a matrix product, only fp32 on CPUs keeps a row's bits apart (see `linear`).
OPS: Mapping[str, Kernel] = {
    kernel.op: kernel
    for kernel in (
        _reference("embedding", embedding, formats=frozenset({ANY_FORMAT})),
        _reference("linear", linear, formats=frozenset({ANY_FORMAT}), invariance={"float32": "bitwise"}),
        _reference("rms_norm", rms_norm),
        _reference("add_rms_norm", add_rms_norm),
        _reference("layer_norm", layer_norm),
        _reference("rope", rope),
        _reference("silu_mul", silu_mul),
        _reference("gelu_tanh_mul", gelu_tanh_mul),
        _reference("gelu_tanh", gelu_tanh),
        _reference("soft_cap", soft_cap),
        _reference("cache_write", cache_write, orders=frozenset({"PSKD", "PKSD"}), formats=_FLOATS | {"int8"}),
        _reference("all_reduce", all_reduce),
        _reference("all_gather", all_gather),
        _reference("gather_tokens", gather_tokens),
        _reference("gather_rows", gather_rows),
        _reference("own_tokens", own_tokens),
        _reference("look_up", look_up),
        _reference("rms_norm_over_ranks", rms_norm_over_ranks),
    )
}


def references(device: str) -> tuple[Kernel, ...]:
    """Return the reference of each op for a device. What `linear` promises was measured on CPUs, and holds there."""
    if device.startswith("cpu"):
        return tuple(OPS.values())
    return tuple(evolve(kernel, invariance={}) if kernel.op == "linear" else kernel for kernel in OPS.values())


#: Ops between ranks that share a model.
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "gather_tokens",
    "gather_rows",
    "own_tokens",
    "look_up",
    "rms_norm_over_ranks",
)
#: On one device these are others, by whoever implements those.
_SAME = {"rms_norm_over_ranks": "rms_norm"}

#: Ops that stand for a chain of others, and the named ones among these. They have no reference: without a kernel,
#: whoever calls one runs the chain.
#:
#: `attention_inputs(qkv_TND, num_heads, norms, eps, angles, cache, slots_T, order)` norms each head of queries and keys
#: by two weights (D,), rotates it by angles (T, 1, h), writes keys and values as `cache_write` does, and returns the
#: queries (T, H, D). N is H + 2 K; norms or angles can be None.
#:
#: `norm_linear(x_TE, residual_TE, norm_weight_E, eps, weight, bias_N)` adds x to the residual, which can be None, norms
#: the sum as `rms_norm` does and multiplies it as `linear` does; it returns (the product (T, N), the sum (T, E)). One
#: linear alone reads what is normed, so that this need not be stored: where two do, the chain runs.
#:
#: `sample_rows(logits_LV, temperatures_L, top_ks_L, top_ps_L, min_ps_L, uniforms_L)` draws an id a row (L,), int64, as
#: `intarsia.sampling` does: logits are fp32 and not changed, top_ks int32 with 0 for all, the others float64.
FUSED: Mapping[str, tuple[str, ...]] = {
    "attention_inputs": ("rms_norm", "rope", "cache_write"),
    "norm_linear": ("rms_norm", "add_rms_norm", "gather_tokens", "linear"),
    "sample_rows": (),
}
#: What kernels can be for.
NAMES = (*OPS, *FUSED)

#: Ops that are chosen anew for each weight format.
BY_FORMAT = ("embedding", "linear", "norm_linear")


@frozen
class OpChoice:
    """Which kernel stands for an op: `source` is the key of its provider."""

    kernel: Kernel
    source: str


@frozen
class Ops:
    """The named ops, resolved. Call them as methods: `ops.rms_norm(x, weight, eps)`.

    Attributes:
        choices: op, or `op[format]`, -> the kernel that stands for it.
    """

    choices: Mapping[str, OpChoice]
    _linear: dict[str, Callable[..., torch.Tensor]] = field(init=False, repr=False)
    _embedding: Mapping[str, Callable[..., torch.Tensor]] = field(init=False, repr=False)
    _norm_linear: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = field(init=False, repr=False)
    rms_norm: Callable[..., torch.Tensor] = field(init=False, repr=False)
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]] = field(init=False, repr=False)
    layer_norm: Callable[..., torch.Tensor] = field(init=False, repr=False)
    rope: Callable[..., torch.Tensor] = field(init=False, repr=False)
    silu_mul: Callable[..., torch.Tensor] = field(init=False, repr=False)
    gelu_tanh_mul: Callable[..., torch.Tensor] = field(init=False, repr=False)
    gelu_tanh: Callable[..., torch.Tensor] = field(init=False, repr=False)
    soft_cap: Callable[..., torch.Tensor] = field(init=False, repr=False)
    cache_write: Callable[..., None] = field(init=False, repr=False)
    all_reduce: Callable[..., torch.Tensor] = field(init=False, repr=False)
    all_gather: Callable[..., torch.Tensor] = field(init=False, repr=False)
    gather_tokens: Callable[..., torch.Tensor] = field(init=False, repr=False)
    gather_rows: Callable[..., torch.Tensor] = field(init=False, repr=False)
    own_tokens: Callable[..., torch.Tensor] = field(init=False, repr=False)
    look_up: Callable[..., torch.Tensor] = field(init=False, repr=False)
    rms_norm_over_ranks: Callable[..., torch.Tensor] = field(init=False, repr=False)
    attention_inputs: Callable[..., torch.Tensor] | None = field(init=False, repr=False)
    sample_rows: Callable[..., torch.Tensor] | None = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        for op in OPS:
            if op not in BY_FORMAT:
                object.__setattr__(self, op, self.choices[op].kernel.call)
        for op in FUSED:
            if op not in BY_FORMAT:
                object.__setattr__(self, op, self.choices[op].kernel.call if op in self.choices else None)
        for op in BY_FORMAT:
            chosen = {
                name.removeprefix(f"{op}[").removesuffix("]"): choice.kernel.call
                for name, choice in self.choices.items()
                if name.startswith(f"{op}[")
            }
            object.__setattr__(self, f"_{op}", chosen)
        for name, choice in self.choices.items():
            if choice.kernel.packed and name.startswith("linear["):
                self._linear[choice.kernel.packed] = choice.kernel.call
                if normed := self.choices.get(f"norm_{name}"):
                    self._norm_linear[choice.kernel.packed] = normed.kernel.call

    def linear(self, x_TC: torch.Tensor, weight: Weight, bias_N: torch.Tensor | None = None) -> torch.Tensor:
        """Run the `linear` kernel of the weight's format."""
        return self._linear[weight.format.name](x_TC, weight, bias_N)

    def norm_linear(self, weight: Weight) -> Callable[..., tuple[torch.Tensor, torch.Tensor]] | None:
        """Return what norms rows and multiplies them by this weight, of `FUSED`; None where nothing does both."""
        return self._norm_linear.get(weight.format.name)

    def pack(self, weight: Weight) -> Weight:
        """Return the weight as the `linear` kernel of its format reads it best; itself where that packs nothing."""
        pack = self.choices[f"linear[{weight.format.name}]"].kernel.pack
        return weight if pack is None else pack(weight)

    def packs(self, weight_format: str) -> bool:
        """Whether `pack` makes another weight of one in this format."""
        return self.choices[f"linear[{weight_format}]"].kernel.pack is not None

    def embedding(self, ids_T: torch.Tensor, weight: Weight, dtype: torch.dtype) -> torch.Tensor:
        """Run the `embedding` kernel of the weight's format."""
        return self._embedding[weight.format.name](ids_T, weight, dtype)

    def orders(self) -> frozenset[str]:
        """Return the cache axis orders that the cache-write kernel reads."""
        return self.choices["cache_write"].kernel.orders

    def invariance(self, dtype: str) -> dict[str, Invariance]:
        """Return what each op promises for a dtype; an op that says nothing promises `numeric`."""
        return {name: choice.kernel.invariance.get(dtype, "numeric") for name, choice in self.choices.items()}


def resolve(
    sets: Sequence[tuple[str, Sequence[Kernel]]], dtype: str, formats: Sequence[str], device: str = "cpu"
) -> Ops:
    """Choose a kernel for every op, and for every weight format where the op reads weights.

    Args:
        sets: (provider key, its kernels), best first; the references stand behind them all.
        dtype: name of the activation dtype.
        formats: weight formats that the model's weights have.
        device: where it runs.

    Returns:
        The ops, complete.

    Raises:
        PluginError: a kernel claims an op that does not exist.
    """
    for source, kernels in sets:
        for kernel in kernels:
            if kernel.op not in NAMES:
                raise PluginError(f"kernels {source!r}: there is no op {kernel.op!r}.{did_you_mean(kernel.op, NAMES)}")
    ranked = [*sets, ("torch", references(device))]

    def first(op: str, weight_format: str | None) -> OpChoice:
        for source, kernels in ranked:
            for kernel in kernels:
                if kernel.op != op or (kernel.dtypes and dtype not in kernel.dtypes):
                    continue
                if weight_format is None or kernel.formats & {weight_format, ANY_FORMAT}:
                    return OpChoice(kernel, source)
        raise AssertionError(f"no reference for {op}")

    choices: dict[str, OpChoice] = {}
    for op in OPS:
        if op in BY_FORMAT:
            choices |= {f"{op}[{name}]": first(op, name) for name in formats}
        else:
            choices[op] = first(_SAME.get(op, op), None)
    names = [(op, name) for op in FUSED for name in (formats if op in BY_FORMAT else [None])]
    fused = {op if name is None else f"{op}[{name}]": _fused(op, name, sets, choices, dtype) for op, name in names}
    return Ops(choices | {name: choice for name, choice in fused.items() if choice is not None})


def _fused(
    op: str,
    weight_format: str | None,
    sets: Sequence[tuple[str, Sequence[Kernel]]],
    choices: Mapping[str, OpChoice],
    dtype: str,
) -> OpChoice | None:
    """Return the kernel that stands for a chain; None where a set before its own has a part of the chain.

    One that writes the cache must write all that the chosen `cache_write` does. One that reads weights must be of the
    set that packs them.
    """
    writer, packer = choices["cache_write"].kernel, choices.get(f"linear[{weight_format}]")
    for source, kernels in sets:
        fitting = [
            kernel
            for kernel in kernels
            if (not kernel.dtypes or dtype in kernel.dtypes)
            and (kernel.op not in BY_FORMAT or kernel.formats & {weight_format, ANY_FORMAT})
        ]
        reads = packer is None or packer.kernel.pack is None or packer.source == source
        for kernel in fitting:
            writes = kernel.orders >= writer.orders and kernel.formats >= writer.formats
            if kernel.op == op and reads and (writes or "cache_write" not in FUSED[op]):
                return OpChoice(kernel, source)
        if any(kernel.op in FUSED[op] for kernel in fitting):
            return None
    return None


def rebound(ops: Ops, calls: Mapping[str, Callable[..., Any]], source: str) -> Ops:
    """Return the ops with other calls for some collectives: those of ranks that share a model.

    They promise `numeric`: how ranks cut a sum decides its last bits. What stands for a chain with one of them in it is
    left out: the chain runs.

    Args:
        ops: of one device.
        calls: op -> what stands for it.
        source: key of the executor that they are of.
    """
    assert calls.keys() <= set(COLLECTIVES)
    kept = {
        name: choice
        for name, choice in ops.choices.items()
        if calls.keys().isdisjoint(FUSED.get(name.partition("[")[0], ()))
    }
    return Ops({**kept, **{op: OpChoice(Kernel(op=op, call=call), source) for op, call in calls.items()}})


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        return old_name(__name__, name)
