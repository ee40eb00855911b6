"""Broken families, around llama."""

import json

from attrs import evolve

from contracts.planted import planting
from intarsia.defaults.llama import FAMILY
from intarsia.engine import Engine
from intarsia.errors import CheckpointError
from intarsia.testing import prompt_logits
from intarsia.testing.engines import tiny_config
from intarsia.testing.model_families import FamilyContract
from intarsia.types import Fit, Provider, TensorSource, Unfit

FAULTS = []
plant = planting(FAULTS)


class Family:
    """A good family: llama under another name."""

    def spec(self, config, tensor_names):
        return evolve(FAMILY.spec(config, tensor_names), family="tried")

    def weight_map(self, spec, tensor_names):
        weight_map = FAMILY.weight_map(spec, tensor_names)
        return evolve(weight_map, tensors=self.changed(dict(weight_map.tensors), spec))

    def changed(self, tensors, spec):
        return tensors

    @staticmethod
    def fit(context):
        found = context.config.get("model_type")
        return Fit(50) if found == "tried" else Unfit(f"model_type is {found!r}")


#: What faults are planted in: the contract finds nothing wrong with these.
SOUND = (Family,)


def contract(part):
    """Return the contract for a broken family. The reference is llama."""

    class Broken(FamilyContract):
        def provider(self):
            return Provider(key="tried", summary="llama", fit=part.fit, build=lambda context: part())

        def reference(self, folder, token_ids):
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"model_type": "llama"}))
            with Engine.from_config(tiny_config(folder)) as engine:
                found = prompt_logits(engine, token_ids)
            (folder / "config.json").write_text(json.dumps(config))
            return found

    return Broken


def refitted(layer, **attention):
    return evolve(layer, attention=evolve(layer.attention, **attention))


# --- which checkpoints ------------------------------------------------------------------------------------------------


@plant("test_it_fits_its_own_model_type_alone")
class FitsItsKin(Family):
    """It fits every model_type that begins like its own"""

    @staticmethod
    def fit(context):
        return Fit(50) if str(context.config.get("model_type")).startswith("tried") else Unfit("another")


@plant("test_it_fits_its_own_model_type_alone")
class NeedsAType(Family):
    """Asked about a config without a model_type, it raises"""

    @staticmethod
    def fit(context):
        return Fit(50) if context.config["model_type"] == "tried" else Unfit("another")


# --- specs and weights ------------------------------------------------------------------------------------------------


@plant("test_a_spec_can_be_run")
class NamesAnother(Family):
    """Its specs name another family"""

    def spec(self, config, tensor_names):
        return FAMILY.spec(config, tensor_names)


@plant("test_a_spec_can_be_run")
class TurnsTooMuch(Family):
    """It rotates more dimensions than a head has"""

    def spec(self, config, tensor_names):
        spec = super().spec(config, tensor_names)
        attention = spec.layers[0].attention
        rope = evolve(attention.rope, dim=2 * attention.head_dim)
        return evolve(spec, layers=tuple(refitted(layer, rope=rope) for layer in spec.layers))


@plant("test_a_spec_can_be_run")
class TakesFieldsAway(Family):
    """It takes the fields that it knows out of the config that it was handed"""

    def spec(self, config, tensor_names):
        spec = super().spec(config, tensor_names)
        config.pop("hidden_act", None)
        return spec


@plant("test_the_weight_map_has_what_the_spec_demands")
class DropsTheBias(Family):
    """Its spec says that projections have biases, and its weight map has none"""

    def spec(self, config, tensor_names):
        spec = super().spec(config, tensor_names)
        return evolve(spec, layers=tuple(refitted(layer, qkv_bias=True) for layer in spec.layers))

    def changed(self, tensors, spec):
        return {name: source for name, source in tensors.items() if not name.endswith("bias")}


@plant("test_the_weight_map_has_what_the_spec_demands")
class ForgetsTheLastNorm(Family):
    """Its weight map lacks the norm before the head"""

    def changed(self, tensors, spec):
        return {name: source for name, source in tensors.items() if name != "norm.weight"}


@plant("test_the_weight_map_has_what_the_spec_demands")
class TurnsAMatrix(Family):
    """It takes a matrix for stored the other way round"""

    def changed(self, tensors, spec):
        name = "layers.0.down.weight"
        return tensors | {name: evolve(tensors[name], transposed=True)}


