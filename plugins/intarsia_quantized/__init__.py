"""Quantized Hugging Face folders: read as they are stored, and written from any model."""

from __future__ import annotations

from intarsia.hookspecs import hookimpl
from intarsia.types import Provider, lazy
from intarsia_quantized.options import QuantizedOptions


@hookimpl
def provide_loaders() -> list[Provider]:
    """The loader of folders whose config has a `quantization_config`."""
    return [
        Provider(
            key="quantized",
            summary="quantized Hugging Face folders: compressed-tensors, GPTQ, AWQ",
            options=QuantizedOptions,
            fit=lazy("intarsia_quantized.loader:fit"),
            build=lazy("intarsia_quantized.loader:build"),
        )
    ]


@hookimpl
def provide_commands() -> list[Provider]:
    """Offer `intarsia quantize`."""
    summary = "Quantize a model into a folder that transformers and vLLM load too."
    return [Provider(key="quantize", summary=summary, build=lazy("intarsia_quantized.command:build"))]
