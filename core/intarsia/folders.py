"""Where things are kept from one start to the next. Needs no torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path

#: Names the folder in the place of the user's cache folder.
CACHE_VARIABLE = "INTARSIA_CACHE"


def cache_folder(kind: str) -> Path:
    """Return the folder of one kind of things, such as `weights`: in INTARSIA_CACHE or in the user's cache folder."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen) / kind
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "intarsia" / kind
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intarsia" / kind
