"""`intarsia plugins new`: names that are refused, folders that are left alone, packages that pass their own tests."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia.cli import run
from intarsia.cli.plugins_facts import names
from intarsia.hookspecs import KINDS
from intarsia.testing.claims import claims
from intarsia.testing.suites import suite_of
from plugin_packages import path_of, placeholders, written

BIN = Path(sys.executable).parent
SLOTS = [kind.slot for kind in KINDS]
LONG = "a-name-of-forty-letters-is-as-long-as-it"


@pytest.fixture
def refused(capsys, tmp_path, monkeypatch):
    """Run `plugins new` where it must be refused in one line; return the line."""
    monkeypatch.chdir(tmp_path)

    def call(*args):
        before = sorted(tmp_path.rglob("*"))
        assert run(["plugins", "new", *args]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("intarsia: error: ")
        assert err.count("\n") == 1
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        return err

    return call


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", ["name of a distribution"]),
        ("-x", ["'-x'"]),
        ("a b", ["'a b'"]),
        ("../up", ["'../up'"]),
        ("naïve", ["'naïve'"]),
        ("x" * 41, ["40 letters"]),
        ("2-fast", ["'2_fast'"]),
        ("class", ["'class'"]),
        ("match", ["'match'"]),
        ("queue", ["Python's own"]),
        ("Collections", ["Python's own"]),
        ("intarsia", ["is taken"]),
        ("tests", ["is taken"]),
        ("conftest", ["is taken"]),
        ("Torch", ["'torch'", "installed already"]),
        ("intarsia.gguf", ["'intarsia_gguf'", "installed already"]),
        ("pip_tools_of_mine/x", ["name of a distribution"]),
    ],
)
def test_a_name_that_python_or_pip_could_not_use_is_refused(refused, name, words):
    message = refused("--kind", "scheduler", "--", name)
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("kind", "key", "words"),
    [
        ("scheduler", "Upper", ["'Upper'", "lower-case"]),
        ("scheduler", "auto", ["meaning of its own"]),
        ("scheduler", "none", ["meaning of its own"]),
        ("scheduler", "static", ["'static' already", "defaults"]),
        ("scheduler", "paged", ["plugin 'paged'", "intarsia"]),
        ("commands", "explain", ["command 'explain' of its own"]),
        ("commands", "client", ["'client' already", "zmq"]),
    ],
)
def test_a_key_that_is_taken_or_means_something_is_refused_with_its_owner(refused, kind, key, words):
    message = refused("my-part", "--kind", kind, "--key", key)
    for word in words:
        assert word in message


def test_a_kind_that_is_unknown_is_refused_with_the_nearest(refused):
    assert "Did you mean 'scheduler'?" in refused("my-part", "--kind", "shceduler")
    assert "--kind" in refused("my-part")


def test_a_kind_is_known_in_the_singular_and_with_hyphens(tmp_path):
    for word, package in (("logits-processor", "one"), ("Command", "two"), ("kernel", "three")):
        assert run(["plugins", "new", f"my-{package}", "--kind", word, "--into", str(tmp_path / package)]) == 0


@pytest.mark.parametrize("there", ["folder", "file", "link"])
def test_what_is_there_already_is_left_alone(refused, tmp_path, there):
    target = tmp_path / "my-part"
    if there == "folder":
        target.mkdir()
    elif there == "file":
        target.write_text("mine")
    else:
        target.symlink_to(tmp_path / "nowhere")
    assert "is there already" in refused("my-part", "--kind", "scheduler")


def test_a_folder_that_cannot_be_made_is_named(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "no folder" in refused("my-part", "--kind", "scheduler", "--into", "missing/my-part")
    assert "no folder" in refused("my-part", "--kind", "scheduler", "--into", "file/my-part")


def test_what_was_written_is_listed_and_what_comes_next_is_said(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["plugins", "new", "Intarsia_Mine", "--kind", "scheduler"]) == 0
    out, err = capsys.readouterr()
    listed = {Path(line) for line in out.splitlines()}
    assert listed == {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    folder = Path("Intarsia_Mine")
    wanted = ("pyproject.toml", "README.md", ".gitignore", ".github/workflows/ci.yml", "src/intarsia_mine/py.typed")
    assert listed >= {folder / name for name in wanted}
    assert not (tmp_path / folder / "LICENSE").exists(), "a license is the author's to choose"
    assert "pip install -e" in err
    assert "intarsia plugins check mine" in err


@pytest.mark.parametrize("name", [LONG, pytest.param("a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", SLOTS)
def test_names_of_any_length_give_code_that_is_in_form(tmp_path, kind, name):
    package, _ = written(tmp_path, name, kind)
    assert placeholders(package) == []
    for command in (["check", "."], ["format", "--check", "--diff", "."]):
        found = subprocess.run([BIN / "ruff", *command], cwd=package, capture_output=True, text=True, check=False)
        assert found.returncode == 0, found.stdout + found.stderr


def passes(package, path, *, key, wanted=()):
    """Run what the README of a package says: its tests, its types, its contracts, or some claims of these."""
    # What mypy has read of torch and of intarsia once serves all packages.
    cache = package.parents[1] / "mypy-cache"
    environment = os.environ | {"PYTHONPATH": path_of(*path), "MYPY_CACHE_DIR": str(cache)}
    commands = (
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        [sys.executable, "-m", "mypy"],
        [sys.executable, "-m", "intarsia", "plugins", "check", key, "--json", *(f"--claim={each}" for each in wanted)],
    )
    for command in commands:
        ran = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, f"{command}: {ran.stdout[-3000:]}{ran.stderr[-3000:]}"
    return json.loads(ran.stdout)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", SLOTS)
def test_a_package_of_each_kind_passes_its_own_tests_as_written(tmp_path, kind):
    package, path = written(tmp_path, "my-own-part", kind)
    # The tests run the whole contract; the command has to find it, and the first claim tells whether it did.
    first = claims(suite_of(kind))[0].name
    report = passes(package, path, key="my_own_part", wanted=[*names(), first])
    parts = {each["part"]: each for each in report["parts"]}
    assert set(parts) == {"plugin", f"{kind}.my_own_part"}
    assert parts[f"{kind}.my_own_part"]["contract"] == "my_own_part.contract.Contract"
    assert [claim["claim"] for claim in parts[f"{kind}.my_own_part"]["claims"]] == [first]


@pytest.mark.slow
def test_a_package_can_be_built_and_installed(tmp_path):
    package, _ = written(tmp_path, "my-own-part", "scheduler")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", package]
    built = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    report = passes(package, [tmp_path / "site"], key="my_own_part")
    assert report["ok"]
    files = {str(file.relative_to(tmp_path / "site")) for file in (tmp_path / "site" / "my_own_part").rglob("*.*")}
    assert "my_own_part/py.typed" in files


def test_an_engine_uses_a_scheduler_as_written(tmp_path, monkeypatch):
    from intarsia import Engine, SamplingParams
    from intarsia.testing.tiny import save_tiny_model

    _, path = written(tmp_path, "my-imported-part", "scheduler")  # it stays imported: no other test's name
    for folder in path:
        monkeypatch.syspath_prepend(folder)
    model = save_tiny_model(tmp_path / "model")
    said = []
    for use in ("static", "my_imported_part"):
        config = {"model": str(model), "engine": {"dtype": "float32"}, "cache": {"memory": "16MiB"}}
        with Engine.from_config(config | {"scheduler": {"use": use, "max_batch": 2}}) as engine:
            params = SamplingParams(temperature=0, max_tokens=8)
            said.append([answer.token_ids for answer in engine.generate([[1, 2], [3], [4, 5, 6]], params)])
            assert engine.parts.selection("scheduler").plugin == {"static": "defaults"}.get(use, use)
    assert said[0] == said[1]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.slot != "family"], ids=lambda kind: kind.slot)
def test_the_version_of_the_hook_is_written_down(tmp_path, kind):
    package, _ = written(tmp_path, "my-own-part", kind.slot)
    assert f"api={kind.api}," in (package / "src/my_own_part/__init__.py").read_text()
