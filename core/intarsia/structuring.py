"""Plain data -> attrs classes, strictly: a text is no number, true is no number, and nothing unknown passes.

Written for config files, whose authors need the path, the value and what would be right.
"""

from __future__ import annotations

import contextlib
import math
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import attrs

from intarsia.errors import ConfigError, PluginError, did_you_mean

T = TypeVar("T")

_MAX_DEPTH = 32
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    types.NoneType: "left out",
}


def structure(cls: type[T], data: Mapping[str, Any], path: str, owner: str | None = None) -> T:
    """Make an attrs class from a table, by its type hints.

    Hints can be bool, int, float (takes whole numbers too), str, Path, Literal, unions, `tuple[T, ...]`,
    `Mapping[str, T]`, Any and other attrs classes.

    Args:
        cls: the attrs class.
        data: option -> value.
        path: where the table stands in the config, such as `scheduler`.
        owner: whose options these are, for messages, such as the part's key; the path if None.

    Raises:
        ConfigError: an option is unknown or missing, or its value has the wrong type or is refused by a validator.
        PluginError: the class itself has hints that cannot be read from a config.
    """
    if not isinstance(data, Mapping):
        raise _wrong(path, data, "a table")
    fields = {field.alias or field.name: field for field in attrs.fields(cls) if field.init}  # type: ignore[arg-type]
    for key in data:
        if key not in fields:
            name = shown(key, quote=False)
            raise ConfigError(
                f"{path}.{name}: unknown option of {owner or path!r}.{did_you_mean(name, fields)}",
                field=f"{path}.{name}",
            )
    hints = _hints(cls)
    values: dict[str, Any] = {}
    for key, field in fields.items():
        hint = hints.get(field.name, Any)
        if key in data:
            values[key] = _convert(hint, data[key], f"{path}.{key}")
        elif field.default is attrs.NOTHING:
            raise ConfigError(f"{path}.{key}: missing; it must be {type_text(hint)}", field=f"{path}.{key}")
    try:
        return cls(**values)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise _refused(error, path, fields) from error


def check_options(cls: type) -> None:
    """Check that a config can fill this attrs class, its nested ones included.

    Raises:
        PluginError: a type hint cannot be read, or is none that `structure` knows.
    """
    hints = _hints(cls)
    for field in attrs.fields(cls):
        hint = hints.get(field.name, Any)
        if field.init and not _readable(hint):
            raise PluginError(
                f"{cls.__module__}.{cls.__qualname__}.{field.name}: no config can hold a {hint}; known are bool, int, "
                "float, str, Path, Literal, unions, tuple[T, ...], Mapping[str, T] and attrs classes"
            )
        for nested in (hint, *get_args(hint)):
            if isinstance(nested, type) and attrs.has(nested):
                check_options(nested)


def type_text(hint: Any) -> str:
    """Return in words which values an option of this type takes."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return ("one of " if len(args) > 1 else "") + ", ".join(map(repr, args))
    if origin in (Union, types.UnionType):
        return " or ".join(type_text(arg) for arg in args)
    if origin is tuple:
        plural = {bool: "flags", int: "whole numbers", float: "numbers", str: "texts", Path: "paths"}
        return f"a list of {plural.get(args[0], type_text(args[0]))}"
    if hint is Any:
        return "anything"
    return _WORDS.get(hint, "a table")


def checked_plain(value: Any, path: str = "", depth: int = 0) -> Any:
    """Copy data, checking that it is what TOML or JSON can say: texts, numbers, flags, lists, tables and None.

    Raises:
        ConfigError: something else is in it (a date, an object), or it is nested too deep.
    """
    where = path or "config"
    if depth > _MAX_DEPTH:
        raise ConfigError(f"{shown(where, quote=False)}: nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ConfigError(f"{where}: the key {shown(key)} is not a text", field=where)
        prefix = f"{path}." if path else ""
        return {key: checked_plain(item, f"{prefix}{key}", depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [checked_plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, str | Path):
        return str.__str__(value) if isinstance(value, str) else str(value)
    if type(value) is int and not -(2**63) <= value < 2**64:
        raise ConfigError(f"{where}: a whole number of more than 64 bits", field=where)
    if value is None or type(value) in (bool, int, float):
        return value
    raise _wrong(where, value, "a text, number, flag, list or table")


def check_text(value: Any, path: str, right: str) -> str:
    """Return the value if it is a text of at least one character; raise ConfigError that says what is right."""
    if not isinstance(value, str) or not value:
        raise _wrong(path, value, right)
    return value


def shown(value: object, *, quote: bool = True) -> str:
    """Return a value for a message, cut where it is long."""
    try:
        text = value if isinstance(value, str) and not quote else repr(value)
    except Exception:  # a repr of someone else's object, or a number of too many digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong(path: str, value: object, right: str) -> ConfigError:
    return ConfigError(f"{path}: {shown(value)} is not {right}", field=path)


def _refused(error: Exception, path: str, fields: Mapping[str, Any]) -> ConfigError:
    """Wrap a validator's error. Stock validators quote the name of the field, which gives the whole path."""
    # attrs puts more than the message into args.
    message = str(error.args[0]) if error.args else type(error).__name__
    key = next((key for key, field in fields.items() if f"'{field.name}'" in message), None)
    where = f"{path}.{key}" if key else path
    return ConfigError(f"{where}: {message}", field=where)


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except Exception as error:
        raise PluginError(f"{cls.__module__}.{cls.__qualname__}: its type hints cannot be read: {error}") from error


