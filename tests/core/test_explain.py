"""The report: plain data, a hash that names the composition, and a memory plan that the real tensors keep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from attrs import Converter, Factory, evolve, field, frozen

from engines import CACHE, engine_of
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.explain import explain
from intarsia.hookspecs import hookimpl
from intarsia.models.eager import EagerRunner
from intarsia.plugins import Registry
from intarsia.protocols import Drafter, Kernel
from intarsia.types import Draft, Fit, PluginsOptions, Provider, Unfit, Weight
from models import tiny_llama

SECTIONS = {"engine": {"dtype": "float32", "threads": 1}, "cache": CACHE}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=3, heads=8, kv_heads=2, head_dim=24)[0]


def report_of(model, plugins=(), **sections):
    config = load_config({"model": str(model), **SECTIONS, **sections})
    return explain(config, compose(config, Registry.discover(PluginsOptions(allow=()), plugins)))


def drafters(*providers: Provider) -> object:
    return types.SimpleNamespace(provide_drafters=hookimpl(lambda: list(providers)))


class Guesser(Drafter):
    def propose(self, requests):
        return [Draft() for _ in requests]


def drafter(key="guess", **fields) -> Provider:
    part = Guesser()
    return Provider(**{"key": key, "summary": "guesses", "build": lambda _: part} | fields)


# --- the report -------------------------------------------------------------------------------------------------------


def test_a_report_is_strict_json_and_says_who_is_there_and_why(model):
    report = report_of(model, scheduler={"use": "static", "max_batch": 3}, attention="sdpa")
    assert json.loads(json.dumps(report, allow_nan=False)) == report
    kept = {"model", "engine", "device", "parts", "ops", "fused", "formats", "sampling", "memory", "parallel"}
    kept |= {"steps", "invariance", "hash", "swaps", "observers", "deprecated"}
    assert set(report) == kept and report["device"] == {}, "of a CPU nothing is told"
    assert all({"key", "provider", "asked_by", "reason", "options"} <= set(part) for part in report["parts"].values())
    scheduler = report["parts"]["scheduler"]
    assert (scheduler["key"], scheduler["asked_by"]) == ("static", "config")
    assert scheduler["options"] == {"max_batch": 3, "max_waiting": 4096}
    runner = report["parts"]["runner"]
    assert (runner["key"], runner["asked_by"]) == ("eager", "auto")
    assert runner["provider"].startswith("defaults (intarsia ") and runner["reason"]
    assert report["parts"]["attention"]["key"] == "sdpa"
    assert report["engine"]["device"] == "cpu" and report["engine"]["max_model_len"] == 512
    model_facts = {"layers": 3, "heads": 8, "kv_heads": 2, "head_dim": 24, "vocab_size": 257, "family": "llama"}
    assert model_facts.items() <= report["model"].items()
    assert set(report["ops"].values()) == {"torch"}
    assert report["invariance"]["level"] == "neighbours"
    assert report["invariance"]["by_part"]["attention"] == "neighbours"
    assert report["invariance"]["by_part"]["linear[dense]"] == "bitwise"


def test_a_slot_of_several_parts_lists_them_in_order(model):
    part = types.SimpleNamespace(applies=lambda _: False, prepare=lambda _: None, open=lambda *_: None)
    offered = [Provider(key=key, summary="", build=lambda _: part) for key in ("one", "two")]
    plugin = types.SimpleNamespace(provide_logits_processors=hookimpl(lambda: offered))
    report = report_of(model, {"mine": plugin}, logits_processors=["two", "one"])
    slot = report["parts"]["logits_processors"]
    assert slot["key"] == "two+one" and [one["key"] for one in slot["all"]] == ["two", "one"]


def quantized_report(model, *plugins, **sections):
    """A report with a quantizer whose format nobody but the reference knows, unless plugins do."""
    part = types.SimpleNamespace(
        format="odd", accepts=lambda *_: True, num_bytes=lambda *_: 1, quantize=lambda _, weight: weight
    )
    provider = Provider(key="odd", summary="", build=lambda _: part)
    quantizers = types.SimpleNamespace(provide_quantizers=hookimpl(lambda: [provider]))
    offered = {"quantizers": quantizers} | {f"plugin{i}": plugin for i, plugin in enumerate(plugins)}
    return report_of(model, offered, quantizer="odd", **sections)


def odd_kernels(**facts):
    kernel = Kernel(op="linear", call=None, formats=frozenset({"odd"}), **facts)
    part = types.SimpleNamespace(kernels=lambda: [kernel])
    provider = Provider(key="fast", summary="", build=lambda _: part)
    return types.SimpleNamespace(provide_kernels=hookimpl(lambda: [provider]))


def test_a_format_that_each_step_dequantizes_does_not_pay_and_its_quantizer_says_so(model):
    report = quantized_report(model)
    assert report["formats"]["dense"] == {"read_by": "kernels 'torch'", "pays": True, "remark": ""}
    odd = report["formats"]["odd"]
    assert odd["read_by"] == "kernels 'torch'" and not odd["pays"]
    assert odd["remark"].startswith("odd does not pay here: each step dequantizes it (kernels 'torch').")
    assert report["parts"]["quantizer"]["reason"] == odd["remark"]


def test_a_format_pays_where_kernels_or_a_runner_read_it_as_it_is(model):
    read = quantized_report(model, odd_kernels(), kernels="fast")
    assert read["formats"]["odd"] == {"read_by": "kernels 'fast'", "pays": True, "remark": ""}
    assert read["parts"]["quantizer"]["reason"] == ""
    slow = quantized_report(model, odd_kernels(dequantizes=True), kernels="fast")
    assert not slow["formats"]["odd"]["pays"] and "(kernels 'fast')" in slow["formats"]["odd"]["remark"]
    fused = Provider(key="all", summary="", build=EagerRunner.build, invariance={"float32": "bitwise"})
    runners = types.SimpleNamespace(provide_runners=hookimpl(lambda: [fused]))
    by_runner = quantized_report(model, runners, runner="all")
    assert by_runner["formats"]["odd"] == {"read_by": "runner 'all'", "pays": True, "remark": ""}


class Nameless:
    """Shows its address."""

    def __init__(self, _):
        assert "0x" in str(self)


@frozen(kw_only=True)
class OddOptions:
    """What TOML can say, and what converters can make of it."""

    path: Path = Path("/a/b")
    ratio: float = float("inf")
    table: dict[str, float] = Factory(lambda: {"b": 1.0, "a": 2.0})
    words: tuple[str, ...] = field(default=("b", "a"), converter=Converter(lambda words: frozenset(words)))
    dtype: str = field(default="float32", converter=Converter(lambda name: getattr(torch, name)))
    thing: str = field(default="", converter=Converter(Nameless))
    big: int = 2**80
    derived: object = field(init=False, default=None)


def test_options_of_any_kind_are_told_as_plain_data_that_is_the_same_in_every_run(model):
    report = report_of(model, {"mine": drafters(drafter(options=OddOptions))}, drafter="guess")
    json.dumps(report, allow_nan=False)
    assert report["parts"]["drafter"]["options"] == {
        "path": "/a/b",
        "ratio": "inf",
        "table": {"b": 1.0, "a": 2.0},
        "words": ["a", "b"],
        "dtype": "torch.float32",
        "thing": "Nameless",
        "big": str(2**80),
    }


# --- the hash ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.explain import explain
from intarsia.plugins import Registry
from intarsia.types import PluginsOptions

config = load_config({"model": sys.argv[1], "engine": {"dtype": "float32", "threads": 1}, "cache": {"memory": "64MiB"}})
print(explain(config, compose(config, Registry.discover(PluginsOptions(allow=()))))["hash"])
"""


