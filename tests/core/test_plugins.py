"""Discovery: what is loaded, whom each part is attributed to, and that each fault names its plugin."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import attrs
import pytest

from intarsia import hookspecs
from intarsia.errors import ConfigError, PluginError
from intarsia.hookspecs import KINDS, hookimpl
from intarsia.plugins import Registry
from intarsia.types import CacheOptions, PluginsOptions, Provider, lazy

BARE = PluginsOptions(allow=())


def provider(key: str = "x", **fields) -> Provider:
    return Provider(**{"key": key, "summary": f"a part called {key}", "build": lambda context: context} | fields)


def offering(hook: str, result) -> object:
    """A plugin whose one hook returns `result`, or raises it."""

    def implementation():
        if isinstance(result, BaseException):
            raise result
        return result

    plugin = types.SimpleNamespace()
    setattr(plugin, hook, hookimpl(implementation))
    return plugin


def discover(**extra: object) -> Registry:
    return Registry.discover(BARE, extra)


class Installer:
    """Lays out installed packages: a module and a dist-info folder each, on sys.path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, source: str, *, version: str = "1.0", module: str = "", dist: str = "") -> None:
        module = module or f"fake_{name}"
        dist = dist or f"fake-{name}"
        (self.folder / f"{module}.py").write_text(source)
        info = self.folder / f"{dist.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(f"[intarsia]\n{name} = {module}\n")


@pytest.fixture
def install(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    yield Installer(tmp_path)
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]


SCHEDULER = """
from intarsia.hookspecs import hookimpl
from intarsia.types import Provider

@hookimpl
def provide_schedulers():
    return [Provider(key="{key}", summary="none", build=lambda context: context)]
"""


# --- entry points -----------------------------------------------------------------------------------------------------


def test_an_installed_plugin_is_found_with_its_distribution_and_version(install):
    install("lottery", SCHEDULER.format(key="lottery"), version="3.2")
    offer = Registry.discover(PluginsOptions(allow=("lottery",))).find("scheduler", "lottery")
    assert (offer.plugin.name, offer.plugin.distribution, offer.plugin.version) == ("lottery", "fake-lottery", "3.2")
    assert offer.kind.hook == "provide_schedulers"


def test_the_defaults_come_first_and_need_not_be_allowed():
    registry = Registry.discover(BARE)
    assert [plugin.name for plugin in registry.plugins] == ["defaults"]
    assert registry.plugins[0].distribution == "intarsia"


def test_without_options_every_installed_plugin_takes_part(install):
    install("lottery", SCHEDULER.format(key="lottery"))
    names = [plugin.name for plugin in Registry.discover().plugins]
    assert names[0] == "defaults"
    assert "lottery" in names and "gguf" in names


@pytest.mark.parametrize(
    "options", [PluginsOptions(block=("lottery",)), PluginsOptions(allow=("gguf",)), PluginsOptions(allow=())]
)
def test_a_plugin_left_out_is_never_imported(install, options):
    install("lottery", "raise SystemExit('imported')")
    registry = Registry.discover(options)
    assert "fake_lottery" not in sys.modules
    assert "lottery" in registry.left_out
    assert "lottery" not in [plugin.name for plugin in registry.plugins]


def test_block_wins_over_allow(install):
    install("lottery", SCHEDULER.format(key="lottery"))
    registry = Registry.discover(PluginsOptions(allow=("lottery",), block=("lottery",)))
    assert "lottery" in registry.left_out


def test_a_part_of_a_plugin_left_out_is_missed_by_name(install):
    install("lottery", SCHEDULER.format(key="lottery"))
    with pytest.raises(ConfigError, match=r"no part 'lottery'.*left out by plugins.allow or .block: .*lottery"):
        Registry.discover(BARE).find("scheduler", "lottery")


@pytest.mark.parametrize("option", ["allow", "block"])
def test_an_unknown_plugin_name_is_refused_with_the_nearest(install, option):
    install("lottery", SCHEDULER.format(key="lottery"))
    with pytest.raises(ConfigError, match=r"'lotery' is installed\. Did you mean 'lottery'\?") as caught:
        Registry.discover(PluginsOptions(**{option: ("lotery",)}))
    assert caught.value.field == f"engine.plugins.{option}"


