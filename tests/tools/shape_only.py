"""A checkpoint of Llama 3 8B's shape without its weights: headers are real, and the data is a hole of the file.

    python tests/tools/shape_only.py FOLDER

What reads headers alone, as `intarsia explain` and `intarsia bench scaling` do, takes it for the model. It has no
tokenizer, and takes 44 KiB on file systems with sparse files.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

EMBED, FFN, LAYERS, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 128256, 32, 8, 128
#: As published with the model.
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": EMBED,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def shapes() -> dict[str, list[int]]:
    """Return each tensor's shape, by name."""
    found = {"model.embed_tokens": [VOCAB, EMBED], "lm_head": [VOCAB, EMBED], "model.norm": [EMBED]}
    for layer in range(LAYERS):
        place = f"model.layers.{layer}"
        found |= {f"{place}.self_attn.{name}_proj": [KV_HEADS * HEAD_DIM, EMBED] for name in "kv"}
        found |= {f"{place}.self_attn.q_proj": [HEADS * HEAD_DIM, EMBED]}
        found |= {f"{place}.self_attn.o_proj": [EMBED, HEADS * HEAD_DIM]}
        found |= {f"{place}.mlp.{name}_proj": [FFN, EMBED] for name in ("gate", "up")}
        found |= {f"{place}.mlp.down_proj": [EMBED, FFN]}
        found |= {f"{place}.{name}_layernorm": [EMBED] for name in ("input", "post_attention")}
    return {f"{name}.weight": shape for name, shape in found.items()}


def save(folder: Path) -> None:
    """Write config and header; the data has its length and no content."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    header, at = {}, 0
    for name, shape in shapes().items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    said = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(said).to_bytes(8, "little") + said)
        file.truncate(8 + len(said) + at)


if __name__ == "__main__":
    save(Path(sys.argv[1]))
