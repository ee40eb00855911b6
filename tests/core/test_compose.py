"""Composition: what is chosen and why, and that each misfit is found before weights load, with both sides named."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
from attrs import evolve, field, frozen

from engines import CACHE, engine_of
from intarsia import SamplingParams
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.defaults import contiguous
from intarsia.errors import CheckpointError, CompositionError, ConfigError, IntarsiaError, PluginError
from intarsia.hookspecs import KINDS, hookimpl, kind_of
from intarsia.models.cache import TensorCache
from intarsia.models.eager import EagerRunner
from intarsia.ops import OPS
from intarsia.plugins import Registry
from intarsia.protocols import Kernel, LogitsProcessor, Parts
from intarsia.testing import prompt_logits
from intarsia.types import CacheOptions, Choice, EngineConfig, Fit, PluginsOptions, Provider, Unfit, Weight
from models import edit_json, tiny_llama

PROMPT = [72, 101, 108, 108, 111, 32, 119, 111]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2)


@pytest.fixture(scope="module")
def model(tiny):
    return tiny[0]


def offering(**parts) -> types.SimpleNamespace:
    """A plugin: slot -> provider, or several."""
    plugin = types.SimpleNamespace()
    for slot, providers in parts.items():
        offered = providers if isinstance(providers, list) else [providers]
        setattr(plugin, kind_of(slot).hook, hookimpl(lambda offered=offered: offered))
    return plugin


def part_of(slot: str) -> object:
    """An object that has every method of a slot's protocol, and does nothing."""
    names = [name for name in vars(kind_of(slot).part) if not name.startswith("_")]
    return types.SimpleNamespace(**dict.fromkeys(names, lambda *_: None))


def provider(key: str = "fake", *, part: object = None, slot: str = "scheduler", **fields) -> Provider:
    made = part if part is not None else part_of(slot)
    return Provider(**{"key": key, "summary": "a fake", "build": lambda _: made} | fields)


def composed(path, /, *plugins, **sections) -> Parts:
    """Compose, loading nothing, with the defaults and these plugins."""
    engine = {"dtype": "float32", "threads": 1} | sections.pop("engine", {})
    config = load_config({"model": str(path), "engine": engine, "cache": CACHE, **sections})
    named = {f"plugin{index}": plugin for index, plugin in enumerate(plugins)}
    return compose(config, Registry.discover(PluginsOptions(allow=()), named))


def started(path, **sections):
    """Start an engine with the defaults and the plugins that are passed, whatever is installed."""
    engine = sections.pop("engine", {}) | {"plugins": {"allow": []}}
    return engine_of(path, engine=engine, **sections)


def refusal(kind: type[IntarsiaError], path, /, *plugins, **sections) -> IntarsiaError:
    """Compose, and return the error of exactly this kind (or a subclass) that it raises."""
    with pytest.raises(kind) as caught:
        composed(path, *plugins, **sections)
    assert "\n" not in str(caught.value)
    return caught.value


# --- choosing ---------------------------------------------------------------------------------------------------------


def test_every_slot_of_the_default_engine_is_recorded_with_whose_it_is_and_why(model):
    parts = composed(model)
    chosen = {s.slot: (s.provider.key, s.plugin, s.distribution, s.asked_by) for s in parts.selections}
    slots = ("loader", "family", "kernels", "attention", "cache", "runner", "scheduler", "executor")
    best = parts.selection("attention").provider.key
    keys = ("safetensors", "llama", "torch", best, "contiguous", "eager", "static", "local")
    assert chosen == {s: (k, "defaults", "intarsia", "auto") for s, k in zip(slots, keys, strict=True)}
    assert best != "eager" and "; over " in parts.selection("attention").reason
    assert "eager ranks 10" in parts.selection("attention").reason
    assert "'llama'" in parts.selection("family").reason
    assert all(selection.reason for selection in parts.selections)


def test_auto_takes_the_highest_rank_and_says_over_whom(model):
    best = provider("best", fit=lambda _: Fit(90, "made for this"))
    out = provider("out", fit=lambda _: Unfit("it has no GPU"))
    selection = composed(model, offering(scheduler=[best, out])).selection("scheduler")
    assert (selection.provider.key, selection.plugin, selection.asked_by) == ("best", "plugin0", "auto")
    assert selection.reason == "made for this; over static ranks 10, out: it has no GPU"


def test_a_named_part_is_taken_whatever_its_rank(model):
    selection = composed(model, offering(scheduler=provider(fit=lambda _: Fit(-5))), scheduler="fake").selection(
        "scheduler"
    )
    assert (selection.provider.key, selection.asked_by) == ("fake", "config")


def test_a_tie_is_refused_naming_both_and_naming_one_resolves_it(model):
    twins = offering(scheduler=[provider("one", fit=lambda _: Fit(60)), provider("two", fit=lambda _: Fit(60))])
    error = refusal(CompositionError, model, twins)
    for word in ("scheduler", "'one'", "'two'", "plugin0", "rank 60"):
        assert word in str(error)
    assert error.field == "scheduler"
    assert composed(model, twins, scheduler="two").selection("scheduler").provider.key == "two"


def test_a_tie_below_the_highest_rank_does_not_matter(model):
    plugin = offering(
        scheduler=[provider(key, fit=lambda _, rank=rank: Fit(rank)) for key, rank in (("a", 9), ("b", 9), ("c", 99))]
    )
    assert composed(model, plugin).selection("scheduler").provider.key == "c"


@pytest.mark.parametrize("loader", ["auto", "safetensors"])
def test_a_mistyped_key_of_the_model_is_named_where_it_stands(model, loader):
    config = load_config({"model": {"use": str(model), "loader": loader, "revison": "main"}})
    with pytest.raises(ConfigError) as caught:
        compose(config, Registry.discover(PluginsOptions(allow=())))
    error = caught.value
    assert error.field == "model.revison"
    assert str(error).startswith("model.revison: unknown option")
    assert loader != "auto" or "Did you mean 'revision'?" in str(error)


def test_where_nothing_fits_each_reason_is_told(model):
    out = [provider(key, slot="loader", fit=lambda _, key=key: Unfit(f"{key} cannot")) for key in ("mmap", "zip")]
    empty = model.parent / "empty"
    empty.mkdir()
    error = refusal(CompositionError, empty, offering(loader=out))
    assert error.field == "model.loader"
    for word in ("mmap: mmap cannot", "zip: zip cannot", "safetensors: the folder has no", str(empty)):
        assert word in str(error)


