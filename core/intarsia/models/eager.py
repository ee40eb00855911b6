"""The eager runner: a DecoderSpec run op by op. What every other runner must equal.

Shape legend: T tokens, L rows of logits, E embed, H heads, K kv heads, D head dim, V vocab.
"""

from __future__ import annotations

import torch
from attrs import field, frozen

from intarsia.models.layers import Layer, Linear, Norm
from intarsia.models.weights import Weights
from intarsia.ops import Ops
from intarsia.protocols import AttentionBackend, CacheStorage, RunnerContext
from intarsia.rope import cos_sin
from intarsia.types import (
    EMBED,
    HEAD,
    POSITIONS,
    AttentionSpec,
    CacheLayout,
    DecoderSpec,
    ForwardBatch,
    RopeSpec,
    Weight,
)


@frozen
class _Angles:
    """cos and sin of one step's positions, (T, 1, h), for each RopeSpec of the model."""

    tables: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, spec: DecoderSpec, max_len: int, dtype: torch.dtype, device: torch.device) -> _Angles:
        tables = {}
        for rope in {layer.attention.rope for layer in spec.layers if layer.attention.rope is not None}:
            cos, sin = cos_sin(rope, max_len)
            tables[rope] = (cos.to(device, dtype), sin.to(device, dtype))
        return cls(tables)

    def at(self, positions_T: torch.Tensor) -> dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]]:
        return {
            rope: (cos[positions_T].unsqueeze(1), sin[positions_T].unsqueeze(1))
            for rope, (cos, sin) in self.tables.items()
        }


def _embedding(weights: Weights, name: str) -> Weight:
    weight = weights[name]
    assert isinstance(weight, Weight)
    return weight


@frozen(eq=False)
class EagerRunner:
    """Calls the named ops layer by layer."""

    spec: DecoderSpec
    layout: CacheLayout
    dtype: torch.dtype
    ops: Ops
    attention: AttentionBackend
    embed: Weight
    positions: Weight | None
    embedding_scale: float
    layers: tuple[Layer, ...]
    norm: Norm
    head: Linear
    angles: _Angles = field(repr=False)

    @classmethod
    def build(cls, context: RunnerContext) -> EagerRunner:
        """Bind the loaded weights to the spec, and tabulate the rotary angles."""
        spec, weights = context.spec, context.weights
        max_len = context.engine.max_model_len
        assert max_len is not None
        dtype, device = getattr(torch, context.engine.dtype), torch.device(context.engine.device)
        group_of = {layer: index for index, group in enumerate(context.layout.groups) for layer in group.layers}
        embed = _embedding(weights, EMBED)
        norm = Norm.named(weights, "norm", spec.norm)
        assert norm is not None
        return cls(
            spec=spec,
            layout=context.layout,
            dtype=dtype,
            ops=context.ops,
            attention=context.attention,
            embed=embed,
            positions=_embedding(weights, POSITIONS) if spec.num_positions else None,
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=dtype).item(),
            layers=tuple(Layer.named(weights, i, spec, group_of[i]) for i in range(spec.num_layers)),
            norm=norm,
            head=Linear.named(weights, "head" if HEAD in weights else "embed", bias="head"),
            angles=_Angles.of(spec, max_len, dtype, device),
        )

    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a range of layers from the embedding (range starts at 0) or from `hidden_TE`; return (T, E)."""
        if hidden_TE is None:
            assert layers.start == 0
            hidden_TE = self._embed(batch)
        angles = self.angles.at(batch.positions_T)
        delta_TE: torch.Tensor | None = None  # what the block before adds to the residual: added with the next norm
        for index in layers:
            layer, spec = self.layers[index], self.layers[index].spec
            normed_TE, hidden_TE = self._enter(layer.attention_norm, hidden_TE, delta_TE)
            delta_TE = self._attend(layer, normed_TE, cache, index, batch, angles)
            if spec.parallel:
                delta_TE = delta_TE + self.ops.all_reduce(layer.mlp(self.ops, normed_TE))
            else:
                delta_TE = self._leave(layer.attention_post_norm, delta_TE, spec.residual_scale)
                normed_TE, hidden_TE = self._enter(layer.mlp_norm, hidden_TE, delta_TE)
                delta_TE = self.ops.all_reduce(layer.mlp(self.ops, normed_TE))
            delta_TE = self._leave(layer.mlp_post_norm, delta_TE, spec.residual_scale)
        return hidden_TE if delta_TE is None else hidden_TE + delta_TE

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        hidden_TE = self.ops.embedding(batch.ids_T, self.embed, self.dtype)
        if self.embedding_scale != 1:
            hidden_TE = hidden_TE * self.embedding_scale
        if self.positions is not None:
            hidden_TE = hidden_TE + self.ops.embedding(batch.positions_T, self.positions, self.dtype)
        return hidden_TE

    def _enter(
        self, norm: Norm | None, hidden_TE: torch.Tensor, delta_TE: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what is due to the residual; return (what the next block reads, the residual)."""
        if delta_TE is None:
            return (hidden_TE if norm is None else norm(self.ops, hidden_TE)), hidden_TE
        if norm is not None:
            return norm.add(self.ops, delta_TE, hidden_TE)
        hidden_TE = hidden_TE + delta_TE
        return hidden_TE, hidden_TE

    def _leave(self, norm: Norm | None, delta_TE: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what a block adds to the residual."""
        if norm is not None:
            delta_TE = norm(self.ops, delta_TE)
        return delta_TE if scale == 1 else delta_TE * scale

    def _attend(
        self,
        layer: Layer,
        normed_TE: torch.Tensor,
        cache: CacheStorage,
        index: int,
        batch: ForwardBatch,
        angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        spec: AttentionSpec = layer.spec.attention
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(self.ops, normed_TE).view(len(normed_TE), -1, spec.head_dim)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.q_norm is not None and layer.k_norm is not None:
            normed = (self._qk_norm(qk[:, :heads], layer.q_norm), self._qk_norm(qk[:, heads:], layer.k_norm))
            qk = torch.cat(normed, dim=1)
        if spec.rope is not None:
            qk = self.ops.rope(qk, *angles[spec.rope])
        queries, keys = qk[:, :heads], qk[:, heads:]
        storage = cache.layer(index)
        self.ops.cache_write(keys, values, storage, batch.slots_T[layer.group], self.layout.order)
        mixed = self.attention.attend(queries, storage, spec, layer.group, batch)
        return self.ops.all_reduce(layer.out(self.ops, mixed.reshape(len(normed_TE), -1)))

    def _qk_norm(self, x_THD: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Norm each head by a weight (D,), or all heads together by one of (H D,)."""
        grouped = x_THD.reshape(len(x_THD), -1, len(weight))
        return self.ops.rms_norm(grouped, weight, self.spec.norm.eps).view(x_THD.shape)

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of some tokens."""
        spec = self.spec
        logits = self.head(self.ops, self.norm(self.ops, hidden_TE[rows_L])).float()
        if spec.logit_scale != 1:
            logits = logits * spec.logit_scale
        return logits if spec.logit_soft_cap is None else self.ops.soft_cap(logits, spec.logit_soft_cap)


def build(context: RunnerContext) -> EagerRunner:
    """Make the runner around loaded weights."""
    return EagerRunner.build(context)
