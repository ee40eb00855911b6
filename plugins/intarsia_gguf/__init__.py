"""Models in GGUF files, llama.cpp's format: one file holds config, tokenizer and weights."""

from __future__ import annotations

from pathlib import Path

from intarsia.errors import CheckpointError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import Loader, LoaderContext
from intarsia.types import Fit, Provider, Unfit


@hookimpl
def provide_loaders() -> list[Provider]:
    """Offer the loader of `.gguf` files."""
    return [Provider(key="gguf", summary="GGUF files, as llama.cpp writes them", build=_build, fit=_fit)]


def _fit(context: LoaderContext) -> Fit | Unfit:
    from intarsia_gguf.files import describe

    described = describe(context.path)
    return Fit(50, described.reason) if described.file is not None else Unfit(described.reason)


def _build(context: LoaderContext) -> Loader:
    from intarsia_gguf.checkpoint import GgufLoader
    from intarsia_gguf.files import describe

    described = describe(context.path)
    # A file that was asked for by this loader's key is opened whatever it looks like: `open` says what is wrong.
    file = described.file or (context.path if context.path.is_file() else None)
    if file is None:
        raise CheckpointError(f"{context.path}: {described.reason}")
    return GgufLoader(Path(file))