def test_a_named_part_that_does_not_fit_is_refused_with_its_reason_and_what_fits(model):
    broken = provider("broken", fit=lambda _: 1 / 0)
    out = provider("out", fit=lambda _: Unfit("it wants 8 GPUs"))
    error = refusal(CompositionError, model, offering(scheduler=[broken, out]), scheduler="out")
    assert str(error) == "scheduler: 'out' cannot be used here: it wants 8 GPUs. What fits: static."
    assert error.field == "scheduler"


def test_an_unknown_part_is_refused_with_the_nearest(model):
    error = refusal(ConfigError, model, attention="spda")
    assert "'spda'" in str(error) and "Did you mean 'sdpa'?" in str(error)


def test_optional_slots_stay_empty_even_where_a_part_would_fit_and_the_config_was_made_by_hand(model):
    plugin = offering(drafter=provider(slot="drafter"), quantizer=provider(slot="quantizer", fit=lambda _: Fit(90)))
    config = EngineConfig(quantizer=(Choice("auto"),), drafter=Choice("none"), cache=Choice("auto", CACHE))
    config = evolve(config, model=evolve(config.model, use=str(model)))
    parts = compose(config, Registry.discover(PluginsOptions(allow=()), {"mine": plugin}))
    assert (parts.drafter, parts.quantizers) == (None, ())
    assert not {"drafter", "quantizer"} & {s.slot for s in parts.selections}


# --- options ----------------------------------------------------------------------------------------------------------


@frozen(kw_only=True)
class Turbo:
    turbo_level: int = field(default=1)

    @turbo_level.validator
    def _(self, _, value):
        if value > 11:
            raise ValueError(f"'turbo_level' goes to 11, not {value}")


def test_an_option_that_no_part_knows_names_the_nearest_of_all_of_them(model):
    error = refusal(ConfigError, model, cache=CACHE | {"page_sise": 3})
    assert error.field == "cache.page_sise" and "Did you mean 'page_size'?" in str(error)
    plugin = offering(scheduler=provider(options=Turbo))
    error = refusal(ConfigError, model, plugin, scheduler={"turbo_levle": 3})
    assert error.field == "scheduler.turbo_levle" and "Did you mean 'turbo_level'?" in str(error)
    assert "'static' or 'fake'" in str(error)


def test_a_wrong_value_is_told_by_the_part_that_knows_the_option(model):
    plugin = offering(scheduler=provider(options=Turbo))
    assert "goes to 11" in str(refusal(ConfigError, model, plugin, scheduler={"turbo_level": 12}))
    error = refusal(ConfigError, model, plugin, scheduler={"turbo_level": "x"})
    assert (error.field, str(error)) == ("scheduler.turbo_level", "scheduler.turbo_level: 'x' is not a whole number")
    error = refusal(ConfigError, model, plugin, scheduler={"max_batch": 0})
    assert error.field == "scheduler.max_batch"


def test_options_lead_auto_to_the_part_that_takes_them_and_it_says_so(model):
    plugin = offering(scheduler=provider(options=Turbo, fit=lambda _: Fit(90)))
    selection = composed(model, plugin, scheduler={"max_batch": 2}).selection("scheduler")
    assert selection.provider.key == "static" and "unknown option of 'fake'" in selection.reason


def test_options_of_two_parts_together_are_refused_saying_who_takes_which(model):
    plugin = offering(scheduler=provider(options=Turbo))
    error = refusal(ConfigError, model, plugin, scheduler={"max_batch": 2, "turbo_level": 3})
    assert "'fake' takes turbo_level" in str(error) and "'static' takes max_batch, max_waiting" in str(error)


def test_a_wrong_option_in_a_list_names_its_place(model):
    plugin = offering(kernels=provider("quick", slot="kernels", options=Turbo))
    kernels = ["torch", {"use": "quick", "turbo_level": True}]
    assert refusal(ConfigError, model, plugin, kernels=kernels).field == "kernels[1].turbo_level"


# --- plugins that break -----------------------------------------------------------------------------------------------


def broken(_):
    raise LookupError("gone")


@frozen(kw_only=True)
class BrokenOptions:
    size: int = field(default=0, validator=lambda *_: {}["gone"])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"fit": broken}, ["fit", "LookupError: gone"]),
        ({"build": broken}, ["build", "LookupError: gone"]),
        ({"options": BrokenOptions}, ["options", "KeyError"]),
        ({"fit": lambda _: True}, ["fit returned True", "Fit or an Unfit"]),
        ({"fit": lambda _: None}, ["fit returned None"]),
        ({"fit": lambda _: Fit("high")}, ["'high'", "whole number"]),
        ({"fit": lambda _: Fit(float("nan"))}, ["nan", "whole number"]),
        ({"build": lambda _: None}, ["build returned None", "no Scheduler", "plan"]),
        ({"build": lambda _: object()}, ["no Scheduler", "add, plan, update, remove"]),
    ],
)
@pytest.mark.parametrize("named", [True, False])
def test_a_part_that_fails_or_breaks_the_contract_is_named_with_its_plugin(model, fields, words, named):
    plugin = offering(scheduler=provider(**({"fit": lambda _: Fit(90)} | fields)))
    error = refusal(PluginError, model, plugin, **({"scheduler": "fake"} if named else {}))
    for word in (*words, "'plugin0'", "scheduler 'fake'"):
        assert word in str(error)
    if any("gone" in word for word in words):
        assert isinstance(error.__cause__, LookupError)


