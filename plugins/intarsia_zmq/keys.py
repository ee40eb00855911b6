"""CURVE key pairs: in files as ZeroMQ's own tools write them, or as text."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import zmq
from attrs import field, frozen

from intarsia.errors import ConfigError

PUBLIC_SUFFIX: Final = ".key"
SECRET_SUFFIX: Final = ".key_secret"  # noqa: S105
#: A key as text is 40 characters of Z85 (ZeroMQ RFC 32), which have no quotes and no spaces.
_KEY = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
_LINE = re.compile(r"""^\s*(public-key|secret-key)\s*=\s*["']([^"']*)["']\s*$""", re.MULTILINE)
_MAX_BYTES = 64 << 10
_HEAD = "# A {what} key of intarsia's, for CURVE over ZeroMQ. {rule}\nmetadata\ncurve\n"


@frozen
class KeyPair:
    """A CURVE key pair, each 40 characters of Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def new_key_pair() -> KeyPair:
    """Return a fresh pair."""
    return KeyPair(*zmq.curve_keypair())


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Make a key pair and write it: NAME.key is public, NAME.key_secret for its owner alone. Return both paths.

    Raises:
        ConfigError: one of the files is there, or the name is no file name; nothing has been written.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise ConfigError(f"name: {name!r} is not 1 to 64 letters, digits, dots, dashes and underscores", field="name")
    paths = folder / f"{name}{PUBLIC_SUFFIX}", folder / f"{name}{SECRET_SUFFIX}"
    for path in paths:
        if os.path.lexists(path):
            raise ConfigError(f"{path} is there already; move it away first, or give another --name", field="name")
    folder.mkdir(parents=True, exist_ok=True)
    pair = new_key_pair()
    public = f'    public-key = "{pair.public.decode()}"\n'
    secret = f'    secret-key = "{pair.secret.decode()}"\n'
    _write(paths[1], _HEAD.format(what="secret", rule="Keep it to yourself.") + public + secret, 0o600)
    _write(paths[0], _HEAD.format(what="public", rule="Anyone may have it.") + public, 0o644)
    return paths


def read_key_pair(path: Path) -> KeyPair:
    """Return the pair in a secret key's file.

    Raises:
        ConfigError: it cannot be read, or holds no pair; the message shows nothing of the file.
    """
    found = _read(path)
    if "secret-key" not in found or "public-key" not in found:
        text = f"{path}: no secret key and its public key; give the {SECRET_SUFFIX} file that `intarsia keygen` wrote"
        raise ConfigError(text, field="key")
    return KeyPair(found["public-key"], found["secret-key"])


def read_public_key(key: str | Path) -> bytes:
    """Return a public key that is given as 40 characters of Z85, or as a file of one.

    Raises:
        ConfigError: it is neither.
    """
    if isinstance(key, str) and _KEY.fullmatch(key) and not Path(key).exists():
        return key.encode()
    found = _read(Path(key)).get("public-key")
    if found is None:
        raise ConfigError(f"{key}: no public key; give a {PUBLIC_SUFFIX} file, or the key itself", field="server_key")
    return found


def _read(path: Path) -> dict[str, bytes]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else "it is no text"
        raise ConfigError(f"{path}: no key can be read from it: {why}", field="key") from error
    return {name: value.encode() for name, value in _LINE.findall(text) if _KEY.fullmatch(value)}


def _write(path: Path, text: str, mode: int) -> None:
    # Exclusively, and with its mode from the beginning: nobody else can open it in between.
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
