"""How a family's contract runs it: on a config, and on a checkpoint that is made up from what its weight map names."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from intarsia.errors import CheckpointError
from intarsia.protocols import ModelContext, ModelFamily
from intarsia.testing.engines import scratch, unharmed
from intarsia.types import DecoderSpec, Provider, WeightMap

if TYPE_CHECKING:
    import torch

__all__ = ["STRANGE", "FamilyCase", "refusable"]

T = TypeVar("T")

#: What any field of a config can hold.
STRANGE: tuple[Any, ...] = (None, True, False, 0, -1, 1, 2, 3, 7, 1.5, 1e-320, 1e300, 10**400, math.nan, math.inf)
STRANGE += ("", "silu", "7", [], [1], ["full_attention"] * 4, {}, {"rope_type": "default"}, {"a": {}})
#: Names enough that no mixture of experts lacks some, before a checkpoint's own are known.
_PLENTY = frozenset(f"unknown.{number}" for number in range(4096))


class FamilyCase:
    """A family on trial: subclasses say whose provider it is, and what its configs are like.

    Attributes:
        head: name of the head's tensor in a checkpoint whose head is its own.
        ties: name of the field that says that the head is the embedding; empty where none does.
        tolerance: how far logits may be from the reference's.
    """

    head: ClassVar[str] = "lm_head.weight"
    ties: ClassVar[str] = "tie_word_embeddings"
    tolerance: ClassVar[float] = 1e-4

    def provider(self) -> Provider:
        """Return the family's provider; its key is the `model_type` of its checkpoints."""
        raise NotImplementedError("return the provider of the family on trial")

    def config(self) -> dict[str, Any]:
        """Return the config of a tiny model, whole, as its config.json has it: a llama's, unless this is overridden."""
        return {
            "model_type": self.provider().key,
            "architectures": ["TinyForCausalLM"],
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
        }

    def reference(self, folder: Path, token_ids: list[int]) -> torch.Tensor | None:
        """Return the fp32 logits (T, V) of every position, by other code; None where there is none to ask.

        Args:
            folder: of a model with random weights, as Hugging Face saves it, without a tokenizer.
            token_ids: the prompt.
        """
        del folder, token_ids
        return None

    # --- for the claims ---------------------------------------------------------------------------------------------

    def family(self, config: Mapping[str, Any] | None = None) -> ModelFamily:
        """Return the family, built for a config."""
        built: ModelFamily = self.provider().build(ModelContext(config=self.config() if config is None else config))
        return built

    def read(
        self, config: Mapping[str, Any], names: frozenset[str] | None = None
    ) -> tuple[DecoderSpec, WeightMap] | CheckpointError:
        """Return what the family makes of a config, or how it refuses it. Its tensors have the names that it asks for.

        Args:
            config: which it may not change.
            names: of the checkpoint's tensors, where they are others.
        """
        before = copy.deepcopy(dict(config))
        found = refusable(lambda: self._read(config, names))
        assert repr(before) == repr(dict(config)), "the config that it was handed has changed"
        return found

    def _read(self, config: Mapping[str, Any], names: frozenset[str] | None) -> tuple[DecoderSpec, WeightMap]:
        family = self.family(config)
        known = _PLENTY | {self.head} if names is None else names
        spec = family.spec(config, known)
        return spec, family.weight_map(spec, known)

    def model(self) -> tuple[DecoderSpec, WeightMap, frozenset[str]]:
        """Return what the family makes of the whole config and of a checkpoint with the tensors that it asks for."""
        config = self.config()
        found = self.read(config)
        if isinstance(found, CheckpointError) and type(self).config is FamilyCase.config:
            raise NotImplementedError(
                f"return from `config` the config of a tiny model of this family: it refuses a llama's, {found}"
            )
        _, weight_map = unharmed("spec and weight_map", self._read, config, None)
        names = frozenset(name for source in weight_map.tensors.values() for name in source.names)
        spec, again = unharmed("spec and weight_map", self._read, config, names)
        assert again == weight_map, "of a checkpoint with the tensors that it asked for it asks for others"
        return spec, weight_map, names

    @contextmanager
    def saved(self) -> Iterator[Path]:
        """Lend the folder of a model with random weights."""
        import torch
        from safetensors.torch import save_file

        _, weight_map, _ = self.model()
        generator = torch.Generator().manual_seed(0)
        tensors = {}
        for source in weight_map.tensors.values():
            for name, shape in zip(source.names, source.shapes, strict=True):
                noise = torch.randn(shape, generator=generator)
                # Norms near what a new model has, so that logits stay of a size.
                tensors[name] = (
                    0.2 * noise if len(shape) > 1 or name.endswith("bias") else 1 - source.offset + 0.1 * noise
                )
        with scratch() as folder:
            save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
            (folder / "config.json").write_text(json.dumps(self.config()))
            yield folder


def refusable(call: Callable[[], T]) -> T | CheckpointError:
    """Return what a call returns, or how it refuses a config; anything else that is raised is a fault."""
    try:
        return call()
    except CheckpointError as error:
        return error
    except Exception as error:
        raise AssertionError(
            f"{type(error).__name__}: {error}; what is wrong with a config is told by CheckpointError"
        ) from error
