"""The pages say what the code does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

from intarsia import hookspecs
from intarsia.config import load_config
from intarsia.hookspecs import KINDS, OBSERVERS, hook_docs
from intarsia.types import EngineConfig
from intarsia_zmq.options import ZmqOptions

ROOT = Path(__file__).parents[2]
GENERATED = ("hooks.md", "config.md")


def test_the_generated_pages_are_current():
    command = [sys.executable, ROOT / "docs/generate.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr


def test_a_stale_page_fails_the_check(tmp_path):
    """The check of a copy whose pages were changed says which, and changes nothing."""
    (tmp_path / "generate.py").write_text((ROOT / "docs/generate.py").read_text())
    (tmp_path / "hooks.md").write_text("old")
    (tmp_path / "config.md").write_text((ROOT / "docs/config.md").read_text())
    command = [sys.executable, tmp_path / "generate.py"]
    check = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert check.returncode == 1
    assert "docs/hooks.md is stale" in check.stderr
    assert (tmp_path / "hooks.md").read_text() == "old"
    subprocess.run(command, capture_output=True, check=True)
    again = subprocess.run([*command, "--check"], capture_output=True, text=True, check=False)
    assert (again.returncode, again.stderr) == (0, "")


@pytest.mark.parametrize("name", sorted(hook_docs()))
def test_every_hook_says_when_what_comes_back_and_an_example(name):
    text = hook_docs()[name]
    assert re.search(r"\bCalled (once|after|before)\b", text)
    assert "Returns" in text or "What it returns is ignored" in text
    assert "Example: " in text


def test_no_hook_is_missing_from_the_documented_ones():
    marked = {name for name, value in vars(hookspecs).items() if hasattr(value, "intarsia_spec")}
    assert marked == set(hook_docs())
    assert marked == {kind.hook for kind in KINDS} | {"check_composition", *OBSERVERS}


def test_every_hook_is_on_its_page():
    page = (ROOT / "docs/hooks.md").read_text()
    assert re.findall(r"^## (\w+_\w+)$", page, flags=re.MULTILINE) == list(hook_docs())


@pytest.mark.parametrize("name", sorted(hook_docs()))
def test_every_hook_is_tested(name):
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path != Path(__file__)]
    assert any(re.search(rf"\b{name}\b", path.read_text()) for path in tests)


def test_the_links_of_the_generated_pages_lead_somewhere():
    for name in GENERATED:
        page = (ROOT / "docs" / name).read_text()
        # GitHub's anchors: lower case, spaces to dashes, other punctuation dropped.
        headings = re.findall(r"^#+ (.*)$", page, flags=re.MULTILINE)
        anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
        links = set(re.findall(r"\]\(#([^)]*)\)", page))
        assert links and links <= anchors


def test_the_examples_of_the_config_page_are_configs(tmp_path):
    examples = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/config.md").read_text(), flags=re.DOTALL)
    assert len(examples) > 5
    for example in examples:
        path = tmp_path / "engine.toml"
        path.write_text(example)
        assert load_config(path) != EngineConfig()


def test_the_config_page_lists_the_options_in_a_table_by_their_paths():
    page = (ROOT / "docs/config.md").read_text()
    rows = re.findall(r"^\| `(limits\.\w+)` \| a whole number \| `(\d+)` \| .{10,} \|$", page, flags=re.MULTILINE)
    defaults = attrs.asdict(ZmqOptions().limits)
    assert rows == [(f"limits.{name}", str(default)) for name, default in defaults.items()]


def test_every_path_that_the_architecture_names_exists():
    page = (ROOT / "docs/architecture.md").read_text()
    found = re.findall(r"(?<![\w/.-])(?:core|plugins|contrib|tests|docs|examples)/[\w./*-]*", page)
    paths = {path.rstrip(".,") for path in found}
    assert paths
    assert not sorted(path for path in paths if not list(ROOT.glob(path)))
