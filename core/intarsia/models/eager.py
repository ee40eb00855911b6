"""The eager runner: a DecoderSpec run op by op. What every other runner must equal.

Shape legend: T tokens, L rows of logits, E embed, H heads, K kv heads, D head dim, V vocab.
"""

from __future__ import annotations

from functools import partial

import torch
from attrs import field, frozen

from intarsia.models.layers import Layer, Linear, Mlp, Norm
from intarsia.models.weights import Weights
from intarsia.ops import Ops
from intarsia.protocols import AttentionBackend, CacheStorage, LayerCache, RunnerContext
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


def _embedding(weights: Weights, name: str) -> Weight | None:
    weight = weights.get(name)
    assert weight is None or isinstance(weight, Weight)
    return weight


@frozen(eq=False)
class EagerRunner:
    """Calls the named ops layer by layer.

    Where ranks share the model, this is what one of them runs. What a pipeline's stage does not have is None: the
    embeddings but in the first, the last norm and the head but in the last.
    """

    spec: DecoderSpec
    layout: CacheLayout
    dtype: torch.dtype
    ops: Ops
    attention: AttentionBackend
    embed: Weight | None
    positions: Weight | None
    embedding_scale: float
    layers: tuple[Layer, ...]
    norm: Norm | None
    head: Linear | None
    angles: _Angles = field(repr=False)

    @classmethod
    def build(cls, context: RunnerContext) -> EagerRunner:
        """Bind the loaded weights to the spec, and tabulate the rotary angles."""
        spec, weights = context.spec, context.weights
        max_len = context.engine.max_model_len
        assert max_len is not None
        dtype, device = getattr(torch, context.engine.dtype), torch.device(context.engine.device)
        group_of = {layer: index for index, group in enumerate(context.layout.groups) for layer in group.layers}
        embed, norm = _embedding(weights, EMBED), Norm.named(weights, "norm", spec.norm)
        head = "head" if HEAD in weights else "embed"
        return cls(
            spec=spec,
            layout=context.layout,
            dtype=dtype,
            ops=context.ops,
            attention=context.attention,
            embed=embed,
            positions=_embedding(weights, POSITIONS),
            embedding_scale=torch.tensor(spec.embedding_scale, dtype=dtype).item(),
            layers=tuple(Layer.named(weights, i, spec, group_of[i]) for i in range(spec.num_layers)),
            norm=norm,
            head=None if norm is None else Linear.named(weights, head, bias="head"),
            angles=_Angles.of(spec, max_len, dtype, device),
        )

    def run(
        self, batch: ForwardBatch, cache: CacheStorage, layers: range, hidden_TE: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a range of layers from the embedding (range starts at 0) or from `hidden_TE`; return (T, E).

        Where activations are sharded along tokens, the residual stream is of this rank's alone, on both ends.
        """
        if hidden_TE is None:
            assert layers.start == 0
            hidden_TE = self._embed(batch)
        angles, num_tokens = self.angles.at(batch.positions_T), len(batch.ids_T)
        delta_TE: torch.Tensor | None = None  # what the block before adds to the residual: added with the next norm
        for index in layers:
            layer, spec = self.layers[index], self.layers[index].spec
            if spec.parallel:
                normed_TE, hidden_TE = self._enter(layer.attention_norm, hidden_TE, delta_TE, num_tokens)
                qkv_TN = layer.qkv(self.ops, normed_TE)
                delta_TE = self._attend(layer, qkv_TN, cache, index, batch, angles)
                delta_TE = self.ops.all_reduce(delta_TE + layer.mlp(self.ops, normed_TE))
            else:
                qkv_TN, hidden_TE = self._project(layer.attention_norm, layer.qkv, hidden_TE, delta_TE, num_tokens)
                delta_TE = self._attend(layer, qkv_TN, cache, index, batch, angles)
                delta_TE = self._leave(layer.attention_post_norm, self.ops.all_reduce(delta_TE), spec.residual_scale)
                delta_TE, hidden_TE = self._feed(layer, hidden_TE, delta_TE, num_tokens)
                delta_TE = self.ops.all_reduce(delta_TE)
            delta_TE = self._leave(layer.mlp_post_norm, delta_TE, spec.residual_scale)
        return hidden_TE if delta_TE is None else hidden_TE + delta_TE

    def _embed(self, batch: ForwardBatch) -> torch.Tensor:
        assert self.embed is not None, "a stage behind the first takes up hidden_TE"
        rows = partial(self.ops.embedding, weight=self.embed, dtype=self.dtype)
        hidden_TE = self.ops.look_up(batch.ids_T, rows)
        if self.embedding_scale != 1:
            hidden_TE = hidden_TE * self.embedding_scale
        if self.positions is not None:
            positions_T = self.ops.own_tokens(batch.positions_T)
            hidden_TE = hidden_TE + self.ops.embedding(positions_T, self.positions, self.dtype)
        return hidden_TE

    def _enter(
        self, norm: Norm | None, hidden_TE: torch.Tensor, delta_TE: torch.Tensor | None, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add what is due to the residual; return (what the next block reads, of all tokens, the residual)."""
        if delta_TE is None:
            normed_TE = hidden_TE if norm is None else norm(self.ops, hidden_TE)
        elif norm is not None:
            normed_TE, hidden_TE = norm.add(self.ops, delta_TE, hidden_TE)
        else:
            normed_TE = hidden_TE = hidden_TE + delta_TE
        return self.ops.gather_tokens(normed_TE, num_tokens), hidden_TE

    def _project(
        self, norm: Norm | None, linear: Linear, hidden_TE: torch.Tensor, delta_TE: torch.Tensor | None, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Enter a block that begins with one linear: return (its product (T, N), the residual)."""
        fused = None if norm is None or norm.spec.kind != "rms" else self.ops.norm_linear(linear.weight)
        if norm is not None and fused is not None:
            x_TE, residual_TE = (hidden_TE, None) if delta_TE is None else (delta_TE, hidden_TE)
            return fused(x_TE, residual_TE, norm.weight, norm.spec.eps, linear.weight, linear.bias)
        normed_TE, hidden_TE = self._enter(norm, hidden_TE, delta_TE, num_tokens)
        return linear(self.ops, normed_TE), hidden_TE

    def _feed(
        self, layer: Layer, hidden_TE: torch.Tensor, delta_TE: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (what the feed-forward of this rank gives, the residual); a mixture's rows are read many times."""
        if isinstance(layer.mlp, Mlp):
            raised_TF, hidden_TE = self._project(layer.mlp_norm, layer.mlp.up, hidden_TE, delta_TE, num_tokens)
            return layer.mlp.finish(self.ops, raised_TF), hidden_TE
        normed_TE, hidden_TE = self._enter(layer.mlp_norm, hidden_TE, delta_TE, num_tokens)
        return layer.mlp(self.ops, normed_TE), hidden_TE

    def _leave(self, norm: Norm | None, delta_TE: torch.Tensor, scale: float) -> torch.Tensor:
        """Return what a block adds to the residual."""
        if norm is not None:
            delta_TE = norm(self.ops, delta_TE)
        return delta_TE if scale == 1 else delta_TE * scale

    def _attend(
        self,
        layer: Layer,
        qkv_TN: torch.Tensor,
        cache: CacheStorage,
        index: int,
        batch: ForwardBatch,
        angles: dict[RopeSpec, tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        spec: AttentionSpec = layer.spec.attention
        qkv_TND = qkv_TN.view(len(qkv_TN), -1, spec.head_dim)
        storage = cache.layer(index)
        turns = None if spec.rope is None else angles[spec.rope]
        queries = self._inputs(layer, qkv_TND, turns, storage, batch.slots_T[layer.group])
        mixed = self.attention.attend(queries, storage, spec, layer.group, batch)
        return layer.out(self.ops, mixed.reshape(len(qkv_TN), -1))

    def _inputs(
        self,
        layer: Layer,
        qkv_TND: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        cache: LayerCache,
        slots_T: torch.Tensor,
    ) -> torch.Tensor:
        """Norm and rotate queries and keys, write keys and values to their slots, and return the queries (T, H, D)."""
        spec, order = layer.spec.attention, self.layout.order
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        fused, over_all = self.ops.attention_inputs, spec.qk_norm == "all"
        if fused is not None and not over_all and (norms is not None or angles is not None):
            return fused(qkv_TND, heads, norms, self.spec.norm.eps, angles, cache, slots_T, order)
        qk, values = qkv_TND[:, : heads + kv_heads], qkv_TND[:, heads + kv_heads :]
        if norms is not None:
            normed = (
                self._qk_norm(qk[:, :heads], norms[0], over_all=over_all),
                self._qk_norm(qk[:, heads:], norms[1], over_all=over_all),
            )
            qk = torch.cat(normed, dim=1)
        if angles is not None:
            qk = self.ops.rope(qk, *angles)
        queries, keys = qk[:, :heads], qk[:, heads:]
        self.ops.cache_write(keys, values, cache, slots_T, order)
        return queries

    def _qk_norm(self, x_THD: torch.Tensor, weight: torch.Tensor, *, over_all: bool) -> torch.Tensor:
        """Norm each head by a weight (D,), or all heads together, those of other ranks too, by one of (H D,)."""
        grouped = x_THD.reshape(len(x_THD), -1, len(weight))
        norm = self.ops.rms_norm_over_ranks if over_all else self.ops.rms_norm
        return norm(grouped, weight, self.spec.norm.eps).view(x_THD.shape)

    def logits(self, hidden_TE: torch.Tensor, rows_L: torch.Tensor) -> torch.Tensor:
        """Return fp32 logits (L, V) of some tokens; where ranks share the vocabulary, of this rank's ids."""
        spec = self.spec
        assert self.norm is not None and self.head is not None, "the last stage alone has logits"
        logits = self.head(self.ops, self.norm(self.ops, self.ops.gather_rows(hidden_TE, rows_L))).float()
        if spec.logit_scale != 1:
            logits = logits * spec.logit_scale
        return logits if spec.logit_soft_cap is None else self.ops.soft_cap(logits, spec.logit_soft_cap)


def build(context: RunnerContext) -> EagerRunner:
    """Make the runner around loaded weights."""
    return EagerRunner.build(context)
