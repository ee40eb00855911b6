"""Who may import whom, and what stays light."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/__init__.py"))
HEAVY = ("torch", "triton", "transformers", "tokenizers", "gguf", "safetensors", "numpy")


def loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter; return the modules that it loaded."""
    code = f"{statement}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr
    return set(json.loads(run.stdout.splitlines()[-1]))


def plugins_in(modules: set[str]) -> set[str]:
    return {name for name in modules if name.startswith("intarsia_") or name.split(".")[:2] == ["intarsia", "defaults"]}


def test_the_import_contracts_hold():
    linter = Path(sys.executable).parent / "lint-imports"
    run = subprocess.run([linter, "--no-cache"], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_plugin_is_under_the_contracts_and_has_an_entry_point():
    pyproject = (ROOT / "pyproject.toml").read_text()
    entries = importlib.metadata.distribution("intarsia").entry_points.select(group="intarsia")
    modules = {entry.value for entry in entries}
    for plugin in PLUGINS:
        assert plugin in modules
        assert pyproject.count(f'"{plugin}"') >= 4, f"{plugin}: entry point, root package and two contracts"


@pytest.mark.parametrize(
    "module",
    ["intarsia", "intarsia.errors", "intarsia.types", "intarsia.protocols", "intarsia.hookspecs", "intarsia.config"],
)
def test_the_public_surface_loads_neither_torch_nor_a_plugin(module):
    loaded = loaded_by(f"import {module}")
    assert module in loaded
    assert not loaded & set(HEAVY)
    assert not plugins_in(loaded)


@pytest.mark.parametrize("plugin", ["intarsia.defaults", *PLUGINS])
def test_a_plugins_front_module_loads_nothing_heavy(plugin):
    loaded = loaded_by(f"import {plugin}")
    assert plugin in loaded
    assert not loaded & set(HEAVY)


def test_discovery_loads_nothing_heavy():
    loaded = loaded_by("from intarsia.plugins import Registry; Registry.discover().all_offers()")
    assert "intarsia.defaults" in loaded
    assert not loaded & set(HEAVY)


def test_the_bare_core_loads_no_plugin():
    statement = "from intarsia.plugins import Registry as R; from intarsia.types import PluginsOptions as O"
    loaded = loaded_by(f"{statement}; R.discover(O(allow=()))")
    assert {name.split(".")[0] for name in plugins_in(loaded)} == {"intarsia"}


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugins_front_module_holds_hook_implementations_only(plugin):
    tree = ast.parse((ROOT / "plugins" / plugin / "__init__.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            marks = [each.id for each in node.decorator_list if isinstance(each, ast.Name)]
            assert "hookimpl" in marks, f"{plugin}.{node.name} is no hook implementation"
        else:
            assert not isinstance(node, ast.ClassDef), f"{plugin}.{node.name} belongs in a module of its own"


@pytest.mark.parametrize("module", ["intarsia.errors", "intarsia.types", "intarsia.protocols"])
def test_a_public_module_lists_all_that_it_defines(module):
    """`__all__` is complete, so that what a plugin may use is not a matter of what happened to be imported there."""
    loaded = importlib.import_module(module)
    listed = set(loaded.__all__)
    assert len(loaded.__all__) == len(listed)
    assert not [name for name in listed if not hasattr(loaded, name)]
    defined = {
        name
        for name, value in vars(loaded).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and (value.__module__ == module or value.__module__.startswith(f"{module}."))
    }
    assert defined <= listed


def test_core_plugins_and_contrib_are_no_packages_themselves():
    assert not [folder for folder in ("core", "plugins", "contrib") if (ROOT / folder / "__init__.py").exists()]
