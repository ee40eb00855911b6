"""What README, the guide and the examples show is run, so that it cannot rot."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import attrs
import pytest
import torch

from intarsia import SamplingParams, errors
from intarsia.cli import run
from intarsia.config import load_config
from intarsia.hookspecs import KINDS
from intarsia.plugins import Registry
from intarsia.types import EngineConfig, PluginsOptions
from intarsia_cpu.build import compiler

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
GUIDE = (ROOT / "docs/python-api.md").read_text()
SERVING = (ROOT / "docs/serving.md").read_text()
ARCHITECTURE = (ROOT / "docs/architecture.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


def engine_configs(page: str) -> list[str]:
    """TOML blocks without those of a pyproject.toml."""
    return [block for block in blocks(page, "toml") if "[project" not in block]


def commands(page: str) -> list[str]:
    """The commands of a page's shell blocks, each on one line."""
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [words(re.sub(r"\s#.*", "", line)) for line in lines if line.startswith("intarsia")]


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def words(text: str) -> str:
    return " ".join(text.split())


# --- what is shown runs -----------------------------------------------------------------------------------------------


def test_the_quickstart_runs(capsys):
    example("quickstart").main()
    out = capsys.readouterr().out
    assert "The capital of France is Paris." in out
    assert "second ended by abort" in out
    assert "first ended by length" in out
    assert "'running': 0" in out


def test_the_example_plugin_runs_and_changes_the_answer(capsys):
    example("plugin_no_repeat").main()
    _, plain, changed = capsys.readouterr().out.split("--- logits_processors")
    assert "1, 2, 1, 2" in plain
    assert "1, 2" in changed
    assert "1, 2, 1, 2" not in changed


@pytest.mark.parametrize(
    "size, answer, forbidden",
    [
        (3, [5, 6, 7, 5, 6], {7}),
        (3, [5, 6, 7, 5, 6, 8, 5, 6], {7, 8}),
        (3, [5, 6, 7, 6, 5], set()),
        (2, [5, 6, 5], {6}),
        (1, [5, 6], {5, 6}),
        (4, [5], set()),
        (3, [], set()),
    ],
)
def test_the_example_plugin_forbids_what_would_repeat_the_answer_and_nothing_else(size, answer, forbidden):
    logits_V = torch.zeros(10)
    prompt = [5, 6, 9]
    opened = example("plugin_no_repeat").NoRepeat(size=size).open(None, len(prompt))
    opened.process([*prompt, *answer], logits_V)
    assert set(logits_V.isneginf().nonzero().flatten().tolist()) == forbidden


def test_readme_shows_the_example_plugin():
    shown = next(block for block in blocks(README, "python") if "@hookimpl" in block)
    imports, rest = shown.split("\n\n\n", 1)
    source = (ROOT / "examples/plugin_no_repeat.py").read_text()
    assert rest.strip() in source
    assert set(imports.splitlines()) <= set(source.splitlines())


def test_the_page_on_families_shows_a_whole_one_and_a_line_of_the_tests():
    family, case, _ = blocks((ROOT / "docs/adding-a-family.md").read_text(), "python")
    assert family == (ROOT / "plugins/intarsia_families/qwen3.py").read_text()
    assert case.strip() in (ROOT / "tests/families.py").read_text()


@pytest.mark.parametrize("page, index", [("README.md", 0), *(("docs/python-api.md", i) for i in range(8))])
def test_the_shown_python_runs(page, index, capsys):
    code = re.sub(r"max_tokens=\d+", "max_tokens=4", blocks((ROOT / page).read_text(), "python")[index])
    exec(compile(code, f"{page}[{index}]", "exec"), {})
    said = capsys.readouterr().out
    assert said.strip()
    for line in code.splitlines():  # a comment behind a print says what it prints
        if "print(" in line and "  # " in line:
            assert line.split("  # ")[1] in said


def test_every_python_block_is_run():
    assert len(blocks(README, "python")) == 2
    assert len(blocks(GUIDE, "python")) == 8


