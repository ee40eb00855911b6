"""Which beginnings of prompts a replica has seen: chained digests of blocks of bytes.

No model is needed for it. A prompt is written as bytes in one way only, and cut into blocks of a fixed size; the digest
of a block covers all before it, and the salt, as the page hashes of a prefix cache do (Kwon et al. 2023; the radix tree
of Zheng et al. 2024 says the same of tokens). Two prompts share a leading block where they share its bytes and all
bytes before them.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, cast

import attrs
from attrs import define, field, frozen

from intarsia.types import Chat, Prompt

_DIGEST_BYTES = 16
#: A token id is written as four bytes, and a token of text has about four.
BYTES_PER_TOKEN = 4


@frozen
class Prefix:
    """A prompt as far as its placement is concerned.

    Attributes:
        tokens: about how many it has.
        blocks: digests of its whole blocks, from the first on.
    """

    tokens: int
    blocks: tuple[bytes, ...] = ()


def read_prefix(prompt: Prompt, salt: str, block_bytes: int, most: int) -> Prefix:
    """Return a prompt's beginning.

    Args:
        prompt: text, ids or a chat, as they come over the wire.
        salt: requests of other salts share nothing.
        block_bytes: of one block.
        most: blocks; what follows is not looked at.
    """
    num_bytes = block_bytes * most
    kind, size, data = b"t", 0, bytearray()
    if isinstance(prompt, str):
        size = len(prompt)
        data += prompt[:num_bytes].encode("utf-8", "surrogatepass")
    elif isinstance(prompt, Chat):
        kind = b"c"
        for said in _written(prompt):
            size += len(said)
            if len(data) < num_bytes:
                data += said
    else:
        kind, size = b"i", BYTES_PER_TOKEN * len(prompt)
        ids = cast("Sequence[int]", prompt[: num_bytes // BYTES_PER_TOKEN])
        data += array("i", ids).tobytes()
    chain = blake2b(kind + salt.encode("utf-8", "surrogatepass"), digest_size=_DIGEST_BYTES).digest()
    blocks = []
    for begin in range(0, min(len(data), num_bytes) - block_bytes + 1, block_bytes):
        chain = blake2b(data[begin : begin + block_bytes], digest_size=_DIGEST_BYTES, key=chain).digest()
        blocks.append(chain)
    return Prefix(size // BYTES_PER_TOKEN, tuple(blocks))


def _written(chat: Chat) -> Iterator[bytes]:
    """Write what a template prints before the messages, then these one by one: a longer chat goes on where it was."""
    rest = attrs.asdict(chat, recurse=False)
    for name in ("messages", "continue_final_message", "add_generation_prompt"):  # the last two change the end alone
        del rest[name]
    yield _json(rest)
    yield from map(_json, chat.messages)


def _json(said: Mapping[str, Any]) -> bytes:
    # A third party's template variable may be something that JSON cannot say: its name will do.
    return json.dumps(said, sort_keys=True, separators=(",", ":"), default=str).encode()


@define(eq=False)
class Seen:
    """The blocks that one replica was sent, the longest unused of which are forgotten first.

    Attributes:
        limit: how many are remembered. More than the replica's own cache holds would be wishful.
    """

    limit: int
    _blocks: OrderedDict[bytes, None] = field(factory=OrderedDict, init=False)

    def __len__(self) -> int:
        return len(self._blocks)

    def count(self, prefix: Prefix) -> int:
        """Return how many of a prompt's leading blocks are remembered."""
        blocks = self._blocks
        for number, block in enumerate(prefix.blocks):
            if block not in blocks:
                return number
        return len(prefix.blocks)

    def add(self, prefix: Prefix) -> None:
        """Remember a prompt."""
        blocks = self._blocks
        # From the last on: without its beginning an end is of no use, so ends go first.
        for block in reversed(prefix.blocks):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.limit:
            blocks.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the replica began anew."""
        self._blocks.clear()
