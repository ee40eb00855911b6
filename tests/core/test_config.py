"""Config: what is read from TOML, mappings and overrides, and that each fault has its path and what would be right."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.config import as_dict, fingerprint, load_config, structure
from intarsia.errors import ConfigError
from intarsia.hookspecs import KINDS
from intarsia.types import CacheOptions, Choice, EngineConfig, EngineOptions, ModelChoice, PluginsOptions


def refused(source, *overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return caught.value


# --- sources ----------------------------------------------------------------------------------------------------------


def test_a_toml_file_is_read_section_by_section(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text(
        """
        quantizer = ["sparse24", { use = "int8", group_size = 64 }]
        attention = "sdpa"
        [model]
        use = "smollm2"
        loader = "gguf"
        revision = "main"
        threads = 2
        [engine]
        dtype = "float32"
        plugins.block = ["x"]
        [scheduler]
        use = "static"
        max_batch = 8
        [cache]
        page_size = 32
        """
    )
    expected = EngineConfig(
        model=ModelChoice(use="smollm2", loader="gguf", revision="main", options={"threads": 2}),
        engine=EngineOptions(dtype="float32", plugins=PluginsOptions(block=("x",))),
        quantizer=(Choice("sparse24"), Choice("int8", {"group_size": 64})),
        attention=Choice("sdpa"),
        scheduler=Choice("static", {"max_batch": 8}),
        cache=Choice("auto", {"page_size": 32}),
    )
    assert load_config(path) == expected
    assert load_config(str(path)) == expected


def test_nothing_is_the_default_config():
    assert load_config() == load_config(None) == load_config({}) == EngineConfig()


def test_one_text_is_no_list_of_overrides():
    with pytest.raises(ConfigError, match=r"give a list of them, \['cache.page_size=32'\]"):
        load_config({}, "cache.page_size=32")


def test_a_config_passes_through_and_takes_overrides():
    config = EngineConfig(scheduler=Choice("static", {"max_batch": 8}))
    assert load_config(config) is config
    assert load_config(config, ["scheduler.max_batch=4"]).scheduler == Choice("static", {"max_batch": 4})


def test_the_source_mapping_is_left_as_it_was():
    source = {"model": "smollm2", "cache": {"page_size": 16}, "plugins": {"block": ["a"]}}
    load_config(source, ["cache.page_size=32", "plugins.block=[]", "model.loader=gguf"])
    assert source == {"model": "smollm2", "cache": {"page_size": 16}, "plugins": {"block": ["a"]}}


def test_a_syntax_error_names_file_and_line(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("[engine]\ndtype = float32\n")
    message = str(refused(path))
    assert str(path) in message and "line 2" in message


def test_a_syntax_error_at_the_end_names_the_line_too(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("[engine]\nseed = [1,\n2")
    message = str(refused(path))
    assert str(path) in message and "line 3" in message


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"\xff\xfe\x00", "UTF-8"),
        (b"model = " + b"[" * 100_000, "too deep"),
        (b"model = " + b"[" * 40 + b"]" * 40, "deeper"),
        (b"engine.seed = " + b"9" * 5000, "engine.toml"),
        (b"engine.seed = " + b"9" * 50, "engine.seed"),
        (b"scheduler.until = 2024-01-01", "scheduler.until"),
        (b"[cache]\n[cache]\n", "line 2"),
        (b"# " + b"x" * 2**20, "longer than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_config_is_refused(tmp_path, content, word):
    path = tmp_path / "engine.toml"
    path.write_bytes(content)
    assert word in str(refused(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert "No such file" in str(refused(tmp_path / "missing.toml"))
    assert "missing.toml" in str(refused(tmp_path / "missing.toml"))
    assert str(tmp_path) in str(refused(tmp_path))
    assert "not a config file" in str(refused("a\0b"))
    assert "longer than" in str(refused("/dev/zero"))


def test_a_byte_order_mark_is_tolerated(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_bytes(b"\xef\xbb\xbfmodel = 'smollm2'\r\n")
    assert load_config(path).model.use == "smollm2"


@pytest.mark.parametrize("source", [3, [1], {1: 2}, {"model": {1: 2}}, {"scheduler": {"x": object()}}, {"cache": b"x"}])
def test_what_is_no_plain_data_is_refused(source):
    refused(source)


def test_paths_are_taken_as_text():
    assert load_config({"model": Path("models/tiny.gguf")}).model.use == str(Path("models/tiny.gguf"))


# --- sections ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slot", ["cache", "scheduler", "attention", "drafter", "runner", "executor"])
def test_a_text_is_short_for_use(slot):
    assert getattr(load_config({slot: "mine"}), slot) == Choice("mine")
    assert getattr(load_config({slot: {"use": "mine", "size": 2}}), slot) == Choice("mine", {"size": 2})


@pytest.mark.parametrize("slot", ["quantizer", "kernels", "frontend", "logits_processors"])
def test_a_slot_of_many_takes_a_text_a_table_or_a_list(slot):
    for value in ("mine", {"use": "mine"}, ["mine"], [{"use": "mine"}]):
        assert getattr(load_config({slot: value}), slot) == (Choice("mine"),)
    both = getattr(load_config({slot: ["one", {"use": "two", "size": 2}]}), slot)
    assert both == (Choice("one"), Choice("two", {"size": 2}))


def test_the_model_can_be_a_text():
    assert load_config({"model": "org/name"}).model == ModelChoice(use="org/name")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if hasattr(EngineConfig(), kind.slot)], ids=lambda k: k.slot)
def test_none_empties_optional_slots_and_no_others(kind):
    if not kind.optional:
        error = refused({kind.slot: "none"})
        assert error.field == f"{kind.slot}.use" and "'auto'" in str(error)
    elif kind.many:
        for empty in ("none", ["none"], [], "auto", {"use": "none"}):
            assert getattr(load_config({kind.slot: empty}), kind.slot) == ()
    else:
        assert getattr(load_config({kind.slot: "none"}), kind.slot) == Choice("none")


@pytest.mark.parametrize("drafter", [{"k": 4}, {"use": "none", "k": 4}, {"use": "auto", "k": 4}])
def test_options_for_a_slot_left_empty_are_not_dropped_in_silence(drafter):
    error = refused({"drafter": drafter})
    assert error.field == "drafter.use" and "nothing takes k" in str(error)


@pytest.mark.parametrize("value", [["none", "int8"], ["int8", "auto"]])
def test_none_stands_alone_in_a_list(value):
    assert refused({"quantizer": value}).field == "quantizer"


def test_a_slot_that_is_needed_cannot_be_an_empty_list():
    assert refused({"kernels": []}).field == "kernels"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"cache": 3}, "cache"),
        ({"cache": None}, "cache"),
        ({"cache": ["paged"]}, "cache"),
        ({"cache": ""}, "cache.use"),
        ({"cache": {"use": 3}}, "cache.use"),
        ({"quantizer": ["int8", 3]}, "quantizer[1]"),
        ({"quantizer": [{"use": "a"}, {"use": ""}]}, "quantizer[1].use"),
        ({"model": 3}, "model"),
        ({"model": ["a"]}, "model"),
        ({"model": {"use": 3}}, "model.use"),
        ({"model": {"loader": ""}}, "model.loader"),
        ({"model": {"family": "none"}}, "model.family"),
        ({"model": {"revision": 3}}, "model.revision"),
        ({"engine": "cpu"}, "engine"),
        ({"engine": {"plugins": []}}, "engine.plugins"),
        ({"engine": {"plugins": {"allow": "gguf"}}}, "engine.plugins.allow"),
        ({"engine": {"plugins": {"allow": ["gguf", 1]}}}, "engine.plugins.allow[1]"),
        ({"plugins": {"alow": []}}, "engine.plugins.alow"),
        ({"engine": {"threads": "8"}}, "engine.threads"),
        ({"engine": {"threads": True}}, "engine.threads"),
        ({"engine": {"threads": 1.0}}, "engine.threads"),
        ({"engine": {"threads": 0}}, "engine.threads"),
        ({"engine": {"dtype": "fp32"}}, "engine.dtype"),
        ({"engine": {"device": None}}, "engine.device"),
        ({"engine": {"seed": 2**64}}, "engine.seed"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path(source, field):
    error = refused(source)
    assert error.field == field
    assert str(error).startswith(field)


def test_the_message_has_value_and_what_would_be_right():
    message = str(refused({"engine": {"dtype": "fp32"}}))
    assert "'fp32'" in message and "'float32'" in message and "'bfloat16'" in message
    assert "'8' is not a whole number" in str(refused({"engine": {"threads": "8"}}))


@pytest.mark.parametrize(
    ("source", "field", "words"),
    [
        ({"schedular": "static"}, "schedular", "Did you mean 'scheduler'?"),
        ({"page_size": 3}, "page_size", "'cache.page_size'"),
        ({"max_model_len": 3}, "max_model_len", "'engine.max_model_len'"),
        ({"alow": []}, "alow", "'engine.plugins.allow'"),
        ({"zzzzz": 3}, "zzzzz", "Known: attention, cache"),
        ({"engine": {"max_batch": 3}}, "engine.max_batch", "max_batch is no engine option"),
        ({"engine": {"devise": "cpu"}}, "engine.devise", "Did you mean 'engine.device'?"),
        ({"engine": {"page_size": 3}}, "engine.page_size", "Did you mean 'cache.page_size'?"),
        ({"engine": {"scheduler": "static"}}, "engine.scheduler", "Did you mean 'scheduler'?"),
        ({"engine": {"plugins": {"blok": []}}}, "engine.plugins.blok", "Did you mean 'block'?"),
        ({"loader": "gguf"}, "loader", "'model.loader'"),
        ({"commands": "bench"}, "commands", "no such section"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_of_all_sections(source, field, words):
    error = refused(source)
    assert error.field == field
    assert words in str(error)


def test_plugins_are_short_for_engine_plugins():
    long = load_config({"engine": {"plugins": {"allow": []}, "seed": 1}})
    assert load_config({"plugins": {"allow": []}, "engine": {"seed": 1}}) == long
    assert long.engine.plugins.allow == ()
    assert load_config({}).engine.plugins.allow is None


def test_plugins_set_in_both_places_are_refused():
    assert refused({"plugins": {}, "engine": {"plugins": {}}}).field == "plugins"


# --- overrides --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("cache.page_size=32", EngineConfig(cache=Choice("auto", {"page_size": 32}))),
        (" cache . page_size = 32", EngineConfig(cache=Choice("auto", {"page_size": 32}))),
        ("model=smollm2", EngineConfig(model=ModelChoice(use="smollm2"))),
        ('model="smollm2"', EngineConfig(model=ModelChoice(use="smollm2"))),
        ("model=a=b", EngineConfig(model=ModelChoice(use="a=b"))),
        ("model.revision=2024-01-01", EngineConfig(model=ModelChoice(revision="2024-01-01"))),
        ("plugins.allow=[]", EngineConfig(engine=EngineOptions(plugins=PluginsOptions(allow=())))),
        ("plugins={block=['a']}", EngineConfig(engine=EngineOptions(plugins=PluginsOptions(block=("a",))))),
        ("engine.plugins.block=['a']", EngineConfig(engine=EngineOptions(plugins=PluginsOptions(block=("a",))))),
        ('kernels=["cpu","torch"]', EngineConfig(kernels=(Choice("cpu"), Choice("torch")))),
        ("kernels=cpu", EngineConfig(kernels=(Choice("cpu"),))),
        ("scheduler.use=static", EngineConfig(scheduler=Choice("static"))),
        ("scheduler={use='static', max_batch=2}", EngineConfig(scheduler=Choice("static", {"max_batch": 2}))),
        ("engine.seed=7", EngineConfig(engine=EngineOptions(seed=7))),
        ("runner.deep.er=1", EngineConfig(runner=Choice("auto", {"deep": {"er": 1}}))),
        ("scheduler.name=a\nb = 3", EngineConfig(scheduler=Choice("auto", {"name": "a\nb = 3"}))),
        ("scheduler.name=1\nb = 3", EngineConfig(scheduler=Choice("auto", {"name": "1\nb = 3"}))),
        ("scheduler.name=", EngineConfig(scheduler=Choice("auto", {"name": ""}))),
    ],
)
def test_an_override_sets_one_path(override, expected):
    assert load_config({}, [override]) == expected


@pytest.mark.parametrize(
    ("source", "override", "expected"),
    [
        ({"cache": "paged"}, "cache.page_size=32", EngineConfig(cache=Choice("paged", {"page_size": 32}))),
        ({"model": "a"}, "model.loader=gguf", EngineConfig(model=ModelChoice(use="a", loader="gguf"))),
        ({"kernels": "cpu"}, "kernels.fast=true", EngineConfig(kernels=(Choice("cpu", {"fast": True}),))),
        ({"quantizer": ["int8"]}, "quantizer.group=64", EngineConfig(quantizer=(Choice("int8", {"group": 64}),))),
        ({"quantizer": []}, "quantizer.use=int8", EngineConfig(quantizer=(Choice("int8"),))),
        ({"cache": {"use": "paged", "page_size": 1}}, "cache=flat", EngineConfig(cache=Choice("flat"))),
        (
            {"plugins": {"block": ["a"]}},
            "plugins.allow=[]",
            EngineConfig(engine=EngineOptions(plugins=PluginsOptions(allow=(), block=("a",)))),
        ),
    ],
)
def test_an_override_expands_short_forms_first(source, override, expected):
    assert load_config(source, [override]) == expected


def test_later_overrides_win():
    assert load_config({}, ["engine.seed=1", "engine.seed=2"]).engine.seed == 2


@pytest.mark.parametrize(
    ("source", "override", "word"),
    [
        ({}, "cache.page_size", "path=value"),
        ({}, "=3", "path=value"),
        ({}, "", "path=value"),
        ({}, "cache.=3", "path=value"),
        ({}, ".cache=3", "path=value"),
        ({}, "cache..x=3", "path=value"),
        ({}, "schedular.use=static", "'scheduler'"),
        ({}, "schedular=static", "'scheduler'"),
        ({}, "engine.devise=cpu", "'engine.device'"),
        ({}, "engine.threads='8'", "engine.threads: '8' is not a whole number"),
        ({"engine": {"device": "cpu"}}, "engine.device.x=1", "engine.device: is 'cpu', not a table"),
        ({"quantizer": ["a", "b"]}, "quantizer.group=64", "holds 2 parts"),
        ({"cache": 3}, "cache.page_size=32", "cache: 3 is not a table"),
        ({"engine": "cpu"}, "engine.seed=1", "engine: 'cpu' is not a table"),
        ({"engine": "cpu"}, "plugins.allow=[]", "engine: 'cpu' is not a table"),
    ],
)
def test_a_wrong_override_is_refused(source, override, word):
    assert word in str(refused(source, override))


# --- a part's own options ---------------------------------------------------------------------------------------------


@attrs.frozen
class Window:
    size: int = 4


@attrs.frozen
class Options:
    max_batch: int = attrs.field(default=8, validator=attrs.validators.ge(1))
    rate: float = 1.0
    mode: Literal["fast", "slow", 1] = "fast"
    names: tuple[str, ...] = ()
    pair: tuple[int, int] = (1, 2)
    limit: int | None = None
    size: int | str = 0
    file: Path | None = None
    extra: Mapping[str, Any] = attrs.Factory(dict)
    counts: Mapping[str, int] = attrs.Factory(dict)
    window: Window = attrs.Factory(Window)
    windows: tuple[Window, ...] = ()
    _hidden: bool = False
    made: int = attrs.field(init=False, default=0)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("max_batch", 3, 3),
        ("rate", 2, 2.0),
        ("rate", 0.5, 0.5),
        ("rate", math.inf, math.inf),
        ("mode", "slow", "slow"),
        ("mode", 1, 1),
        ("names", ["a", "b"], ("a", "b")),
        ("pair", [3, 4], (3, 4)),
        ("limit", None, None),
        ("limit", 3, 3),
        ("size", "2GiB", "2GiB"),
        ("size", 7, 7),
        ("file", "a/b", Path("a/b")),
        ("extra", {"a": [1]}, {"a": [1]}),
        ("counts", {"a": 1}, {"a": 1}),
        ("window", {"size": 2}, Window(2)),
        ("windows", [{"size": 2}, {}], (Window(2), Window(4))),
    ],
)
def test_options_are_structured_by_their_hints(key, value, expected):
    made = getattr(structure(Options, {key: value}, "scheduler"), key)
    assert made == expected
    assert type(made) is type(expected)


def test_a_private_field_is_set_by_its_public_name():
    assert structure(Options, {"hidden": True}, "scheduler")._hidden is True


@pytest.mark.parametrize(
    ("key", "value", "field", "right"),
    [
        ("max_batch", "8", "max_batch", "a whole number"),
        ("max_batch", True, "max_batch", "a whole number"),
        ("max_batch", 1.0, "max_batch", "a whole number"),
        ("max_batch", None, "max_batch", "a whole number"),
        ("max_batch", [1], "max_batch", "a whole number"),
        ("rate", "1", "rate", "a number"),
        ("rate", True, "rate", "a number"),
        ("rate", math.nan, "rate", "a number"),
        ("rate", 10**400, "rate", "a number"),
        ("mode", "medium", "mode", "one of 'fast', 'slow', 1"),
        ("mode", True, "mode", "one of"),
        ("mode", 1.0, "mode", "one of"),
        ("names", "ab", "names", "a list of texts"),
        ("names", ["a", 3], "names[1]", "a text"),
        ("pair", [1, 2, 3], "pair", "2 of them"),
        ("limit", "3", "limit", "a whole number"),
        ("size", 1.5, "size", "a whole number or a text"),
        ("file", 3, "file", "a path"),
        ("file", "", "file", "a path"),
        ("extra", [], "extra", "a table"),
        ("counts", {"a": "1"}, "counts.a", "a whole number"),
        ("window", 3, "window", "a table"),
        ("window", {"size": "2"}, "window.size", "a whole number"),
        ("windows", [{}, {"size": "2"}], "windows[1].size", "a whole number"),
        ("hidden", 1, "hidden", "true or false"),
    ],
)
def test_an_option_of_the_wrong_type_is_refused(key, value, field, right):
    with pytest.raises(ConfigError, match=r"^scheduler") as caught:
        structure(Options, {key: value}, "scheduler")
    assert caught.value.field == f"scheduler.{field}"
    assert right in str(caught.value)


def test_an_unknown_option_names_its_owner_and_the_nearest():
    with pytest.raises(ConfigError) as caught:
        structure(Options, {"max_bach": 3}, "scheduler", "static")
    assert str(caught.value) == "scheduler.max_bach: unknown option of 'static'. Did you mean 'max_batch'?"
    assert caught.value.field == "scheduler.max_bach"


@pytest.mark.parametrize("key", ["made", "_hidden", "", "x" * 10_000])
def test_what_cannot_be_set_is_unknown(key):
    with pytest.raises(ConfigError, match="unknown option") as caught:
        structure(Options, {key: 0}, "scheduler")
    assert len(str(caught.value)) < 400


def test_a_missing_option_is_named_with_what_would_be_right():
    @attrs.frozen
    class Needy:
        path: str

    with pytest.raises(ConfigError, match=r"frontend\.path: missing; it must be a text"):
        structure(Needy, {}, "frontend")


def test_stock_validators_give_the_whole_path():
    with pytest.raises(ConfigError, match=r"scheduler\.max_batch: 'max_batch' must be >= 1: 0") as caught:
        structure(Options, {"max_batch": 0}, "scheduler")
    assert caught.value.field == "scheduler.max_batch"


@pytest.mark.parametrize("kind", [ValueError, TypeError, OverflowError])
def test_other_errors_of_validators_are_wrapped_with_the_path(kind):
    @attrs.frozen
    class Picky:
        size: int = attrs.field(default=1)

        @size.validator
        def _(self, attribute, value):
            raise kind("odd sizes only")

    with pytest.raises(ConfigError, match="cache: odd sizes only"):
        structure(Picky, {"size": 2}, "cache")


def test_a_validators_own_config_error_passes_through():
    with pytest.raises(ConfigError, match=r"^cache\.page_size: 'page_size' must be >= 1: 0$"):
        structure(CacheOptions, {"page_size": 0}, "cache")


# --- plain data and back ----------------------------------------------------------------------------------------------

keys = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
part_keys = keys.filter(lambda key: key not in ("auto", "none"))
scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
part_options = st.dictionaries(keys.filter(lambda key: key != "use"), values, max_size=3)
named = st.builds(Choice, part_keys, part_options)
needed = st.builds(Choice, st.just("auto") | part_keys, part_options)
names = st.lists(keys, max_size=3).map(tuple)
configs = st.builds(
    EngineConfig,
    model=st.builds(
        ModelChoice,
        use=st.text(),
        loader=st.just("auto") | part_keys,
        family=st.just("auto") | part_keys,
        revision=st.none() | st.text(),
        options=st.dictionaries(
            keys.filter(lambda key: key not in ("use", "loader", "family", "revision")), values, max_size=3
        ),
    ),
    engine=st.builds(
        EngineOptions,
        device=st.text(),
        dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
        max_model_len=st.none() | st.integers(1, 2**40),
        seed=st.none() | st.integers(0, 2**64 - 1),
        plugins=st.builds(PluginsOptions, allow=st.none() | names, block=names),
    ),
    cache=needed,
    scheduler=needed,
    attention=needed,
    runner=needed,
    executor=needed,
    drafter=st.just(Choice()) | st.just(Choice("none")) | named,
    kernels=st.lists(needed, min_size=1, max_size=3).map(tuple),
    quantizer=st.lists(named, max_size=3).map(tuple),
    frontend=st.lists(named, max_size=3).map(tuple),
    logits_processors=st.lists(named, max_size=3).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(configs)
def test_a_config_survives_the_way_to_plain_data_and_back(config):
    data = as_dict(config)
    assert load_config(data) == config
    assert as_dict(load_config(data)) == data


def test_the_default_config_as_plain_data_spells_out_every_section():
    data = as_dict(EngineConfig())
    assert set(data) == {field.name for field in attrs.fields(EngineConfig)}
    assert data["kernels"] == [{"use": "auto"}]
    assert data["engine"]["plugins"] == {"block": []}


junk_keys = st.text(max_size=5) | st.sampled_from(
    ["use", "engine", "model", "cache", "plugins", "allow", "kernels", "quantizer", "drafter", "seed", "page_size"]
)
junk = st.recursive(
    scalars | st.floats() | st.integers() | st.sampled_from(["auto", "none"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(junk_keys, inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(junk_keys, junk, max_size=4), st.lists(st.text(max_size=30), max_size=2))
def test_arbitrary_data_raises_nothing_but_config_errors(data, overrides):
    try:
        config = load_config(data, overrides)
    except ConfigError as error:
        assert str(error)
    else:
        as_dict(config)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([field.name for field in attrs.fields(Options)]) | junk_keys, junk, max_size=3))
def test_arbitrary_options_raise_nothing_but_config_errors(data):
    try:
        structure(Options, data, "scheduler")
    except ConfigError as error:
        assert str(error)


def test_a_fingerprint_depends_on_content_and_not_on_order():
    one = fingerprint({"a": 1, "b": {"c": [1, 2], "d": "é"}})
    assert one == fingerprint({"b": {"d": "é", "c": (1, 2)}, "a": 1})
    assert len(one) == 16 and int(one, 16) >= 0
    others = [{"a": 1}, {"a": "1"}, {"a": True}, {"a": 1.0}, {"a": None}, {"a": [1]}, {}]
    assert len({fingerprint(other) for other in others}) == len(others)


def test_a_fingerprint_is_the_sha256_of_canonical_json():
    # printf '{"a":1}' | sha256sum
    assert fingerprint({"a": 1}) == "015abd7f5cc57a2d"
