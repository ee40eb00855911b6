"""A Hugging Face folder: its files, its config and its tokenizer, read as untrusted input. Needs no torch."""

from __future__ import annotations

import json
import re
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

from attrs import field, frozen

from intarsia.errors import CheckpointError
from intarsia.types import TokenizerSpec

#: Bytes that files of each kind may have. The largest that are known take a quarter of that at most.
_MAX_CONFIG, _MAX_INDEX, _MAX_TOKENIZER, _MAX_TEMPLATE = 16 << 20, 64 << 20, 256 << 20, 4 << 20
_MAX_EOS_IDS = 1024
#: The tokens with names of their own, which chat templates use (transformers' SPECIAL_TOKENS_ATTRIBUTES).
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_GENERATION = "generation_config.json"
#: What generation_config.json says of sampling, of all that it can hold.
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty")
_SHARED_BLOB = re.compile(r"[0-9a-f]{64}")


def _resolve(path: Path) -> Path:
    return path.resolve()


@frozen
class ModelFolder:
    """A folder that lends only files of its own.

    Names come from files that anyone can have written, so that one may name or link to a file outside. Such a file is
    never opened. The cache of huggingface_hub is the exception: its snapshots link to its blobs.
    """

    path: Path = field(converter=_resolve)

    def find(self, name: object, asked_by: str = "") -> Path | None:
        """Return the path of a file in this folder, or None where there is none.

        Args:
            name: relative to the folder, with `/`; anything else is refused.
            asked_by: which entry of which file names it, for the message.

        Raises:
            CheckpointError: the name leads out of the folder, or to what is no regular file.
        """
        shown = f"{asked_by or 'file'}: {name!r:.200}"
        if not isinstance(name, str) or not _is_plain(name):
            raise CheckpointError(f"{shown} is not the name of a file in the model's folder")
        try:
            real = (self.path / name).resolve(strict=True)
            mode = real.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if (self.path / name).is_symlink():
                raise CheckpointError(f"{shown} links to a file that does not exist") from None
            return None
        except (OSError, ValueError, RuntimeError) as error:  # no permission; not a file's name; a loop of links
            raise CheckpointError(f"{shown} cannot be read: {error}") from None
        if not real.is_relative_to(self.path) and not self._is_cached_blob(real):
            raise CheckpointError(f"{shown} links to a file outside the model's folder")
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{shown} is not a regular file")
        return real

    def _is_cached_blob(self, real: Path) -> bool:
        """Whether this folder is `models--x--y/snapshots/<revision>` of a hub cache, and the file one of its blobs.

        Newer caches share blobs between models: `blobs/<two digits>/<hash>` beside the models' folders.
        """
        repository = self.path.parent.parent
        if self.path.parent.name != "snapshots" or not repository.name.startswith("models--"):
            return False
        shared = repository.parent / "blobs" / real.name[:2] / real.name
        return real.parent == repository / "blobs" or (real == shared and bool(_SHARED_BLOB.fullmatch(real.name)))

    def read_text(self, name: str, limit: int) -> str | None:
        """Return a file's text, or None where there is none; raise CheckpointError past `limit` bytes."""
        if (path := self.find(name)) is None:
            return None
        try:
            with path.open("rb") as file:
                data = file.read(limit + 1)
            if len(data) > limit:
                raise CheckpointError(f"{name} has more than {limit >> 20} MiB: too large for what it is")
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{name} is not UTF-8: byte {error.start}") from None
        except OSError as error:
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from None

    def read_object(self, name: str, limit: int) -> dict[str, Any] | None:
        """Return a JSON file's object, or None where there is no such file; raise CheckpointError for anything else."""
        text = self.read_text(name, limit)
        return None if text is None else parse_object(text, name)


def _is_plain(name: str) -> bool:
    """Whether a name stays inside its folder, on every system, by its letters alone."""
    if not name or "\\" in name or "\0" in name or PureWindowsPath(name).drive:
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))


