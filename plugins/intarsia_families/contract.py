"""What the contract of families is told of those whose configs are unlike a llama's.

`intarsia plugins check families` runs these, and the others by the suite's own config.
"""

from __future__ import annotations

from typing import Any, ClassVar

from intarsia.testing.model_families import FamilyContract
from intarsia.types import Provider
from intarsia_families import provide_models


def _provided(key: str) -> Provider:
    return next(provider for provider in provide_models() if provider.key == key)


class Gemma3Contract(FamilyContract):
    """The text model of one with a vision tower."""

    head: ClassVar[str] = "language_model.lm_head.weight"

    def provider(self) -> Provider:
        return _provided("gemma3")

    def config(self) -> dict[str, Any]:
        """Return the config of a tiny model, whose text model has a config of its own."""
        text = {name: value for name, value in super().config().items() if name not in ("architectures", "model_type")}
        told = {"model_type": "gemma3_text", "tie_word_embeddings": True, "head_dim": 8}
        return {
            "model_type": "gemma3",
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": text | told,
            "tie_word_embeddings": True,
        }


class Gpt2Contract(FamilyContract):
    """Its fields have names of their own."""

    def provider(self) -> Provider:
        return _provided("gpt2")

    def config(self) -> dict[str, Any]:
        """Return the config of a tiny model."""
        sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": False, **sizes}


class MixtralContract(FamilyContract):
    """A llama with experts."""

    def provider(self) -> Provider:
        return _provided("mixtral")

    def config(self) -> dict[str, Any]:
        """Return the config of a tiny model with four experts, two of which run."""
        return super().config() | {"num_local_experts": 4, "num_experts_per_tok": 2}


class Qwen3MoeContract(FamilyContract):
    """A llama with experts, each of a width of its own."""

    def provider(self) -> Provider:
        return _provided("qwen3_moe")

    def config(self) -> dict[str, Any]:
        """Return the config of a tiny model with four experts, two of which run."""
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        return super().config() | experts | {"head_dim": 8}
