"""The `quantization_config` of compressed-tensors, read as far as weights depend on it. Needs no torch.

A config has groups of modules, each with a scheme: the arguments of its weights and those of its input activations.
Which modules a group means is said by names, regular expressions or classes. It is found here by the tensors instead:
a module's scheme is the one that its tensors have the shapes of, and its targets are asked only where several are. So
no regular expression of a file that anyone can have written is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from intarsia.errors import CheckpointError
from intarsia.families import Fields

#: Formats of a module that are read, and what each calls the tensor of its numbers.
PACKED, INTEGERS = "pack-quantized", ("int-quantized", "naive-quantized")
_FORMATS = {PACKED: "weight_packed", **dict.fromkeys(INTEGERS, "weight")}
_MIXED = "mixed-precision"
#: Our own part of a config: the groups whose activations may be rounded, though their format leaves them in floats.
MARK = "intarsia_activations"
#: Orders of columns: these leave them where they are, and the others permute them.
_ACTORDERS = {"weight": False, "static": False, "group": True, "dynamic": True}
_MAX_GROUPS, _MAX_GROUP_SIZE = 1024, 1 << 20
#: Classes of modules, as targets name them.
_CLASSES = ("Linear", "Embedding")


@frozen
class Scheme:
    """How the weights of some modules are stored.

    Attributes:
        group: columns that share a scale; None is the whole row.
        whole: one scale for the whole matrix.
        activations: `int8` where they are rounded, whether by scales of their own or by one that is stored.
        holder: the tensor that holds the numbers.
    """

    targets: tuple[str, ...]
    bits: Literal[4, 8]
    group: int | None
    whole: bool
    symmetric: bool
    permutes: bool
    activations: Literal["int8", "float"]
    holder: str


@frozen
class Schemes:
    """The schemes of a folder, and the modules that have none."""

    schemes: tuple[Scheme, ...]
    ignored: frozenset[str]

    @classmethod
    def read(cls, fields: Fields) -> Schemes:
        """Read the config; raise CheckpointError that names what is not known."""
        for name in ("transform_config", "moe_sparsity_config"):
            if fields.get(name, {}) not in ({}, None):
                raise fields.wrong(name, "absent or empty: it changes what the tensors stand for")
        fields.must_be("quantization_status", "compressed")
        form = _form(fields, (*_FORMATS, _MIXED))
        groups = fields.table("config_groups")
        if not 1 <= len(groups.values) <= _MAX_GROUPS:
            raise fields.wrong("config_groups", f"an object of 1 to {_MAX_GROUPS} groups")
        ignored = fields.get("ignore", [])
        if not isinstance(ignored, list) or not all(isinstance(name, str) for name in ignored):
            raise fields.wrong("ignore", "a list of names")
        rounded = fields.table(MARK)
        schemes = (_scheme(groups.table(name), form, rounds=rounded.has(name)) for name in groups.values)
        return cls(tuple(schemes), frozenset(ignored))

    def of(self, module: str, fitting: Sequence[Scheme]) -> Scheme:
        """Return a module's scheme, out of those that fit its tensors.

        Raises:
            CheckpointError: none fits, several do and no target tells which, or the module is among those ignored.
        """
        if module in self.ignored:
            raise CheckpointError(f"quantization_config.ignore lists {module!r}, and its tensors are quantized")
        if not fitting:
            raise CheckpointError(f"the tensors of {module!r} have the shapes of no group in quantization_config")
        if len({_meaning(scheme) for scheme in fitting}) == 1:
            return fitting[0]
        kind = _CLASSES[1] if module.rpartition(".")[2].startswith("embed") else _CLASSES[0]
        for target in (module, kind):
            if found := next((scheme for scheme in fitting if target in scheme.targets), None):
                return found
        raise CheckpointError(
            f"the tensors of {module!r} have the shapes of several groups in quantization_config, and no target names "
            "the module or its class"
        )


def _meaning(scheme: Scheme) -> tuple[Any, ...]:
    return (scheme.bits, scheme.group, scheme.symmetric, scheme.activations)


def _form(fields: Fields, known: Sequence[str]) -> str:
    form: str = fields.choice("format", {name: name for name in known})
    return form


def _scheme(fields: Fields, form: str, *, rounds: bool) -> Scheme:
    form = _form(fields, tuple(_FORMATS)) if fields.has("format") else form
    if form == _MIXED:
        raise CheckpointError(f"config: {fields.prefix}format is missing, and the folder's format is {_MIXED!r}")
    targets = fields.get("targets")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise fields.wrong("targets", "a list of names")
    if fields.has("output_activations"):
        raise fields.wrong("output_activations", "null: outputs are not rounded")
    if not fields.has("weights"):
        raise fields.wrong("weights", "an object: modules that only round activations are not read")
    return Scheme(
        targets=tuple(targets),
        activations="int8" if rounds else _activations(fields.table("input_activations")),
        holder=_FORMATS[form],
        **_weights(fields.table("weights")),
    )


def _weights(fields: Fields) -> Mapping[str, Any]:
    bits = _integers(fields, (4, 8))
    fields.must_be("dynamic", False)
    size = fields.get("group_size", None if fields.has("strategy") else -1)
    strategy = fields.choice(
        "strategy", {name: name for name in ("channel", "group", "tensor")}, "channel" if size == -1 else "group"
    )
    return {
        "bits": bits,
        "group": fields.size("group_size", high=_MAX_GROUP_SIZE) if strategy == "group" else None,
        "whole": strategy == "tensor",
        "symmetric": fields.flag("symmetric", True),
        "permutes": _permutes(fields),
    }


def _permutes(fields: Fields) -> bool:
    if fields.get("actorder", False) is False:
        return False
    return bool(fields.choice("actorder", _ACTORDERS))


def _integers(fields: Fields, bits: Sequence[int]) -> int:
    kind = fields.get("type", "int")
    if kind != "int":
        raise fields.wrong("type", "'int'")
    found = fields.size("num_bits", 8)
    if found not in bits:
        raise fields.wrong("num_bits", " or ".join(map(str, bits)))
    return found


def _activations(fields: Fields) -> Literal["int8", "float"]:
    if not fields.values:
        return "float"
    _integers(fields, (8,))
    fields.choice("strategy", {name: name for name in ("token", "tensor", "group")}, "token")
    return "int8"
