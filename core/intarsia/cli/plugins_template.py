"""Templates of plugins: the files under `intarsia/templates`, with names filled in.

Each kind of part has a folder of its own, `common` is for all. `$name` stands for a name, `$$` for a dollar.
"""

from __future__ import annotations

import importlib.metadata
import json
import shutil
import tomllib
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from string import Template

from intarsia.cli.plugins_names import Names
from intarsia.errors import ConfigError
from intarsia.hookspecs import Kind

_SUFFIX = ".tmpl"
#: Where a template's file goes, if not into the package: `{package}` is filled in.
_PLACES = {
    "pyproject.toml": "pyproject.toml",
    "README.md": "README.md",
    "gitignore": ".gitignore",
    "ci.yml": ".github/workflows/ci.yml",
    "test_contract.py": "tests/test_contract.py",
    "test_part.py": "tests/test_part.py",
}
#: What a kind says in other files: texts, and `dependencies` as a list.
_FACTS = "facts.toml"


def write_package(folder: Path, names: Names, kind: Kind) -> list[Path]:
    """Write a package for a part of a kind, whole or not at all; return the files.

    Raises:
        ConfigError: the folder is there already, or cannot be made.
    """
    if folder.exists() or folder.is_symlink():
        raise ConfigError(f"{folder} is there already; give another folder with --into", field="into")
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"{folder.parent} is no folder that {folder.name} can be made in", field="into")
    rendered = dict(_render(names, kind))
    try:
        folder.mkdir()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be made: {error.strerror}", field="into") from None
    try:
        for place, text in rendered.items():
            path = folder / place
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, "utf-8")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return [folder / place for place in rendered]


def _render(names: Names, kind: Kind) -> Iterator[tuple[str, str]]:
    """Yield the place of each file in the package's folder, and its text."""
    templates = files("intarsia").joinpath("templates")
    values = {
        "name": names.distribution,
        "package": names.package,
        "key": names.key,
        "slot": kind.slot,
        "hook": kind.hook,
        "api": str(kind.api),
        "part": kind.part.__name__,
        "intarsia": _minor_version(),
    }
    facts = tomllib.loads(_fill(templates.joinpath(kind.slot, _FACTS + _SUFFIX), values))
    needed = [f"intarsia>={values['intarsia']}", *facts.pop("dependencies", [])]
    values |= {name: text.strip() for name, text in facts.items()}
    values.setdefault("language", "toml")
    values["dependencies"] = ", ".join(json.dumps(each) for each in needed)
    for source in (templates.joinpath("common"), templates.joinpath(kind.slot)):
        for file in sorted(source.iterdir(), key=lambda each: each.name):
            name = file.name.removesuffix(_SUFFIX)
            if name != _FACTS and name != file.name:
                yield _PLACES.get(name, f"src/{names.package}/{name}"), _fill(file, values)


def _fill(file: Traversable, values: dict[str, str]) -> str:
    return Template(file.read_text("utf-8")).substitute(values)


def _minor_version() -> str:
    """Return the version of intarsia that the templates are of, without its last number."""
    return ".".join(importlib.metadata.version("intarsia").split(".")[:2])
