"""A tiny random model, for suites that run engines: it means nothing, and what it says repeats itself soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def save_tiny_model(
    folder: Path,
    *,
    num_ids: int = 64,
    layers: int = 2,
    seed: int = 0,
    hidden: int = 32,
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int | None = None,
    ffn: int = 64,
    biases: bool = False,
    **config: Any,
) -> Path:
    """Save a random llama without a tokenizer, as Hugging Face does, into a folder; return the folder.

    Args:
        folder: made where it is missing.
        num_ids: of its vocabulary; none of them ends an answer.
        layers: how many.
        seed: of its weights.
        hidden: width of its residual stream.
        heads: of its queries.
        kv_heads: of its keys and values.
        head_dim: width of each; None is `hidden / heads`.
        ffn: width of its feed-forward.
        biases: whether its projections have them.
        **config: fields of its config.json, over its own.
    """
    import torch
    from safetensors.torch import save_file

    head_dim = hidden // heads if head_dim is None else head_dim
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": weight(num_ids, hidden), "lm_head.weight": weight(num_ids, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        shapes = {
            "self_attn.q_proj": (heads * head_dim, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, heads * head_dim),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        if biases:
            tensors |= {f"{prefix}.{name}.bias": weight(shape[0]) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
    made = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": biases,
        "mlp_bias": biases,
        "vocab_size": num_ids,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(made | config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
