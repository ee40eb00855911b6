"""Versions of hooks, and what goes: old plugins go on working for a release, and are told of by name."""

from __future__ import annotations

import json
import sys
import types

import attrs
import pytest

from engines import engine_of
from intarsia import hookspecs
from intarsia import types as values
from intarsia.cli import run
from intarsia.deprecations import DEPRECATIONS, Deprecation, old_arguments
from intarsia.errors import PluginError
from intarsia.hookspecs import API, KINDS, OBSERVERS, hook_docs, hookimpl, hookspec
from intarsia.observers import Observers
from intarsia.plugins import Registry
from intarsia.types import PluginsOptions, Provider, StepResult
from models import tiny_llama

BARE = PluginsOptions(allow=())


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """Nothing was told of yet."""
    monkeypatch.setattr("intarsia.deprecations._uses", {})


@pytest.fixture
def plant(monkeypatch):
    return lambda *planted: monkeypatch.setattr("intarsia.deprecations.DEPRECATIONS", planted)


def discover(**extra: object) -> Registry:
    return Registry.discover(BARE, extra)


def plugin(**functions) -> types.SimpleNamespace:
    return types.SimpleNamespace(**functions)


def part(**fields) -> Provider:
    return Provider(**{"key": "mine", "summary": "mine", "build": lambda context: None} | fields)


# --- versions ---------------------------------------------------------------------------------------------------------


def test_every_hook_has_a_version():
    assert set(API) == set(hook_docs())
    assert all(API[kind.hook] == kind.api for kind in KINDS)


@pytest.mark.parametrize("hook", ["check_composition", *OBSERVERS])
@pytest.mark.parametrize(("api", "advice"), [(1, None), (0, "the plugin is older: upgrade it"), (2, "upgrade it")])
def test_hooks_that_check_or_observe_say_what_they_were_written_for(hook, api, advice):
    def implementation():
        """Takes nothing."""

    watch = plugin(**{hook: hookimpl(implementation, api=api)})
    if advice is None:
        assert discover(watch=watch).has_observers(hook)
        return
    with pytest.raises(PluginError, match=rf"plugin 'watch' .*made for version {api} of {hook}, this is") as caught:
        discover(watch=watch)
    assert advice in str(caught.value)


def test_the_version_of_parts_is_their_providers():
    with pytest.raises(PluginError, match=r"provide_schedulers is marked api=1; say it in Provider\(api=1\)"):
        discover(mine=plugin(provide_schedulers=hookimpl(lambda: [part()], api=1)))


def test_the_mark_keeps_pluggys_options_and_the_function_is_the_same():
    def engine_started():
        return "called"

    assert hookimpl(engine_started) is engine_started and engine_started() == "called"

    @hookimpl(api=1, trylast=True)
    def step_finished():
        return "called"

    assert step_finished() == "called"
    assert step_finished.intarsia_impl["trylast"] and step_finished.intarsia_api == 1


def test_a_hook_that_gained_an_argument_calls_old_implementations(monkeypatch):
    @hookspec
    def step_finished(result, outputs, seconds, energy_j):
        """Observe a step."""

    monkeypatch.setattr(hookspecs, "step_finished", step_finished)
    seen = []
    old = plugin(step_finished=hookimpl(lambda seconds: seen.append(seconds)))
    new = plugin(step_finished=hookimpl(lambda energy_j: seen.append(energy_j)))
    told = Observers(discover(old=old, new=new))
    told.tell("step_finished", result=StepResult(), outputs=(), seconds=0.5, energy_j=9.0)
    assert sorted(seen) == [0.5, 9.0]


def test_a_context_that_gained_a_field_builds_old_parts():
    @attrs.frozen(kw_only=True)
    class Newer(hookspecs.protocols.PartContext):
        energy_j: float = 0.0

    offer = discover(mine=plugin(provide_schedulers=hookimpl(lambda: [part(build=lambda c: c.num_ids)]))).find(
        "scheduler", "mine"
    )
    assert offer.provider.build(Newer(spec=None, num_ids=3)) == 3


