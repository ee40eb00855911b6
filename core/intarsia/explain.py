"""The report behind `explain`: each part and why it is there, the memory plan, the invariance level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import torch

from intarsia.config import as_dict, fingerprint
from intarsia.deprecations import uses
from intarsia.invariance import promises
from intarsia.layout import lay_out, weight_bytes
from intarsia.lookahead import look_ahead
from intarsia.machine import device_facts, free_memory
from intarsia.models.swapping import staging_bytes
from intarsia.models.weights import num_parameters
from intarsia.ops import ANY_FORMAT
from intarsia.protocols import Parts, Selection
from intarsia.recommended import recommended
from intarsia.types import DENSE, EngineConfig

#: What would pay.
_PAYS = "Kernels or a runner that read it as it is would; why others are not here is said of `kernels` and `runner`"


def explain(
    config: EngineConfig,
    parts: Parts,
    swaps: Sequence[Mapping[str, Any]] = (),
    observers: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return what a composition is made of, as plain data that JSON can say.

    Keys:
        model: what runs.
        engine: the shared options as resolved.
        device: what the GPU is, see `intarsia.machine.device_facts`; empty on CPUs.
        parts: slot -> key, provider, asked_by, reason, options; a slot with several parts lists them under `all`.
        ops: op -> the key of who implements it.
        fused: op -> source, saves: who does in one pass over memory what takes several; bytes that saves a token.
        formats: weight format -> who reads it, and whether it pays here, see `weight_formats`.
        sampling: name -> what requests take that do not say, and `recommended`: the names of those that are the
            model's, from its generation_config.json or metadata.
        memory: bytes, see `memory_plan`.
        parallel: who holds what where ranks share the model, see `parallel_plan`.
        steps: how many are in flight at most, and why.
        invariance: the level of the whole, and each part's.
        deprecated: what plugins use that goes in a release to come, in sentences; it is no part of the hash.
        observers: whose hooks observe, and which of them were disabled for what, see `Observers.report`.
        swaps: what was replaced while it ran, in order, see `Engine.swap`; it is no part of what the hash names.
        hash: names this composition: equal parts, versions, options and config have equal hashes, on any day and in any
            process.
    """
    ahead = look_ahead(parts)
    by_part = promises(parts.ops, parts.attention, parts.selection("runner").provider, parts.engine.dtype)
    formats = weight_formats(parts)
    report: dict[str, Any] = {
        "model": _model(config, parts),
        "engine": _plain(attrs.asdict(parts.engine)),
        "device": device_facts(parts.engine.device),
        "parts": _parts(parts, formats),
        "ops": {name: choice.source for name, choice in parts.ops.choices.items()},
        "fused": fused(parts),
        "formats": formats,
        "sampling": {
            **attrs.asdict(parts.sampling),
            "recommended": sorted(recommended(config.model, parts.checkpoint)),
        },
        "memory": memory_plan(parts),
        "parallel": parallel_plan(parts),
        "steps": {"in_flight": ahead.depth, "reason": ahead.reason},
        "invariance": {"level": parts.invariance, "by_part": by_part},
    }
    report["hash"] = fingerprint({"config": as_dict(config), **_identity(report)})
    report["deprecated"] = [*parts.deprecated, *map(str, uses("name"))]
    report["observers"] = [dict(observer) for observer in observers]
    report["swaps"] = [dict(swap) for swap in swaps]
    return report


