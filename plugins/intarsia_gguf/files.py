"""Which file of a path is the model."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen

MAGIC = b"GGUF"


@frozen
class Described:
    """What a path holds: the GGUF file, or None, and why."""

    file: Path | None
    reason: str


def describe(path: Path) -> Described:
    """Find the GGUF file of a path: the path itself, or the only one of a folder without a Hugging Face config."""
    try:
        return _describe_folder(path) if path.is_dir() else _describe_file(path)
    except OSError as error:
        return Described(None, f"cannot be read: {error.strerror or error}")


def _describe_file(path: Path) -> Described:
    if path.exists() and not path.is_file():
        # Opening a pipe would wait for its writer.
        return Described(None, f"{path.name} is no regular file")
    with path.open("rb") as file:
        magic = file.read(len(MAGIC))
    if magic == MAGIC:
        return Described(path, f"{path.name} is a GGUF file")
    return Described(None, f"{path.name} is no GGUF file: it starts with {magic!r} instead of {MAGIC!r}")


def _describe_folder(path: Path) -> Described:
    found = sorted(entry for entry in path.iterdir() if entry.suffix == ".gguf" and entry.is_file())
    if (path / "config.json").exists():
        return Described(None, "the folder has a config.json; to use a GGUF file in it, give the path of that file")
    if not found:
        return Described(None, "the folder holds no .gguf file")
    if len(found) > 1:
        names = ", ".join(entry.name for entry in found[:8])
        return Described(None, f"the folder holds {len(found)} .gguf files; give the path of one: {names}")
    return _describe_file(found[0])
