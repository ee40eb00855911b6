"""GPT-2: learned positions, layer norms with biases, a feed-forward without a gate (Radford et al. 2019)."""

from __future__ import annotations

from intarsia.families import ACTIVATIONS, MAX_HEADS, MAX_LAYERS, MAX_LEN, Family, Fields, Names, is_tied
from intarsia.types import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec


def _read(fields: Fields, tensor_names: frozenset[str]) -> DecoderSpec:
    fields.must_be("add_cross_attention", False)
    num_positions = fields.size("n_positions", 1024, high=MAX_LEN)
    count = fields.size("n_layer", high=MAX_LAYERS)
    return DecoderSpec(
        family="gpt2",
        vocab_size=fields.size("vocab_size"),
        embed_dim=fields.size("n_embd"),
        max_len=num_positions,
        norm=NormSpec("layer", fields.number("layer_norm_epsilon", 1e-5), bias=True),
        tied=is_tied(fields, tensor_names),
        layers=tuple(_layer(fields, index) for index in range(count)),
        num_positions=num_positions,
    )


def _layer(fields: Fields, index: int) -> LayerSpec:
    embed_dim, num_heads = fields.size("n_embd"), fields.size("n_head", high=MAX_HEADS)
    if embed_dim % num_heads:
        raise fields.wrong("n_embd", f"a multiple of n_head ({num_heads})")
    head_dim = embed_dim // num_heads
    scale = head_dim**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    if fields.flag("scale_attn_by_inverse_layer_idx"):
        scale /= index + 1
    # `reorder_and_upcast_attn` scales the keys first and sums in fp32, as attention does here in any case.
    attention = AttentionSpec(num_heads, num_heads, head_dim, scale, rope=None, qkv_bias=True, out_bias=True)
    mlp = MlpSpec(
        fields.size("n_inner", 4 * embed_dim),
        fields.choice("activation_function", ACTIVATIONS, "gelu_new"),
        bias=True,
        gated=False,
    )
    return LayerSpec(attention, mlp)


def _names(prefix: str) -> Names:
    return Names(
        embed=f"{prefix}wte",
        positions=f"{prefix}wpe",
        norm=f"{prefix}ln_f",
        layer=f"{prefix}h.{{}}",
        attention_norm="ln_1",
        qkv=("attn.c_attn",),
        out="attn.c_proj",
        mlp_norm="ln_2",
        up="mlp.c_fc",
        down="mlp.c_proj",
        transposed=True,
        # Older checkpoints store the causal mask.
        ignored=("*h.*.attn.bias", "*h.*.attn.masked_bias"),
    )


#: The first published checkpoints were saved without their head, and their names without its prefix.
FAMILY = Family(_read, _names("transformer."), other_names=(_names(""),), model_class="LMHeadModel")
