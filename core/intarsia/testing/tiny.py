"""A tiny random model, for suites that run engines: it means nothing, and what it says repeats itself soon."""

from __future__ import annotations

import json
from pathlib import Path


def save_tiny_model(folder: Path, *, num_ids: int = 64, layers: int = 2, seed: int = 0) -> Path:
    """Save a random llama without a tokenizer, as Hugging Face does, into a folder; return the folder.

    Args:
        folder: made where it is missing.
        num_ids: of its vocabulary; none of them ends an answer.
        layers: how many.
        seed: of its weights.
    """
    import torch
    from safetensors.torch import save_file

    hidden, heads, kv_heads, ffn = 32, 2, 1, 64
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    tensors = {"model.embed_tokens.weight": weight(num_ids, hidden), "lm_head.weight": weight(num_ids, hidden)}
    tensors["model.norm.weight"] = torch.ones(hidden)
    for layer in range(layers):
        head_dim = hidden // heads
        shapes = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (ffn, hidden),
            "mlp.up_proj": (ffn, hidden),
            "mlp.down_proj": (hidden, ffn),
        }
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": weight(*shape) for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": num_ids,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
