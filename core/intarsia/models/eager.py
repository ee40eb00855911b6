"""The eager runner: a DecoderSpec run op by op. What every other runner must equal.

Shape legend: T tokens, L rows of logits, E embed, H heads, K kv heads, D head dim, F ffn, V vocab.
"""

from __future__ import annotations

import torch
from attrs import field, frozen

from intarsia.models.rope import cos_sin
from intarsia.models.weights import HEAD, Weights
from intarsia.ops import Ops
from intarsia.protocols import AttentionBackend, CacheStorage, RunnerContext
from intarsia.types import AttentionSpec, CacheLayout, DecoderSpec, ForwardBatch, LayerSpec, RopeSpec, Weight


@frozen
class _Linear:
    """A weight and its bias, if it has one."""

    weight: Weight
    bias: torch.Tensor | None

    @classmethod
    def named(cls, weights: Weights, name: str) -> _Linear:
        weight, bias = weights[f"{name}.weight"], weights.get(f"{name}.bias")
        assert isinstance(weight, Weight) and not isinstance(bias, Weight)
        return cls(weight, bias)


def _vector(weights: Weights, name: str) -> torch.Tensor:
    vector = weights[f"{name}.weight"]
    assert not isinstance(vector, Weight)
    return vector


@frozen
class _Layer:
    """One layer's spec and weights."""

    spec: LayerSpec
    group: int
    attention_norm: torch.Tensor
    qkv: _Linear
    out: _Linear
    mlp_norm: torch.Tensor
    gate_up: _Linear
    down: _Linear

    @classmethod
    def named(cls, weights: Weights, index: int, spec: LayerSpec, group: int) -> _Layer:
        prefix = f"layers.{index}"
        return cls(
            spec,
            group,
            _vector(weights, f"{prefix}.attention_norm"),
            _Linear.named(weights, f"{prefix}.qkv"),
            _Linear.named(weights, f"{prefix}.out"),
            _vector(weights, f"{prefix}.mlp_norm"),
            _Linear.named(weights, f"{prefix}.gate_up"),
            _Linear.named(weights, f"{prefix}.down"),
        )


@frozen
class _Angles:
    """cos and sin of one step's positions, (T, 1, h), for each RopeSpec of the model."""

    tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]

    def at(self, positions_T: torch.Tensor) -> dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]:
        return {
            rope: (cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1))
            for rope, (cos, sin) in self.tables.items()
        }


@frozen(eq=False)
class EagerRunner:
    """Calls the named ops layer by layer."""

    spec: DecoderSpec
    layout: CacheLayout
    dtype: torch.dtype
    ops: Ops
    attention: AttentionBackend
    embed: Weight
    layers: tuple[_Layer, ...]
    norm: torch.Tensor
    head: Weight
    angles: _Angles = field(repr=False)

    @classmethod
    def build(cls, context: RunnerContext) -> EagerRunner:
        """Bind the loaded weights to the spec, and tabulate the rotary angles."""
        spec, weights = context.spec, context.weights
        assert context.engine.max_model_len is not None
        dtype, device = getattr(torch, context.engine.dtype), torch.device(context.engine.device)
        ropes = {layer.attention.rope for layer in spec.layers if layer.attention.rope is not None}
        tables = {}
        for rope in ropes:
            cos, sin = cos_sin(rope, context.engine.max_model_len)
            tables[rope] = (cos.to(device, dtype), sin.to(device, dtype))
        group_of = {layer: index for index, group in enumerate(context.layout.groups) for layer in group.layers}
        embed = _Linear.named(weights, "embed").weight
        return cls(
            spec=spec,
            layout=context.layout,
            dtype=dtype,
            ops=context.ops,
            attention=context.attention,
            embed=embed,
            layers=tuple(_Layer.named(weights, i, layer, group_of[i]) for i, layer in enumerate(spec.layers)),
            norm=_vector(weights, "norm"),
            head=_Linear.named(weights, "head").weight if HEAD in weights else embed,
            angles=_Angles(tables),
        )

    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a range of layers from the embedding (range starts at 0) or from `hidden_TE`; return (T, E)."""
        if hidden_TE is None:
            assert layers.start == 0
            hidden_TE = self.ops.embedding(batch.ids_T, self.embed, self.dtype)
        angles = self.angles.at(batch.positions_T)
        eps = self.spec.norm_eps
        delta_TE: torch.Tensor | None = None  # what the layer before adds to the residual: added with the next norm
        for index in layers:
            layer = self.layers[index]
            if delta_TE is None:
                normed_TE = self.ops.rms_norm(hidden_TE, layer.attention_norm, eps)
            else:
                normed_TE, hidden_TE = self.ops.add_rms_norm(delta_TE, hidden_TE, layer.attention_norm, eps)
            delta_TE = self._attend(layer, normed_TE, cache, index, batch, angles)
            normed_TE, hidden_TE = self.ops.add_rms_norm(delta_TE, hidden_TE, layer.mlp_norm, eps)
            gate_up = self.ops.linear(normed_TE, layer.gate_up.weight, layer.gate_up.bias)
            down = self.ops.linear(self.ops.silu_mul(gate_up), layer.down.weight, layer.down.bias)
            delta_TE = self.ops.all_reduce(down)
        return hidden_TE if delta_TE is None else hidden_TE + delta_TE

    def _attend(
        self,
        layer: _Layer,
        normed_TE: torch.Tensor,
        cache: CacheStorage,
        index: int,
        batch: ForwardBatch,
        angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        spec: AttentionSpec = layer.spec.attention
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = self.ops.linear(normed_TE, layer.qkv.weight, layer.qkv.bias).view(len(normed_TE), -1, spec.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if spec.rope is not None:
            qk = self.ops.rope(qk, *angles[spec.rope])
        queries, keys = qk[:, :heads], qk[:, heads:]
        storage = cache.layer(index)
        self.ops.cache_write(keys, values, storage, batch.slots_T[layer.group], self.layout.order)
        mixed = self.attention.attend(queries, storage, spec, layer.group, batch)
        out = self.ops.linear(mixed.reshape(len(normed_TE), -1), layer.out.weight, layer.out.bias)
        return self.ops.all_reduce(out)

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of some tokens."""
        normed = self.ops.rms_norm(hidden_TE[rows_L], self.norm, self.spec.norm_eps)
        return self.ops.linear(normed, self.head).float()


def build(context: RunnerContext) -> EagerRunner:
    """Make the runner around loaded weights."""
    return EagerRunner.build(context)