# --- what goes --------------------------------------------------------------------------------------------------------

RENAMED = Deprecation(what="hook", name="provide_planners", instead="provide_schedulers", gone="0.3")
SAYS_RENAMED = "plugin 'mine' (- -) uses the hook provide_planners, which goes in intarsia 0.3: use provide_schedulers"


def test_a_renamed_hook_is_called_and_its_plugin_told_once(plant, caplog):
    plant(RENAMED)
    old = plugin(provide_planners=hookimpl(lambda: [part()]))
    for _ in range(2):
        registry = discover(mine=old)
        assert registry.find("scheduler", "mine").plugin.name == "mine"
        assert [str(use) for use in registry.deprecated] == [SAYS_RENAMED]
    assert [record.getMessage() for record in caplog.records] == [SAYS_RENAMED]


def test_a_plugin_with_both_names_of_a_hook_is_asked_once(plant, caplog):
    plant(RENAMED)
    functions = {name: hookimpl(lambda: [part()]) for name in ("provide_planners", "provide_schedulers")}
    registry = discover(mine=plugin(**functions))
    assert list(registry.offers("scheduler")) == ["static", "mine"] and registry.deprecated == ()
    assert not caplog.records


def test_without_the_entry_the_old_hook_is_unknown():
    with pytest.raises(PluginError, match="there is no hook 'provide_planners'"):
        discover(mine=plugin(provide_planners=hookimpl(lambda: [part()])))


def test_a_hook_that_goes_for_good_is_called_until_then(plant, caplog):
    plant(Deprecation(what="hook", name="engine_stopping", gone="0.3"))
    seen = []
    told = Observers(discover(mine=plugin(engine_stopping=hookimpl(lambda engine: seen.append(engine)))))
    told.tell("engine_stopping", engine="engine")
    assert seen == ["engine"]
    assert "uses the hook engine_stopping, which goes in intarsia 0.3: nothing takes its place" in caplog.text


def test_a_renamed_argument_is_passed_under_both_names(plant, monkeypatch, caplog):
    @hookspec
    def step_finished(result, outputs, seconds, duration_s):
        """Observe a step."""

    monkeypatch.setattr(hookspecs, "step_finished", step_finished)
    plant(
        Deprecation(what="argument", name="step_finished.seconds", instead="step_finished.duration_s", gone="0.3"),
    )
    seen = []
    old = plugin(step_finished=hookimpl(lambda seconds: seen.append(("old", seconds))))
    new = plugin(step_finished=hookimpl(lambda duration_s: seen.append(("new", duration_s))))
    registry = discover(old=old, new=new)
    Observers(registry).tell("step_finished", result=StepResult(), outputs=(), duration_s=0.5)
    assert sorted(seen) == [("new", 0.5), ("old", 0.5)]
    (use,) = registry.deprecated
    assert str(use) == (
        "plugin 'old' (- -) uses the argument step_finished.seconds, which goes in intarsia 0.3: "
        "use step_finished.duration_s"
    )
    assert old_arguments("engine_started", {"duration_s": 1}) == {"duration_s": 1}


def test_an_old_version_of_a_hook_is_taken_for_a_release(plant, monkeypatch, caplog):
    monkeypatch.setattr("intarsia.hookspecs.API", {**API, "provide_schedulers": 2})
    plant(Deprecation(what="api", name="provide_schedulers.1", instead="provide_schedulers.2", gone="0.3"))
    registry = Registry.discover(
        BARE,
        {"old": plugin(provide_schedulers=hookimpl(lambda: [part()]))},
    )
    assert registry.find("scheduler", "mine")
    assert "plugin 'old' (- -) uses the hook version provide_schedulers.1" in caplog.text
    with pytest.raises(PluginError, match=r"plugin 'new' .*for version 3 of provide_schedulers, this is version 2"):
        discover(new=plugin(provide_schedulers=hookimpl(lambda: [part(api=3)])))


