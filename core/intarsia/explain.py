"""The report behind `explain`: each part and why it is there, the memory plan, the invariance level."""

from __future__ import annotations

from typing import Any

import attrs

from intarsia.config import as_dict, fingerprint
from intarsia.machine import free_memory
from intarsia.models.weights import num_parameters
from intarsia.protocols import Parts, Selection
from intarsia.types import EngineConfig


def explain(config: EngineConfig, parts: Parts) -> dict[str, Any]:
    """Return what a composition is made of, as plain data.

    Keys:
        model: what runs.
        engine: the shared options as resolved.
        parts: slot -> key, provider, asked_by, reason, options; a slot with several parts lists them under `all`.
        ops: op -> the key of who implements it.
        memory: bytes, see `memory_plan`.
        invariance: the level of the whole, and each part's.
        hash: names this composition: equal parts, versions, options and config have equal hashes.
    """
    promises = parts.ops.invariance(parts.engine.dtype) | {"attention": parts.attention.invariance(parts.engine.dtype)}
    report: dict[str, Any] = {
        "model": _model(config, parts),
        "engine": attrs.asdict(parts.engine),
        "parts": _parts(parts),
        "ops": {name: choice.source for name, choice in parts.ops.choices.items()},
        "memory": memory_plan(parts),
        "invariance": {"level": parts.invariance, "by_part": promises},
    }
    # Free memory differs from moment to moment; it is no part of what the engine is.
    report["hash"] = fingerprint({"config": as_dict(config), **{k: v for k, v in report.items() if k != "memory"}})
    return report


def memory_plan(parts: Parts) -> dict[str, Any]:
    """Return where memory goes, in bytes, on the device.

    Keys:
        weights; cache and its pages, page_size and layout; token: 2 x layers x kv heads x head dim x bytes a number;
        max_batch: how many sequences of max_model_len fit at once.
    """
    layout, max_len = parts.layout, parts.engine.max_model_len
    assert max_len is not None
    return {
        "weights": parts.weight_bytes,
        "token": layout.token_bytes,
        "page_size": layout.page_size,
        "page": layout.page_bytes,
        "pages": parts.cache.num_pages,
        "cache": parts.cache.num_pages * layout.page_bytes,
        "layout": {"order": layout.order, "format": layout.format, "groups": len(layout.groups)},
        "max_batch": parts.cache.capacity(max_len),
        "free": free_memory(parts.engine.device),
    }


def _model(config: EngineConfig, parts: Parts) -> dict[str, Any]:
    spec = parts.spec
    attention = spec.layers[0].attention
    return {
        "reference": config.model.use,
        "family": spec.family,
        "parameters": num_parameters(parts.weight_map),
        "layers": spec.num_layers,
        "embed_dim": spec.embed_dim,
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "vocab_size": spec.vocab_size,
        "max_len": spec.max_len,
        "tied": spec.tied,
    }


def _parts(parts: Parts) -> dict[str, Any]:
    slots: dict[str, list[dict[str, Any]]] = {}
    for selection in parts.selections:
        slots.setdefault(selection.slot, []).append(_selection(selection))
    return {
        slot: chosen[0] if len(chosen) == 1 else chosen[0] | {"key": "+".join(c["key"] for c in chosen), "all": chosen}
        for slot, chosen in slots.items()
    }


def _selection(selection: Selection) -> dict[str, Any]:
    return {
        "key": selection.provider.key,
        "provider": f"{selection.plugin} ({selection.distribution} {selection.version})",
        "asked_by": selection.asked_by,
        "reason": selection.reason,
        "options": attrs.asdict(selection.options),
    }