def _identity(report: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out what is no part of what the engine is: machine, free memory, why one part was preferred to others."""
    kept = {
        key: value for key, value in report.items() if key not in ("device", "memory", "parallel", "steps", "parts")
    }
    parts = {slot: part.get("all", [part]) for slot, part in report["parts"].items()}
    chosen = {slot: [{k: v for k, v in one.items() if k != "reason"} for one in each] for slot, each in parts.items()}
    return kept | {"parts": chosen}


def memory_plan(parts: Parts) -> dict[str, Any]:
    """Return where memory goes, in bytes, on the device.

    Keys:
        weights: all of them, as loaded.
        token: 2 x layers x kv heads x (head dim x bytes a number + bytes of a scale); page: page_size of them.
        pages, cache: those that sequences can use, and their bytes.
        spare: one page more, which holds no sequence: padded tokens write there.
        drafter: what it takes beside: pages of its own, a second model.
        staging: buffers that pages pass through on their way to host memory and back.
        total: weights, cache, spare, drafter and staging.
        host_pages, host: pages of preempted sequences that host memory holds, and their bytes there, none of the total.
        layout: order of the axes, entry format, number of groups.
        max_batch: how many sequences of max_model_len fit at once.
        free: what is free now.
    """
    layout, max_len = parts.layout, parts.engine.max_model_len
    assert max_len is not None
    cache = parts.num_pages * layout.page_bytes
    drafter = 0 if parts.drafter is None else parts.drafter.num_bytes(layout)
    staging = staging_bytes(layout) if parts.num_host_pages else 0
    return {
        "weights": parts.weight_bytes,
        "token": layout.token_bytes,
        "page_size": layout.page_size,
        "page": layout.page_bytes,
        "pages": parts.num_pages,
        "cache": cache,
        "spare": layout.page_bytes,
        "drafter": drafter,
        "staging": staging,
        "total": parts.weight_bytes + cache + layout.page_bytes + drafter + staging,
        "host_pages": parts.num_host_pages,
        "host": parts.num_host_pages * layout.page_bytes,
        "layout": {"order": layout.order, "format": layout.format, "groups": len(layout.groups)},
        "max_batch": parts.cache.capacity(max_len),
        "free": free_memory(parts.engine.device),
    }


def parallel_plan(parts: Parts) -> dict[str, Any]:
    """Return who holds what where ranks share the model, before any of them starts; empty on one device.

    Keys:
        tp, pp, sequence, rank: what is asked for, and which rank this is.
        ranks: of each rank `rank`, `stage`, `slice`, `layers` (from, to), `weights` and `cache` (bytes), `activations`
            (bytes a token at most) and `sends` (bytes a token, within its stage).
        logits, stage: bytes that are sent for a row of logits, and a token to the stage behind.
    """
    partition = parts.partition
    if partition is None:
        return {}
    report, options = dict(partition.report(parts.engine)), parts.selection("cache").options
    pages = parts.num_pages + 1
    report["ranks"] = [
        {
            **facts,
            "weights": weight_bytes(
                partition.cut(parts.weight_map, share), parts.quantizers, parts.ops, parts.engine.dtype
            ),
            "cache": pages * lay_out(parts.spec, options, parts.layout.order, parts.engine.dtype, share).page_bytes,
        }
        for facts, share in zip(report["ranks"], partition.shares, strict=True)
    ]
    return report


def fused(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return the fused ops of a composition: who computes them, and the bytes of memory traffic a token that they save.

    A runner that promises a level of its own computes all by its own code: then none is used.
    """
    if parts.selection("runner").provider.invariance:
        return {}
    size = getattr(torch, parts.engine.dtype).itemsize
    found = {}
    for name, choice in parts.ops.choices.items():
        saves = choice.kernel.saves
        if saves is not None and (saved := saves(parts.spec, size)) > 0:
            found[name] = {"source": choice.source, "saves": saved}
    return found


def weight_formats(parts: Parts) -> dict[str, dict[str, Any]]:
    """Return who multiplies by weights of each format that the composition has, and whether that pays.

    Keys of each:
        read_by: slot and key.
        pays: whether few bits make a step faster than floats would, not only smaller in memory.
        remark: where it does not, why, and what would; else empty.
    """
    runner = parts.selection("runner").provider
    chosen = {
        name[len("linear[") : -1]: choice for name, choice in parts.ops.choices.items() if name.startswith("linear[")
    }
    found: dict[str, dict[str, Any]] = {}
    for weight_format, choice in chosen.items():
        # A runner that promises a level of its own computes all by its own code.
        reader = f"runner {runner.key!r}" if runner.invariance else f"kernels {choice.source!r}"
        dequantizes = choice.kernel.dequantizes or ANY_FORMAT in choice.kernel.formats
        pays = weight_format == DENSE.name or bool(runner.invariance) or not dequantizes
        remark = "" if pays else f"{weight_format} does not pay here: each step dequantizes it ({reader}). {_PAYS}"
        found[weight_format] = {"read_by": reader, "pays": pays, "remark": remark}
    return found


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


def _parts(parts: Parts, formats: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    slots: dict[str, list[dict[str, Any]]] = {}
    for selection in parts.selections:
        slots.setdefault(selection.slot, []).append(_selection(selection))
    # Whoever brings a format hears of it: the quantizers that make it, and the loader where files have it.
    made = [quantizer.format for quantizer in parts.quantizers]
    for part, weight_format in zip(slots.get("quantizer", []), made, strict=True):
        _remark(part, formats[weight_format]["remark"])
    for weight_format, facts in formats.items():
        if weight_format not in made:
            _remark(slots["loader"][0], facts["remark"])
    return {
        slot: chosen[0] if len(chosen) == 1 else chosen[0] | {"key": "+".join(c["key"] for c in chosen), "all": chosen}
        for slot, chosen in slots.items()
    }


def _remark(part: dict[str, Any], remark: str) -> None:
    part["reason"] = "; ".join(filter(None, (part["reason"], remark)))


def _selection(selection: Selection) -> dict[str, Any]:
    return {
        "key": selection.provider.key,
        "provider": f"{selection.plugin} ({selection.distribution} {selection.version})",
        "asked_by": selection.asked_by,
        "reason": selection.reason,
        "options": _plain(attrs.asdict(selection.options, filter=lambda attribute, _: attribute.init)),
    }


def _plain(value: Any) -> Any:
    """Return what JSON can say of an option: a plugin's converters can make anything of it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((_plain(item) for item in value), key=repr)
    if value is None or isinstance(value, bool | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else str(value)
    # Where a class says nothing of its own, its objects show their address, which changes from run to run.
    cls: Any = type(value)
    return str(value) if (cls.__repr__, cls.__str__) != (object.__repr__, object.__str__) else cls.__qualname__