def test_an_old_name_is_the_new_one_and_whoever_imports_it_is_told_of(plant, tmp_path, monkeypatch, caplog):
    plant(Deprecation(what="name", name="intarsia.types.Plan", instead="intarsia.types.BatchPlan", gone="0.3"))
    (tmp_path / "old_names.py").write_text("from intarsia.types import Plan\n")
    info = tmp_path / "old_dist-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: old-dist\nVersion: 3.1\n")
    (info / "top_level.txt").write_text("old_names\n")
    monkeypatch.syspath_prepend(tmp_path)
    try:
        import old_names
    finally:
        sys.modules.pop("old_names", None)
    assert old_names.Plan is values.BatchPlan
    assert [record.getMessage() for record in caplog.records] == [
        "module 'old_names' (old-dist 3.1) uses intarsia.types.Plan, which goes in intarsia 0.3: "
        "use intarsia.types.BatchPlan"
    ]


@pytest.mark.parametrize("module", ["types", "protocols", "errors", "hookspecs", "ops"])
def test_a_name_that_never_was_is_an_attribute_error(module):
    loaded = __import__(f"intarsia.{module}", fromlist=["x"])
    with pytest.raises(AttributeError, match=f"module 'intarsia.{module}' has no attribute 'NeverWas'"):
        _ = loaded.NeverWas


# --- where it is shown ------------------------------------------------------------------------------------------------


def test_plugins_and_explain_show_what_goes_and_whose_it_is(plant, tmp_path, monkeypatch, capsys):
    plant(RENAMED)
    (tmp_path / "fake_planner.py").write_text(
        "from intarsia.hookspecs import hookimpl\nfrom intarsia.types import Fit, Provider\n"
        "@hookimpl\ndef provide_planners():\n"
        "    return [Provider(key='mine', summary='m', build=lambda c: c, fit=lambda c: Fit(0))]\n"
    )
    info = tmp_path / "fake_planner-4.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-planner\nVersion: 4.0\n")
    (info / "entry_points.txt").write_text("[intarsia]\nplanner = fake_planner\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = "plugin 'planner' (fake-planner 4.0) uses the hook provide_planners, which goes in intarsia 0.3"
    model = tiny_llama(tmp_path, layers=1)[0]
    try:
        assert run(["plugins", "-o", 'plugins.allow=["planner"]']) == 0
        assert says in " ".join(capsys.readouterr().err.split())
        options = ["-m", str(model), "-o", 'plugins.allow=["planner"]', "-o", "cache.memory=64MiB"]
        assert run(["explain", *options, "--json"]) == 0
        (said,) = json.loads(capsys.readouterr().out)["deprecated"]
        assert said.startswith(says)
        assert run(["explain", *options]) == 0
        assert says in " ".join(capsys.readouterr().out.split())
    finally:
        sys.modules.pop("fake_planner", None)


def test_what_goes_is_no_part_of_the_hash(plant, tmp_path):
    model = tiny_llama(tmp_path, layers=1)[0]
    mine = {"mine": plugin(provide_schedulers=hookimpl(lambda: [part()]))}
    with engine_of(model, scheduler="static", plugins=mine) as engine:
        before = engine.explain()
    plant(RENAMED)
    mine = {"mine": plugin(provide_planners=hookimpl(lambda: [part()]))}
    with engine_of(model, scheduler="static", plugins=mine) as engine:
        after = engine.explain()
    assert (before["deprecated"], after["deprecated"]) == ([], [SAYS_RENAMED])
    assert before["hash"] == after["hash"]


def test_the_table_is_well_formed():
    known = {
        "hook": lambda name: name.isidentifier(),
        "argument": lambda name: name.split(".")[0] in API,
        "api": lambda name: name.split(".")[0] in API and name.split(".")[1].isdigit(),
        "name": lambda name: name.startswith("intarsia."),
    }
    for each in DEPRECATIONS:
        assert known[each.what](each.name) and each.gone
