"""Writes checkpoints of transformers as GGUF files, as llama.cpp's convert_hf_to_gguf.py does.

Names come from the gguf package's own tables; it knows nothing of the code under test.
"""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

#: model_type -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "gpt2": "gpt2",
    "phi": "phi2",
}
_PERMUTED = ("llama", "mistral", "mixtral", "granite")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")

Tensors = dict[str, np.ndarray]


def write_gguf(
    folder: Path,
    path: Path,
    *,
    metadata: Mapping[str, Any] | None = None,
    edit: Callable[[Tensors], Tensors] | None = None,
    q8_0: bool = False,
    stored: Mapping[str, tuple[Kind, np.ndarray]] | None = None,
) -> Tensors:
    """Write the checkpoint in `folder` as a GGUF file; return what the file means, by transformers' names.

    Args:
        folder: a saved model of transformers, with one safetensors file.
        path: of the file.
        metadata: keys, without their prefix, to be changed; None leaves one out.
        edit: changes the tensors of the file, by GGUF's names.
        q8_0: quantize what can be.
        stored: type and bytes, a row each, of tensors that are quantized already, by transformers' names.
    """
    config = json.loads((folder / "config.json").read_text())
    theirs = load_file(folder / "model.safetensors")
    ours, means = {}, {}
    stored = stored or {}
    for name, values in theirs.items():
        if name in stored:
            kind, raw = stored[name]
            means[name], ours[name] = gguf.dequantize(raw, kind), _converted(name, raw, config)
            continue
        linear = config["model_type"] == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
        values = np.ascontiguousarray(values.T) if linear else values
        if q8_0 and _is_quantized(name, values):
            values = gguf.dequantize(gguf.quantize(values, Kind.Q8_0), Kind.Q8_0)
        means[name] = np.ascontiguousarray(values.T) if linear else values
        ours[name] = _converted(name, values, config)
    tensors = _named(ours, config)
    named = _named({name: ours[name] for name in stored}, config)
    kinds = dict(zip(named, (kind for kind, _ in stored.values()), strict=True))
    tensors |= _rope_factors(config)
    tensors = edit(tensors) if edit else tensors
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config["model_type"]])
    for key, value in {**_metadata(config), **(metadata or {})}.items():
        if value is not None:
            _add(writer, f"{writer.arch}.{key}", value)
    writer.add_tokenizer_model("none")
    for name, values in tensors.items():
        if name in kinds:
            writer.add_tensor(name, np.ascontiguousarray(values), raw_dtype=kinds[name])
        elif q8_0 and _is_quantized(name, values):
            writer.add_tensor(name, gguf.quantize(values, Kind.Q8_0), raw_dtype=Kind.Q8_0)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return means