def test_the_hash_is_the_same_in_every_process(model):
    hashes = {report_of(model)["hash"]}
    for seed in ("1", "2"):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(model)],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stderr
        hashes.add(run.stdout.strip())
    assert len(hashes) == 1
    assert len(hashes.pop()) == 16


def test_the_hash_does_not_depend_on_free_memory(model, monkeypatch):
    hashes, pages = set(), set()
    for size in (1 << 30, 3 << 30):
        monkeypatch.setattr("intarsia.compose.free_memory", lambda _, size=size: size)
        monkeypatch.setattr("intarsia.explain.free_memory", lambda _, size=size: size)
        report = report_of(model, cache={})
        assert report["memory"]["free"] == size
        hashes.add(report["hash"])
        pages.add(report["memory"]["pages"])
    assert (len(hashes), len(pages)) == (1, 2)


def test_the_hash_tells_compositions_apart_and_not_what_else_is_installed(model):
    same = report_of(model)["hash"]
    passed_over = drafters(drafter(fit=lambda _: Unfit("never")))
    assert report_of(model, {"mine": passed_over})["hash"] == same
    kernels = types.SimpleNamespace(
        provide_kernels=hookimpl(
            lambda: [Provider(key="x", summary="", build=lambda _: None, fit=lambda _: Unfit("no GPU"))]
        )
    )
    report = report_of(model, {"mine": kernels})
    assert "no GPU" in report["parts"]["kernels"]["reason"] and report["hash"] == same
    others = [
        report_of(model, attention="eager"),
        report_of(model, scheduler={"max_batch": 9}),
        report_of(model, engine={"dtype": "bfloat16", "threads": 1}),
        report_of(model, cache={"memory": "32MiB"}),
        report_of(model, {"mine": drafters(drafter())}, drafter="guess"),
    ]
    assert len({same, *(each["hash"] for each in others)}) == 6


