"""A family of models: what its config means, and what its tensors are called."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from attrs import Factory, frozen

from intarsia.errors import CheckpointError
from intarsia.families.fields import Fields
from intarsia.families.names import Names
from intarsia.protocols import ModelContext
from intarsia.types import DecoderSpec, Fit, MoeSpec, Provider, Unfit, WeightMap


@frozen
class Family:
    """What `provide_models` asks for.

    Attributes:
        read: makes the spec of (a config, the names of the checkpoint's tensors); raises CheckpointError for a value
            that the family does not know.
        names: what its checkpoints call their tensors.
        other_names: other spellings of the same; taken is the first of all whose embedding the checkpoint holds.
        model_class: the end of the class names in `architectures` that it knows.
    """

    read: Callable[[Fields, frozenset[str]], DecoderSpec]
    names: Names = Factory(Names)
    other_names: tuple[Names, ...] = ()
    model_class: str = "ForCausalLM"

    def spec(self, config: Mapping[str, Any], tensor_names: frozenset[str]) -> DecoderSpec:
        """Return the model; raise CheckpointError for what the family does not know."""
        fields = Fields(config)
        if fields.has("quantization_config"):
            raise fields.wrong("quantization_config", "absent; model.loader = 'quantized' reads what it describes")
        architectures = fields.get("architectures", ())
        known = isinstance(architectures, list | tuple) and all(isinstance(name, str) for name in architectures)
        if not known or (architectures and not any(name.endswith(self.model_class) for name in architectures)):
            raise fields.wrong("architectures", f"the list of one model class that ends in {self.model_class!r}")
        return self.read(fields, tensor_names)

    def weight_map(self, spec: DecoderSpec, tensor_names: frozenset[str]) -> WeightMap:
        """Return which checkpoint tensors make the model's.

        Raises:
            CheckpointError: there are fewer tensors than experts.
        """
        # Before they are given names: a config of a few bytes can ask for billions.
        experts = sum(layer.mlp.num_experts for layer in spec.layers if isinstance(layer.mlp, MoeSpec))
        if experts > len(tensor_names):
            raise CheckpointError(
                f"config: the layers have {experts} experts together; the checkpoint has {len(tensor_names)} tensors"
            )
        known = (self.names, *self.other_names)
        found = next((names for names in known if names.fits(tensor_names)), self.names)
        return found.weight_map(spec)


def provider(model_type: str, where: str, summary: str) -> Provider:
    """Return the provider of a family.

    Args:
        model_type: what its checkpoints call it in `config.json`; also its key.
        where: `module:NAME` of its Family, which is imported when a model needs it.
        summary: one line for `intarsia plugins`.
    """

    def fit(context: ModelContext) -> Fit | Unfit:
        found = context.config.get("model_type")
        if found == model_type:
            return Fit(50, f"model_type is {model_type}")
        return Unfit(f"the checkpoint's model_type is {found!r}, not {model_type!r}")

    def build(_: ModelContext) -> Family:
        module, name = where.split(":")
        family: Family = getattr(importlib.import_module(module), name)
        return family

    return Provider(key=model_type, summary=summary, fit=fit, build=build)
