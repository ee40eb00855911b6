"""Write the pages that are made from the code: docs/hooks.md and docs/config.md.

`python docs/generate.py` writes them; with `--check` it writes nothing and exits 1 where a page is stale.
"""

from __future__ import annotations

import argparse
import ast
import importlib.metadata
import inspect
import re
import sys
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs

from intarsia import hookspecs, protocols
from intarsia.hookspecs import API, KINDS, OBSERVERS, PROJECT, Kind, hook_docs
from intarsia.plugins import Offer, Registry
from intarsia.structuring import type_text
from intarsia.types import (
    AttentionSpec,
    BatchPlan,
    CacheGroup,
    CacheLayout,
    CacheMove,
    CacheOptions,
    CacheStats,
    DecoderSpec,
    EngineConfig,
    EngineOptions,
    Entered,
    ForwardBatch,
    LayerSpec,
    MlpSpec,
    ModelChoice,
    Output,
    PluginsOptions,
    Provider,
    Request,
    RopeSpec,
    Row,
    RowResult,
    SamplingParams,
    TensorSource,
    TokenizerSpec,
    Weight,
    WeightMap,
)

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py from the code: change that, then `make docs`. -->\n"

HOOKS_INTRO = """\
# Hooks

A plugin is a module under the entry-point group `intarsia` that implements any of these hooks. The grammar is the
contract: `provide_` returns providers of parts, `check_` raises, a participle observes. Hooks choose parts; parts do
the work: no hook runs per token or per layer.

```python
{example}
```

```toml
[project.entry-points.intarsia]
mine = "my_package"
```

The entry point's name is what `plugins.allow` and `plugins.block` speak of. The module with the hooks stays light:
what is heavy is imported in `build`. A part whose `fit` returns `Unfit` says why; `auto` takes the highest rank, and a
tie is an error.

Each hook has a version. A plugin says which it was written for, where that is not 1: parts by `Provider(api=2)`, the
other hooks by `@hookimpl(api=2)`. A hook that gains an argument, a context that gains a field and a protocol that gains
what a part need not have keep their version, and plugins from before go on working. What is removed or renamed goes on
working for one release: the log, `intarsia plugins` and `intarsia explain` name the plugins that use it, with what to
use instead and the release in which it goes. [surface.txt](surface.txt) records all that plugins can rely on.

## In the order of an engine's life
"""

CONFIG_INTRO = """\
# Config reference

A config is a TOML file, or the same as a Python mapping. Each section is a slot that a part fills: `use` is the part's
key, the other keys are the part's own options.

```toml
model = "smollm2"             # a plain string is short for `use`

[engine]
dtype = "float32"

[scheduler]
use = "static"
max_batch = 8

[cache]                       # without `use`, composition chooses the part: "auto"
page_size = 32
```

- `"auto"` is the default everywhere: composition takes the part that fits best and says why in `intarsia explain`.
- `"none"` leaves a slot empty where that is possible; there `"auto"` does so too.
- Slots that hold several parts take a list of strings and tables, in order: `kernels = ["cpu", "torch"]`.
- `-o path=value` overrides one path, as often as it is given: `-o cache.page_size=32`, `-o scheduler.use=static`,
  `-o 'kernels=["cpu"]'`. The value is TOML; what is no TOML value is a string.
- `[plugins]` is short for `[engine.plugins]`. `plugins.allow = []` is the bare core.
- Types are strict: `"8"` is no number. An unknown key is an error that names the nearest.
"""


#: What plan, step and model are described with, in the order of a request's life.
VALUES = (
    Request,
    SamplingParams,
    protocols.SequenceView,
    BatchPlan,
    Row,
    Entered,
    CacheMove,
    ForwardBatch,
    RowResult,
    protocols.DraftRequest,
    Output,
    CacheLayout,
    CacheGroup,
    CacheStats,
    DecoderSpec,
    LayerSpec,
    AttentionSpec,
    MlpSpec,
    RopeSpec,
    TokenizerSpec,
    TensorSource,
    WeightMap,
    Weight,
    protocols.Kernel,
)
VALUES_INTRO = """\
What parts give and take, from `intarsia.types` and `intarsia.protocols`; frozen, but for the engine's own sequences.

A scheduler writes the whole `BatchPlan`: the rows; `entered`, each sequence with its first row and again after a
preemption; `left`, each sequence removed since the last plan; and `moves`, from the allocator's `take_moves()`.
`OverloadedError` takes `retry_after_s`, a hint in seconds.
"""


# --- reading the code -------------------------------------------------------------------------------------------------


def prose(docstring: str | None) -> str:
    """Return a docstring without its `Attributes:` and `Raises:` lists, each paragraph on one line."""
    text = re.split(r"^(?:Attributes|Args|Raises):$", inspect.cleandoc(docstring or ""), flags=re.MULTILINE)[0]
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.strip().split("\n\n"))


def field_docs(cls: type) -> dict[str, str]:
    """Return what a class's source says of its fields, in `Attributes:` lists and `#:` comments; parents first."""
    docs: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if attrs.has(each):
            docs |= attributes_list(each.__doc__ or "") | _comments(inspect.getsource(each))
    return docs