def test_the_defaults_cannot_be_blocked():
    with pytest.raises(ConfigError, match=r"'defaults' .*cannot be blocked") as caught:
        Registry.discover(PluginsOptions(block=("defaults",)))
    assert caught.value.field == "engine.plugins.block"


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise SystemExit('bye')", "SystemExit: bye"),
        ("def broken(:", "SyntaxError"),
        ("1 / 0", "ZeroDivisionError"),
    ],
)
def test_a_plugin_that_fails_to_import_is_named_with_its_error_and_the_way_on(install, source, error):
    install("lottery", source, version="2.1")
    with pytest.raises(PluginError) as caught:
        Registry.discover(PluginsOptions(allow=("lottery",)))
    message = str(caught.value)
    assert "'lottery' (fake-lottery 2.1) fails to import" in message
    assert error in message
    assert """-o 'plugins.block=["lottery"]'""" in message


def test_the_way_on_keeps_what_is_blocked_already(install):
    install("first", "1 / 0")
    install("second", "1 / 0")
    with pytest.raises(PluginError, match=r"""plugins.block=\["first", "second"\]"""):
        Registry.discover(PluginsOptions(allow=("first", "second"), block=("first",)))


def test_an_entry_point_to_nowhere_is_an_import_failure(install, tmp_path):
    install("lottery", "")
    (tmp_path / "fake_lottery-1.0.dist-info/entry_points.txt").write_text("[intarsia]\nlottery = not a module!\n")
    with pytest.raises(PluginError, match=r"'lottery' .*fails to import"):
        Registry.discover(PluginsOptions(allow=("lottery",)))


def test_two_distributions_with_one_entry_point_name_are_both_named(install):
    install("lottery", SCHEDULER.format(key="a"), module="fake_a", dist="alpha", version="1.1")
    install("lottery", SCHEDULER.format(key="b"), module="fake_b", dist="beta", version="2.2")
    with pytest.raises(PluginError, match=r"'fake_a' of alpha 1\.1 and 'fake_b' of beta 2\.2"):
        Registry.discover(PluginsOptions(allow=("lottery",)))
    assert Registry.discover(PluginsOptions(block=("lottery",)))


def test_one_distribution_seen_twice_on_the_path_is_one_plugin(install, tmp_path, monkeypatch):
    install("lottery", SCHEDULER.format(key="lottery"))
    again = tmp_path / "again"
    again.mkdir()
    Installer(again)("lottery", SCHEDULER.format(key="lottery"))
    monkeypatch.syspath_prepend(again)
    registry = Registry.discover(PluginsOptions(allow=("lottery",)))
    assert [plugin.name for plugin in registry.plugins] == ["defaults", "lottery"]


def test_two_names_for_one_module_are_refused(install, tmp_path):
    install("lottery", SCHEDULER.format(key="lottery"))
    entries = tmp_path / "fake_lottery-1.0.dist-info/entry_points.txt"
    entries.write_text("[intarsia]\nlottery = fake_lottery\nraffle = fake_lottery\n")
    with pytest.raises(PluginError, match=r"'raffle' .* same module as plugin 'lottery'"):
        Registry.discover(PluginsOptions(allow=("lottery", "raffle")))


@pytest.mark.parametrize("metadata", [None, "", "Metadata-Version: 2.1\n"])
def test_a_package_without_metadata_does_not_stop_discovery(install, tmp_path, metadata):
    install("lottery", SCHEDULER.format(key="lottery"))
    path = tmp_path / "fake_lottery-1.0.dist-info/METADATA"
    path.unlink() if metadata is None else path.write_text(metadata)
    offer = Registry.discover(PluginsOptions(allow=("lottery",))).find("scheduler", "lottery")
    assert (offer.plugin.distribution, offer.plugin.version) == ("unknown", "unknown")


def test_a_malformed_entry_point_file_is_a_plugin_error(install, tmp_path):
    install("lottery", "")
    (tmp_path / "fake_lottery-1.0.dist-info/entry_points.txt").write_text("[intarsia]\nlottery\n")
    with pytest.raises(PluginError, match="entry points of the installed packages cannot be read"):
        Registry.discover(BARE)


# --- what is offered --------------------------------------------------------------------------------------------------


