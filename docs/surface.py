"""Record the public surface in docs/surface.txt, one fact a line: so that a change to it is a visible difference.

`python docs/surface.py` writes the file. With `--check` it writes nothing and exits 1 where the file is stale, where
CHANGELOG.md does not name a change since the last release, or where a hook changed and kept its version. With
`--release` what is there now becomes the surface of a release: done once, as a release is made.

A line begins with two spaces where the last release had it, with `+` where it came since, with `-` where it went.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import pkgutil
import re
import sys
import textwrap
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs

from intarsia import hookspecs, ops, testing
from intarsia.hookspecs import API, KINDS

DOCS = Path(__file__).parent
ROOT = DOCS.parent
HEADER = "# The public surface; written by docs/surface.py, which says what the signs mean."
#: Modules whose names are public: those in `__all__`, or those that are defined there.
MODULES = (
    "intarsia",
    "intarsia.checkpoints",
    "intarsia.errors",
    "intarsia.families",
    "intarsia.gpu_kernels",
    "intarsia.ops",
    "intarsia.protocols",
    "intarsia.quantizing.calibration",
    "intarsia.quantizing.integers",
    "intarsia.quantizing.options",
    "intarsia.quantizing.remembered",
    "intarsia.quantizing.sparse",
    "intarsia.rope",
    "intarsia.testing",
    "intarsia.testing.claims",
    "intarsia.types",
)
#: A member that a part which inherits the protocol need not have.
INHERITED = " [inherited]"
_MAX_VALUE = 100


# --- facts ------------------------------------------------------------------------------------------------------------


def facts() -> set[str]:
    """Return every fact: `module name...`."""
    found = set(_hooks()) | {f"ops op {name}" for name in ops.NAMES}
    for name in MODULES:
        module = importlib.import_module(name)
        for public in _names(module):
            home = ".".join(getattr(getattr(module, public), "__module__", name).split(".")[:2])
            if name == "intarsia" and home != "intarsia.engine":
                found.add(f"intarsia {public} is {home}.{public}")
                continue
            found |= {f"{name.removeprefix('intarsia.')} {fact}" for fact in _facts_of(public, getattr(module, public))}
    for name, contract in _contracts():
        found |= {f"{name} {fact}" for fact in _contract_facts(contract)}
    return {" ".join(fact.split()) for fact in found}


def _hooks() -> Iterator[str]:
    kinds = {kind.hook: kind for kind in KINDS}
    yield f"hookspecs hookimpl{_signature(hookspecs.hookimpl)}"
    for hook, api in API.items():
        arguments = ", ".join(inspect.signature(getattr(hookspecs, hook)).parameters)
        kind = kinds.get(hook)
        what = ""
        if kind is not None:
            flags = "".join(f" {flag}" for flag in ("many", "optional") if getattr(kind, flag))
            what = f" slot={kind.slot} part={kind.part.__name__} context={kind.context.__name__}{flags}"
        yield f"hookspecs {hook}({arguments}) api={api}{what}"


def _names(module: ModuleType) -> list[str]:
    listed: list[str] | None = getattr(module, "__all__", None)
    if listed is not None:
        return list(listed)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (getattr(value, "__module__", None) == module.__name__ or (name.isupper() and not inspect.ismodule(value)))
    ]


def _facts_of(name: str, value: Any) -> Iterator[str]:
    if inspect.ismodule(value):
        yield f"{name} module"
    elif inspect.isclass(value):
        yield from _class_facts(name, value)
    elif inspect.isroutine(value):
        yield f"{name}{_signature(value)}"
    else:
        shown = repr(value)
        plain = len(shown) <= _MAX_VALUE and " at 0x" not in shown and "<function" not in shown
        yield f"{name} = {shown}" if plain else f"{name}: {type(value).__name__}"


def _class_facts(name: str, cls: type) -> Iterator[str]:
    bases = [base.__name__ for base in cls.__bases__ if base not in (object, typing.Protocol)]
    code = f" code={cls.code}" if issubclass(cls, Exception) and hasattr(cls, "code") else ""
    yield f"{name}({', '.join(bases)}){code}" if bases or code else f"{name} class"
    if attrs.has(cls):
        inherited = {each.name for base in cls.__mro__[1:] if attrs.has(base) for each in attrs.fields(base)}
        for field in attrs.fields(cls):
            if field.init and field.name not in inherited and not field.name.startswith("_"):
                yield f"{name}.{field.alias}: {_type(field.type)}{_default(field)}"
    elif issubclass(cls, Exception) and "__init__" in vars(cls):
        yield f"{name}{_signature(vars(cls)['__init__'])}"
    elif hasattr(cls, "__members__"):
        yield from (f"{name}.{member} = {value.value!r}" for member, value in cls.__members__.items())
        return
    taken = {field.name for field in attrs.fields(cls)} if attrs.has(cls) else set()
    yield from _members(name, cls, taken)


def _members(name: str, cls: type, taken: Iterable[str] = ()) -> Iterator[str]:
    is_protocol = getattr(cls, "_is_protocol", False)
    for member, value in vars(cls).items():
        if (member.startswith("_") and member != "__call__") or member in taken:
            continue
        value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if isinstance(value, property):
            yield f"{name}.{member}: {_type(inspect.signature(value.fget).return_annotation)}"  # type: ignore[arg-type]
        elif inspect.isfunction(value):
            mark = INHERITED if is_protocol and _has_body(value) else ""
            yield f"{name}.{member}{_signature(value)}{mark}"


def _has_body(function: Any) -> bool:
    """Whether a protocol's method does something: then a part that inherits it need not have its own."""
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    assert isinstance(node, ast.FunctionDef)
    last = node.body[-1]
    return not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Constant))