# --- configs and commands ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [*engine_configs(README), *engine_configs(SERVING), (ROOT / "examples/engine.toml").read_text()]
)
def test_the_shown_configs_name_parts_and_options_that_exist(text, tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text(text)
    config = load_config(path)
    assert config != EngineConfig()
    registry = Registry.discover(config.engine.plugins, {"no_repeat": example("plugin_no_repeat")})
    for kind in KINDS:
        chosen = getattr(config, kind.slot, ())
        for choice in chosen if isinstance(chosen, tuple) else (chosen,):
            if choice.use not in ("auto", "none"):
                offer = registry.find(kind.slot, choice.use)
                assert set(choice.options) <= {field.name for field in attrs.fields(offer.provider.options)}


def test_the_shown_entry_point_is_one():
    shown = next(block for block in blocks(README, "toml") if "[project" in block)
    assert tomllib.loads(shown)["project"]["entry-points"]["intarsia"] == {"no_repeat": "my_package"}


def test_explain_says_what_readme_shows(tmp_path, capsys):
    """Every line that is shown is a line of the real report; `...` stands for what is left out."""
    if compiler() is None:
        pytest.skip("the page shows a machine with a C++ compiler")
    path = tmp_path / "engine.toml"
    path.write_text(engine_configs(README)[0])
    assert run(["explain", "-c", str(path)]) == 0
    said = [words(line) for line in capsys.readouterr().out.splitlines()]
    for line in blocks(README, "text")[0].splitlines():
        start, _, end = words(line).partition("...")
        assert any(each.startswith(start) and each.endswith(end) for each in said), line


def test_the_demo_says_what_readme_shows(capsys):
    """Its arguments are the Makefile's."""
    command = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "--report" in line)
    options, prompt, _ = command.partition("intarsia ")[2].split('"')
    assert run([*options.split(), prompt]) == 0
    captured = capsys.readouterr()
    said = [words(line) for line in (captured.out + captured.err).splitlines() if line.strip()]
    shown = [words(line) for line in blocks(README, "console")[0].splitlines()[1:]]
    assert len(said) == len(shown)
    for line, real in zip(shown, said, strict=True):
        assert re.fullmatch(re.escape(line).replace(r"\.\.\.", ".+"), real)


@pytest.mark.parametrize("command", [*commands(README), *commands(GUIDE), *commands(SERVING)])
def test_the_shown_commands_are_known(command, capsys):
    """Their options exist: asked for help with them all, the command line gives it."""
    _, name, *rest = command.replace('"', "").split(" ")
    assert run([name, "--help"]) == 0
    known = capsys.readouterr().out
    if rest and re.search(rf"^  {re.escape(rest[0])}  ", known, flags=re.MULTILINE):  # a group's command
        assert run([name, rest[0], "--help"]) == 0
        known = capsys.readouterr().out
    for option in (each for each in rest if each.startswith("-")):
        assert re.search(rf"(^|[\s,]){re.escape(option)}\b", known), option
    overrides = [value for flag, value in pairwise(rest) if flag == "-o"]
    assert not overrides or load_config(None, overrides) != EngineConfig()


# --- what is said -----------------------------------------------------------------------------------------------------


def test_the_guide_lists_every_sampling_parameter_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", GUIDE, flags=re.MULTILINE)
    empty = attrs.Factory(dict)
    fields = [(f.name, "{}" if f.default == empty else repr(f.default)) for f in attrs.fields(SamplingParams)]
    assert rows == fields


def test_the_layers_on_the_page_are_those_of_the_contracts():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract for contract in contracts if contract["type"] == "layers")["layers"]
    assert blocks(ARCHITECTURE, "")[0].splitlines() == [layer.replace("intarsia.", "") for layer in layers]


def test_every_module_of_the_core_is_in_the_house():
    core = ROOT / "core/intarsia"
    modules = [p for p in core.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()]
    for module in modules:
        if module.name != "__init__.py":
            name = f"core/intarsia/{module.name}{'/' if module.is_dir() else ''}"
            assert f"| `{name}` |" in ARCHITECTURE


def test_the_error_codes_on_the_page_are_all_and_end_as_it_says():
    from intarsia.cli.outcomes import report
    from intarsia.cli.signals import Signals

    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d) \|$", ARCHITECTURE, flags=re.MULTILINE)
    classes = {name for name in errors.__all__ if isinstance(getattr(errors, name), type)}
    assert {name for _, name, _ in rows} == classes
    with Signals.installed() as signals:
        for code, name, exit_code in rows:
            error_class = getattr(errors, name)
            error = error_class("x", retry_after_s=1.0) if code == "overloaded" else error_class("x")
            assert error.code == code
            assert report(error, signals) == int(exit_code)


def test_the_links_of_the_pages_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "contrib").glob("*.md")):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            path = page.parent / target if target else page
            assert path.exists(), f"{page.name}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)$", path.read_text(), flags=re.MULTILINE)
                anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
                assert anchor in anchors, f"{page.name}: {target}#{anchor}"


def test_the_picture_shows_every_slot_and_every_part_that_comes_with_intarsia():
    picture = ElementTree.parse(ROOT / "docs/img/parts.svg").getroot()
    texts = {element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {kind.slot for kind in KINDS} <= texts
    entries = importlib.metadata.distribution("intarsia").entry_points.select(group="intarsia")
    registry = Registry.discover(PluginsOptions(allow=tuple(entry.name for entry in entries)))
    # The families of their plugin are too many: it stands for them.
    shown = {"families" if offer.plugin.name == "families" else offer.provider.key for offer in registry.all_offers()}
    assert shown - texts == set()