def parse_object(text: str | bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object; raise CheckpointError that names the file for anything else."""
    try:
        value = json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, name))
    except RecursionError:
        raise CheckpointError(f"{name}: nested too deep") from None
    except ValueError as error:  # malformed, not UTF-8, or a number of thousands of digits
        raise CheckpointError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} holds a {type(value).__name__}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]], name: str) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise CheckpointError(f"{name}: the key {key!r:.200} is there twice")
    return table


def read_config(folder: ModelFolder) -> dict[str, Any]:
    """Return config.json; raise CheckpointError where it is missing, malformed or has no `model_type`."""
    config = folder.read_object("config.json", _MAX_CONFIG)
    if config is None:
        raise CheckpointError("the model's folder has no config.json")
    kind = config.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise CheckpointError(
            f"config.json: model_type is {kind!r:.200}, not the name of a model family", field="model_type"
        )
    return config


def read_index(folder: ModelFolder, name: str) -> dict[str, Any] | None:
    """Return the `weight_map` of a sharded checkpoint, tensor -> file as written, or None where there is no index."""
    if (index := folder.read_object(name, _MAX_INDEX)) is None:
        return None
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{name}: weight_map is {weight_map!r:.200}, not an object of tensor -> file")
    return weight_map


def read_sampling(folder: ModelFolder) -> dict[str, Any]:
    """Return what generation_config.json says of sampling, as written but for null, which is as if absent."""
    generation = folder.read_object(_GENERATION, _MAX_CONFIG) or {}
    return {name: generation[name] for name in _SAMPLING if generation.get(name) is not None}


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def read_tokenizer(folder: ModelFolder, config: Mapping[str, Any]) -> TokenizerSpec | None:
    """Return the tokenizer, or None where the folder has no tokenizer.json.

    A BOS is added to plain prompts if `add_bos_token` is true or the post-processor of tokenizer.json adds it. What
    ends a generation is taken from generation_config.json, else config.json, else the tokenizer's own EOS.

    Raises:
        CheckpointError: a file is malformed; names it.
    """
    definition = folder.read_text("tokenizer.json", _MAX_TOKENIZER)
    if definition is None:
        return None
    tokenizer, added = _load(definition)
    settings = _settings(folder)
    texts = {name: text for name in _SPECIAL if (text := _token_text(settings, name)) is not None}
    bos_id = _id_of(tokenizer, texts.get("bos_token"))
    if bos_id is None and added and added[0] != _id_of(tokenizer, texts.get("eos_token")):
        bos_id = added[0]
    wanted = settings.get("add_bos_token") is True or bos_id in added[:1]
    return TokenizerSpec(
        definition=definition,
        bos_id=bos_id,
        eos_ids=_eos_ids(folder, config, _id_of(tokenizer, texts.get("eos_token"))),
        add_bos=wanted and bos_id is not None,
        chat_template=_chat_template(folder, settings),
        special_tokens=texts,
    )


def _load(definition: str) -> tuple[Any, list[int]]:
    """Return the tokenizer, and the ids that its post-processor adds to a text."""
    from tokenizers import Tokenizer

    parse_object(definition, "tokenizer.json")  # bounds its depth, and names a syntax error's place
    try:
        tokenizer = Tokenizer.from_str(definition)
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer, tokenizer.encode("").ids
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises plain Exceptions, and panics, which are not even those
        raise CheckpointError(f"tokenizer.json is not a tokenizer: {error}") from None


def _settings(folder: ModelFolder) -> dict[str, Any]:
    """Return tokenizer_config.json, with the older special_tokens_map.json where transformers 5 reads it."""
    settings = folder.read_object("tokenizer_config.json", _MAX_CONFIG) or {}
    if "added_tokens_decoder" not in settings:
        settings |= folder.read_object("special_tokens_map.json", _MAX_CONFIG) or {}
    return settings


def _token_text(settings: Mapping[str, Any], name: str) -> str | None:
    token = settings.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"tokenizer_config.json: {name} is {token!r:.200}, not a token's text")
    return text


def _id_of(tokenizer: Any, text: str | None) -> int | None:
    found = None if text is None else tokenizer.token_to_id(text)
    return None if found is None else int(found)


def _eos_ids(folder: ModelFolder, config: Mapping[str, Any], own: int | None) -> tuple[int, ...]:
    generation = folder.read_object(_GENERATION, _MAX_CONFIG) or {}
    for name, values in ((_GENERATION, generation), ("config.json", config)):
        ids = values.get("eos_token_id")
        if ids is None or ids == []:
            continue
        listed = ids if isinstance(ids, list) else [ids]
        if len(listed) > _MAX_EOS_IDS or not all(_is_id(token) for token in listed):
            raise CheckpointError(f"{name}: eos_token_id is {ids!r:.200}, not a token id or a list of them")
        return tuple(dict.fromkeys(listed))
    return () if own is None else (own,)


def _is_id(token: object) -> bool:
    return isinstance(token, int) and not isinstance(token, bool) and token >= 0


def _chat_template(folder: ModelFolder, settings: Mapping[str, Any]) -> str | None:
    """Return the chat template: the file before the setting, as transformers does; of named ones the default."""
    if (text := folder.read_text("chat_template.jinja", _MAX_TEMPLATE)) is not None:
        return text
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = _named(template).get("default")
    if template is not None and not isinstance(template, str):
        raise CheckpointError(f"tokenizer_config.json: chat_template is {template!r:.200}, not a text or named texts")
    return template


def _named(templates: Iterable[Any]) -> dict[str, Any]:
    try:
        return {entry["name"]: entry["template"] for entry in templates}
    except (KeyError, TypeError):
        raise CheckpointError("tokenizer_config.json: chat_template's entries are not of name and template") from None
