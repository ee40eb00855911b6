"""A plugin with the loader `random`: a llama of any size from its config alone, for speed where no weights are at hand.

Matrices hold normal numbers of deviation 0.02, norms ones. A large model is there within seconds: all matrices are cut
from one pool of random numbers, each from a place of its own.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import Factory, define, frozen

from intarsia.errors import CheckpointError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import LoaderContext
from intarsia.types import Fit, Provider, StoredTensor, TokenizerSpec, Unfit

if TYPE_CHECKING:
    import torch

#: A prime number, so that no matrix repeats itself row by row.
_POOL = 16777259
_DEVIATION = 0.02


@define(eq=False)
class _Pool:
    """The random numbers, made at the first use in each dtype."""

    numbers: dict[Any, Any] = Factory(dict)

    def fill(self, out: torch.Tensor, start: int) -> None:
        import torch

        if out.dtype not in self.numbers:
            generator = torch.Generator().manual_seed(0)
            self.numbers[out.dtype] = (torch.randn(_POOL, generator=generator) * _DEVIATION).to(out.dtype)
        pool, flat, done, at = self.numbers[out.dtype], out.view(-1), 0, start % _POOL
        while done < len(flat):
            count = min(len(flat) - done, _POOL - at)
            flat[done : done + count].copy_(pool[at : at + count])
            done, at = done + count, 0


@frozen(eq=False)
class _RandomTensor:
    name: str
    shape: tuple[int, ...]
    pool: _Pool
    format: str = "BF16"

    @property
    def num_bytes(self) -> int:
        """Bytes that a file would have."""
        total = 2
        for size in self.shape:
            total *= size
        return total

    def read(self, out: torch.Tensor) -> None:
        """Fill `out`."""
        if len(self.shape) == 1:
            out.fill_(1)
        else:
            self.pool.fill(out, zlib.crc32(self.name.encode()))


@frozen(eq=False)
class RandomCheckpoint:
    """A llama's tensors, made when they are read."""

    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    dtype: str = "bfloat16"
    sampling: Mapping[str, Any] = Factory(dict)
    keeps_weights: bool = False

    def tokenizer(self) -> TokenizerSpec | None:
        """Return None: prompts are token ids."""
        return None


def llama_config(**sizes: int) -> dict[str, Any]:
    """Return a llama's config; sizes are in transformers' spelling, those of Llama 3 8B where they are not given."""
    config: dict[str, Any] = {
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    return config | sizes


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    embed, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or embed // config["num_attention_heads"]
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, embed), "model.norm.weight": (embed,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, embed)
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (heads, embed),
            "self_attn.k_proj": (kv_heads, embed),
            "self_attn.v_proj": (kv_heads, embed),
            "self_attn.o_proj": (embed, heads),
            "mlp.gate_proj": (ffn, embed),
            "mlp.up_proj": (ffn, embed),
            "mlp.down_proj": (embed, ffn),
            "input_layernorm": (embed,),
            "post_attention_layernorm": (embed,),
        }
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


@frozen
class RandomLoader:
    """Opens a folder that holds a llama's config.json and nothing else."""

    path: Path

    def open(self) -> RandomCheckpoint:
        """Read the config.

        Raises:
            CheckpointError: it is no llama's.
        """
        config = llama_config() | json.loads((self.path / "config.json").read_text())
        if config["model_type"] != "llama":
            raise CheckpointError(f"config.json: model_type {config['model_type']!r}; random weights are for 'llama'")
        pool = _Pool()
        return RandomCheckpoint(config, {name: _RandomTensor(name, s, pool) for name, s in _shapes(config).items()})


def save_config(folder: Path, **sizes: int) -> Path:
    """Write the config.json that the loader opens; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(llama_config(**sizes)))
    return folder


@hookimpl
def provide_loaders() -> list[Provider]:
    """Offer the loader `random`; a config must name it."""

    def fit(context: LoaderContext) -> Fit | Unfit:
        if (context.path / "config.json").is_file():
            return Fit(0, "random weights")
        return Unfit("there is no config.json in a folder")

    def build(context: LoaderContext) -> RandomLoader:
        return RandomLoader(context.path)

    return [Provider(key="random", summary="a llama with random weights", fit=fit, build=build)]