def attributes_list(docstring: str) -> dict[str, str]:
    lines = inspect.cleandoc(docstring).splitlines()
    if "Attributes:" not in lines:
        return {}
    docs: dict[str, str] = {}
    names: list[str] = []
    for line in lines[lines.index("Attributes:") + 1 :]:
        entry = re.match(r" {4}(\w+(?:, \w+)*): (.*)", line)
        if entry:
            names = entry[1].split(", ")
            docs |= dict.fromkeys(names, entry[2])
        elif line.startswith(" " * 8):
            docs |= {name: f"{docs[name]} {line.strip()}" for name in names}
        else:
            break
    return docs


def _comments(source: str) -> dict[str, str]:
    docs: dict[str, str] = {}
    above: list[str] = []
    for line in source.splitlines():
        comment = re.match(r"\s+#: ?(.*)", line)
        field = re.match(r"\s+(\w+)\s*:[^#]*(?:#: ?(.*))?$", line)
        if comment:
            above.append(comment[1])
            continue
        if field and (above or field[2]):
            docs[field[1]] = " ".join([*above, field[2] or ""]).strip()
        above = []
    return docs


def class_node(cls: type) -> ast.ClassDef:
    """Return the syntax of a class: signatures as they are written."""
    (node,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(node, ast.ClassDef)
    return node


def members(protocol: type) -> Iterator[str]:
    """Yield a list item for each method and property of a protocol: its signature and docstring."""
    for node in class_node(protocol).body:
        if not isinstance(node, ast.FunctionDef):
            continue
        is_property = any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)
        node.args.args = node.args.args[1:]
        returns = ast.unparse(node.returns) if node.returns else "None"
        name = node.name if node.name != "__call__" else ""
        signature = f"{name}: {returns}" if is_property else f"{name}({ast.unparse(node.args)}) -> {returns}"
        doc = prose(ast.get_docstring(node)).replace("\n\n", "\n\n  ")
        yield f"- `{signature}`\n\n  {doc}\n"


# --- Markdown ---------------------------------------------------------------------------------------------------------


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table."""
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    titles = list(header)
    lines = [titles, ["---"] * len(titles), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def toml_value(value: Any) -> str:
    """Return a default as a config would spell it."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    if isinstance(value, tuple | list):
        return f"`[{', '.join(toml_value(item).strip('`') for item in value)}]`"
    assert isinstance(value, int | float | Path), f"{value!r} has no form in a config"
    return f"`{value}`"


def options_table(cls: type, skip: Iterable[str] = ()) -> str:
    """Return the table of an options class."""
    return table(["option", "takes", "default", "meaning"], _option_rows(cls, skip))


def _option_rows(cls: type, skip: Iterable[str] = (), prefix: str = "") -> Iterator[list[str]]:
    """Yield a row for each option; those of a nested table by their paths."""
    hints, docs = typing.get_type_hints(cls), field_docs(cls)
    for field in attrs.fields(cls):
        if not field.init or field.name in skip:
            continue
        default: Any = field.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory()
        if attrs.has(type(default)):
            yield from _option_rows(type(default), prefix=f"{prefix}{field.alias}.")
            continue
        shown = "required" if default is attrs.NOTHING else toml_value(default)
        takes = type_text(hints.get(field.name, Any)).replace(" or left out", "")
        # A config has no None: it leaves the option out.
        meaning = re.sub(r"\bNone\b", "unset", docs.get(field.name, "")).removesuffix(".")
        yield [f"`{prefix}{field.alias}`", takes.replace("'", '"'), shown, meaning]


# --- the pages --------------------------------------------------------------------------------------------------------


def hooks_page() -> str:
    """Return docs/hooks.md."""
    docs = hook_docs()
    example = inspect.cleandoc(hookspecs.__doc__ or "").split("::\n\n")[1]
    rows = [[_link(kind.hook), str(kind.api), f"`{kind.slot}`", kind.what, _holds(kind)] for kind in KINDS]
    others = ("check_composition", *OBSERVERS)
    rows += [[_link(name), str(API[name]), "", prose(docs[name]).split("\n\n")[0], ""] for name in others]
    parts = [NOTE, HOOKS_INTRO.format(example=inspect.cleandoc(example))]
    parts += [table(["hook", "version", "slot", "for", "the slot holds"], rows), "## Provider\n", _fields_of(Provider)]
    for kind in KINDS:
        parts += [f"## {kind.hook}\n", _hook_text(docs[kind.hook])]
        parts += [f"Context: [{kind.context.__name__}](#{kind.context.__name__.lower()}).\n"]
        parts += [f"### {kind.part.__name__}\n", f"{prose(kind.part.__doc__)}\n", *members(kind.part), ""]
    for name in ("check_composition", *OBSERVERS):
        arguments = inspect.signature(getattr(hookspecs, name)).parameters
        parts += [f"## {name}\n", f"`{name}({', '.join(arguments)})`\n", _hook_text(docs[name])]
    parts += ["## Values\n", VALUES_INTRO]
    for value in VALUES:
        shown = _fields_of(value) if attrs.has(value) else "\n".join([f"{prose(value.__doc__)}\n", *members(value), ""])
        parts += [f"### {value.__name__}\n", shown]
    parts += ["## Contexts\n", "What `fit` and `build` receive. Each has the fields of the one it extends.\n"]
    contexts = {each for kind in KINDS for each in kind.context.__mro__ if attrs.has(each)}
    for context in sorted(contexts, key=lambda each: (len(each.__mro__), each.__name__)):
        parts += [f"### {context.__name__}\n", _fields_of(context)]
    return _page(parts)


