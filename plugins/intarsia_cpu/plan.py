"""A model as the native step reads it: `src/step_plan.h`, field by field, filled from a DecoderSpec and its weights.

Shape legend: E embed, H heads, K kv heads, D head dim, F ffn, V vocab, L positions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from attrs import field, frozen

from intarsia.rope import cos_sin
from intarsia.types import CacheLayout, DecoderSpec, LayerSpec, MlpSpec, RopeSpec, Weight, dense
from intarsia_cpu.entries import ENTRIES
from intarsia_cpu.linears import FORMATS, PACKED, LinearStruct, interleave, pack, struct

Weights = Mapping[str, Weight | torch.Tensor]

DTYPES = {"float32": 0, "bfloat16": 1}
_NORM_KINDS = {"rms": 0, "layer": 1}
_QK_NORMS = {None: 0, "head": 1, "all": 2}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}

_POINTER, _INT, _DOUBLE = ctypes.c_void_p, ctypes.c_int64, ctypes.c_double


class Norm(ctypes.Structure):
    """Mirrors StepNorm."""

    _fields_ = (("weight", _POINTER), ("bias", _POINTER))


class Layer(ctypes.Structure):
    """Mirrors StepLayer."""

    _fields_ = (
        *((name, Norm) for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")),
        *((name, _POINTER) for name in ("q_norm", "k_norm", "cos", "sin")),
        *((name, LinearStruct) for name in ("qkv", "out", "up", "down")),
        *((name, _INT) for name in ("qk_norm", "num_heads", "num_kv_heads", "head_dim", "rotary", "window", "group")),
        *((name, _INT) for name in ("activation", "parallel")),
        *((name, _DOUBLE) for name in ("scale", "soft_cap", "residual_scale")),
    )


class Model(ctypes.Structure):
    """Mirrors StepModel."""

    _fields_ = (
        *((name, _POINTER) for name in ("embed", "positions", "layers")),
        ("norm", Norm),
        ("head", LinearStruct),
        *((name, _INT) for name in ("dtype", "embed_dim", "vocab_size", "num_layers", "norm_kind", "page_size")),
        ("cache_entry", _INT),
        *((name, _DOUBLE) for name in ("eps", "embedding_scale", "logit_scale", "logit_soft_cap")),
    )


class Cache(ctypes.Structure):
    """Mirrors StepCache."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values", "key_scales", "value_scales")),
        *((name, _INT) for name in ("page_stride", "head_stride", "slot_stride")),
        *((name, _INT) for name in ("scale_page_stride", "scale_head_stride", "scale_slot_stride")),
    )


class Batch(ctypes.Structure):
    """Mirrors StepBatch."""

    _fields_ = (
        *((name, _POINTER) for name in ("ids", "positions", "slots", "bounds", "starts", "pages", "page_bounds")),
        *((name, _POINTER) for name in ("caches", "reads")),
        *((name, _INT) for name in ("num_tokens", "num_rows", "num_reads")),
    )


#: In the order of `intarsia_step_sizes`.
MIRRORS: tuple[type[ctypes.Structure], ...] = (LinearStruct, Layer, Model, Cache, Batch)


@frozen(eq=False)
class Plan:
    """A model for the native step, and the tensors that it points to.

    Attributes:
        kept: keeps memory alive that `model` points to.
    """

    model: Model
    kept: tuple[Any, ...] = field(repr=False)


def plan(spec: DecoderSpec, layout: CacheLayout, weights: Weights, dtype: str, max_len: int) -> Plan:
    """Lay a model out for the native step.

    Args:
        spec: the model: dense, of dtype float32 or bfloat16.
        layout: of the cache; PKSD, of the same dtype or int8.
        weights: by canonical name, those of linears in `FORMATS`, packed or not.
        dtype: of activations.
        max_len: positions that rotary tables are made for.
    """
    return _Planner(spec, layout, weights, dtype, max_len).plan()


