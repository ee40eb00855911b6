"""Plugins laid out as if they were installed: written by `intarsia plugins new`, or from a few lines of source."""

import os
import re
import tomllib
from pathlib import Path

from intarsia.cli import run


def written(folder, name, kind, *more):
    """Write a plugin of a kind and lay it out; return its folder, and what goes on the path."""
    package = Path(folder) / name
    assert run(["plugins", "new", name, "--kind", kind, "--into", str(package), *more]) == 0
    return package, [package / "src", lay_out(package)]


def lay_out(package):
    """Write what an installation of a package says of it, as pip would; return the folder that goes on the path."""
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    site = package / ".installed"
    info = site / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    facts = {"Name": "name", "Version": "version", "Summary": "description", "Requires-Python": "requires-python"}
    lines = ["Metadata-Version: 2.4", *(f"{title}: {project[field]}" for title, field in facts.items())]
    lines += [f"Requires-Dist: {each}" for each in project["dependencies"]]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    groups = [f"[{group}]\n{_lines(entries)}" for group, entries in project["entry-points"].items()]
    (info / "entry_points.txt").write_text("\n".join(groups))
    return site


def _lines(entries):
    return "".join(f"{name} = {value}\n" for name, value in entries.items())


def path_of(*folders):
    """Return the value of PYTHONPATH with these folders before what it has."""
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def placeholders(package):
    """Return the files that a name was not filled into."""
    files = [file for file in package.rglob("*") if file.is_file()]
    return [file.name for file in files if re.search(r"\$(?!\{\{)", file.read_text())]
