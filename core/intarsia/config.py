"""TOML, a mapping and `-o` overrides -> EngineConfig. Every error names the path, the value and what would be right.

The same strictness serves the parts' own options: `structure` turns plain data into any attrs class by its type hints.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import attrs

from intarsia.errors import ConfigError
from intarsia.hookspecs import Kind, kind_of
from intarsia.structuring import check_text, checked_plain, shown, structure
from intarsia.types import AUTO, NONE, CacheOptions, Choice, EngineConfig, EngineOptions, ModelChoice, PluginsOptions

__all__ = ["as_dict", "fingerprint", "load_config", "structure"]

#: No config is as long; a device or a model that was named by mistake can have no end.
_MAX_BYTES = 2**20
_SECTIONS = tuple(field.name for field in attrs.fields(EngineConfig))


def load_config(
    source: str | Path | Mapping[str, Any] | EngineConfig | None = None, overrides: Sequence[str] = ()
) -> EngineConfig:
    """Read a TOML file, a mapping of sections or a config, apply `path=value` overrides in order, and check it all.

    Whether the parts exist and take their options is for composition to say, which knows the plugins.

    Raises:
        ConfigError: the file cannot be read or parsed, or a section, key, type or value is wrong.
    """
    if isinstance(overrides, str):
        raise ConfigError(f"overrides: {shown(overrides)} is one text; give a list of them, [{shown(overrides)}]")
    if isinstance(source, EngineConfig):
        if not overrides:
            return source
        data = as_dict(source)
    elif isinstance(source, str | Path):
        data = _read_toml(Path(source))
    elif source is None:
        data = {}
    elif isinstance(source, Mapping):
        data = _plain_table(source)
    else:
        raise ConfigError(f"config: a {type(source).__name__} is not a path or a mapping of sections")
    _lift_plugins(data)
    for override in overrides:
        _apply_override(data, override)
    return _engine_config(data)


def as_dict(config: EngineConfig) -> dict[str, Any]:
    """Return a config as plain data, each section spelt out; `load_config` of it is the config again."""
    model = attrs.asdict(config.model, filter=lambda field, value: field.name != "options" and value is not None)
    data: dict[str, Any] = {
        "model": model | checked_plain(config.model.options, "model"),
        # TOML has no null: an option at None is left out, as None is its default.
        "engine": checked_plain(attrs.asdict(config.engine, filter=lambda _, value: value is not None), "engine"),
    }
    for name in _SECTIONS[2:]:
        value: Choice | tuple[Choice, ...] = getattr(config, name)
        data[name] = [_choice_dict(c, name) for c in value] if isinstance(value, tuple) else _choice_dict(value, name)
    return data


def fingerprint(data: Mapping[str, Any]) -> str:
    """Return 16 hex digits that tell plain data apart: the start of the SHA-256 of its canonical JSON."""
    text = json.dumps(checked_plain(data), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _choice_dict(choice: Choice, path: str) -> dict[str, Any]:
    return {"use": choice.use, **checked_plain(choice.options, path)}


# --- sources ----------------------------------------------------------------------------------------------------------


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot read this config file: {error.strerror or error}") from None
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise ConfigError(f"{str(path)!r}: not a config file: TOML is UTF-8 text ({error})") from None
    if len(content) > _MAX_BYTES:
        raise ConfigError(f"{path}: not a config file: it is longer than {_MAX_BYTES} bytes")
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: not a config: nested too deep") from None
    except ValueError as error:
        last = f"at line {text.count(chr(10)) + 1}, the end of the file"
        message = str(error).replace("at end of document", last)
        raise ConfigError(f"{path}: not valid TOML: {message}") from None
    return _plain_table(data)


def _plain_table(data: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = checked_plain(data)
    return plain


def _lift_plugins(data: dict[str, Any]) -> None:
    """Move `[plugins]` to `[engine.plugins]`, of which it is the short form."""
    if "plugins" not in data:
        return
    engine = data.setdefault("engine", {})
    if not isinstance(engine, dict):
        raise ConfigError(f"engine: {shown(engine)} is not a table", field="engine")
    if "plugins" in engine:
        raise ConfigError(
            "plugins: set as [plugins] and as [engine.plugins], which are the same; keep one", field="plugins"
        )
    engine["plugins"] = data.pop("plugins")


def _apply_override(data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    steps = [step.strip() for step in path.split(".")]
    if not equals or not all(steps):
        raise ConfigError(f"-o {shown(override)}: an override is path=value, such as cache.page_size=32")
    if steps[0] == "plugins":
        steps.insert(0, "engine")
    if steps[0] not in _SECTIONS:
        raise _no_section(steps[0])
    if len(steps) == 1:
        data[steps[0]] = _override_value(text, path)
        return
    table = _open_section(data, steps[0])
    for depth, step in enumerate(steps[1:-1], start=2):
        table = table.setdefault(step, {})
        if not isinstance(table, dict):
            where = ".".join(steps[:depth])
            raise ConfigError(f"{where}: is {shown(table)}, not a table, so {path.strip()} cannot be set", field=where)
    table[steps[-1]] = _override_value(text, path)


def _override_value(text: str, path: str) -> Any:
    """Read a TOML value; what is none is a string, and so is a date, which no option takes."""
    try:
        data = tomllib.loads(f"value = {text}")
        # A text with line breaks could bring keys of its own: then it is no value.
        return checked_plain(data["value"], path) if data.keys() == {"value"} else text
    except (ValueError, RecursionError, ConfigError):
        return text


def _open_section(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a section as a table to set keys in; the short forms are expanded first."""
    section = data.get(name, {})
    if name != "engine":
        if isinstance(section, list) and len(section) == 1:
            section = section[0]
        if isinstance(section, list) and section:
            raise ConfigError(f"{name}: holds {len(section)} parts; override the whole list instead", field=name)
        if isinstance(section, list):
            section = {}
        if isinstance(section, str):
            section = {"use": section}
    if not isinstance(section, dict):
        raise ConfigError(f"{name}: {shown(section)} is not a table", field=name)
    data[name] = section
    return section


