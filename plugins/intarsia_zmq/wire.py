"""Messages as bytes: msgpack maps and raw blobs. docs/wire-protocol.md says what is in them."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]
from attrs import field, frozen

from intarsia.errors import InvalidRequestError
from intarsia_zmq.errors import MalformedError, UnsupportedError
from intarsia_zmq.limits import WireLimits
from intarsia_zmq.scan import harmless, scan

#: The version of the protocol that this code speaks.
VERSION: Final = 1
#: The frames of one ZeroMQ message.
Frames: TypeAlias = list[bytes]

_TYPECODES = {"<i4": "i", "<f4": "f"}
_DTYPES = {code: dtype for dtype, code in _TYPECODES.items()}
_STANDS = frozenset(("blob", "dtype", "n"))
#: Where blobs may stand: everywhere that the page says "ids" or "floats". Elsewhere such a map is a client's own data.
_BLOBS = ("prompt", "token_ids", "top_ids", "logprobs", "top_logprobs")
#: What blobs may stand within.
_HOLDERS = ("logprobs", "prompt_logprobs", "choices")

#: These are written in one version of the protocol and read in all.
_TIMELESS = ("hello", "welcome", "error")
_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))
_CONTAINERS = frozenset((dict, list))
_MAX_KIND = 64
_MAX_ID = 256
#: What a batch begins with: everything before its array of messages.
_BATCH = msgpack.packb({"v": VERSION, "kind": "batch", "body": {"messages": 0}})[:-1]


@frozen
class Message:
    """One message.

    Attributes:
        kind: the verb.
        id: the request it is about; "" where it is about none.
        seq: its number among what the server says about that request, from 1; 0 has none.
        body: what the verb says. `array.array`s of typecode i and f, where ids and floats stand, travel as blobs.
    """

    kind: str
    id: str = ""
    seq: int = 0
    body: Mapping[str, Any] = field(factory=dict)


# --- writing ----------------------------------------------------------------------------------------------------------


def encode(message: Message) -> Frames:
    """Return the frames of a message; the same message has the same bytes always.

    Raises:
        InvalidRequestError: something in its body cannot be sent: a whole number beyond 64 bits, half of a character
            (a lone surrogate), an object.
    """
    return _pack(_map(message))


def encode_batch(messages: Iterable[Message]) -> Frames:
    """Return the frames of one message that stands for several.

    Raises:
        InvalidRequestError: as `encode`.
    """
    return _pack({"v": VERSION, "kind": "batch", "body": {"messages": [_map(each) for each in messages]}})


def pack(kind: str, request_id: str, seq: int, body: Mapping[str, Any]) -> Frames:
    """Return the frames of what a server says about a request; as `encode`, with no message made."""
    return _pack({"v": VERSION, "kind": kind, "id": request_id, "seq": seq, "body": body})


def batched(packed: Sequence[Frames], limits: WireLimits) -> Iterator[Frames]:
    """Put encoded messages together in as few as the limits allow, in their order.

    Those with blobs go by themselves: their numbers would have to be written anew.
    """
    group: list[bytes] = []
    size = 0
    for frames in packed:
        head = frames[0]
        alone = len(frames) > 1
        if group and (alone or size + len(head) > limits.message_bytes or len(group) >= limits.batch_messages):
            yield _joined(group)
            group, size = [], 0
        if alone:
            yield frames
        else:
            group.append(head)
            # The batch's own map and array take less than 64 bytes.
            size += len(head) if size else len(head) + 64
    if group:
        yield _joined(group)


def _joined(maps: list[bytes]) -> Frames:
    if len(maps) == 1:
        return maps
    count = len(maps)
    header = b"\xdc" + count.to_bytes(2, "big") if 16 <= count < 1 << 16 else msgpack.Packer().pack_array_header(count)
    return [b"".join((_BATCH, header, *maps))]


def _map(message: Message) -> dict[str, Any]:
    made: dict[str, Any] = {"v": VERSION, "kind": message.kind}
    if message.id:
        made["id"] = message.id
    if message.seq:
        made["seq"] = message.seq
    if message.body:
        made["body"] = message.body
    return made


def _pack(value: dict[str, Any]) -> Frames:
    try:
        return [msgpack.packb(value)]
    except TypeError:
        return _pack_blobs(value)
    except (ValueError, OverflowError) as error:
        raise _unsendable(value, error) from error


def _pack_blobs(value: dict[str, Any]) -> Frames:
    frames = [b""]

    def blob(numbers: object) -> dict[str, Any]:
        if not isinstance(numbers, array) or numbers.typecode not in _DTYPES:
            raise TypeError(f"a {type(numbers).__name__} is nothing that msgpack has")
        frames.append(_swapped(numbers).tobytes())
        return {"blob": len(frames) - 2, "dtype": _DTYPES[numbers.typecode], "n": len(numbers)}

    try:
        frames[0] = msgpack.packb(value, default=blob)
    except (TypeError, ValueError, OverflowError) as error:
        raise _unsendable(value, error) from error
    return frames


def _unsendable(value: dict[str, Any], error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"{value['kind']}: it cannot be sent: {error}")


def _swapped(numbers: array[Any]) -> array[Any]:
    """Return the numbers in little-endian order, or from it."""
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers


# --- reading ----------------------------------------------------------------------------------------------------------


def decode(frames: Sequence[bytes], limits: WireLimits) -> list[Message]:
    """Return the messages that these frames are: one, or those of a batch. Blobs become `array.array`s.

    Raises:
        MalformedError: it is no message, or one that is beyond the limits; found before much is made of it.
        UnsupportedError: it is of another version.
    """
    if not 1 <= len(frames) <= limits.frames:
        raise MalformedError(f"{len(frames)} frames; a message has 1 to {limits.frames}")
    size = sum(map(len, frames))
    if size > limits.message_bytes:
        raise MalformedError(f"{size} bytes; a message has at most {limits.message_bytes}")
    blobs = frames[1:]
    found = _unpack(frames[0], limits)
    message = _read(found, blobs)
    if message.kind != "batch":
        return [message]
    parts = message.body.get("messages")
    if not isinstance(parts, list) or not 0 < len(parts) <= limits.batch_messages:
        most = limits.batch_messages
        raise MalformedError(f"batch: `messages` is no array of 1 to {most}" if most else "batch: only servers send it")
    made = [_read(part, blobs) for part in parts]
    if any(each.kind == "batch" for each in made):
        raise MalformedError("batch: one stands within another")
    return made


def _unpack(data: bytes, limits: WireLimits) -> Any:
    if not harmless(data):
        scan(data, limits)
    try:
        value = msgpack.unpackb(
            data,
            max_array_len=min(limits.array_items, len(data)),
            max_map_len=min(limits.map_keys, len(data)),
            object_pairs_hook=None if limits.repeated_keys else _unique,
        )
    except MalformedError:
        raise
    except (ValueError, RecursionError) as error:
        # Some of msgpack's errors have no text.
        raise MalformedError(f"not msgpack, or beyond the limits: {error or type(error).__name__}") from error
    _check_nesting(value, limits)
    return value


def _unique(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise MalformedError("a map has a key twice")
    if not set(map(type, made)) <= {str}:
        raise MalformedError("a map has a key that is no text")
    return made


def _check_nesting(value: Any, limits: WireLimits) -> None:
    """Check the depth, and that there is nothing but what JSON has, and bytes. Level by level: nothing recurses."""
    level = [value]
    for _ in range(limits.nesting + 1):
        if not level:
            return
        if not set(map(type, level)) <= _CONTAINERS:
            raise MalformedError("it is no map, or has a value of a type that messages do not have")
        level = [
            each
            for container in level
            for each in (container.values() if type(container) is dict else container)
            if type(each) not in _SCALARS
        ]
    raise MalformedError(f"nested deeper than {limits.nesting} levels")


def _read(found: Any, blobs: Sequence[bytes]) -> Message:
    """Make a message of a decoded map."""
    if type(found) is not dict:
        raise MalformedError("it is no map")
    get = found.get
    version, kind, request_id, seq, body = get("v"), get("kind"), get("id", ""), get("seq", 0), get("body")
    if type(version) is not int:
        raise MalformedError("v: missing, or no whole number: the version of the protocol")
    if type(kind) is not str or not 0 < len(kind) <= _MAX_KIND:
        raise MalformedError(f"kind: missing, or not a text of 1 to {_MAX_KIND} characters")
    if version != VERSION and kind not in _TIMELESS:
        raise UnsupportedError(f"v: version {version} is not spoken here; {VERSION} is", field="v")
    if type(request_id) is not str or len(request_id) > _MAX_ID or not request_id.isprintable():
        raise MalformedError(f"id: not a text of at most {_MAX_ID} printable characters")
    if type(seq) is not int or seq < 0:
        raise MalformedError("seq: not a whole number from 0")
    if body is None:
        body = {}
    elif type(body) is not dict:
        raise MalformedError("body: no map")
    if blobs:
        _resolve(body, blobs)
    return Message(kind, request_id, seq, body)


def _resolve(body: dict[str, Any], blobs: Sequence[bytes]) -> None:
    """Put numbers in place of the maps that stand for blobs."""
    for key in _BLOBS:
        value = body.get(key)
        if type(value) is dict and value.keys() == _STANDS:
            body[key] = _numbers(value, blobs)
    for key in _HOLDERS:
        held = body.get(key)
        for each in held if type(held) is list else (held,):
            if type(each) is dict:
                _resolve(each, blobs)


def _numbers(stand: dict[str, Any], blobs: Sequence[bytes]) -> array[Any]:
    index, dtype, count = stand["blob"], stand["dtype"], stand["n"]
    if type(index) is not int or not 0 <= index < len(blobs):
        raise MalformedError(f"blob: there is no blob {index!r:.32} among {len(blobs)}")
    typecode = _TYPECODES.get(dtype) if type(dtype) is str else None
    if typecode is None:
        raise MalformedError(f"dtype: {dtype!r:.32} is not one of {', '.join(_TYPECODES)}")
    if type(count) is not int or 4 * count != len(blobs[index]):
        raise MalformedError(f"n: blob {index} has {len(blobs[index])} bytes, which are not {count!r:.32} numbers")
    return _swapped(array(typecode, blobs[index]))