def test_the_distribution_and_version_of_an_installed_plugin_are_named(model, tmp_path, monkeypatch):
    (tmp_path / "fake_boom.py").write_text(
        "from intarsia.hookspecs import hookimpl\nfrom intarsia.types import Fit, Provider\n"
        "@hookimpl\ndef provide_drafters():\n"
        "    return [Provider(key='boom', summary='', build=lambda context: {}['x'])]\n"
    )
    info = tmp_path / "fake_boom-4.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-boom\nVersion: 4.2\n")
    (info / "entry_points.txt").write_text("[intarsia]\nboom = fake_boom\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = load_config({"model": str(model), "cache": CACHE, "drafter": "boom"})
    try:
        with pytest.raises(PluginError, match=r"plugin 'boom' \(fake-boom 4\.2\): drafter 'boom' failed in build: Key"):
            compose(config, Registry.discover(PluginsOptions(allow=("boom",))))
    finally:
        sys.modules.pop("fake_boom", None)


def test_errors_of_our_own_kinds_pass_as_the_part_raised_them(model):
    def build(_):
        raise ConfigError("scheduler.x: wrong", field="scheduler.x")

    assert (
        refusal(ConfigError, model, offering(scheduler=provider(build=build)), scheduler="fake").field == "scheduler.x"
    )


def test_a_runner_that_cannot_be_built_is_named_once_weights_are_loaded(model):
    for build, word in ((broken, "LookupError: gone"), (lambda _: object(), "no Runner")):
        plugin = offering(runner=provider(build=build))
        with pytest.raises(PluginError, match="runner 'fake'") as caught:
            started(model, runner="fake", plugins={"mine": plugin})
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("slot", "part"),
    [
        ("loader", {"open": broken}),
        ("family", {"spec": lambda *_: 1 / 0}),
        ("quantizer", {"accepts": lambda *_: 1 / 0, "format": "dense"}),
        ("kernels", {"kernels": lambda: 1 / 0}),
        ("attention", {"orders": 3}),
        ("cache", {"capacity": broken}),
    ],
)
def test_a_part_whose_methods_fail_during_composition_is_named(model, slot, part):
    fake = types.SimpleNamespace(**vars(part_of(slot)) | part)
    plugin = offering(
        **{slot: provider(slot=slot, part=fake, **({"options": CacheOptions} if slot == "cache" else {}))}
    )
    where = {"model": {"use": str(model), slot: "fake"}} if slot in ("loader", "family") else {slot: {"use": "fake"}}
    error = refusal(PluginError, model, plugin, **where)
    assert f"'plugin0' (- -): {slot} 'fake' failed in" in str(error)


# --- what parts require of each other ---------------------------------------------------------------------------------


def test_each_part_is_handed_the_parts_that_it_requires_and_no_others(model):
    seen = {}

    def requiring(slot, *requires, part=None):
        def fit(context):
            seen[slot, "fit"] = dict(context.parts)
            return Fit(90)

        def build(context):
            seen[slot, "build"] = dict(context.parts)
            return part or part_of(slot)

        return provider(slot=slot, fit=fit, build=build, requires=requires)

    plugin = offering(
        drafter=requiring("drafter", "attention", "kernels"),
        logits_processors=requiring("logits_processors", "drafter"),
        scheduler=requiring("scheduler"),
        executor=requiring("executor", "scheduler", "cache", "logits_processors"),
    )
    parts = composed(model, plugin, drafter="fake", logits_processors=["fake"])
    wanted = {
        "drafter": {"attention": parts.attention},
        "logits_processors": {"drafter": parts.drafter},
        "scheduler": {},
        "executor": {
            "scheduler": parts.scheduler,
            "cache": parts.cache,
            "logits_processors": parts.logits_processors,
        },
    }
    (kernels,) = seen["drafter", "build"].pop("kernels")
    assert seen["drafter", "fit"].pop("kernels") == (kernels,) and kernels.kernels()
    assert seen == {(slot, when): handed for slot, handed in wanted.items() for when in ("fit", "build")}
    assert parts.logits_processors and parts.drafter is not None


@pytest.mark.parametrize(
    ("slot", "requires"),
    [
        ("scheduler", "executor"),
        ("drafter", "runner"),
        ("attention", "cache"),
        ("kernels", "kernels"),
        ("family", "loader"),
    ],
)
def test_requiring_what_is_not_there_before_is_the_plugins_mistake(model, slot, requires):
    plugin = offering(**{slot: provider(slot=slot, requires=(requires,))})
    where = {"model": {"use": str(model), slot: "fake"}} if slot == "family" else {slot: "fake"}
    error = refusal(PluginError, model, plugin, **where)
    assert f"{slot} 'fake' requires {requires!r}" in str(error) and "it can require: " in str(error)


def test_requiring_a_slot_that_is_left_empty_is_a_misfit_that_names_what_could_fill_it(model):
    plugin = offering(
        scheduler=provider(requires=("drafter",), fit=lambda _: Fit(90)),
        drafter=provider("guess", slot="drafter"),
    )
    error = refusal(CompositionError, model, plugin, scheduler="fake")
    for word in ("scheduler: 'fake'", "requires a part for 'drafter'", "installed: guess", "What fits: static"):
        assert word in str(error)
    by_auto = composed(model, plugin).selection("scheduler")
    assert by_auto.provider.key == "static" and "requires a part for 'drafter'" in by_auto.reason
    assert composed(model, plugin, drafter="guess").selection("scheduler").provider.key == "fake"


# --- the model and the machine ----------------------------------------------------------------------------------------


def test_no_model_is_a_config_error(model):
    with pytest.raises(ConfigError, match=r"model\.use"):
        compose(load_config({}), Registry.discover())


def opening(config: dict) -> object:
    """A plugin whose loader finds this config in whatever file it is given."""
    checkpoint = types.SimpleNamespace(config=config, tensors={}, tokenizer=lambda: None)
    return offering(loader=provider(part=types.SimpleNamespace(open=lambda: checkpoint)))


@pytest.mark.parametrize("config", [{"model_type": "lama"}, {}, {"model_type": None}, {"model_type": ["llama"]}])
def test_a_model_type_without_a_family_names_the_nearest(model, config):
    error = refusal(CheckpointError, model, opening(config), model={"use": str(model), "loader": "fake"})
    assert str(model) in str(error) and "of no family that is installed" in str(error) and "llama" in str(error)


def test_a_family_that_is_named_must_fit(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=1)
    edit_json(path / "config.json", model_type="mamba")
    error = refusal(CompositionError, path, model={"use": str(path), "family": "llama"})
    for word in ("model.family", "'llama'", "'mamba'"):
        assert word in str(error)


def test_a_family_that_is_named_is_recorded_as_asked_for(model):
    selection = composed(model, model={"use": str(model), "family": "llama"}).selection("family")
    assert selection.asked_by == "config"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_a_misfit_that_names_what_works(model, device):
    error = refusal(CompositionError, model, engine={"device": device})
    assert error.field == "engine.device" and repr(device) in str(error) and "cpu" in str(error)


