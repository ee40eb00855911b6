"""Composing one part of a running engine anew: what can be replaced, and the checks that a whole composition makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

from attrs import evolve

from intarsia.compose import ask_plugins, check_provided
from intarsia.config import as_dict, load_config
from intarsia.errors import CompositionError, ConfigError, did_you_mean
from intarsia.hookspecs import KINDS
from intarsia.plugins import Registry
from intarsia.protocols import DrafterContext, PartContext, Parts, ReplacesDrafter
from intarsia.selection import Selector, blamed
from intarsia.types import Choice, EngineConfig

__all__ = ["REPLACEABLE", "key_of", "replaced"]

#: Slots whose part can be replaced while requests run.
REPLACEABLE: Final = ("scheduler", "drafter")
#: Why those of the others cannot.
_REASONS: Final = {
    "loader": "the weights of running requests were read by it",
    "family": "the model that runs was read by it",
    "model": "weights and cache are those of one model",
    "engine": "every part was composed for these options",
    "quantizer": "weights went through it as they loaded",
    "kernels": "weights were packed for them, and the runner holds them",
    "attention": "the cache was laid out for it, and the runner holds it",
    "cache": "the keys and values of running requests are in it",
    "runner": "it was built around the loaded weights, and warmed up",
    "logits_processors": "running requests were checked by them, and their answers depend on them",
    "executor": "it holds weights and cache",
    "frontend": "clients are connected to it",
    "commands": "no engine has any",
}
_ORDER: Final = {kind.slot: place for place, kind in enumerate(KINDS)}


def replaced(
    config: EngineConfig, parts: Parts, registry: Registry, slot: str, choice: Choice
) -> tuple[EngineConfig, Parts]:
    """Choose and build another part for a slot of a composition; return the config and the parts with it.

    Nothing of the parts that are there changes. Checks are those that composing the config anew would make.

    Raises:
        ConfigError: there is no such slot or part, or an option is wrong.
        CompositionError: the slot's part cannot be replaced while requests run, or the new one does not fit the others.
        PluginError: a plugin's code fails or breaks its contract.
    """
    _check_slot(parts, slot)
    changed = load_config(as_dict(config) | {slot: {"use": choice.use, **choice.options}})
    others = [selection for selection in parts.selections if selection.slot != slot]
    select = Selector.around(registry, others, {name: part for name, part in parts.built.items() if name != slot})
    part = select.one(slot, getattr(changed, slot), _context_of(parts, slot))
    check_provided(select, select.of(slot))
    for chosen in select.of(slot):
        select.note(chosen, f"swapped in for {key_of(parts, slot)!r}")
    selections = tuple(chosen.selection() for chosen in sorted(select.chosen, key=lambda one: _ORDER[one.slot]))
    facts: dict[str, Any] = {slot: part, "selections": selections, "built": select.built}
    made = evolve(parts, **facts)
    ask_plugins(changed, made, registry)
    if slot == "drafter":
        with blamed("num_bytes", *(chosen.offer for chosen in select.of(slot))):
            _check_memory(made)
    return changed, made


def key_of(parts: Parts, slot: str) -> str:
    """Return the key of a slot's part; `none` where it is empty."""
    return next((one.provider.key for one in parts.selections if one.slot == slot), "none")


def _check_slot(parts: Parts, slot: str) -> None:
    """Refuse what cannot be replaced, and say why."""
    if slot not in REPLACEABLE:
        reason = _REASONS.get(slot)
        if reason is None:
            raise ConfigError(f"{slot}: no such slot.{did_you_mean(slot, [*REPLACEABLE, *_REASONS])}", field=slot)
        raise CompositionError(
            f"{slot}: it cannot be replaced while the engine runs: {reason}; start another engine with it. What can "
            f"be: {', '.join(REPLACEABLE)}",
            field=slot,
        )
    for selection in parts.selections:
        if slot in selection.provider.requires:
            raise CompositionError(
                f"{slot}: {selection.slot} {selection.provider.key!r} was built around it, so that it cannot be "
                "replaced while the engine runs; start another engine with it",
                field=slot,
            )
    if slot == "drafter" and not isinstance(parts.executor, ReplacesDrafter):
        key = parts.selection("executor").provider.key
        raise CompositionError(
            f"drafter: executor {key!r} cannot take another one while it runs; start another engine with it, or run on "
            "executor 'local'",
            field=slot,
        )


def _context_of(parts: Parts, slot: str) -> Callable[..., PartContext]:
    """Return what makes the new part's context: as composition made that of the one before."""
    partition = parts.partition
    facts: dict[str, Any] = {
        "engine": parts.engine,
        "spec": parts.spec if partition is None else partition.share.spec,
        "num_ids": parts.num_ids,
        "tokenizer": parts.tokenizer,
        "partition": partition,
    }
    if slot == "drafter":
        return partial(DrafterContext, **facts, load_model=_no_second_model)
    return partial(PartContext, **facts)


def _no_second_model(reference: str, **sections: Any) -> Parts:
    del sections
    raise CompositionError(
        f"drafter.model: {reference!r} needs memory that is planned before the cache is made; a drafter with a model "
        "of its own cannot come while the engine runs: start another engine with it",
        field="drafter.model",
    )


def _check_memory(parts: Parts) -> None:
    """All of the device's memory is the cache's by now."""
    num_bytes = 0 if parts.drafter is None else parts.drafter.num_bytes(parts.layout)
    if num_bytes:
        raise CompositionError(
            f"drafter: {key_of(parts, 'drafter')!r} takes {num_bytes} bytes of the device, which are planned before "
            "the cache is made; start another engine with it",
            field="drafter",
        )
