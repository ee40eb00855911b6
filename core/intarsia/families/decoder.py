"""The pieces of a DecoderSpec that many families read alike. Names and defaults are those of transformers' configs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intarsia.errors import CheckpointError
from intarsia.families.fields import MAX_EXPERTS, MAX_HEADS, MAX_LAYERS, MAX_LEN, Fields
from intarsia.families.rope import max_len
from intarsia.types import Activation, AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec

HEAD = "lm_head.weight"

#: What `layer_types` can hold.
_TYPES = ("full_attention", "sliding_attention")

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


def mixture(fields: Fields, ffn_dim: str, **differs: Any) -> MoeSpec:
    """Return a mixture of gated experts whose chosen shares sum to 1, but for what `differs`.

    Args:
        fields: the config. The number of experts has two names, of which transformers 5 writes the newer.
        ffn_dim: the name of an expert's width.
        differs: fields of MoeSpec.
    """
    older = fields.has("num_experts") and not fields.has("num_local_experts")
    name = "num_experts" if older else "num_local_experts"
    num_experts = fields.size(name, high=MAX_EXPERTS)
    top_k = fields.size("num_experts_per_tok", high=MAX_EXPERTS)
    if top_k > num_experts:
        raise fields.wrong("num_experts_per_tok", f"at most {name} ({num_experts})")
    facts: dict[str, Any] = {
        "num_experts": num_experts,
        "top_k": top_k,
        "ffn_dim": fields.size(ffn_dim),
        "activation": fields.choice("hidden_act", ACTIVATIONS, "silu"),
    }
    return MoeSpec(**facts | differs)


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


def windows(fields: Fields, slides: Sequence[bool]) -> tuple[int | None, ...]:
    """Return the window of each layer, or None: `sliding_window` for the layers that slide.

    Args:
        fields: the config.
        slides: whether each layer does, where no `layer_types` says it.
    """
    types = [_TYPES[1] if one else _TYPES[0] for one in slides]
    if fields.has("layer_types"):
        types = list(fields.texts("layer_types", _TYPES, len(types)))
    if _TYPES[1] not in types:
        return (None,) * len(types)
    window = fields.size("sliding_window", high=MAX_LEN)
    return tuple(window if one == _TYPES[1] else None for one in types)


def one_window(fields: Fields) -> int | None:
    """Return the window that every layer has, or None, as `sliding_window` says.

    transformers reads no `layer_types` with such configs: where there are some that say otherwise, they are refused.
    """
    window = fields.size("sliding_window", high=MAX_LEN) if fields.has("sliding_window") else None
    if fields.has("layer_types"):
        fields.texts("layer_types", (_TYPES[0 if window is None else 1],), num_layers(fields))
    return window


def late_windows(fields: Fields) -> tuple[int | None, ...]:
    """Return the window of each layer, or None, as Qwen's configs say it: where windows are in use, late layers slide.

    Layers from `max_window_layers` on have the window, where no `layer_types` says otherwise.
    """
    count, first = num_layers(fields), 0
    used = fields.flag("use_sliding_window") and fields.has("sliding_window")
    if used and not fields.has("layer_types"):
        first = fields.size("max_window_layers", 28, low=0, high=MAX_LAYERS)
    found = windows(fields, [used and index >= first for index in range(count)])
    if not used and any(found):
        raise fields.wrong("use_sliding_window", "true, as the sliding layers of layer_types need")
    return found


def is_tied(fields: Fields, tensor_names: frozenset[str], *, head: str = HEAD) -> bool:
    """Return whether the head is the embedding.

    Where the checkpoint has a head it is used, whatever the flag says, as transformers 5 does.

    Args:
        fields: the config.
        tensor_names: of the checkpoint.
        head: the name of the head's tensor.
    """
    tied = fields.flag("tie_word_embeddings", True)
    if head in tensor_names:
        return False
    if fields.has("tie_word_embeddings") and not tied:
        raise CheckpointError(
            f"the checkpoint has no {head}, and config's tie_word_embeddings is false: the head is missing",
            field="tie_word_embeddings",
        )
    return True