@pytest.mark.parametrize("device", ["meta", "garbage", "", "cpu:3", "cuda:", "cuda:-1", "cuda:01", "cuda:" + "9" * 400])
def test_what_is_no_device_is_a_config_error(model, device):
    error = refusal(ConfigError, model, engine={"device": device})
    assert error.field == "engine.device" and len(str(error)) < 200


def test_max_model_len_is_at_most_the_models(model):
    assert composed(model, engine={"max_model_len": 512}).engine.max_model_len == 512
    assert composed(model).engine.max_model_len == 512
    error = refusal(ConfigError, model, engine={"max_model_len": 513})
    assert error.field == "engine.max_model_len" and "513" in str(error) and "512" in str(error)


def test_more_threads_than_any_machine_starts_are_refused(model):
    assert refusal(ConfigError, model, engine={"threads": 2**40}).field == "engine.threads"


# --- memory -----------------------------------------------------------------------------------------------------------

SIZES = ["inf", "-inf", "1e999", "1e999GiB", "-1GiB", "nan", "", "GiB", "1iB", "1 Gi B", "0x10", "1_000", "٣GiB"]


@pytest.mark.parametrize("size", [*SIZES, "9" * 30, "9" * 5000, "9999999999TiB", "1" * 40 + "." + "1" * 40])
def test_what_is_no_size_is_a_config_error_that_names_cache_memory(model, size):
    error = refusal(ConfigError, model, cache={"memory": size})
    assert error.field == "cache.memory" and "cache.memory: " in str(error) and len(str(error)) < 200


#: bytes of one token: 2 x layers x kv heads x head dim x bytes a number
TOKEN = 2 * 2 * 2 * 16 * 4


def free(monkeypatch, size: int) -> None:
    monkeypatch.setattr("intarsia.compose.free_memory", lambda _: size)


@pytest.mark.parametrize("memory", ["0", "1", "100KiB", f"{512 * TOKEN - 1}"])
def test_memory_for_less_than_one_sequence_is_refused_and_what_the_message_says_works(model, memory):
    error = refusal(CompositionError, model, cache={"memory": memory})
    assert error.field == "cache.memory"
    for word in (repr(memory), "engine.max_model_len = 512", f"{512 * TOKEN} bytes"):
        assert word in str(error)
    advice = str(error).partition("what would do: ")[2]
    larger = re.search(r"cache\.memory = '(\w+)'", advice)[1]
    assert composed(model, cache={"memory": larger}).cache.capacity(512) == 1
    shorter = re.search(r"engine\.max_model_len = (\d+)", advice)
    assert bool(shorter) == (memory not in ("0", "1"))
    if shorter:
        length = int(shorter[1])
        parts = composed(model, cache={"memory": memory}, engine={"max_model_len": length})
        assert parts.cache.capacity(length) == 1


def test_memory_for_exactly_one_sequence_is_enough(model):
    parts = composed(model, cache={"memory": str(512 * TOKEN)})
    assert (parts.num_pages, parts.cache.capacity(512)) == (32, 1)


def test_memory_that_is_not_there_is_refused_before_weights_load(model, monkeypatch):
    error = refusal(CompositionError, model, cache={"memory": "900TiB"})
    assert error.field == "cache.memory" and "'900TiB'" in str(error)
    weights = composed(model).weight_bytes
    free(monkeypatch, weights + 3_000_000)
    error = refusal(CompositionError, model, cache={"memory": "3500000"})
    fits = re.search(r"'(\w+)' fits", str(error))[1]
    assert composed(model, cache={"memory": fits}).num_pages > 0


def test_weights_that_do_not_fit_are_refused(model, monkeypatch):
    weights = composed(model).weight_bytes
    free(monkeypatch, weights)
    error = refusal(CompositionError, model, cache={"memory": "auto"})
    assert error.field == "model" and str(weights) in str(error)


def test_an_open_cache_takes_half_of_what_is_free_beside_the_weights(model, monkeypatch):
    weights = composed(model).weight_bytes
    free(monkeypatch, weights + 2 * 40 * 512 * TOKEN)
    parts = composed(model, cache={})
    assert parts.num_pages * 16 * TOKEN == 40 * 512 * TOKEN


def test_free_memory_is_asked_once_so_that_all_count_the_same_pages(model, monkeypatch):
    sizes = iter([1 << 30, *range(1 << 29, 0, -(1 << 20))])
    asked = []
    monkeypatch.setattr("intarsia.compose.free_memory", lambda _: asked.append(next(sizes)) or asked[-1])
    parts = composed(model, cache={})
    assert asked == [1 << 30]
    assert parts.num_pages == parts.cache.num_pages == parts.executor.context.num_pages


def test_a_page_larger_than_the_longest_sequence_needs_one_whole_page(model):
    error = refusal(CompositionError, model, cache={"memory": "1MiB", "page_size": 2**40})
    assert "a smaller cache.page_size" in str(error)
    assert composed(model, cache={"memory": "4MiB", "page_size": 4096}).num_pages == 2


def test_a_cache_that_claims_more_pages_than_it_was_given_is_refused(model):
    def build(context):
        return contiguous.ContiguousAllocator(16, 1, 32, context.num_pages)

    error = refusal(
        PluginError, model, offering(cache=provider(build=build, options=CacheOptions)), cache=CACHE | {"use": "fake"}
    )
    assert "cache 'fake'" in str(error) and "pages" in str(error)


# --- cache, attention, kernels ----------------------------------------------------------------------------------------


@frozen
class Backend:
    """An attention backend that only says what it reads."""

    orders: tuple[str, ...] = ("PSKD",)
    formats: tuple[str, ...] = ("float32",)
    level: str = "bitwise"

    def invariance(self, dtype):
        return self.level

    def prepare(self, batch, layout): ...

    def attend(self, q_THD, cache, spec, group, batch): ...


def backend(key="fake", rank=1, **facts) -> Provider:
    return provider(key, part=Backend(**facts), fit=lambda _: Fit(rank))


@pytest.mark.parametrize("name", ["garbage", "nn", "Tensor", "", "float31"])
def test_what_is_no_cache_format_is_a_config_error(model, name):
    error = refusal(ConfigError, model, attention="sdpa", cache=CACHE | {"format": name})
    assert error.field == "cache.format" and "attention 'sdpa'" in str(error) and "float32" in str(error)


