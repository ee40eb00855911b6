"""Rotary frequencies of transformers, as the reference."""

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding


def reference_rope(config: PreTrainedConfig, length: int, layer_type: str | None = None) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies and the attention factor of a config, for a sequence of a length in tokens.

    Kind `default` is not among transformers' table of functions: Phi 3's reads `partial_rotary_factor` too, and Gemma
    3's has layer types.
    """
    table = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
    if table["rope_type"] != "default":
        return ROPE_INIT_FUNCTIONS[table["rope_type"]](config, seq_len=length, layer_type=layer_type)
    module = Phi3RotaryEmbedding if layer_type is None else Gemma3RotaryEmbedding
    return module.compute_default_rope_parameters(config, layer_type=layer_type)