# --- sections ---------------------------------------------------------------------------------------------------------


def _engine_config(data: Mapping[str, Any]) -> EngineConfig:
    sections: dict[str, Any] = {}
    for name, value in data.items():
        if name not in _SECTIONS:
            raise _no_section(name)
        if name == "engine":
            sections[name] = _engine_options(value)
        elif name == "model":
            sections[name] = _model(value)
        else:
            sections[name] = _slot(kind_of(name), value)
    return EngineConfig(**sections)


def _engine_options(value: Any) -> EngineOptions:
    known = [field.name for field in attrs.fields(EngineOptions)]
    for key in value if isinstance(value, dict) else ():
        if key not in known:
            name = shown(key, quote=False)
            raise ConfigError(
                f"engine.{name}: {name} is no engine option.{_suggest(key, known)}", field=f"engine.{name}"
            )
    return structure(EngineOptions, value, "engine")


def _model(value: Any) -> ModelChoice:
    if isinstance(value, str):
        return ModelChoice(use=value)
    if not isinstance(value, dict):
        raise ConfigError(f"model: {shown(value)} is not a name, path or hub id, nor a table", field="model")
    own = {field.name: value[field.name] for field in attrs.fields(ModelChoice) if field.name in value}
    own.pop("options", None)
    model = structure(ModelChoice, own, "model")
    for key in ("loader", "family"):
        if not getattr(model, key) or getattr(model, key) == NONE:
            raise ConfigError(f"model.{key}: {own[key]!r} is not 'auto' or the key of a part", field=f"model.{key}")
    return attrs.evolve(model, options={key: value[key] for key in value if key not in own})


def _slot(kind: Kind, value: Any) -> Choice | tuple[Choice, ...]:
    if not kind.many:
        return _choice(kind, value, kind.slot)
    if not isinstance(value, list):
        choices: tuple[Choice, ...] = (_choice(kind, value, kind.slot),)
    elif not value and not kind.optional:
        raise ConfigError(f"{kind.slot}: an empty list names no part; 'auto' lets composition choose", field=kind.slot)
    else:
        choices = tuple(_choice(kind, item, f"{kind.slot}[{index}]") for index, item in enumerate(value))
    # What is left empty has one form, so that equal engines have equal configs.
    empty = [choice.use for choice in choices if choice.use == NONE or (kind.optional and choice.use == AUTO)]
    if empty and len(choices) > 1:
        raise ConfigError(f"{kind.slot}: {empty[0]!r} leaves it empty, so it stands alone", field=kind.slot)
    return () if empty else choices


def _choice(kind: Kind, value: Any, path: str) -> Choice:
    if isinstance(value, str):
        value = {"use": value}
    if not isinstance(value, dict):
        also = ", or a list of them" if kind.many and path == kind.slot else ""
        raise ConfigError(f"{path}: {shown(value)} is not the key of a part or a table{also}", field=path)
    use = check_text(value.get("use", AUTO), f"{path}.use", f"the key of a part, such as in: {kind.example}")
    options = {key: item for key, item in value.items() if key != "use"}
    if use == NONE and not kind.optional:
        raise ConfigError(
            f"{path}.use: 'none', but every engine has this part ({kind.what}); 'auto' lets composition choose",
            field=f"{path}.use",
        )
    if options and kind.optional and use in (AUTO, NONE):
        # The slot stays empty: options of no part must not be dropped in silence.
        names = ", ".join(shown(key, quote=False) for key in options)
        raise ConfigError(
            f"{path}.use: {use!r} leaves this empty, so nothing takes {names}; name the part", field=f"{path}.use"
        )
    return Choice(use, options)


def _no_section(name: str) -> ConfigError:
    return ConfigError(f"{shown(name, quote=False)}: no such section.{_suggest(name, _SECTIONS)}", field=name)


def _suggest(word: str, known: Iterable[str]) -> str:
    """Return the nearest of all fixed paths, whatever their section, or the known names where none is near."""
    paths = {name: name for name in _SECTIONS} | {"plugins": "plugins"}
    for section, cls in (
        ("cache", CacheOptions),
        ("model", ModelChoice),
        ("engine.plugins", PluginsOptions),
        ("engine", EngineOptions),
    ):
        paths |= {
            field.name: f"{section}.{field.name}"
            for field in attrs.fields(cls)
            if field.name not in ("use", "options", "plugins")
        }
    near = [paths[name] for name in get_close_matches(word[:100], paths, n=3, cutoff=0.6)]
    if near:
        return f" Did you mean {' or '.join(map(repr, near))}?"
    return f" Known: {', '.join(sorted(known))}."