def test_a_format_that_attention_does_not_read_names_who_does(model):
    error = refusal(CompositionError, model, cache=CACHE | {"format": "int16"})
    assert error.field == "cache.format" and "cache.format = 'auto'" in str(error)
    plugin = offering(
        attention=[backend("reads16", formats=("int16",)), backend("broken"), provider("bad", build=broken)]
    )
    error = refusal(CompositionError, model, plugin, attention="sdpa", cache=CACHE | {"format": "int16"})
    for word in ("'int16'", "attention 'sdpa'", "float16", "attention = 'reads16'"):
        assert word in str(error)
    assert "'narrow'" not in str(error) and "'bad'" not in str(error)


def test_a_backend_that_does_not_read_int8_is_refused_with_those_that_do(model):
    plugin = offering(attention=backend())
    error = refusal(CompositionError, model, plugin, attention="fake", cache=CACHE | {"format": "int8"})
    assert error.field == "cache.format"
    for word in ("'int8'", "attention 'fake'", *(f"attention = {key!r}" for key in ("eager", "sdpa", "tiled"))):
        assert word in str(error)
    for key in ("eager", "sdpa", "tiled"):
        layout = composed(model, attention=key, runner="eager", cache=CACHE | {"format": "int8"}).layout
        assert (layout.format, layout.entry_bytes, layout.scale_bytes) == ("int8", 1, 4)


def test_an_int8_cache_needs_a_cache_write_that_converts_to_it(model):
    floats = evolve(OPS["cache_write"], formats=frozenset({"float32", "bfloat16"}))
    plugin = offering(kernels=provider(part=types.SimpleNamespace(kernels=lambda: [floats])))
    error = refusal(CompositionError, model, plugin, kernels="fake", cache=CACHE | {"format": "int8"})
    for word in ("'int8'", "cache_write of kernels 'fake'", "cache.format = 'auto'"):
        assert word in str(error)


def test_a_format_that_cache_write_does_not_write_is_refused_until_a_kernel_says_that_it_does(model):
    plain = evolve(OPS["cache_write"], formats=frozenset())
    silent = offering(kernels=provider(part=types.SimpleNamespace(kernels=lambda: [plain])))
    for name in ("float16", "bfloat16"):
        error = refusal(CompositionError, model, silent, kernels="fake", cache=CACHE | {"format": name})
        for word in (repr(name), "cache_write of kernels 'fake'", "float32", "cache.format = 'auto'"):
            assert word in str(error)
    writes = evolve(OPS["cache_write"], formats=frozenset({"bfloat16"}))
    plugin = offering(kernels=provider(part=types.SimpleNamespace(kernels=lambda: [writes])))
    parts = composed(model, plugin, kernels="fake", cache=CACHE | {"format": "bfloat16"})
    assert (parts.layout.format, parts.layout.entry_bytes) == ("bfloat16", 2)
    assert parts.layout.token_bytes == TOKEN // 2


def test_a_cache_format_equal_to_the_engines_dtype_is_auto(model):
    by_name = composed(model, engine={"dtype": "bfloat16"}, cache=CACHE | {"format": "bfloat16"})
    assert by_name.layout == composed(model, engine={"dtype": "bfloat16"}).layout


def test_attention_that_does_not_read_the_engines_dtype_is_refused(model):
    plugin = offering(attention=backend(formats=("float16",)))
    error = refusal(CompositionError, model, plugin, attention="fake")
    assert error.field == "engine.dtype"
    for word in ("'float32'", "attention 'fake'", "attention = 'sdpa'", "engine.dtype = 'float16'"):
        assert word in str(error)
    assert composed(model, plugin, attention="fake", engine={"dtype": "float16"}).layout.format == "float16"


def test_a_format_whose_size_is_not_known_is_refused(model):
    writes = evolve(OPS["cache_write"], formats=frozenset({"q8"}))
    kernels = provider(part=types.SimpleNamespace(kernels=lambda: [writes]))
    plugin = offering(attention=backend(formats=("q8",)), kernels=kernels)
    error = refusal(CompositionError, model, plugin, attention="fake", kernels="fake", cache=CACHE | {"format": "q8"})
    assert error.field == "cache.format" and "'q8'" in str(error)


def test_attention_and_cache_write_without_an_order_in_common_are_refused_with_what_works(model):
    narrow = evolve(OPS["cache_write"], orders=frozenset({"PKSD"}))
    plugin = offering(
        attention=backend(),
        kernels=provider("narrow", fit=lambda _: Fit(1), part=types.SimpleNamespace(kernels=lambda: [narrow])),
    )
    error = refusal(CompositionError, model, plugin, attention="fake", kernels="narrow")
    for word in ("attention 'fake'", "PSKD", "kernels 'narrow'", "PKSD", "kernels = 'torch'"):
        assert word in str(error)
    assert composed(model, plugin, attention="fake").layout.order == "PSKD"
    assert composed(model, plugin, kernels="narrow").layout.order == "PKSD"


def test_the_layout_has_the_first_order_that_the_runner_reads_and_the_engine_runs_with_it(tiny):
    model, reference = tiny

    def fit(context):
        return Fit(90) if context.layout.order == "PKSD" else Unfit(f"it does not read {context.layout.order}")

    plugin = offering(runner=provider(fit=fit, build=EagerRunner.build))
    with started(model, plugins=[plugin]) as engine:
        assert engine.parts.layout.order == "PSKD"
        assert [s.provider.key for s in engine.parts.selections if s.slot == "runner"] == ["eager"]
    with started(model, runner="fake", plugins=[plugin]) as engine:
        assert engine.parts.layout.order == "PKSD"
        logits = prompt_logits(engine, PROMPT)
    with torch.no_grad():
        torch.testing.assert_close(logits, reference(torch.tensor([PROMPT])).logits[0], atol=1e-4, rtol=0)


