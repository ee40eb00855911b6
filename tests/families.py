"""One line a model: what `tests/plugins/test_families.py` holds against transformers.

A case is a tiny config of transformers; its model gets random weights. Windows are short, so that they show.
"""

import copy
import json
from pathlib import Path

import torch
from attrs import frozen
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, Qwen3Config

from models import TOKENIZER_SIZE, tiny_tokenizer

#: Of nearly every config; what differs is said in the case.
SMALL = {
    "vocab_size": TOKENIZER_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": TOKENIZER_SIZE - 1,
    "pad_token_id": None,
}


@frozen
class Case:
    """One model to hold against transformers.

    Attributes:
        name: of the test; begins with the family's.
        config: of the tiny model.
        max_model_len: of the engine. LongRoPE and dynamic NTK depend on it.
        lengths: of the prompts, in tokens. LongRoPE in transformers depends on them.
    """

    name: str
    config: PreTrainedConfig
    max_model_len: int = 128
    lengths: tuple[int, ...] = (40, 9, 17, 32)


CASES = (Case("qwen3", Qwen3Config(**SMALL, head_dim=16)),)


def saved(case: Case, path: Path) -> PreTrainedModel:
    """Make a case's model with random weights, in fp32, and save it with a tokenizer; return it.

    Weights are large enough for logits to differ clearly, norms are random around what a new model has, and biases
    are not zero.
    """
    torch.manual_seed(0)
    config = copy.deepcopy(case.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                parameter.copy_(0.2 * noise)
            elif parameter.ndim == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(0.2 * noise)
    path.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return model


def config_of(path: Path) -> dict[str, object]:
    """Return the config.json of a saved model."""
    return json.loads((path / "config.json").read_text())


def as_version_4(config: dict[str, object]) -> dict[str, object]:
    """Return a config as transformers 4 wrote it: `rope_theta` and `rope_scaling` in place of `rope_parameters`."""
    config = copy.deepcopy(config)
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    if "full_attention" in rope:  # Gemma 3 had a theta of its own for the layers with a window
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    kind = rope.pop("rope_type", "default")
    config["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    return config