def save_as(folder: Path, means: Tensors, path: Path) -> Path:
    """Save a checkpoint of transformers with other numbers in a new folder."""
    path.mkdir()
    (path / "config.json").write_text((folder / "config.json").read_text())
    save_file(means, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _is_quantized(name: str, values: np.ndarray) -> bool:
    kept = ("ffn_gate_inp.weight", "mlp.gate.weight", "moe.gate.weight", "wpe.weight", "position_embd.weight")
    return values.ndim > 1 and values.shape[-1] % 32 == 0 and not name.endswith(kept)


def _converted(name: str, values: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """What `modify_tensors` of the converter's model classes does to one tensor."""
    if config["model_type"] in _PERMUTED:
        if ".q_proj." in name:
            return _permuted(values, config["num_attention_heads"])
        if ".k_proj." in name:
            return _permuted(values, config["num_key_value_heads"])
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return values + np.float32(1)
    return values


def _permuted(values: np.ndarray, num_heads: int) -> np.ndarray:
    halves = values.reshape(num_heads, 2, values.shape[0] // num_heads // 2, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _named(theirs: Tensors, config: Mapping[str, Any]) -> Tensors:
    """Stack the experts, and give all their names in the file."""
    stacked: dict[str, list[tuple[int, np.ndarray]]] = {}
    plain = {}
    for name, values in theirs.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            plain[name] = values
        else:
            stacked.setdefault(f"{match[1]}.{match[3]}.weight", []).append((int(match[2]), values))
    for name, experts in stacked.items():
        if "block_sparse_moe" in name:  # Mixtral's stacks have the names of another checkpoint of it
            name = name.removeprefix("model.").replace("block_sparse_moe", "feed_forward")
        plain[name] = np.stack([values for _, values in sorted(experts, key=lambda expert: expert[0])])
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(kind, 64)
    found = {names.get_name(name, try_suffixes=(".weight", ".bias")): values for name, values in plain.items()}
    assert None not in found and len(found) == len(plain)
    return found


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return rope.get("full_attention", rope)


def _rope_factors(config: Mapping[str, Any]) -> Tensors:
    rope = _rope(config)
    if rope.get("rope_type") != "longrope":
        return {}
    return {f"rope_factors_{one}.weight": np.array(rope[f"{one}_factor"], np.float32) for one in ("long", "short")}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
    else:
        writer.add_string(key, value)


def _metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """What `set_gguf_parameters` of the converter writes, and the size of the vocabulary."""
    kind = config["model_type"]
    if kind == "gpt2":
        return {
            "block_count": config["n_layer"],
            "context_length": config["n_positions"],
            "embedding_length": config["n_embd"],
            "feed_forward_length": 4 * config["n_embd"],
            "attention.head_count": config["n_head"],
            "attention.layer_norm_epsilon": config["layer_norm_epsilon"],
            "vocab_size": config["vocab_size"],
        }
    rope, num_heads = _rope(config), config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
    written: dict[str, Any] = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": num_heads,
        "attention.head_count_kv": config["num_key_value_heads"],
        "vocab_size": config["vocab_size"],
    }
    if kind == "phi":
        part = int(rope["partial_rotary_factor"] * config["hidden_size"]) // num_heads
        return written | {
            "attention.layer_norm_epsilon": config["layer_norm_eps"],
            "rope.dimension_count": part,
        }
    written |= {"attention.layer_norm_rms_epsilon": config["rms_norm_eps"], "rope.freq_base": float(rope["rope_theta"])}
    if kind == "phi3":
        return written | _phi3(config, rope)
    if kind == "granite":
        written |= {
            "attention.scale": config["attention_multiplier"],
            "embedding_scale": config["embedding_multiplier"],
            "residual_scale": config["residual_multiplier"],
            "logit_scale": config["logits_scaling"],
        }
    elif config.get("head_dim"):
        written |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if kind in _PERMUTED:
        written["rope.dimension_count"] = head_dim
    if rope.get("rope_type") in ("linear", "yarn"):
        written |= {"rope.scaling.type": rope["rope_type"], "rope.scaling.factor": float(rope["factor"])}
        if rope["rope_type"] == "yarn":
            written["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    experts = config.get("num_local_experts") or config.get("num_experts")
    if experts:
        written |= {"expert_count": experts, "expert_used_count": config["num_experts_per_tok"]}
    if kind == "qwen3_moe":
        written["expert_feed_forward_length"] = config["moe_intermediate_size"]
    return written | (_gemma(config) if kind.startswith("gemma") else {})


def _phi3(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    num_heads, length = config["num_attention_heads"], config["max_position_embeddings"]
    original = config["original_max_position_embeddings"]
    written = {
        "rope.scaling.original_context_length": original,
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * config["hidden_size"]) // num_heads,
        "attention.sliding_window": config["sliding_window"] or 0,
    }
    if rope.get("rope_type") == "longrope":
        scale = length / original
        written["rope.scaling.attn_factor"] = float(np.sqrt(1 + np.log(scale) / np.log(original))) if scale > 1 else 1.0
    return written


def _gemma(config: Mapping[str, Any]) -> dict[str, Any]:
    written = {}
    if config["sliding_window"]:
        written["attention.sliding_window"] = config["sliding_window"]
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if config.get(name):
            written[name] = config[name]
    return written
