"""A quantized model as a folder: weights, config, tokenizer. 2:4 sparse ones are of our own format."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from attrs import frozen

from intarsia.checkpoints import FolderCheckpoint
from intarsia.errors import CheckpointError
from intarsia.protocols import Parts
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.sparse import SparseFormat
from intarsia.types import Checkpoint, TokenizerSpec, Weight
from intarsia_quantized import sparse24
from intarsia_quantized.compressing import compress, quantization_config
from intarsia_quantized.folder_writer import FolderWriter, writing
from intarsia_quantized.quantizing import quantized

#: Files beside the weights that a folder keeps as they are.
_KEPT = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
    "LICENSE",
)
#: Parts of a config that describe files which are not these.
_DROPPED = ("quantization_config", "compression_config", "torch_dtype", "dtype")


@frozen
class Written:
    """What was written.

    Attributes:
        num_bytes: of all tensors.
        formats: weight format -> how many modules have it.
        others: linear modules that are not quantized.
    """

    num_bytes: int
    formats: Mapping[str, int]
    others: tuple[str, ...]


def write(parts: Parts, out: Path, *, dtype: torch.dtype, force: bool, plain: Parts | None = None) -> Written:
    """Quantize a composed model and write its folder.

    Args:
        parts: the model with its quantizers; its weights are not loaded.
        out: where.
        dtype: of tensors that are not quantized.
        force: replace files that are there.
        plain: the model with quantizers that give no input scales, for weights whose scales have no place.

    Raises:
        ConfigError: the folder cannot be written to.
        CheckpointError: a weight cannot be read, quantized or written; names it. Then nothing is written.
    """
    source = parts.checkpoint.folder.path if isinstance(parts.checkpoint, FolderCheckpoint) else None
    with writing(out, source, force=force) as writer:
        formats, others = _write_tensors(parts, plain, writer, dtype)
        if not formats:
            raise CheckpointError("no weight is quantized: quantizer.include and exclude leave none")
        _check_alike(formats)
        writer.write_json("config.json", _config(parts, formats, others, dtype))
        _write_rest(parts.checkpoint, writer)
    counts: dict[str, int] = {}
    for layout in formats.values():
        counts[layout.name] = counts.get(layout.name, 0) + 1
    return Written(writer.num_bytes, counts, tuple(others))


def _write_tensors(
    parts: Parts, plain: Parts | None, writer: FolderWriter, dtype: torch.dtype
) -> tuple[dict[str, IntegerFormat | SparseFormat], list[str]]:
    """Return the format of each module that is quantized, and the linear modules that are not."""
    formats: dict[str, IntegerFormat | SparseFormat] = {}
    others: list[str] = [] if "head.weight" in parts.weight_map.tensors else ["lm_head"]
    for named in quantized(parts, plain):
        module = named.name.rpartition(".")[0]
        if isinstance(named.value, Weight):
            layout = named.value.format
            if isinstance(layout, SparseFormat):
                writer.add(sparse24.store(module, named.value, dtype))
            else:
                writer.add(compress(module, named.value))
                assert isinstance(layout, IntegerFormat)
            formats[module] = layout
        else:
            writer.add({named.name: named.value.to(dtype).contiguous()})
            if named.linear:
                others.append(module)
    return formats, [module for module in others if module not in formats]


def _check_alike(formats: Mapping[str, IntegerFormat | SparseFormat]) -> None:
    """Refuse sparse weights beside others: there is no folder for both."""
    sparse = [module for module, layout in formats.items() if isinstance(layout, SparseFormat)]
    if sparse and len(sparse) < len(formats):
        other = next(module for module in formats if module not in sparse)
        raise CheckpointError(f"{sparse[0]} is 2:4 sparse and {other} is not; a folder holds one kind")


def _described(formats: Mapping[str, IntegerFormat | SparseFormat], others: list[str]) -> dict[str, Any]:
    integers = {module: layout for module, layout in formats.items() if isinstance(layout, IntegerFormat)}
    return quantization_config(integers, others) if integers else sparse24.quantization_config()


def _config(
    parts: Parts, formats: Mapping[str, IntegerFormat | SparseFormat], others: list[str], dtype: torch.dtype
) -> dict[str, Any]:
    name = str(dtype).removeprefix("torch.")
    config = {key: _plain(value) for key, value in parts.checkpoint.config.items() if key not in _DROPPED}
    # Older readers know the second name alone.
    config |= {"dtype": name, "torch_dtype": name, "quantization_config": _described(formats, others)}
    if parts.spec.tied:
        config["tie_word_embeddings"] = "lm_head" not in formats
    return config


def _plain(value: Any) -> Any:
    """Return a config's value as JSON has it."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _write_rest(checkpoint: Checkpoint, writer: FolderWriter) -> None:
    """Copy the tokenizer and the like from the model's folder, or write what another file says of them."""
    if isinstance(checkpoint, FolderCheckpoint):
        for name in _KEPT:
            if (path := checkpoint.folder.find(name)) is not None:
                shutil.copyfile(path, writer.path / name)
        return
    tokenizer = checkpoint.tokenizer()
    generation = dict(checkpoint.sampling)
    if tokenizer is not None:
        _write_tokenizer(tokenizer, writer)
        generation |= {"eos_token_id": list(tokenizer.eos_ids)} if tokenizer.eos_ids else {}
        generation |= {"bos_token_id": tokenizer.bos_id} if tokenizer.bos_id is not None else {}
    if generation:
        writer.write_json("generation_config.json", generation)


def _write_tokenizer(tokenizer: TokenizerSpec, writer: FolderWriter) -> None:
    (writer.path / "tokenizer.json").write_text(tokenizer.definition, encoding="utf-8")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": tokenizer.add_bos}
    writer.write_json("tokenizer_config.json", settings | dict(tokenizer.special_tokens))
    if tokenizer.chat_template is not None:
        (writer.path / "chat_template.jinja").write_text(tokenizer.chat_template, encoding="utf-8")