@frozen(eq=False)
class _Planner:
    spec: DecoderSpec
    layout: CacheLayout
    weights: Weights
    dtype: str
    max_len: int
    kept: list[Any] = field(factory=list, init=False)
    angles: dict[RopeSpec, tuple[int, int]] = field(factory=dict, init=False)

    def plan(self) -> Plan:
        spec = self.spec
        layers = (Layer * spec.num_layers)(*(self._layer(i, layer) for i, layer in enumerate(spec.layers)))
        model = Model(
            embed=self._table("embed"),
            positions=self._table("positions") if spec.num_positions else None,
            layers=ctypes.addressof(layers),
            norm=self._norm("norm"),
            head=self._linear("head" if "head.weight" in self.weights else "embed", "head"),
            dtype=DTYPES[self.dtype],
            embed_dim=spec.embed_dim,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            norm_kind=_NORM_KINDS[spec.norm.kind],
            page_size=self.layout.page_size,
            cache_entry=ENTRIES[self.layout.format],
            eps=spec.norm.eps,
            # As the ops have it: a number of the model's dtype.
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=self._torch_dtype).item(),
            logit_scale=spec.logit_scale,
            logit_soft_cap=spec.logit_soft_cap or 0,
        )
        return Plan(model, (layers, *self.kept))

    def _layer(self, index: int, layer: LayerSpec) -> Layer:
        prefix, attention, mlp = f"layers.{index}", layer.attention, layer.mlp
        assert isinstance(mlp, MlpSpec), "fit refuses mixtures"
        cos, sin = (None, None) if attention.rope is None else self._angles(attention.rope)
        return Layer(
            **{
                name: self._norm(f"{prefix}.{name}")
                for name in ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")
            },
            q_norm=self._address(f"{prefix}.q_norm.weight"),
            k_norm=self._address(f"{prefix}.k_norm.weight"),
            cos=cos,
            sin=sin,
            qkv=self._linear(f"{prefix}.qkv"),
            out=self._linear(f"{prefix}.out"),
            up=self._linear(f"{prefix}.{'gate_up' if mlp.gated else 'up'}", gated=mlp.gated),
            down=self._linear(f"{prefix}.down"),
            qk_norm=_QK_NORMS[attention.qk_norm],
            num_heads=attention.num_heads,
            num_kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            rotary=0 if attention.rope is None else attention.rope.dim,
            window=attention.window or 0,
            group=next(i for i, group in enumerate(self.layout.groups) if index in group.layers),
            activation=_ACTIVATIONS[mlp.activation],
            parallel=layer.parallel,
            scale=attention.scale,
            soft_cap=attention.soft_cap or 0,
            residual_scale=layer.residual_scale,
        )

    @property
    def _torch_dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    def _keep(self, tensor: torch.Tensor) -> int:
        """Return the address of a tensor that stays alive as long as the plan."""
        self.kept.append(tensor)
        return tensor.data_ptr()

    def _table(self, name: str) -> int:
        """Return rows that are looked up, in the model's dtype."""
        weight = self.weights[f"{name}.weight"]
        assert isinstance(weight, Weight)
        return self._keep(weight.dequantize().to(self._torch_dtype).contiguous())

    def _vector(self, name: str) -> torch.Tensor | None:
        """Return a vector in fp32; None where the model has none of this name."""
        vector = self.weights.get(name)
        assert not isinstance(vector, Weight)
        return None if vector is None else vector.float().contiguous()

    def _address(self, name: str) -> int | None:
        vector = self._vector(name)
        return None if vector is None else self._keep(vector)

    def _norm(self, name: str) -> Norm:
        return Norm(weight=self._address(f"{name}.weight"), bias=self._address(f"{name}.bias"))

    def _linear(self, name: str, bias: str = "", *, gated: bool = False) -> LinearStruct:
        weight, bias_N = self.weights[f"{name}.weight"], self._vector(f"{bias or name}.bias")
        assert isinstance(weight, Weight)
        packed = _packed(weight)
        if gated:
            packed = interleave(packed)
        self.kept.append((packed, bias_N))
        return struct(packed, bias_N, gated=gated, dtype=self._torch_dtype)

    def _angles(self, rope: RopeSpec) -> tuple[int, int]:
        """Return cosine and sine tables, (L, D/2) fp32, one pair a RopeSpec."""
        if rope not in self.angles:
            cos, sin = cos_sin(rope, self.max_len)
            self.angles[rope] = self._keep(cos.contiguous()), self._keep(sin.contiguous())
        return self.angles[rope]


def _packed(weight: Weight) -> Weight:
    """Return a weight in panels; one that another kernel packed is unpacked first."""
    if weight.format.name == PACKED:
        return weight
    return pack(weight if weight.format.name in FORMATS else dense(weight.dequantize()))
