"""The pieces of a DecoderSpec that many families read alike. Names and defaults are those of transformers' configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import CheckpointError
from intarsia.families.fields import MAX_HEADS, MAX_LAYERS, Fields
from intarsia.families.rope import max_len
from intarsia.types import Activation, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, NormSpec, RopeSpec

HEAD = "lm_head.weight"

#: `hidden_act` -> what it means. Hugging Face has several names for one function.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
}


def head_dim(fields: Fields) -> int:
    """Return dimensions of a head: `head_dim`, or the width shared between the heads."""
    embed_dim, num_heads = fields.size("hidden_size"), fields.size("num_attention_heads", high=MAX_HEADS)
    if not fields.has("head_dim") and embed_dim % num_heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({num_heads}), and head_dim is not given")
    size = fields.size("head_dim", embed_dim // num_heads, high=MAX_HEADS)
    if size % 2:
        raise CheckpointError(f"config: head_dim is {size}, not even, as rotary pairs need", field="head_dim")
    return size


def attention(fields: Fields, rope: RopeSpec | None, **differs: Any) -> AttentionSpec:
    """Return grouped-query attention scaled by D ** -0.5 and without biases, but for what `differs`."""
    num_heads = fields.size("num_attention_heads", high=MAX_HEADS)
    num_kv_heads = fields.size("num_key_value_heads", num_heads, high=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.wrong("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    size = head_dim(fields)
    facts = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": size, "scale": size**-0.5, "rope": rope}
    return AttentionSpec(**facts | differs)


def mlp(fields: Fields, **differs: Any) -> MlpSpec:
    """Return a gated feed-forward without biases, but for what `differs`."""
    activation = fields.choice("hidden_act", ACTIVATIONS, "silu")
    facts: dict[str, Any] = {"ffn_dim": fields.size("intermediate_size"), "activation": activation}
    return MlpSpec(**facts | differs)


def decoder(
    family: str, fields: Fields, tensor_names: frozenset[str], layers: Sequence[LayerSpec], **differs: Any
) -> DecoderSpec:
    """Return a decoder with RMS norms around these layers, but for what `differs`.

    Args:
        family: its key.
        fields: the config.
        tensor_names: of the checkpoint.
        layers: all of them, first to last.
        differs: fields of DecoderSpec.
    """
    facts: dict[str, Any] = {
        "family": family,
        "vocab_size": fields.size("vocab_size"),
        "embed_dim": fields.size("hidden_size"),
        "layers": tuple(layers),
    }
    if "max_len" not in differs:
        facts["max_len"] = max_len(fields, layers[0].attention.rope)
    if "norm" not in differs:
        facts["norm"] = NormSpec(eps=fields.number("rms_norm_eps", 1e-6))
    if "tied" not in differs:
        facts["tied"] = is_tied(fields, tensor_names)
    return DecoderSpec(**facts | differs)


def num_layers(fields: Fields) -> int:
    """Return how many layers."""
    return fields.size("num_hidden_layers", high=MAX_LAYERS)


def is_tied(fields: Fields, tensor_names: frozenset[str], *, default: bool = True) -> bool:
    """Return whether the head is the embedding.

    Where the checkpoint has a head it is used, whatever the flag says, as transformers 5 does.

    Args:
        fields: the config.
        tensor_names: of the checkpoint.
        default: what `tie_word_embeddings` is where the config does not say.
    """
    tied = fields.flag("tie_word_embeddings", default)
    if HEAD in tensor_names:
        return False
    if fields.has("tie_word_embeddings") and not tied:
        raise CheckpointError(
            f"the checkpoint has no {HEAD}, and config's tie_word_embeddings is false: the head is missing",
            field="tie_word_embeddings",
        )
    return True
