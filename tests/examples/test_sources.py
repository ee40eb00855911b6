"""The packages in `examples/`, imported from their sources: engines with them, and what an outsider may rely on."""

import ast
import re
import subprocess
import sys
import tomllib

import attrs
import pytest

from engines import engine_of
from example_packages import PACKAGES, ROOT, SLOTS, plugins_from_source
from intarsia import Request, SamplingParams
from intarsia.cli import run
from intarsia.config import load_config
from intarsia.plugins import Registry
from intarsia.testing.tiny import save_tiny_model
from intarsia.types import Choice

#: Of the core, what third parties may import: the surface that is public, and `testing` in tests.
PUBLIC = {"types", "errors", "protocols", "hookspecs", "ops", "rope", "families", "quantizing", "checkpoints"}
PROMPTS = [[1, 1, 1], [5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6], [3], [*range(40)], [*range(40), 5]]
PARAMS = [SamplingParams(temperature=0, max_tokens=24), SamplingParams(temperature=0.8, seed=3, n=2, max_tokens=12)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def plugins(monkeypatch):
    return plugins_from_source(monkeypatch)


def small(model, plugins, **sections):
    """Make an engine whose numbers come from torch alone, so that no compiler is waited for."""
    numbers = {"kernels": "torch", "attention": "tiled", "runner": "eager", "engine": {"max_model_len": 128}}
    return engine_of(model, plugins=plugins, **numbers, **sections)


def answers(model, plugins, **sections):
    """Return what an engine says to all prompts, twice, its figures, and what it is made of."""
    with small(model, plugins, **sections) as engine:
        said = [
            [(choice.token_ids, choice.error) for each in engine.generate(PROMPTS, params) for choice in each.choices]
            for params in (*PARAMS, *PARAMS)
        ]
        return said, engine.stats(), engine.explain()


CRAMPED = {"memory": str(10 * 16 * 2 * 2 * 16 * 4)}  # ten pages of 16 tokens, of two layers, in fp32
PARTS = {
    "scheduler": {"use": "srpt", "max_batch": 3, "max_tokens": 16},
    "cache": {"use": "ttl_prefix", "ttl_s": 60, **CRAMPED},
    "drafter": {"use": "markov", "min_probability": 0.1},
}


@pytest.mark.parametrize("slots", [["scheduler"], ["cache"], ["drafter"], [*PARTS]], ids="-".join)
def test_no_part_changes_an_answer(model, plugins, slots):
    expected, _, _ = answers(model, {})
    said, _, explained = answers(model, plugins, **{slot: PARTS[slot] for slot in slots})
    assert said == expected
    assert {slot: explained["parts"][slot]["key"] for slot in slots} == {slot: PARTS[slot]["use"] for slot in slots}


def test_the_drafter_learns_what_the_model_says_again(model, plugins):
    _, figures, _ = answers(model, plugins, drafter=PARTS["drafter"])
    assert figures["speculation"]["accepted"] > 20


def test_the_scheduler_answers_short_requests_first(model, plugins):
    with small(model, plugins, scheduler={"use": "srpt", "max_batch": 1}) as engine:
        for name, count in (("long", 20), ("short", 2), ("middle", 8)):
            params = SamplingParams(temperature=0, max_tokens=count)
            engine.add(Request(request_id=name, prompt=[1, 2, 3], params=params))
        ended = [output.request_id for output in run_out(engine) if output.finish_reason is not None]
    assert ended == ["short", "middle", "long"]


def run_out(engine):
    while engine.has_work:
        yield from engine.step()


@pytest.mark.parametrize("steps", [1, 3, 6])
def test_it_takes_over_and_hands_over_while_requests_run(model, plugins, steps):
    """From the default, and to it: answers stay, and those that run keep their pages."""
    asked = [Request(request_id=f"r{i}", prompt=prompt, params=PARAMS[0]) for i, prompt in enumerate(PROMPTS)]
    said, kept = [], []
    for swapped in ((), ("srpt", "inflight")):
        ids = {request.request_id: [] for request in asked}
        with small(model, plugins, scheduler={"use": "inflight", "max_batch": 2}) as engine:
            for request in asked:
                engine.add(request)
            for key in (*swapped, None):
                for _ in range(steps if key else 10_000):
                    for output in engine.step() if engine.has_work else ():
                        ids[output.request_id] += output.token_ids
                if key:
                    kept.append(engine.swap("scheduler", Choice(key, {"max_batch": 2}))["kept"])
        said.append(ids)
    assert said[0] == said[1]
    assert kept == [2, 2]


def test_cached_prefixes_are_found_until_their_time_is_over(model, plugins):
    clock, prompt = [0.0], [*range(40)]
    with small(model, plugins, cache={"use": "ttl_prefix", "ttl_s": 5, "memory": "1MiB"}) as engine:
        engine.parts.cache._pages.clock = lambda: clock[0]
        cached = []
        for clock[0] in (0.0, 4.0, 8.0, 13.5):
            (completion,) = engine.generate([prompt], SamplingParams(max_tokens=2, temperature=0))
            cached.append(completion.usage.cached_tokens)
    assert cached == [0, 32, 32, 0]


@pytest.mark.parametrize("options", [{}, {"double_quant": True, "group": 32}], ids=["plain", "double"])
def test_a_model_in_nf4_says_nearly_what_it_said_whoever_schedules_and_drafts(model, plugins, options):
    text, quantizer = [*range(0, 64, 3)], {"use": "nf4", **options}
    scores = []
    for sections in ({}, {"quantizer": quantizer}, {"quantizer": quantizer, **PARTS}):
        with small(model, plugins, **sections) as engine:
            (scored,) = engine.generate([text], SamplingParams(max_tokens=0, prompt_logprobs=0))
            scores.append([each.logprob for each in scored.prompt_logprobs[1:]])
    dense, quantized, among_others = scores
    off = [abs(a - b) for a, b in zip(dense, quantized, strict=True)]
    assert 0 < sum(off) / len(off) < 0.5
    assert among_others == quantized


def test_weights_in_nf4_take_a_fraction_of_the_memory(model, plugins):
    taken = []
    for sections in ({}, {"quantizer": {"use": "nf4", "group": 32}}):
        with small(model, plugins, **sections) as engine:
            taken.append(engine.parts.weight_bytes)
    dense, quantized = taken
    assert quantized < 0.3 * dense  # the embedding and the norms stay


# --- an outsider's package --------------------------------------------------------------------------------------------


def imported(path):
    """Yield the modules that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@pytest.mark.parametrize("key", PACKAGES)
def test_a_package_imports_itself_and_what_is_public(key):
    own, allowed = f"intarsia_{key}", set(PUBLIC)
    for folder, more in (("src", set()), ("tests", {"testing"})):
        files = [*(PACKAGES[key] / folder).rglob("*.py")]
        assert files
        for name in (name for path in files for name in imported(path) if name.startswith("intarsia")):
            package, _, rest = name.partition(".")
            assert package == own or (package == "intarsia" and rest.split(".")[0] in allowed | more), name


@pytest.mark.parametrize("key", PACKAGES)
def test_a_package_is_named_alike_everywhere(key, plugins):
    project = tomllib.loads((PACKAGES[key] / "pyproject.toml").read_text())["project"]
    assert project["name"] == PACKAGES[key].name == f"intarsia-{key.replace('_', '-')}"
    assert project["entry-points"]["intarsia"] == {key: f"intarsia_{key}"}
    assert (PACKAGES[key] / f"src/intarsia_{key}/py.typed").exists()
    offered = [(offer.kind.slot, offer.provider.key) for offer in Registry.discover(extra=plugins).all_offers()]
    assert (SLOTS[key], key) in offered


def test_their_hooks_import_no_torch():
    code = "import sys\nfor name in sys.argv[1:]: __import__(name)\nassert 'torch' not in sys.modules"
    paths = [str(folder / "src") for folder in PACKAGES.values()]
    names = [f"intarsia_{key}" for key in PACKAGES]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths}\n{code}", *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def readme(key):
    return (PACKAGES[key] / "README.md").read_text()


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("key", PACKAGES)
def test_the_configs_of_its_readme_are_configs(key, plugins, tmp_path):
    (shown,) = blocks(readme(key), "toml")
    (tmp_path / "engine.toml").write_text(shown)
    choice = getattr(load_config(tmp_path / "engine.toml"), SLOTS[key])
    (choice,) = choice if isinstance(choice, tuple) else (choice,)
    offer = Registry.discover(extra=plugins).find(SLOTS[key], choice.use)
    known = {field.name: field for field in attrs.fields(offer.provider.options)}
    assert set(choice.options) <= set(known)
    assert offer.provider.options(**choice.options)


@pytest.mark.parametrize("key", PACKAGES)
def test_the_commands_of_its_readme_are_known(key, capsys):
    shown = [line for block in blocks(readme(key), "sh") for line in block.splitlines() if line.startswith("intarsia")]
    shown += re.findall(r"`(intarsia [^`]*)`", readme(key))
    assert any("--swap" in line for line in shown)
    for line in shown:
        _, name, *rest = re.sub(r'\s#.*|"', "", line).split()
        within = rest[:1] if name == "eval" else []
        assert run([name, *within, "--help"]) == 0
        known = capsys.readouterr().out
        for option in (each for each in rest if each.startswith("-")):
            assert re.search(rf"(^|[\s,]){re.escape(option)}\b", known), (line, option)


def test_the_index_lists_every_example_and_its_links_lead_somewhere():
    index = (ROOT / "examples/README.md").read_text()
    for path in (ROOT / "examples").iterdir():
        hidden = path.name == "README.md" or path.name.startswith((".", "__"))
        assert hidden or f"]({path.name})" in index
    pages = [ROOT / "examples/README.md", *(folder / "README.md" for folder in PACKAGES.values())]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.parent.name}: {target}"


def test_an_engine_takes_them_as_modules_too(model, plugins):
    with small(model, [*plugins.values()], cache={"use": "ttl_prefix", "memory": "1MiB"}) as engine:
        assert engine.parts.selection("cache").plugin == "intarsia_ttl_prefix"