class Whole:
    """A plugin that implements every hook; its parts' keys are the slots' names."""

    @hookimpl
    def provide_loaders(self):
        return [provider("of_loader")]

    @hookimpl
    def provide_models(self):
        return [provider("of_family")]

    @hookimpl
    def provide_quantizers(self):
        return [provider("of_quantizer")]

    @hookimpl
    def provide_kernels(self):
        return [provider("of_kernels")]

    @hookimpl
    def provide_attention_backends(self):
        return [provider("of_attention")]

    @hookimpl
    def provide_cache_allocators(self):
        return [provider("of_cache", options=CacheOptions)]

    @hookimpl
    def provide_runners(self):
        return [provider("of_runner", provides=("attention",))]

    @hookimpl
    def provide_drafters(self):
        return [provider("of_drafter")]

    @hookimpl
    def provide_logits_processors(self):
        return [provider("of_logits_processors")]

    @hookimpl
    def provide_schedulers(self):
        return [provider("of_scheduler", requires=("cache",))]

    @hookimpl
    def provide_executors(self):
        return [provider("of_executor")]

    @hookimpl
    def provide_frontends(self):
        return [provider("of_frontend")]

    @hookimpl
    def provide_commands(self):
        return [provider("of_commands")]

    @hookimpl
    def check_composition(self, config, parts): ...

    @hookimpl
    def engine_started(self, engine, parts): ...

    @hookimpl
    def step_finished(self, result, outputs, seconds): ...

    @hookimpl
    def request_finished(self, output): ...

    @hookimpl
    def engine_stopping(self, engine): ...


def test_every_hook_reaches_its_slot_and_its_plugin():
    registry = discover(whole=Whole())
    assert {name for name in vars(Whole) if not name.startswith("_")} == set(hookspecs.hook_docs())
    for kind in KINDS:
        offer = registry.find(kind.slot, f"of_{kind.slot}")
        assert (offer.kind, offer.plugin.name) == (kind, "whole")
        assert (offer.plugin.distribution, offer.plugin.version) == ("-", "-")
        assert registry.offers(kind.slot)[f"of_{kind.slot}"] is offer
    ours = [offer.kind.slot for offer in registry.all_offers() if offer.plugin.name == "whole"]
    assert ours == [kind.slot for kind in KINDS]
    for name in ("check_composition", *hookspecs.OBSERVERS):
        assert registry.has_observers(name)


def test_parts_of_several_plugins_in_one_slot_keep_their_owners():
    registry = discover(
        a=offering("provide_schedulers", [provider("one"), provider("two")]),
        b=offering("provide_schedulers", (each for each in [provider("three")])),
    )
    owners = {key: offer.plugin.name for key, offer in registry.offers("scheduler").items()}
    assert owners | {"one": "a", "two": "a", "three": "b"} == owners


def test_a_hook_that_nobody_implements_has_no_observers():
    registry = discover(a=offering("request_finished", None))
    assert registry.has_observers("request_finished")
    assert not registry.has_observers("step_finished")


def test_observers_are_called_through_the_registry():
    seen = []

    class Watcher:
        @hookimpl
        def request_finished(self, output):
            seen.append(output)

    Registry.discover(BARE, [Watcher()]).hook.request_finished(output="the output")
    assert seen == ["the output"]


def test_the_same_key_in_two_slots_is_no_clash():
    registry = discover(
        a=offering("provide_schedulers", [provider("x")]), b=offering("provide_runners", [provider("x")])
    )
    assert registry.find("scheduler", "x").plugin.name == "a"
    assert registry.find("runner", "x").plugin.name == "b"


def test_an_unknown_key_is_refused_with_the_nearest():
    registry = discover(a=offering("provide_schedulers", [provider("lottery")]))
    with pytest.raises(ConfigError, match=r"scheduler: no part 'lotery'\. Did you mean 'lottery'\?") as caught:
        registry.find("scheduler", "lotery")
    assert caught.value.field == "scheduler"


def test_an_unknown_key_that_is_near_nothing_lists_the_known():
    registry = discover(a=offering("provide_drafters", [provider("ngram"), provider("medusa")]))
    with pytest.raises(ConfigError, match=r"no part 'qqq'\. Known: .*medusa, ngram"):
        registry.find("drafter", "qqq")


@pytest.mark.parametrize(("slot", "path"), [("loader", "model.loader"), ("family", "model.family")])
def test_the_models_own_slots_are_named_by_their_path(slot, path):
    with pytest.raises(ConfigError) as caught:
        discover().find(slot, "nothing")
    assert caught.value.field == path


# --- faults -----------------------------------------------------------------------------------------------------------


def test_two_plugins_with_one_key_are_both_named(install):
    install("alpha", SCHEDULER.format(key="same"), version="1.1")
    install("beta", SCHEDULER.format(key="same"), version="2.2")
    with pytest.raises(PluginError) as caught:
        Registry.discover(PluginsOptions(allow=("alpha", "beta")))
    message = str(caught.value)
    assert "'scheduler'" in message and "'same'" in message
    assert "fake-alpha 1.1" in message and "fake-beta 2.2" in message
    assert """plugins.block=["beta"]""" in message