def test_the_layout_has_the_first_order_that_the_cache_and_the_runner_both_read(model):
    seen = []

    def reading(*orders):
        def fit(context):
            order = context.layout.order
            return Fit(90) if order in orders else Unfit(f"it does not read {order}")

        return fit

    def build(context):
        seen.append(context.layout.order)
        return contiguous.build(context)

    cache = provider("strict", fit=reading("PKSD"), build=build, options=CacheOptions)
    runner = provider("picky", fit=reading("PKSD"), requires=("cache",))
    plugin = offering(cache=cache, runner=[runner, provider("other", fit=reading("PSKD"))])
    parts = composed(model, plugin, cache=CACHE | {"use": "strict"})
    assert (parts.layout.order, seen) == ("PKSD", ["PKSD"])
    # With the best order first, auto takes the cache and the runner that read it.
    parts = composed(model, plugin)
    assert (parts.layout.order, parts.selection("cache").provider.key) == ("PSKD", "contiguous")
    assert parts.selection("runner").provider.key == "other"
    # A runner that reads only the second order takes the cache with it.
    parts = composed(model, plugin, runner="picky")
    assert (parts.layout.order, parts.selection("cache").provider.key) == ("PKSD", "strict")
    assert [s.slot for s in parts.selections].count("cache") == 1
    assert parts.executor.context.layout == parts.layout
    error = refusal(CompositionError, model, plugin, cache=CACHE | {"use": "strict"}, runner="other")
    assert "it does not read PSKD" in str(error)


def test_a_runner_that_reads_no_order_is_refused_with_its_reason_for_the_best_one(model):
    plugin = offering(runner=provider(fit=lambda context: Unfit(f"it does not read {context.layout.order}")))
    error = refusal(CompositionError, model, plugin, runner="fake")
    assert "it does not read PSKD" in str(error) and "What fits: eager" in str(error)


def test_a_runner_with_attention_of_its_own_rules_out_naming_a_backend(model):
    fused = provider("fused", fit=lambda _: Fit(90), provides=("attention",), build=EagerRunner.build)
    error = refusal(CompositionError, model, offering(runner=fused), attention="sdpa", runner="fused")
    for word in ("'sdpa'", "runner 'fused'", "'auto'", "runner 'eager'"):
        assert word in str(error)
    assert error.field == "attention"
    parts = composed(model, offering(runner=fused))
    assert "runner 'fused' brings its own" in parts.selection("attention").reason
    assert parts.invariance == "numeric"
    assert composed(model, offering(runner=fused), attention="sdpa", runner="eager").attention is not None
    # Where the backend alone is named, the runner is chosen among those that use it.
    runner = composed(model, offering(runner=fused), attention="sdpa").selection("runner")
    assert runner.provider.key == "eager"
    assert "fused: it brings its own attention, and 'sdpa' is asked for" in runner.reason


def test_for_each_op_the_first_kernel_in_order_that_fits_is_taken(model):
    def set_of(*kernels):
        return types.SimpleNamespace(kernels=lambda: kernels)

    half = evolve(OPS["silu_mul"], dtypes=frozenset({"float16"}))
    plugin = offering(
        kernels=[
            provider("one", part=set_of(OPS["rope"], half)),
            provider("two", part=set_of(OPS["rope"], OPS["silu_mul"], OPS["linear"])),
        ]
    )
    parts = composed(model, plugin, kernels=["one", "two"])
    sources = {op: choice.source for op, choice in parts.ops.choices.items()}
    special = {"rope": "one", "silu_mul": "two", "linear[dense]": "two"}
    assert sources == dict.fromkeys(sources, "torch") | special
    assert [s.provider.key for s in parts.selections if s.slot == "kernels"] == ["one", "two"]
    parts = composed(model, plugin, kernels=["two", "one"], engine={"dtype": "float16"})
    assert parts.ops.choices["silu_mul"].source == "two" and parts.ops.choices["rope"].source == "two"


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (Kernel(op="liner", call=len), ["'liner'", "Did you mean 'linear'"]),
        (Kernel(op="linear", call=len), ["'linear'", "no weight format"]),
        (len, ["built-in function len"]),
    ],
)
def test_a_kernel_that_could_never_run_is_refused(model, kernel, words):
    plugin = offering(kernels=provider(part=types.SimpleNamespace(kernels=lambda: [kernel])))
    error = refusal(PluginError, model, plugin, kernels=["fake", "torch"])
    for word in (*words, "kernels 'fake'", "'plugin0'"):
        assert word in str(error)


# --- invariance -------------------------------------------------------------------------------------------------------


def demanding(invariance: str, dtype: str = "float32") -> dict[str, str]:
    return {"invariance": invariance, "dtype": dtype}


def test_a_demand_that_a_part_does_not_keep_names_it_and_what_would_do(model):
    assert composed(model, attention="sdpa").invariance == "neighbours"
    assert composed(model, attention="sdpa", engine=demanding("neighbours")).invariance == "neighbours"
    error = refusal(CompositionError, model, attention="sdpa", engine=demanding("bitwise"))
    assert error.field == "engine.invariance"
    for word in ("'bitwise' is demanded", "attention 'sdpa' keeps 'neighbours'", "engine.invariance = 'neighbours'"):
        assert word in str(error)
    assert "linear" not in str(error)


def test_a_demand_in_bfloat16_names_every_part_that_keeps_less(model):
    plugin = offering(attention=backend("exact"))
    demand = demanding("bitwise", "bfloat16")
    error = refusal(CompositionError, model, plugin, attention="sdpa", kernels="torch", engine=demand)
    for word in ("attention 'sdpa' keeps 'neighbours'", "linear[dense] of kernels 'torch' keeps 'numeric'"):
        assert word in str(error)
    ways = str(error).partition("what would do: ")[2].split(" or ")
    assert ways[0] == "engine.invariance = 'numeric'"
    assert "attention = 'exact' with engine.dtype = 'float32'" in ways
    assert not {"attention = 'exact'", "engine.dtype = 'float32'"} & set(ways), "neither would do alone"
    error = refusal(CompositionError, model, attention="sdpa", engine=demanding("neighbours", "bfloat16"))
    ways = str(error).partition("what would do: ")[2].split(" or ")
    assert ways[:2] == ["engine.invariance = 'numeric'", "engine.dtype = 'float32'"]


def test_a_demand_that_other_attention_keeps_names_it_and_it_then_works(model):
    others = [backend("exact"), backend("loose", level="neighbours"), backend("half", formats=("float16",))]
    plugin = offering(attention=others)
    error = refusal(CompositionError, model, plugin, attention="sdpa", engine=demanding("bitwise"))
    assert "attention = 'exact'" in str(error)
    assert "'loose'" not in str(error) and "'half'" not in str(error)
    assert composed(model, plugin, engine=demanding("bitwise"), attention="exact").invariance == "bitwise"