def _readable(hint: Any) -> bool:
    """Whether a config can hold what this hint asks for."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return all(map(_readable, args))
    if origin is tuple:
        return bool(args) and all(arg is Ellipsis or _readable(arg) for arg in args)
    if _is_table(hint):
        return not args or (args[0] is str and _readable(args[1]))
    if origin is Literal or hint is Any or hint in _WORDS:
        return True
    return isinstance(hint, type) and attrs.has(hint)


def _is_table(hint: Any) -> bool:
    kind = get_origin(hint) or hint
    return isinstance(kind, type) and issubclass(kind, Mapping)


def _convert(hint: Any, value: Any, path: str) -> Any:
    """Return the value as the hint wants it; raise ConfigError where it is another type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, path)
    if origin is Literal:
        # By type too: True == 1.
        if any(type(arg) is type(value) and arg == value for arg in args):
            return value
    elif origin is tuple:
        if isinstance(value, list | tuple):
            return _convert_list(hint, value, path)
    elif _is_table(hint):
        if isinstance(value, Mapping):
            item = args[1] if args else Any
            return {key: _convert(item, each, f"{path}.{key}") for key, each in value.items()}
    elif hint in _WORDS:
        return _convert_scalar(hint, value, path)
    else:
        assert attrs.has(hint), f"{path}: {hint} is none that a config can hold; see check_options"
        return structure(hint, value, path)
    raise _wrong(path, value, type_text(hint))


def _convert_scalar(hint: type, value: Any, path: str) -> Any:
    """By the exact type, so that true is no number; only whole numbers pass for floats. NaN is never meant."""
    if hint is float and type(value) in (int, float):
        with contextlib.suppress(OverflowError):  # a whole number beyond the floats
            if not math.isnan(number := float(value)):
                return number
    elif hint is Path:
        if isinstance(value, str | Path) and str(value) and "\0" not in str(value):
            return Path(value)
    elif type(value) is hint:
        return value
    raise _wrong(path, value, type_text(hint))


def _convert_list(hint: Any, value: list[Any] | tuple[Any, ...], path: str) -> tuple[Any, ...]:
    args = get_args(hint)
    items = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
    if len(items) != len(value):
        raise _wrong(path, value, f"{type_text(hint)}, {len(items)} of them")
    return tuple(_convert(item, each, f"{path}[{i}]") for i, (item, each) in enumerate(zip(items, value, strict=True)))


def _convert_union(hint: Any, value: Any, path: str) -> Any:
    members = [arg for arg in get_args(hint) if arg is not types.NoneType]
    if value is None and len(members) < len(get_args(hint)):
        return None
    if len(members) == 1:  # X | None: X knows best what is wrong
        return _convert(members[0], value, path)
    # An exact type first, so that 3 stays whole in `float | int`.
    for member in sorted(members, key=lambda member: type(value) is not member):
        try:
            return _convert(member, value, path)
        except ConfigError:
            continue
    raise _wrong(path, value, type_text(hint))