def test_a_plugin_that_offers_a_key_twice_is_refused():
    with pytest.raises(PluginError, match="have the key 'x'"):
        discover(a=offering("provide_schedulers", [provider("x"), provider("x")]))


def test_a_misspelt_hook_is_refused_with_the_nearest():
    with pytest.raises(PluginError, match=r"plugin 'a' .*no hook 'provide_schedulars'\. Did you mean 'provide_sched"):
        discover(b=offering("provide_schedulers", []), a=offering("provide_schedulars", []))


@pytest.mark.parametrize("module", ["intarsia_paged", None, {}, types.SimpleNamespace(build=print)])
def test_a_plugin_without_any_hook_is_refused(module):
    with pytest.raises(PluginError, match=r"plugin 'a' \(- -\): .* implements no hook"):
        discover(a=module)


def test_a_hook_without_its_mark_is_refused():
    with pytest.raises(PluginError, match=r"plugin 'a' .*provide_runners is not marked with @hookimpl"):
        discover(a=types.SimpleNamespace(provide_runners=lambda: [provider("x")]))


def test_a_hook_with_an_argument_it_does_not_get_is_refused():
    plugin = types.SimpleNamespace(provide_runners=hookimpl(lambda context: [provider("x")]))
    with pytest.raises(PluginError, match=r"plugin 'a' \(- -\).*provide_runners.*context"):
        discover(a=plugin)


def test_a_hook_that_wraps_others_is_refused():
    plugin = types.SimpleNamespace(provide_runners=hookimpl(wrapper=True)(lambda: (yield)))
    with pytest.raises(PluginError, match=r"plugin 'a' .*cannot wrap"):
        discover(a=plugin)


def failing():
    yield provider("fine")
    raise RuntimeError("half way")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "returned None, not a list"),
        (3, "returned 3, not a list"),
        (provider("x"), "not a list of providers"),
        (["x"], "returned 'x' among"),
        ({"x": provider("x")}, "returned 'x' among"),
        ([provider("x"), None], "returned None among"),
        (ValueError("no license"), "failed: ValueError: no license"),
        (SystemExit(3), "failed: SystemExit: 3"),
        (failing(), "failed: RuntimeError: half way"),
    ],
)
def test_a_hook_that_returns_no_providers_is_refused_with_its_owner(result, message):
    with pytest.raises(PluginError, match=r"plugin 'a' \(- -\).*provide_runners") as caught:
        discover(a=offering("provide_runners", result))
    assert message in str(caught.value)


@attrs.frozen
class UseOptions:
    use: str = ""


@attrs.frozen
class UnreadableOptions:
    callback: bytes = b""


@attrs.frozen
class UnresolvedOptions:
    size: NoSuchName = None  # noqa: F821


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"key": ""}, "a key is"),
        ({"key": "Static"}, "a key is"),
        ({"key": "a-b"}, "a key is"),
        ({"key": "x\n"}, "a key is"),
        ({"key": None}, "a key is"),
        ({"key": "auto"}, "a meaning of its own"),
        ({"key": "none"}, "a meaning of its own"),
        ({"summary": None}, "summary None"),
        ({"api": 0}, "plugin is older: upgrade it"),
        *(({"api": api}, "no version of provide_schedulers, which") for api in (True, 1.0, "1", None)),
        ({"fit": None}, "its fit None is no function"),
        ({"build": 5}, "its build 5 is no function"),
        ({"requires": None}, "requires=None is not a tuple"),
        ({"provides": 5}, "provides=5 is not a tuple"),
        ({"api": 2}, "intarsia is older"),
        ({"options": dict}, "not an attrs class"),
        ({"options": CacheOptions()}, "not an attrs class"),
        ({"options": UseOptions}, "'use' is a key of the config itself"),
        ({"options": UnreadableOptions}, "no config can hold a <class 'bytes'>"),
        ({"options": UnresolvedOptions}, "NoSuchName"),
        ({"requires": ("cash",)}, "unknown slot 'cash'. Did you mean 'cache'?"),
        ({"requires": "cache"}, "requires='cache' is not a tuple"),
        ({"provides": "attention"}, "provides='attention' is not a tuple"),
    ],
)
def test_a_provider_that_breaks_the_contract_is_refused_with_its_owner(fields, message):
    with pytest.raises(PluginError, match=r"plugin 'a' \(- -\): provide_schedulers") as caught:
        discover(a=offering("provide_schedulers", [provider(**fields)]))
    assert message in str(caught.value)


def test_an_object_whose_attributes_fail_is_named():
    class Odd:
        def __getattr__(self, name):
            raise RuntimeError(f"no {name} today")

    with pytest.raises(PluginError, match=r"plugin 'odd' \(- -\): its hooks cannot be looked up: RuntimeError: no"):
        discover(odd=Odd())