def test_the_hash_tells_versions_of_a_plugin_apart(model):
    config = load_config({"model": str(model), **SECTIONS})
    parts = compose(config, Registry.discover(PluginsOptions(allow=())))
    newer = evolve(parts, selections=tuple(evolve(s, version="99") for s in parts.selections))
    assert explain(config, parts)["hash"] == explain(config, parts)["hash"] != explain(config, newer)["hash"]


# --- the memory plan --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tie", [True, False])
def test_the_plan_is_what_the_tensors_take(tmp_path, dtype, tie):
    layers, heads, kv_heads, head_dim = 3, 8, 2, 24
    shape = {"layers": layers, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    path, reference = tiny_llama(tmp_path, **shape, tie=tie, attention_bias=True, mlp_bias=True)
    weights: dict = {}

    def build(context):
        weights.update(context.weights)
        return EagerRunner.build(context)

    provider = Provider(key="catching", summary="", build=build, fit=lambda _: Fit(90))
    plugin = types.SimpleNamespace(provide_runners=hookimpl(lambda: [provider]))
    options = {"dtype": dtype, "max_model_len": 100, "plugins": {"allow": []}}
    cache = {"page_size": 8, "memory": "1000000"}
    with engine_of(path, engine=options, cache=cache, kernels="torch", plugins=[plugin]) as engine:
        plan = engine.explain()["memory"]
        itemsize = 4 if dtype == "float32" else 2
        tensors = [t for w in weights.values() for t in (w.tensors.values() if isinstance(w, Weight) else [w])]
        assert plan["weights"] == sum(t.numel() * t.element_size() for t in tensors)
        assert plan["weights"] == sum(p.numel() for p in reference.parameters()) * itemsize
        assert plan["token"] == 2 * layers * kv_heads * head_dim * itemsize
        assert (plan["page_size"], plan["page"]) == (8, 8 * plan["token"])
        # Each sequence reserves 100 tokens: 13 pages of 8.
        assert plan["max_batch"] == 1_000_000 // (13 * plan["page"]) > 0
        assert plan["pages"] == 13 * plan["max_batch"] == engine.parts.cache.num_pages
        assert plan["cache"] == plan["pages"] * plan["page"] <= 1_000_000
        # What padded tokens write to comes on top.
        assert engine.parts.executor._stage._cache.num_bytes == plan["cache"] + plan["spare"]
        assert plan["total"] == plan["weights"] + plan["cache"] + plan["spare"]
        assert plan["layout"] == {"order": "PSKD", "format": dtype, "groups": 1}
        assert plan["free"] > 0


# --- the device -------------------------------------------------------------------------------------------------------

H200 = {
    "name": "NVIDIA H200",
    "capability": "9.0",
    "sms": 132,
    "shared": 233472,
    "l2": 50 << 20,
    "memory": 140 << 30,
    "bytes_per_s": 4.917e12,
}


@pytest.mark.parametrize(("speed", "says"), [(4.917e12, "4.92 TB/s at most"), (None, "a bandwidth that is not told")])
def test_a_gpu_has_a_line_of_its_own_and_no_part_in_the_hash(model, monkeypatch, speed, says):
    from intarsia.cli.explain import _device

    plain = report_of(model)
    told = H200 | {"bytes_per_s": speed}
    monkeypatch.setattr("intarsia.explain.device_facts", lambda _: told)
    report = report_of(model)
    assert report["device"] == told and report["hash"] == plain["hash"]
    ((name, line),) = _device(report["device"])
    assert name == "device" and line.startswith("NVIDIA H200: compute capability 9.0, 132 SMs") and line.endswith(says)
    assert _device({}) == []