def test_the_whole_keeps_the_weakest_promise(model):
    assert composed(model, offering(attention=backend()), attention="fake").invariance == "bitwise"
    plugin = offering(attention=backend(level="numeric"))
    assert composed(model, plugin, attention="fake").invariance == "numeric"


def test_a_runner_that_computes_by_its_own_code_promises_for_the_whole(model):
    def fused(**levels):
        return offering(
            runner=provider(
                "fused", fit=lambda _: Fit(90), provides=("attention",), invariance=levels, build=EagerRunner.build
            )
        )

    half = {"dtype": "bfloat16"}
    assert composed(model, fused(bfloat16="bitwise"), engine=half).invariance == "bitwise"
    assert composed(model, fused(bfloat16="neighbours"), engine=half).invariance == "neighbours"
    assert composed(model, fused(float32="bitwise"), engine=half).invariance == "numeric"
    demand = demanding("bitwise", "bfloat16")
    assert composed(model, fused(bfloat16="bitwise"), engine=demand).invariance == "bitwise"
    error = refusal(CompositionError, model, fused(bfloat16="neighbours"), engine=demand)
    assert "runner 'fused' keeps 'neighbours'" in str(error) and "kernels" not in str(error)
    assert "runner 'fused'" in str(refusal(PluginError, model, fused(bfloat16="exact"), engine=half))


def test_a_promise_that_is_no_level_is_the_plugins_mistake(model):
    assert "'exact'" in str(refusal(PluginError, model, offering(attention=backend(level="exact")), attention="fake"))


# --- quantizers -------------------------------------------------------------------------------------------------------


@frozen
class RowInt8:
    """A weight format of its own: int8 codes and one fp32 scale a row."""

    name: str = "row_int8"

    def dequantize(self, weight):
        return weight.tensors["codes"].float() * weight.tensors["scales"]

    def rows(self, weight, index):
        tensors = {name: tensor[index] for name, tensor in weight.tensors.items()}
        return Weight(self, tensors, tuple(tensors["codes"].shape))

    def shard(self, weight, dim, start, stop):
        raise NotImplementedError


@frozen
class RowQuantizer:
    skipped: tuple[str, ...] = ("embed.weight", "head.weight")
    format: str = "row_int8"

    def accepts(self, name, shape):
        return name not in self.skipped

    def num_bytes(self, name, shape):
        return shape[0] * shape[1] + 4 * shape[0]

    def quantize(self, name, weight):
        dense = weight.dequantize().float()
        scales = dense.abs().amax(1, keepdim=True) / 127
        codes = (dense / scales).round().to(torch.int8)
        return Weight(RowInt8(), {"codes": codes, "scales": scales}, weight.shape)


@frozen
class Zeroing:
    """A quantizer whose weights stay dense, but are zero: it shows whether it ran before the next one."""

    format: str = "dense"

    def accepts(self, name, shape):
        return name.endswith("down.weight")

    def num_bytes(self, name, shape):
        return shape[0] * shape[1] * 4

    def quantize(self, name, weight):
        weight.tensors["weight"].zero_()
        return weight


QUANTIZERS = offering(
    quantizer=[
        provider("rows", part=RowQuantizer()),
        provider("all", part=RowQuantizer(skipped=())),
        provider("zero", part=Zeroing()),
    ]
)


def catching(weights: dict) -> object:
    """A plugin whose runner keeps hold of the weights that it is built around."""

    def build(context):
        weights.update(context.weights)
        return EagerRunner.build(context)

    return offering(runner=provider("catching", build=build, fit=lambda _: Fit(90)))


def bytes_of(weights: dict) -> int:
    tensors = [t for w in weights.values() for t in (w.tensors.values() if isinstance(w, Weight) else [w])]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def quantized_reference(model: torch.nn.Module) -> torch.nn.Module:
    """Round the weights of transformers' own linear layers to the same grid, by numpy-like float64 arithmetic."""
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "proj" in name:
            exact = parameter.detach().double()
            scales = exact.abs().amax(1, keepdim=True) / 127
            parameter.data = ((exact / scales).round() * scales).float()
    return model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantized_engine_computes_what_its_weights_say_and_its_plan_has_their_exact_bytes(tmp_path, dtype):
    path, dense = tiny_llama(tmp_path, layers=2, tie=True)
    weights: dict = {}
    plugins = {"q": QUANTIZERS, "c": catching(weights)}
    engine = started(path, quantizer="rows", kernels="torch", plugins=plugins, engine={"dtype": dtype})
    with engine, torch.no_grad():
        assert {w.format.name for w in weights.values() if isinstance(w, Weight)} == {"dense", "row_int8"}
        assert bytes_of(weights) == engine.parts.weight_bytes == engine.explain()["memory"]["weights"]
        itemsize = 4 if dtype == "float32" else 2
        # 2 layers of 64 x 64 queries, 32 x 64 keys and values, 64 x 64 out, 128 x 64 gate and up, 64 x 128 down.
        linear = 2 * (128 * 64 + 64 * 64 + 256 * 64 + 64 * 128) + 2 * 4 * (128 + 64 + 256 + 64)
        assert engine.parts.weight_bytes == linear + itemsize * (257 * 64 + 5 * 64)
        assert engine.parts.ops.choices["linear[row_int8]"].source == "torch"
        logits = prompt_logits(engine, PROMPT)
        before = dense(torch.tensor([PROMPT])).logits[0]
        after = quantized_reference(dense)(torch.tensor([PROMPT])).logits[0]
    scale = before.std()
    assert (before - after).abs().max() > 1e-3, "rounding must show, or this test says nothing"
    if dtype == "float32":
        torch.testing.assert_close(logits, after, atol=1e-4, rtol=0)
    assert (logits - before).abs().max() < 0.5 * scale


@pytest.mark.parametrize("order", [["rows", "all"], ["all", "all", "rows"]])
def test_a_chain_of_quantizers_counts_what_comes_out_last(tmp_path, order):
    weights: dict = {}
    path, _ = tiny_llama(tmp_path, layers=1)
    with started(path, quantizer=order, plugins={"q": QUANTIZERS, "c": catching(weights)}) as engine:
        assert bytes_of(weights) == engine.parts.weight_bytes == engine.explain()["memory"]["weights"]


