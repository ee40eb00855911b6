"""Names for what full pages hold: a chain of digests, so that a name stands for all tokens up to the page's end."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence


def root(salt: str) -> bytes:
    """Return the name of the empty prefix under a salt. Prefixes of different salts never meet."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, person=b"intarsia.salt").digest()


def extend(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the name of a prefix that goes on from `parent` with one page of tokens."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=32, person=b"intarsia.page").digest()


def names(token_ids: Sequence[int], page_size: int, salt: str) -> Iterator[bytes]:
    """Yield the name of each full page of a sequence, in order."""
    name = root(salt)
    for start in range(0, len(token_ids) - page_size + 1, page_size):
        name = extend(name, token_ids[start : start + page_size])
        yield name
