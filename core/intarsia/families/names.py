"""What a family's checkpoints call their tensors, and the weight map that follows from that and a spec."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import frozen

from intarsia.types import DecoderSpec, LayerSpec, MoeSpec, TensorSource, WeightMap

#: A tensor of the checkpoint, without `.weight` or `.bias`, and how many rows it has.
_Part = tuple[str, int]


@frozen(kw_only=True)
class Names:
    """Tensor names of a checkpoint, without `.weight` or `.bias`; the defaults are those of Llama and most others.

    Attributes:
        layer: what the names of a layer's tensors begin with; `{}` is its number.
        qkv, gate_up: one name for a matrix that is stored whole, or its parts in order.
        expert: what the names of an expert's tensors begin with, inside its layer.
        transposed: whether the layers' matrices are stored the other way round, as GPT-2's are.
        norm_offset: added to the weights of norms, as Gemma's are stored around 0.
        norm_float32: whether norms keep their weights in fp32.
        ignored: glob patterns of tensors that may stay unread.
    """

    embed: str = "model.embed_tokens"
    positions: str = ""
    norm: str = "model.norm"
    head: str = "lm_head"
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    attention_post_norm: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    up: str = ""
    down: str = "mlp.down_proj"
    mlp_post_norm: str = ""
    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    expert_gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    transposed: bool = False
    norm_offset: float = 0.0
    norm_float32: bool = False
    # Old checkpoints store the rotary frequencies, which follow from the config.
    ignored: tuple[str, ...] = ("*.rotary_emb.inv_freq",)

    def fits(self, tensor_names: frozenset[str]) -> bool:
        """Whether a checkpoint's embedding has this name."""
        return f"{self.embed}.weight" in tensor_names

    def weight_map(self, spec: DecoderSpec) -> WeightMap:
        """Return where each weight comes from, in the order that weights are used."""
        tensors = dict(self._embeddings(spec))
        for index, layer in enumerate(spec.layers):
            prefix = self.layer.format(index)
            tensors |= {f"layers.{index}.{name}": source for name, source in self._layer(prefix, layer, spec)}
        tensors |= self._norm("norm", self.norm, spec)
        if not spec.tied:
            tensors["head.weight"] = TensorSource((f"{self.head}.weight",), ((spec.vocab_size, spec.embed_dim),))
        if spec.head_bias:
            tensors["head.bias"] = TensorSource((f"{self.head}.bias",), ((spec.vocab_size,),))
        return WeightMap(tensors, ignored=self.ignored)

    def _embeddings(self, spec: DecoderSpec) -> Iterator[tuple[str, TensorSource]]:
        yield "embed.weight", TensorSource((f"{self.embed}.weight",), ((spec.vocab_size, spec.embed_dim),))
        if spec.num_positions:
            shape = (spec.num_positions, spec.embed_dim)
            yield "positions.weight", TensorSource((f"{self.positions}.weight",), (shape,))

    def _norm(self, name: str, stored: str, spec: DecoderSpec, size: int | None = None) -> dict[str, TensorSource]:
        shapes = ((spec.embed_dim if size is None else size,),)
        sources = {
            f"{name}.weight": TensorSource(
                (f"{stored}.weight",), shapes, float32=self.norm_float32, offset=self.norm_offset
            )
        }
        if spec.norm.bias and size is None:
            sources[f"{name}.bias"] = TensorSource((f"{stored}.bias",), shapes, float32=self.norm_float32)
        return sources

    def _linear(
        self, name: str, prefix: str, parts: tuple[_Part, ...], columns: int, *, bias: bool
    ) -> Iterator[tuple[str, TensorSource]]:
        names = tuple(f"{prefix}.{part}" for part, _ in parts)
        shapes = tuple((columns, rows) if self.transposed else (rows, columns) for _, rows in parts)
        weights = tuple(f"{part}.weight" for part in names)
        yield f"{name}.weight", TensorSource(weights, shapes, transposed=self.transposed)
        if bias:
            yield f"{name}.bias", TensorSource(tuple(f"{part}.bias" for part in names), tuple((r,) for _, r in parts))

    def _layer(self, prefix: str, layer: LayerSpec, spec: DecoderSpec) -> Iterator[tuple[str, TensorSource]]:
        before, after = layer.norms in ("pre", "both"), layer.norms in ("post", "both")
        if before:
            yield from self._norm("attention_norm", f"{prefix}.{self.attention_norm}", spec).items()
        yield from self._attention(prefix, layer, spec)
        if after:
            yield from self._norm("attention_post_norm", f"{prefix}.{self.attention_post_norm}", spec).items()
        if before and not layer.parallel:
            yield from self._norm("mlp_norm", f"{prefix}.{self.mlp_norm}", spec).items()
        yield from self._mlp(prefix, layer, spec.embed_dim)
        if after:
            yield from self._norm("mlp_post_norm", f"{prefix}.{self.mlp_post_norm}", spec).items()

    def _attention(self, prefix: str, layer: LayerSpec, spec: DecoderSpec) -> Iterator[tuple[str, TensorSource]]:
        attention = layer.attention
        q_dim, kv_dim = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
        parts = _split(self.qkv, (q_dim, kv_dim, kv_dim))
        yield from self._linear("qkv", prefix, parts, spec.embed_dim, bias=attention.qkv_bias)
        if attention.qk_norm is not None:
            sizes = (q_dim, kv_dim) if attention.qk_norm == "all" else (attention.head_dim,) * 2
            yield from self._norm("q_norm", f"{prefix}.{self.q_norm}", spec, sizes[0]).items()
            yield from self._norm("k_norm", f"{prefix}.{self.k_norm}", spec, sizes[1]).items()
        yield from self._linear("out", prefix, ((self.out, spec.embed_dim),), q_dim, bias=attention.out_bias)

    def _mlp(self, prefix: str, layer: LayerSpec, embed_dim: int) -> Iterator[tuple[str, TensorSource]]:
        mlp = layer.mlp
        if isinstance(mlp, MoeSpec):
            yield from self._linear("router", prefix, ((self.router, mlp.num_experts),), embed_dim, bias=False)
            for expert in range(mlp.num_experts):
                where, name = f"{prefix}.{self.expert.format(expert)}", f"experts.{expert}"
                parts = _split(self.expert_gate_up, (mlp.ffn_dim, mlp.ffn_dim))
                yield from self._linear(f"{name}.gate_up", where, parts, embed_dim, bias=False)
                down = ((self.expert_down, embed_dim),)
                yield from self._linear(f"{name}.down", where, down, mlp.ffn_dim, bias=False)
            return
        if mlp.gated:
            parts = _split(self.gate_up, (mlp.ffn_dim, mlp.ffn_dim))
            yield from self._linear("gate_up", prefix, parts, embed_dim, bias=mlp.bias)
        else:
            yield from self._linear("up", prefix, ((self.up, mlp.ffn_dim),), embed_dim, bias=mlp.bias)
        yield from self._linear("down", prefix, ((self.down, embed_dim),), mlp.ffn_dim, bias=mlp.bias)


def _split(names: tuple[str, ...], rows: tuple[int, ...]) -> tuple[_Part, ...]:
    """Pair names with their rows; one name has all of them."""
    return ((names[0], sum(rows)),) if len(names) == 1 else tuple(zip(names, rows, strict=True))
