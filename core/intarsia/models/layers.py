"""A layer's weights, bound to its spec: what the eager runner walks through.

Shape legend: T tokens, E embed, F ffn, X experts, N experts a token.
"""

from __future__ import annotations

from typing import cast

import torch
from attrs import frozen

from intarsia.models.weights import Weights
from intarsia.ops import Ops
from intarsia.types import DecoderSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec, Weight


@frozen(eq=False)
class Linear:
    """A weight and its bias, if it has one."""

    weight: Weight
    bias: torch.Tensor | None

    @classmethod
    def named(cls, weights: Weights, name: str, bias: str | None = None) -> Linear:
        """Bind the weight of this canonical name, and the bias of this or another."""
        weight, bias_N = weights[f"{name}.weight"], weights.get(f"{bias or name}.bias")
        assert isinstance(weight, Weight) and not isinstance(bias_N, Weight)
        return cls(weight, bias_N)

    def __call__(self, ops: Ops, x_TC: torch.Tensor) -> torch.Tensor:
        """Return (T, N)."""
        return ops.linear(x_TC, self.weight, self.bias)


@frozen(eq=False)
class Norm:
    """A norm's spec and weights."""

    spec: NormSpec
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def named(cls, weights: Weights, name: str, spec: NormSpec) -> Norm | None:
        """Bind the weights of this canonical name; None where there are none."""
        weight, bias = weights.get(f"{name}.weight"), weights.get(f"{name}.bias")
        assert not isinstance(weight, Weight) and not isinstance(bias, Weight)
        return None if weight is None else cls(spec, weight, bias)

    def __call__(self, ops: Ops, x_TE: torch.Tensor) -> torch.Tensor:
        """Return (T, E)."""
        if self.spec.kind == "layer":
            return ops.layer_norm(x_TE, self.weight, self.bias, self.spec.eps)
        return ops.rms_norm(x_TE, self.weight, self.spec.eps)

    def add(self, ops: Ops, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add x to the residual and return (its norm, the sum)."""
        if self.spec.kind == "rms":
            return ops.add_rms_norm(x_TE, residual_TE, self.weight, self.spec.eps)
        total_TE = residual_TE + x_TE
        return self(ops, total_TE), total_TE


@frozen(eq=False)
class Mlp:
    """One feed-forward block: of a layer, or of an expert."""

    op: str
    up: Linear
    down: Linear

    @classmethod
    def named(cls, weights: Weights, prefix: str, spec: MlpSpec | MoeSpec) -> Mlp:
        """Bind the weights of this prefix; an expert is gated."""
        gated = isinstance(spec, MoeSpec) or spec.gated
        return cls(
            op=f"{spec.activation}_mul" if gated else spec.activation,
            up=Linear.named(weights, f"{prefix}.{'gate_up' if gated else 'up'}"),
            down=Linear.named(weights, f"{prefix}.down"),
        )

    def __call__(self, ops: Ops, x_TE: torch.Tensor) -> torch.Tensor:
        """Return (T, E)."""
        return self.finish(ops, self.up(ops, x_TE))

    def finish(self, ops: Ops, raised_TF: torch.Tensor) -> torch.Tensor:
        """Return (T, E) of what `up` gave: (T, F), or (T, 2 F) where the block is gated."""
        activated_TF: torch.Tensor = getattr(ops, self.op)(raised_TF)
        return self.down(ops, activated_TF)


@frozen(eq=False)
class Mixture:
    """A router and its experts."""

    spec: MoeSpec
    router: Linear
    experts: tuple[Mlp, ...]

    @classmethod
    def named(cls, weights: Weights, prefix: str, spec: MoeSpec) -> Mixture:
        """Bind the weights of this prefix."""
        experts = (Mlp.named(weights, f"{prefix}.experts.{x}", spec) for x in range(spec.num_experts))
        return cls(spec, Linear.named(weights, f"{prefix}.router"), tuple(experts))

    def __call__(self, ops: Ops, x_TE: torch.Tensor) -> torch.Tensor:
        """Return (T, E): a token's experts are added in their order, whatever other tokens go to them."""
        probabilities_TX = torch.softmax(self.router(ops, x_TE).float(), dim=-1)
        shares_TN, chosen_TN = probabilities_TX.topk(self.spec.top_k, dim=-1)
        if self.spec.normalized:
            shares_TN = shares_TN / shares_TN.sum(dim=-1, keepdim=True)
        # (token, place) pairs in the order of their experts, and within one in that of the tokens.
        order = chosen_TN.flatten().argsort(stable=True)
        counts = torch.bincount(chosen_TN.flatten(), minlength=self.spec.num_experts).tolist()
        mixed_TE = torch.zeros_like(x_TE, dtype=torch.float32)
        for expert, pairs in enumerate(torch.split(order, counts)):
            if len(pairs):
                tokens = pairs // self.spec.top_k
                given = self.experts[expert](ops, x_TE[tokens])
                mixed_TE.index_add_(0, tokens, given.float() * shares_TN.flatten()[pairs].unsqueeze(1))
        return mixed_TE.to(x_TE.dtype)


@frozen(eq=False)
class Layer:
    """One layer's spec and weights; norms that it does not have are None."""

    spec: LayerSpec
    group: int
    attention_norm: Norm | None
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    out: Linear
    attention_post_norm: Norm | None
    mlp_norm: Norm | None
    mlp: Mlp | Mixture
    mlp_post_norm: Norm | None

    @classmethod
    def named(cls, weights: Weights, index: int, model: DecoderSpec, group: int) -> Layer:
        """Bind the weights of a layer whose keys and values are in this cache group."""
        prefix, spec = f"layers.{index}", model.layers[index]

        def norm(name: str) -> Norm | None:
            return Norm.named(weights, f"{prefix}.{name}", model.norm)

        mlp = spec.mlp
        return cls(
            spec=spec,
            group=group,
            attention_norm=norm("attention_norm"),
            qkv=Linear.named(weights, f"{prefix}.qkv"),
            q_norm=cast(torch.Tensor | None, weights.get(f"{prefix}.q_norm.weight")),
            k_norm=cast(torch.Tensor | None, weights.get(f"{prefix}.k_norm.weight")),
            out=Linear.named(weights, f"{prefix}.out"),
            attention_post_norm=norm("attention_post_norm"),
            mlp_norm=norm("mlp_norm"),
            mlp=(Mixture if isinstance(mlp, MoeSpec) else Mlp).named(weights, prefix, mlp),  # type: ignore[arg-type]
            mlp_post_norm=norm("mlp_post_norm"),
        )