@plant("test_each_tensor_is_read_once_and_none_is_passed_over")
class ReadsKeysTwice(Family):
    """It reads the keys' weights for the values' too"""

    def changed(self, tensors, spec):
        def twice(source):
            q, k, _ = source.names
            return TensorSource((q, k, k), source.shapes)

        return {name: twice(source) if name.endswith("qkv.weight") else source for name, source in tensors.items()}


@plant("test_each_tensor_is_read_once_and_none_is_passed_over")
class IgnoresALot(Family):
    """Whatever else a layer has may stay unread"""

    def weight_map(self, spec, tensor_names):
        return evolve(super().weight_map(spec, tensor_names), ignored=("model.layers.*.lora", "*.zero_point"))


@plant("test_a_missing_head_is_the_embedding_or_refused")
class TiesInSilence(Family):
    """Where the head is missing it takes the embedding, whatever the config says"""

    def spec(self, config, tensor_names):
        return super().spec(dict(config) | {"tie_word_embeddings": True}, tensor_names)


@plant("test_a_missing_head_is_the_embedding_or_refused")
class BelievesTheFlag(Family):
    """Where the config says so it takes the embedding for the head, although the files have one"""

    def spec(self, config, tensor_names):
        return evolve(super().spec(config, tensor_names), tied=config.get("tie_word_embeddings") is True)


# --- configs ----------------------------------------------------------------------------------------------------------


@plant("test_any_value_gives_a_model_or_an_error_that_names_a_field")
class DividesByAnything(Family):
    """It computes with numbers before it looks at them"""

    def spec(self, config, tensor_names):
        config["hidden_size"] // config["num_attention_heads"]
        return super().spec(config, tensor_names)


@plant("test_any_value_gives_a_model_or_an_error_that_names_a_field")
class TakesAnyEpsilon(Family):
    """It takes whatever number a norm's epsilon is: NaN, and true"""

    def spec(self, config, tensor_names):
        eps = config.get("rms_norm_eps", 1e-6)
        spec = super().spec(dict(config) | {"rms_norm_eps": 1e-6}, tensor_names)
        return evolve(spec, norm=evolve(spec.norm, eps=eps)) if isinstance(eps, int | float) else spec


@plant("test_any_value_gives_a_model_or_an_error_that_names_a_field")
class NamesNoField(Family):
    """It says that the config is wrong, and not where"""

    def spec(self, config, tensor_names):
        try:
            return super().spec(config, tensor_names)
        except CheckpointError:
            raise CheckpointError("the config is malformed") from None


@plant("test_missing_fields_have_a_default_or_are_named")
class LooksUp(Family):
    """A field that is missing is an error of Python's"""

    def spec(self, config, tensor_names):
        assert config["num_hidden_layers"]
        return super().spec(config, tensor_names)


@plant("test_unknown_fields_change_nothing")
class KnowsEveryField(Family):
    """It refuses configs with a field that it does not know"""

    def spec(self, config, tensor_names):
        if "no_such_field" in config:
            raise CheckpointError("config: no_such_field is unknown", field="no_such_field")
        return super().spec(config, tensor_names)


@plant("test_other_models_of_its_name_are_refused")
class TakesAnyHead(Family):
    """It takes a classifier for a language model"""

    def spec(self, config, tensor_names):
        return super().spec({name: value for name, value in config.items() if name != "architectures"}, tensor_names)


@plant("test_other_models_of_its_name_are_refused")
class TakesFewBits(Family):
    """It reads packed weights as if they were numbers"""

    def spec(self, config, tensor_names):
        plain = {name: value for name, value in config.items() if name != "quantization_config"}
        return super().spec(plain, tensor_names)


# --- numbers ----------------------------------------------------------------------------------------------------------


@plant("test_logits_equal_the_reference")
class ScalesByWidth(Family):
    """It scales scores by the model's width, not by a head's"""

    def spec(self, config, tensor_names):
        spec = super().spec(config, tensor_names)
        return evolve(spec, layers=tuple(refitted(layer, scale=spec.embed_dim**-0.5) for layer in spec.layers))


@plant("test_logits_equal_the_reference")
class TakesKeysForValues(Family):
    """It lays values where keys belong"""

    def changed(self, tensors, spec):
        def swapped(source):
            q, k, v = source.names
            return TensorSource((q, v, k), source.shapes)

        return {name: swapped(source) if name.endswith("qkv.weight") else source for name, source in tensors.items()}
