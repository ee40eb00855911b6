"""What the contract of loaders is told of `gguf`; `intarsia plugins check gguf` runs it.

The file is written by the gguf package, by no code of the loader's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intarsia.testing.loaders import LoaderContract
from intarsia.types import Provider
from intarsia_gguf import provide_loaders

if TYPE_CHECKING:
    import torch


class GgufContract(LoaderContract):
    """A llama in one file, as llama.cpp's converter lays it out, in fp32 and without a tokenizer."""

    def provider(self) -> Provider:
        return provide_loaders()[0]

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> Path:
        """Write the file; return its path."""
        import gguf

        path = folder / "model.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        _add_metadata(writer, config)
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
        for name, values in tensors.items():
            num_heads = heads.get(name.split(".")[-2])
            laid_out = values if num_heads is None else _interleaved(values, num_heads)
            theirs = names.get_name(name, try_suffixes=(".weight",))
            assert theirs is not None, name
            writer.add_tensor(theirs, laid_out.contiguous().numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


def _interleaved(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return a matrix (H D, C) as llama.cpp rotates it: the two numbers of a pair are neighbours, not a half apart."""
    return values.reshape(num_heads, 2, -1, values.shape[-1]).transpose(1, 2).reshape(values.shape)


def _add_metadata(writer: Any, config: Mapping[str, Any]) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config["rope_theta"]))
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