def test_an_older_plugin_is_told_which_version_it_was_made_for(monkeypatch):
    monkeypatch.setattr("intarsia.hookspecs.API", {kind.hook: 3 for kind in KINDS})
    with pytest.raises(PluginError, match=r"made for version 1 of provide_\w+, this is version 3; the plugin is older"):
        discover(a=offering("provide_schedulers", [provider("x")]))


def test_cache_options_inherit_what_every_cache_has():
    with pytest.raises(PluginError, match=r"do not inherit intarsia\.types\.CacheOptions"):
        discover(a=offering("provide_cache_allocators", [provider("x")]))


def test_a_loaders_options_cannot_hide_the_models_keys():
    @attrs.frozen
    class Options:
        revision: str = ""

    with pytest.raises(PluginError, match="'revision' is a key of the config itself"):
        discover(a=offering("provide_loaders", [provider("x", options=Options)]))


# --- plugins passed in ------------------------------------------------------------------------------------------------


def test_passed_plugins_can_be_named_by_themselves():
    module = types.ModuleType("raffle")
    module.provide_schedulers = hookimpl(lambda: [provider("raffle")])
    registry = Registry.discover(BARE, [module, Whole()])
    assert [plugin.name for plugin in registry.plugins] == ["defaults", "raffle", "Whole"]


def test_a_passed_plugin_can_be_blocked():
    plugin = offering("provide_schedulers", [provider("x")])
    registry = Registry.discover(PluginsOptions(allow=(), block=("a",)), {"a": plugin})
    assert "x" not in registry.offers("scheduler")


def test_a_passed_plugin_cannot_take_an_installed_ones_name():
    with pytest.raises(PluginError, match="two plugins are called 'gguf'"):
        discover(gguf=offering("provide_schedulers", []))


def test_two_passed_plugins_of_one_name_are_refused():
    with pytest.raises(PluginError, match="'SimpleNamespace'"):
        Registry.discover(BARE, [types.SimpleNamespace(), types.SimpleNamespace()])


# --- lazy builders ----------------------------------------------------------------------------------------------------


def test_a_lazy_builder_imports_at_its_first_call_and_says_what_it_calls(tmp_path, monkeypatch):
    (tmp_path / "lazily_built.py").write_text("def build(context):\n    return ['built', context]\n")
    monkeypatch.syspath_prepend(tmp_path)
    build = lazy("lazily_built:build")
    assert "lazily_built" not in sys.modules and build.__name__ == "lazily_built:build"
    assert build("context") == ["built", "context"]
    with pytest.raises(AttributeError, match="missing"):
        lazy("lazily_built:missing")(None)


# --- one after another ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("other", ["Lottery", "LOTTERY", "lottery-"])
def test_names_that_differ_in_case_and_dashes_alone_are_refused(install, other):
    if other.endswith("-"):
        install("my-lottery", SCHEDULER.format(key="first"), module="fake_one", dist="fake-one")
        install("my_lottery", SCHEDULER.format(key="second"), module="fake_two", dist="fake-two", version="2.0")
        names = ("my-lottery", "my_lottery")
    else:
        install("lottery", SCHEDULER.format(key="first"), module="fake_one", dist="fake-one")
        install(other, SCHEDULER.format(key="second"), module="fake_two", dist="fake-two", version="2.0")
        names = ("lottery", other)
    with pytest.raises(PluginError, match="differ in case and dashes alone") as caught:
        Registry.discover(PluginsOptions(allow=names))
    assert "fake-one 1.0" in str(caught.value) and "fake-two 2.0" in str(caught.value)
    assert Registry.discover(PluginsOptions(allow=names[:1])).find("scheduler", "first")
    assert Registry.discover(PluginsOptions(allow=names, block=names[:1])).find("scheduler", "second")


def test_an_installed_plugin_that_is_passed_in_too_is_refused(install):
    install("lottery", SCHEDULER.format(key="lottery"))
    import fake_lottery

    with pytest.raises(PluginError, match=r"is the same module as plugin 'lottery'"):
        Registry.discover(PluginsOptions(allow=("lottery",)), [fake_lottery])


def test_two_plugins_with_a_command_of_one_name_are_both_named():
    commands = {name: offering("provide_commands", [provider("train")]) for name in ("a", "b")}
    with pytest.raises(PluginError, match=r"two parts for 'commands' have the key 'train': of plugin 'a' .*plugin 'b'"):
        discover(**commands)