def test_quantizers_run_in_order(tmp_path):
    path, _ = tiny_llama(tmp_path, layers=2)
    weights: dict = {}
    plugins = {"q": QUANTIZERS, "c": catching(weights)}
    with started(path, quantizer=["zero", "all"], plugins=plugins) as engine:
        assert [s.provider.key for s in engine.parts.selections if s.slot == "quantizer"] == ["zero", "all"]
        matrices = {name: w for name, w in weights.items() if isinstance(w, Weight)}
        assert {w.format.name for w in matrices.values()} == {"row_int8"}
        assert not any(matrices[f"layers.{i}.down.weight"].dequantize().nan_to_num().any() for i in range(2))
        assert bytes_of(weights) == engine.parts.weight_bytes


# --- logits processors ------------------------------------------------------------------------------------------------


class Ban(LogitsProcessor):
    """Forbids a token to requests with an odd seed."""

    def __init__(self, token):
        self.token = token

    def applies(self, params):
        return params.seed is not None and params.seed % 2 == 1

    def open(self, params, num_prompt):
        self.num_prompt = num_prompt
        return self

    def process(self, token_ids, logits_V):
        logits_V[self.token] = -torch.inf


class Raise(Ban):
    def process(self, token_ids, logits_V):
        if len(token_ids) > self.num_prompt + 1:
            raise LookupError("no such grammar")


def greedy(reference, prompt, steps, banned=()) -> list[int]:
    ids = list(prompt)
    for _ in range(steps):
        logits = reference(torch.tensor([ids])).logits[0, -1]
        logits[list(banned)] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


@torch.no_grad()
def test_a_logits_processor_changes_only_the_requests_that_it_applies_to(tiny):
    model, reference = tiny
    free_run = greedy(reference, PROMPT, 8)
    banned_run = greedy(reference, PROMPT, 8, banned=[free_run[0]])
    assert free_run[0] not in banned_run
    plugin = offering(logits_processors=provider("ban", part=Ban(free_run[0])))
    params = [SamplingParams(max_tokens=8, temperature=0, seed=seed, ignore_eos=True) for seed in (2, 3)]
    with started(model, logits_processors=["ban"], plugins=[plugin]) as engine:
        free_answer, banned_answer = engine.generate([PROMPT, PROMPT], params)
    assert list(free_answer.token_ids) == free_run
    assert list(banned_answer.token_ids) == banned_run


@torch.no_grad()
def test_a_logits_processor_that_raises_ends_its_own_request_only(tiny):
    model, reference = tiny
    plugin = offering(logits_processors=provider("bad", part=Raise(0)))
    params = [SamplingParams(max_tokens=8, temperature=0, seed=seed, ignore_eos=True) for seed in (2, 3)]
    with started(model, logits_processors="bad", plugins=[plugin]) as engine:
        good, bad = engine.generate([PROMPT, PROMPT], params)
        assert bad.finish_reason == "error" and "LookupError: no such grammar" in bad.error
        assert list(bad.token_ids) == greedy(reference, PROMPT, 2)
        assert good.finish_reason == "length" and list(good.token_ids) == greedy(reference, PROMPT, 8)
        again = engine.generate([PROMPT], params[0])[0]
        assert again.token_ids == good.token_ids
        engine.parts.cache.check_integrity()
        assert engine.parts.cache.stats().used == 0


# --- check_composition ------------------------------------------------------------------------------------------------


def judging(check) -> object:
    return types.SimpleNamespace(check_composition=hookimpl(check))


def test_check_composition_sees_the_config_and_the_parts_and_can_refuse_before_weights_load(model):
    seen = {}

    def check(parts, config):
        seen["both"] = config, parts

    parts = composed(model, judging(check), judging(lambda config: seen.update(config=config)))
    assert seen["both"] == (seen["config"], parts) and isinstance(parts, Parts)
    assert seen["config"].model.use == str(model)

    def refuse(parts):
        raise CompositionError(f"runner {parts.selection('runner').provider.key!r} and mine; runner = 'x' works")

    loaded: dict = {}
    plugins = {"judge": judging(refuse), "catch": catching(loaded)}
    with pytest.raises(CompositionError, match="runner 'catching' and mine"):
        started(model, plugins=plugins)
    assert loaded == {}


def test_a_check_that_fails_is_named_with_its_plugin(model):
    error = refusal(PluginError, model, judging(lambda parts: 1 / 0))
    assert "'plugin0'" in str(error) and "check_composition failed: ZeroDivisionError" in str(error)
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_check_that_wraps_the_others_is_refused(model):
    def check(config):
        yield

    plugin = types.SimpleNamespace(check_composition=hookimpl(check, wrapper=True))
    assert "cannot wrap" in str(refusal(PluginError, model, plugin))


# --- the whole --------------------------------------------------------------------------------------------------------


def test_parts_are_composed_in_the_order_of_the_kinds(model):
    order = [kind.slot for kind in KINDS]
    slots = [order.index(s.slot) for s in composed(model, QUANTIZERS, quantizer="rows").selections]
    assert slots == sorted(slots)


def test_composing_reads_no_weights(model, monkeypatch):
    def read(self, out):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("intarsia.checkpoints.SafetensorsTensor.read", read)
    monkeypatch.setattr(TensorCache, "allocate", read)
    assert composed(model).weight_bytes > 0


def test_asking_for_a_part_that_was_not_required_says_how_to_get_it(model):
    served = provider(slot="scheduler", build=lambda context: context.parts["cache"])
    error = refusal(PluginError, model, offering(scheduler=served), scheduler="fake")
    assert "no 'cache'" in str(error) and "requires=('cache',)" in str(error)


def test_frontends_are_chosen_and_left_for_who_serves_to_build(model):
    served = provider(slot="frontend", build=broken)
    parts = composed(model, offering(frontend=served), frontend="fake")
    assert parts.selection("frontend").provider.key == "fake"


@pytest.mark.parametrize(
    ("frontend", "words"), [("zmp", ["zmp", "fake"]), ({"use": "fake", "port": 1}, ["port", "fake"])]
)
def test_a_frontend_that_is_not_there_or_takes_no_such_option_is_refused(model, frontend, words):
    error = refusal(ConfigError, model, offering(frontend=provider(slot="frontend")), frontend=frontend)
    assert all(word in str(error) for word in words)
