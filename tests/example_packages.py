"""The packages in `examples/`: where they are, and the plugins in their source folders."""

import importlib
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: The key of each package's part -> its folder.
PACKAGES = {
    path.parent.name.removeprefix("intarsia-").replace("-", "_"): path.parent
    for path in sorted((ROOT / "examples").glob("*/pyproject.toml"))
}
#: The key of each package's part -> the slot that it is for.
SLOTS = {"markov": "drafter", "nf4": "quantizer", "srpt": "scheduler", "ttl_prefix": "cache"}


def plugins_from_source(monkeypatch):
    """Return the packages' plugins by name, imported from their source folders."""
    for folder in PACKAGES.values():
        monkeypatch.syspath_prepend(folder / "src")
    return {key: importlib.import_module(f"intarsia_{key}") for key in PACKAGES}
