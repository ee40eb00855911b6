"""Log-probabilities over the wire: maps where they are few, columns of numbers where they are many."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from intarsia.types import TokenLogprobs
from intarsia_zmq.errors import MalformedError

#: Numbers and ids from so many on travel as blobs.
BLOB_ITEMS = 256

Written: TypeAlias = list[dict[str, Any]] | dict[str, Any]


def write_ids(token_ids: Sequence[int]) -> Sequence[int]:
    """Return ids as a message has them: an array, which travels as a blob, where they are many."""
    return token_ids if len(token_ids) < BLOB_ITEMS else array("i", token_ids)


def write_logprobs(entries: Sequence[TokenLogprobs]) -> Written:
    """Return the entries as an array of maps, or as columns from `BLOB_ITEMS` numbers on, if these have as many
    likeliest tokens each.
    """
    tops = len(entries[0].top) if entries else 0
    if len(entries) * (1 + tops) >= BLOB_ITEMS and all(len(entry.top) == tops for entry in entries):
        return {
            "token_ids": array("i", [entry.token_id for entry in entries]),
            "logprobs": array("f", [entry.logprob for entry in entries]),
            "top": tops,
            "top_ids": array("i", [token for entry in entries for token, _ in entry.top]),
            "top_logprobs": array("f", [logprob for entry in entries for _, logprob in entry.top]),
        }
    return [
        {"token_id": entry.token_id, "logprob": entry.logprob, "top": entry.top}
        if entry.top
        else {"token_id": entry.token_id, "logprob": entry.logprob}
        for entry in entries
    ]


def read_logprobs(written: Any, path: str) -> tuple[TokenLogprobs, ...]:
    """Return the entries.

    Raises:
        MalformedError: they are not as the page says.
    """
    if not written:
        return ()
    try:
        if isinstance(written, Mapping):
            return _from_columns(written)
        return tuple(
            TokenLogprobs(each["token_id"], each["logprob"], tuple((token, p) for token, p in each.get("top", ())))
            for each in written
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MalformedError(f"{path}: not an array of maps, nor columns: {error}", field=path) from error


def _from_columns(columns: Mapping[str, Any]) -> tuple[TokenLogprobs, ...]:
    token_ids, logprobs, tops = columns["token_ids"], columns["logprobs"], columns["top"]
    pairs = list(zip(columns["top_ids"], columns["top_logprobs"], strict=True))
    if type(tops) is not int or len(pairs) != tops * len(token_ids):
        raise ValueError(f"{len(pairs)} likeliest are not {tops!r:.32} a token of {len(token_ids)}")
    return tuple(
        TokenLogprobs(token, logprob, tuple(pairs[i * tops : (i + 1) * tops]))
        for i, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True))
    )
