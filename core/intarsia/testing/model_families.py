"""The contract of model families, as tests to inherit.

::

    from intarsia.testing.model_families import FamilyContract

    class TestMine(FamilyContract):
        def provider(self):
            return my_plugin.provide_models()[0]

        def config(self):
            return {"model_type": "mine", "hidden_size": 32, ...}

pytest runs the inherited tests. `config` is a llama's unless it is overridden. A checkpoint is made up from what the
weight map names; with a `reference`, such as transformers, an engine's logits are held against that.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from intarsia.errors import CheckpointError
from intarsia.protocols import ModelContext
from intarsia.testing.claims import unclaimed
from intarsia.testing.engines import offering, tiny_config, unharmed
from intarsia.testing.family_case import STRANGE, FamilyCase
from intarsia.testing.family_needs import check_spec, needed
from intarsia.types import Fit, Unfit, WeightMap

__all__ = ["FamilyContract"]

_HEADS: tuple[Any, ...] = (["LlamaForSequenceClassification"], ["LlamaModel"], "LlamaForCausalLM", [3], {"a": 1}, 5)


class FamilyContract(FamilyCase):
    """What every family keeps. Subclass it, name the class `Test...`, and say whose provider it is.

    What can be said besides, such as `config` and `reference`, is in `FamilyCase`.
    """

    # --- which checkpoints ------------------------------------------------------------------------------------------

    def test_it_fits_its_own_model_type_alone(self) -> None:
        """It fits configs of its `model_type`, its key, and gives a reason elsewhere, whatever the config holds."""
        key, config = self.provider().key, self.config()
        assert config.get("model_type") == key, (
            f"the config's model_type is {config.get('model_type')!r}, the key {key!r}"
        )
        assert isinstance(self._fit(config), Fit), f"it does not fit a checkpoint of its own model_type, {key!r}"
        for other in (f"{key}_next", f"x{key}", key.upper(), "", None, 3, [key], {key: 1}, ...):
            others = config | {"model_type": other} if other is not ... else {}
            fit = self._fit(others)
            assert isinstance(fit, Unfit), f"it fits a checkpoint whose model_type is {others.get('model_type')!r}"
            assert fit.reason, "it does not fit, and gives no reason"

    def _fit(self, config: Mapping[str, Any]) -> Fit | Unfit:
        found: Fit | Unfit = unharmed("fit", self.provider().fit, ModelContext(config=config))
        assert isinstance(found, Fit | Unfit), f"fit returned {found!r}"
        return found

    # --- specs and weights ------------------------------------------------------------------------------------------

    def test_a_spec_can_be_run(self) -> None:
        """The spec of a config is of the family, whole and within bounds; equal configs have equal specs."""
        spec, _, names = self.model()
        assert spec.family == self.provider().key, f"spec.family is {spec.family!r}, not the family's key"
        check_spec(spec)
        assert hash(spec) is not None
        again = self.read(self.config(), names)
        assert not isinstance(again, CheckpointError) and again[0] == spec, "read again it is another model"

    def test_the_weight_map_has_what_the_spec_demands(self) -> None:
        """Every weight that a runner reads is there, in its shape, and no other."""
        spec, weight_map, _ = self.model()
        wanted, found = needed(spec), {name: source.whole for name, source in weight_map.tensors.items()}
        assert not wanted.keys() - found.keys(), f"missing: {sorted(wanted.keys() - found.keys())[:4]}"
        assert not found.keys() - wanted.keys(), f"nobody reads {sorted(found.keys() - wanted.keys())[:4]}"
        for name, shape in wanted.items():
            assert found[name] == shape, f"{name} is {found[name]}, and the spec demands {shape}"

    def test_each_tensor_is_read_once_and_none_is_passed_over(self) -> None:
        """No tensor of the checkpoint makes two weights, and `ignored` covers nothing that could matter."""
        _, weight_map, names = self.model()
        listed = [name for source in weight_map.tensors.values() for name in source.names]
        twice = sorted({name for name in listed if listed.count(name) > 1})
        assert not twice, f"{twice[:4]} are read for two weights"
        for source in weight_map.tensors.values():
            assert len(source.names) == len(source.shapes), f"{len(source.names)} tensors, {len(source.shapes)} shapes"
            assert not source.transposed or len(source.names) == 1, f"{source.names} are several, and transposed"
        self._check_ignored(weight_map, names)

    def _check_ignored(self, weight_map: WeightMap, names: frozenset[str]) -> None:
        for name in names:
            assert not weight_map.ignores(name), f"{name} is read, and may stay unread: one of the two is wrong"
            for other in (f"{name.rpartition('.')[0]}.lora", f"{name}_scale", f"{name.rpartition('.')[0]}.zero_point"):
                assert other in names or not weight_map.ignores(other), f"a tensor {other} would be passed over"

    def test_a_missing_head_is_the_embedding_or_refused(self) -> None:
        """A head in the files is used, whatever the config says; without one the config decides, and never silently."""
        if not self.ties:
            unclaimed("ties = '': no field says whether the head is the embedding")
        config = self.config()
        names = self.model()[2] | {self.head}
        for tied in (True, False):
            found = self.read(config | {self.ties: tied}, names)
            assert not isinstance(found, CheckpointError), f"{self.ties} {tied}, and a head in the files: {found}"
            assert not found[0].tied and "head.weight" in found[1].tensors, f"{self.ties} {tied}: the head goes unread"
        found = self.read(config | {self.ties: True}, names - {self.head})
        assert not isinstance(found, CheckpointError) and found[0].tied, (
            "without a head the embedding is not taken for it"
        )
        found = self.read(config | {self.ties: False}, names - {self.head})
        assert isinstance(found, CheckpointError), f"the head is missing, {self.ties} is false, and nobody is told"
        assert self.ties in str(found), f"{str(found)[:200]!r} does not name {self.ties}"

    # --- configs ----------------------------------------------------------------------------------------------------

    def test_any_value_gives_a_model_or_an_error_that_names_a_field(self) -> None:
        """Whatever stands in a field, there is a model that can be run, or CheckpointError with the field's name."""
        self.model()
        config = self.config()
        for name in config:
            for value in STRANGE:
                found = self.read(config | {name: value})
                where = f"{name} = {value!r:.40}"
                if not isinstance(found, CheckpointError):
                    try:
                        check_spec(found[0])
                    except AssertionError as error:
                        raise AssertionError(f"{where}: {error}") from None
                else:
                    _check_named(found, where)

    def test_missing_fields_have_a_default_or_are_named(self) -> None:
        """Without a field there is a model, or CheckpointError that names the field, or one that needs it."""
        self.model()
        config = self.config()
        for name in config:
            found = self.read({key: value for key, value in config.items() if key != name})
            if not isinstance(found, CheckpointError):
                check_spec(found[0])
            elif name not in str(found):
                _check_named(found, f"without {name}")
        if not isinstance(empty := self.read({}), CheckpointError):
            check_spec(empty[0])

    def test_unknown_fields_change_nothing(self) -> None:
        """Fields that the family has never heard of are left alone: configs hold much that concerns others."""
        config, spec = self.config(), self.model()[0]
        strange = {
            "no_such_field": [1, {"a": None}],
            "transformers_version": "5.0",
            "_name_or_path": "x",
            "dtype": "half",
        }
        for name, value in strange.items():
            found = self.read(config | {name: value}, self.model()[2])
            assert not isinstance(found, CheckpointError), f"{name}: {found}"
            assert found[0] == spec, f"{name}, which it cannot know, makes it another model"

    def test_other_models_of_its_name_are_refused(self) -> None:
        """Another head than a language model's, and weights in few bits, are refused by the field that says so."""
        self.model()
        config = self.config()
        for classes in _HEADS:
            self._refused(config | {"architectures": classes}, "architectures", classes)
        quantization = {"quant_method": "gptq", "bits": 4}
        self._refused(config | {"quantization_config": quantization}, "quantization_config", quantization)

    def _refused(self, config: Mapping[str, Any], field: str, value: object) -> None:
        found = self.read(config)
        assert isinstance(found, CheckpointError), f"{field} is {value!r}, and it makes a language model of it"
        assert field in str(found), f"{str(found)[:200]!r} does not name {field}"

    # --- numbers ----------------------------------------------------------------------------------------------------

    def test_logits_equal_the_reference(self) -> None:
        """An engine's logits after every token are the reference's, for prompts in one piece and in chunks."""
        from intarsia.engine import Engine
        from intarsia.testing import prompt_logits

        spec = self.model()[0]
        token_ids = [(7 * turn * turn + 3 * turn) % spec.vocab_size for turn in range(min(40, spec.max_len))]
        with self.saved() as folder:
            expected = self.reference(folder, token_ids)
            if expected is None:
                unclaimed("there is no reference: `reference` returns None")
            config = tiny_config(folder, engine={"max_model_len": min(64, spec.max_len)})
            config["model"] = {"use": str(folder), "family": self.provider().key}
            with Engine.from_config(config, plugins=offering("family", self.provider())) as engine:
                for chunk in (None, 7):
                    found = prompt_logits(engine, token_ids, chunk=chunk)
                    assert found.shape == expected.shape, f"logits {tuple(found.shape)}, not {tuple(expected.shape)}"
                    off = float((found - expected).abs().max())
                    assert off <= self.tolerance, f"logits are up to {off:.2g} away from the reference's"


def _check_named(error: CheckpointError, where: str) -> None:
    """Raise AssertionError where an error names no field. That there are fewer tensors than experts is of none."""
    named = error.field is not None and error.field.rpartition(".")[2] in str(error)
    assert named or "experts" in str(error), f"{where}: {str(error)[:200]!r} names no field"
