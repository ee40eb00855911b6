"""Looking over msgpack bytes before anything is made of them.

A decoder makes room for an array when it reads its announced length, so a few bytes can ask for gigabytes; and each
byte of an array may become an object of 70. This looks at every value once and makes nothing.
"""

from __future__ import annotations

from intarsia_zmq.errors import MalformedError
from intarsia_zmq.limits import WireLimits

_FIXED, _LENGTH, _MAP, _ARRAY, _EXT, _UNUSED = range(6)

#: Frames up to so many bytes cannot become more than some megabytes, if no array or map in them can be large.
SMALL_BYTES = 1 << 16
#: The first bytes of arrays and maps with more than 15 items: those that announce their lengths.
_ANNOUNCING = (0xDC, 0xDD, 0xDE, 0xDF)
#: How many such bytes a small frame may have, as values or within texts.
_FEW = 32


def _table() -> list[tuple[int, int]]:
    """Return, for each first byte, what follows: (_FIXED, bytes), (_MAP or _ARRAY, items), or the bytes of a length."""
    table = [(_FIXED, 0)] * 256  # positive and negative fixints, nil, booleans
    for low in range(16):
        table[0x80 + low] = (_MAP, low)
        table[0x90 + low] = (_ARRAY, low)
    for low in range(32):
        table[0xA0 + low] = (_FIXED, low)
    table[0xC1] = (_UNUSED, 0)
    for first, size in ((0xC4, 1), (0xC5, 2), (0xC6, 4), (0xD9, 1), (0xDA, 2), (0xDB, 4)):
        table[first] = (_LENGTH, size)
    for first in (*range(0xC7, 0xCA), *range(0xD4, 0xD9)):
        table[first] = (_EXT, 0)
    table[0xDC] = table[0xDD] = (_ARRAY, 0)
    table[0xDE] = table[0xDF] = (_MAP, 0)
    for first, size in ((0xCA, 4), (0xCB, 8), (0xCC, 1), (0xCD, 2), (0xCE, 4), (0xCF, 8)):
        table[first] = (_FIXED, size)
    for first, size in ((0xD0, 1), (0xD1, 2), (0xD2, 4), (0xD3, 8)):
        table[first] = (_FIXED, size)
    return table


_TABLE = _table()


def harmless(data: bytes) -> bool:
    """Whether these bytes are so few, and announce so little, that a decoder with limits needs no look ahead."""
    return len(data) <= SMALL_BYTES and sum(map(data.count, _ANNOUNCING)) <= _FEW


def scan(data: bytes, limits: WireLimits) -> None:
    """Look over one msgpack value; linear in its bytes, or in `limits.values` where those are fewer.

    Raises:
        MalformedError: it is cut short, goes on after its end, is nested too deep, or has too many items.
    """
    position, values, left = 0, 0, 1
    outer: list[int] = []
    end, table = len(data), _TABLE
    while True:
        while not left:
            if not outer:
                if position > end:
                    raise _ended(position, end, limits)
                if position < end:
                    raise MalformedError(f"{end - position} bytes follow the end of the map")
                return
            left = outer.pop()
        left -= 1
        values += 1
        if position >= end or values > limits.values:
            raise _ended(position, end, limits)
        what, size = table[data[position]]
        position += 1
        if what == _FIXED:
            position += size
        elif what == _LENGTH:
            position += size + int.from_bytes(data[position : position + size], "big")
        else:
            if what in (_EXT, _UNUSED):
                raise MalformedError(f"a value at byte {position - 1} is of a type that messages do not have")
            items, wide = _items(data, position, size)
            position += wide
            outer.append(left)
            left = _checked(items, what, end - position, len(outer), limits)


def _items(data: bytes, position: int, size: int) -> tuple[int, int]:
    """Return (number of items, bytes of that number) of the array or map whose first byte is before `position`."""
    first = data[position - 1]
    if first < 0xDC:
        return size, 0
    wide = 2 if first in (0xDC, 0xDE) else 4
    return int.from_bytes(data[position : position + wide], "big"), wide


def _checked(items: int, what: int, bytes_left: int, depth: int, limits: WireLimits) -> int:
    """Return how many values an array or map holds."""
    most, name = (limits.map_keys, "map") if what == _MAP else (limits.array_items, "array")
    values = 2 * items if what == _MAP else items
    if depth > limits.nesting:
        raise MalformedError(f"nested deeper than {limits.nesting} levels")
    if items > most:
        raise MalformedError(f"one {name} announces {items} items; at most {most} are taken")
    if values > bytes_left:
        raise MalformedError(f"cut short: one {name} announces {items} items and {bytes_left} bytes follow")
    return values


def _ended(position: int, end: int, limits: WireLimits) -> MalformedError:
    if position >= end:
        return MalformedError(f"cut short after {end} bytes")
    return MalformedError(f"more than {limits.values} values in one message; long arrays of numbers go as blobs")