def config_page(registry: Registry) -> str:
    """Return docs/config.md."""
    slots = [kind for kind in KINDS if kind.slot in {field.name for field in attrs.fields(EngineConfig)}]
    rows = [["[`[model]`](#model)", "which model, and how its files are read", ""]]
    rows += [["[`[engine]`](#engine)", "what all parts share", ""]]
    rows += [[f"[`[{kind.slot}]`](#{kind.slot})", kind.what, _holds(kind)] for kind in slots]
    parts = [NOTE, CONFIG_INTRO, table(["section", "for", "holds"], rows)]
    parts += ["## model\n", f"{prose(ModelChoice.__doc__)}\n", options_table(ModelChoice, skip=["options"])]
    parts += ["Other keys are options of the loader.\n"]
    for slot in ("loader", "family"):
        parts += [f"### {slot}\n", *_offers(registry, slot, "####")]
    parts += ["## engine\n", options_table(EngineOptions, skip=["plugins"])]
    parts += ["### engine.plugins\n", f"{prose(PluginsOptions.__doc__)}\n", options_table(PluginsOptions)]
    for kind in slots:
        parts += [f"## {kind.slot}\n", f"{_sentence(kind.what)} {kind.then}\n", f"```toml\n{kind.example}\n```\n"]
        if kind.slot == "cache":
            parts += ["Every allocator has these options, and may have more:\n", options_table(CacheOptions)]
        parts += _offers(registry, kind.slot, "###")
    parts += ["## Commands\n", "Not a section: commands that plugins add to `intarsia`.\n"]
    return _page([*parts, *_offers(registry, "commands", "###")])


def _offers(registry: Registry, slot: str, heading: str) -> list[str]:
    offers = registry.offers(slot)
    if not offers:
        return ["No part comes with Intarsia; plugins can bring some.\n"]
    rows = [[f"`{key}`", offer.provider.summary, f"`{offer.plugin.name}`"] for key, offer in offers.items()]
    parts = [table(["key", "what it is", "plugin"], rows)]
    for key, offer in offers.items():
        shared = [field.name for field in attrs.fields(CacheOptions)] if slot == "cache" else []
        if any(field.init and field.name not in shared for field in attrs.fields(offer.provider.options)):
            parts += [f"{heading} {slot}: {key}\n", *_about(offer), options_table(offer.provider.options, skip=shared)]
    return parts


def _about(offer: Offer) -> list[str]:
    requires = ", ".join(f"`{slot}`" for slot in offer.provider.requires)
    return [f"Works with the parts for {requires}.\n"] if requires else []


def _fields_of(cls: type) -> str:
    docs = field_docs(cls)
    inherited = {field.name for each in cls.__mro__[1:] if attrs.has(each) for field in attrs.fields(each)}
    own = [field.name for field in attrs.fields(cls) if field.name not in inherited]
    base = next((each.__name__ for each in cls.__mro__[1:] if attrs.has(each)), None)
    text = prose(cls.__doc__) + (f" Extends [{base}](#{base.lower()})." if base else "")
    return f"{text}\n\n" + "".join(f"- `{name}`: {docs[name]}\n" if name in docs else f"- `{name}`\n" for name in own)


def _hook_text(docstring: str) -> str:
    return prose(docstring) + "\n"


def _holds(kind: Kind) -> str:
    return ("any number" if kind.optional else "one or more, in order") if kind.many else _one(kind)


def _one(kind: Kind) -> str:
    return "one or none" if kind.optional else "one"


def _link(name: str) -> str:
    return f"[`{name}`](#{name})"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _page(parts: Iterable[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip() + "\n"


def first_party() -> Registry:
    """Discover Intarsia's own plugins alone: what else is installed here does not show in the pages."""
    entries = importlib.metadata.distribution(PROJECT).entry_points.select(group=PROJECT)
    return Registry.discover(PluginsOptions(allow=tuple(sorted(entry.name for entry in entries))))


def pages() -> dict[Path, str]:
    """Return every generated page by path."""
    return {DOCS / "hooks.md": hooks_page(), DOCS / "config.md": config_page(first_party())}


def main() -> int:
    """Write the pages, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a page is stale")
    check: bool = parser.parse_args().check
    stale = {path: text for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text}
    for path, text in stale.items():
        if check:
            print(f"docs/{path.name} is stale: run `make docs`", file=sys.stderr)
        else:
            path.write_text(text, "utf-8")
            print(f"docs/{path.name} written")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