def _contracts() -> Iterator[tuple[str, type]]:
    for found in pkgutil.iter_modules(testing.__path__):
        module = importlib.import_module(f"intarsia.testing.{found.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and value.__name__.endswith("Contract") and value.__module__ == module.__name__:
                yield module.__name__.removeprefix("intarsia."), value


def _contract_facts(contract: type) -> Iterator[str]:
    """Yield what a subclass can say and override. Its claims are on docs/contracts.md."""
    name = contract.__name__
    yield f"{name} class"
    seen: set[str] = set()
    for each in contract.__mro__[:-1]:
        for member, value in vars(each).items():
            if member.startswith(("_", "test_")) or member in seen:
                continue
            seen.add(member)
            value = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if inspect.isfunction(value):
                yield f"{name}.{member}{_signature(value)}"
            elif not callable(value) and not isinstance(value, property):
                yield from _facts_of(f"{name}.{member}", value)


def _signature(function: Any) -> str:
    try:
        signature = inspect.signature(function)
    except ValueError:
        return "(...)"
    parts, star = [], False
    for parameter in signature.parameters.values():
        if parameter.name in ("self", "cls"):
            continue
        text = {"VAR_POSITIONAL": "*", "VAR_KEYWORD": "**"}.get(parameter.kind.name, "") + parameter.name
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not star:
            parts.append("*")
        star = star or parameter.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        if parameter.annotation is not inspect.Parameter.empty:
            text += f": {_type(parameter.annotation)}"
        if parameter.default is not inspect.Parameter.empty:
            text += f" = {_value(parameter.default)}"
        parts.append(text)
    returns = signature.return_annotation
    ends = "" if returns is inspect.Signature.empty else f" -> {_type(returns)}"
    return f"({', '.join(parts)}){ends}"


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return annotation.__name__ if inspect.isclass(annotation) else str(annotation)


def _default(field: attrs.Attribute[Any]) -> str:
    if field.default is attrs.NOTHING:
        return ""
    if isinstance(field.default, attrs.Factory):  # type: ignore[arg-type]
        return f" = {getattr(field.default.factory, '__name__', 'made')}()"  # type: ignore[union-attr]
    return f" = {_value(field.default)}"


def _value(value: Any) -> str:
    if inspect.isroutine(value):
        return str(value.__name__)
    shown = repr(value)
    return "..." if " at 0x" in shown else shown


# --- the file ---------------------------------------------------------------------------------------------------------


def read(text: str) -> dict[str, str]:
    """Return fact -> sign of a recorded surface."""
    return {line[2:]: line[0] for line in text.splitlines() if line and not line.startswith("#")}


def merged(recorded: dict[str, str], current: set[str]) -> dict[str, str]:
    """Return fact -> sign: what the last release had, what is there now, and what of the two differs."""
    released = {fact for fact, sign in recorded.items() if sign != "+"}
    signs = {fact: " " if fact in current else "-" for fact in released}
    return signs | dict.fromkeys(current - released, "+")


def written(signs: dict[str, str]) -> str:
    """Return the file's text: sorted, so that what went stands beside what came in its place."""
    return "\n".join([HEADER, *(f"{signs[fact]} {fact}" for fact in sorted(signs))]) + "\n"


# --- what a change asks for -------------------------------------------------------------------------------------------


def complaints(signs: dict[str, str], changelog: str) -> list[str]:
    """Return what is wrong: changes that the changelog does not name, and hooks that changed and kept their version."""
    changed = {fact: sign for fact, sign in signs.items() if sign != " "}
    news = _unreleased(changelog)
    entries = re.split(r"^(?=- )", news, flags=re.MULTILINE)
    unnamed = sorted({name_of(fact) for fact in changed if not _is_named(name_of(fact), changed, entries)})
    found = [
        f"CHANGELOG.md: its section on what is not released does not name {name}, which changed" for name in unnamed
    ]
    return found + [
        f"{kind.hook}: what its parts must do changed, and it is still version {kind.api}; raise it in hookspecs.KINDS"
        for kind in KINDS
        if _breaks(kind.part.__name__, kind.context.__name__, changed)
        and not any(fact.startswith(f"hookspecs {kind.hook}(") for fact in changed)
    ]


def name_of(fact: str) -> str:
    """Return what a fact is of: `Scheduler.plan`."""
    match = re.match(r"\S+ (?:op )?([\w.]+)", fact)
    assert match is not None, fact
    return match[1]


def _unreleased(changelog: str) -> str:
    """Return the text of the section on top, where that is of no release yet."""
    heading, _, rest = re.sub(r"\A.*?^## ", "", changelog, count=1, flags=re.DOTALL | re.MULTILINE).partition("\n")
    return rest.split("\n## ")[0] if "unreleased" in heading.lower() else ""


def _is_named(name: str, changed: dict[str, str], entries: list[str]) -> bool:
    """Whether one entry has all words of a name, or names a class that came or went whole."""
    whole = {name_of(fact) for fact in changed}
    words = name.split(".")
    names = [words, *([words[:1]] if words[0] in whole else [])]
    return any(all(re.search(rf"\b{word}\b", entry) for word in each) for each in names for entry in entries)


def _breaks(part: str, context: str, changed: dict[str, str]) -> bool:
    """Whether a part that was written before can fail: it lacks a method, or something that it uses is gone."""
    for fact, sign in changed.items():
        owner, _, member = name_of(fact).partition(".")
        if not fact.startswith("protocols ") or not member or owner not in (part, context):
            continue
        if sign == "-" or (owner == part and not fact.endswith(INHERITED)):
            return True
    return False


def main() -> int:
    """Write the file, check it, or make it that of a release."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where something is to be mended")
    parser.add_argument("--release", action="store_true", help="take what is there now for the surface of a release")
    asked = parser.parse_args()
    path = DOCS / "surface.txt"
    recorded = path.read_text("utf-8") if path.exists() else ""
    current = facts()
    signs = dict.fromkeys(current, " ") if asked.release or not recorded else merged(read(recorded), current)
    text = written(signs)
    if not asked.check:
        path.write_text(text, "utf-8")
        return 0
    wrong = (
        [] if text == recorded else ["docs/surface.txt is stale: run `make docs`, and name the changes in CHANGELOG.md"]
    )
    wrong += complaints(signs, (ROOT / "CHANGELOG.md").read_text("utf-8"))
    for complaint in wrong:
        print(complaint, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
