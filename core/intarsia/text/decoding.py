"""The `decoder` of a tokenizer.json as steps that run while tokens come in.

A decoder of the tokenizers library maps the whole list of a text's tokens to text. Decoding a window of the last
tokens, as servers commonly do, is right only where the window's text does not depend on what surrounds it; leading
spaces, byte runs and invalid bytes make it wrong. So each kind of decoder is a step here that says, as data, what it
still has to remember: the joined output is the library's own for any sequence of tokens, in constant work a token.

A step is a pure function (state, pieces, final) -> (pieces, state), where `final` says that nothing follows. States are
values, so that a step can be tried (`Detokenizer.peek`) without consequences.

The meaning of each step is that of `decode_chain` in tokenizers' src/decoders, src/pre_tokenizers/{byte_level,
metaspace}.rs; tests hold the two equal.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from attrs import define, field, frozen
from tokenizers import Regex, decoders

from intarsia.errors import CheckpointError

REPLACEMENT = "\ufffd"
# What `inside` puts around a piece: a word that no decoder changes, besides a space that it may put before it.
_WORD = "abc"

#: Bytes that a run of byte tokens may hold back. Longer runs are released while they are valid.
LONGEST_BYTE_RUN = 64

State = TypeVar("State")


class Step(Protocol[State]):
    """One decoder of the chain."""

    def begin(self) -> State:
        """Return the state before the first token."""
        ...

    def run(self, state: State, pieces: Sequence[str], final: bool, /) -> tuple[Sequence[str], State]:
        """Return what is settled once `pieces` have come, and the state after it. Nothing stays back if `final`."""
        ...


@frozen(eq=False)
class EachPiece(Step[bool]):
    """Maps pieces one by one; the first of a text may be another case. The state: whether it has passed."""

    later: Callable[[str], str]
    first: Callable[[str], str]

    def begin(self) -> bool:
        return False

    def run(self, state: bool, pieces: Sequence[str], _final: bool) -> tuple[Sequence[str], bool]:
        if state or not pieces:
            return [self.later(piece) for piece in pieces], state
        return [self.first(pieces[0]), *(self.later(piece) for piece in pieces[1:])], True


@frozen
class EndOfWord(Step[str | None]):
    """BPE with an end-of-word suffix: a space in its place, nothing at the end. The state: the last piece."""

    suffix: str

    def begin(self) -> str | None:
        return None

    def run(self, state: str | None, pieces: Sequence[str], final: bool) -> tuple[Sequence[str], str | None]:
        known = ([] if state is None else [state]) + list(pieces)
        if not known:
            return [], None
        *before, last = known
        settled = [piece.replace(self.suffix, " ") for piece in before]
        return ([*settled, last.replace(self.suffix, "")], None) if final else (settled, last)


@frozen
class ByteRun:
    """Byte tokens since the last other one.

    Attributes:
        text: the whole characters of the run that are held back.
        tail: bytes of a character that is not complete.
        broken: the run is invalid, so each of its bytes is U+FFFD.
    """

    text: str = ""
    tail: bytes = b""
    broken: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.text.encode()) + len(self.tail)


class ByteFallback(Step[ByteRun]):
    """Runs of byte tokens `<0x0A>`: UTF-8 if all of a run is valid, else U+FFFD for each of its bytes.

    A later byte can spoil a run's earlier characters, so a run is held until it ends, turns invalid, or reaches
    LONGEST_BYTE_RUN. Past that only the part still held can be spoilt: there alone this is not the library's output.
    """

    # Rust's number parser takes a sign as well.
    BYTE = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")

    def begin(self) -> ByteRun:
        return ByteRun()

    def run(self, state: ByteRun, pieces: Sequence[str], final: bool) -> tuple[Sequence[str], ByteRun]:
        out: list[str] = []
        for piece in pieces:
            if match := self.BYTE.fullmatch(piece):
                state = self._grow(state, bytes([int(match[1], 16)]), out)
            else:
                state = self._end(state, out)
                out.append(piece)
        return (out, self._end(state, out)) if final else (out, state)

    def _grow(self, run: ByteRun, byte: bytes, out: list[str]) -> ByteRun:
        if run.broken:
            out.append(REPLACEMENT)
            return run
        try:
            text, used = codecs.utf_8_decode(run.tail + byte, "strict", False)
        except UnicodeDecodeError:
            out.extend(REPLACEMENT * (run.num_bytes + 1))
            return ByteRun(broken=True)
        run = ByteRun(run.text + text, (run.tail + byte)[used:])
        if run.num_bytes < LONGEST_BYTE_RUN:
            return run
        out.append(run.text)
        return ByteRun(tail=run.tail)

    def _end(self, run: ByteRun, out: list[str]) -> ByteRun:
        if run.tail:
            out.extend(REPLACEMENT * run.num_bytes)
        elif run.text:
            out.append(run.text)
        return ByteRun()


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes (Radford et al. 2019, `bytes_to_unicode`), reversed."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@define(eq=False)
class ByteLevel(Step[bytes]):
    """Pieces written in GPT-2's stand-ins for bytes. The state: the bytes of a character that is not complete."""

    _byte_of: dict[str, int] = field(factory=_byte_of_character, init=False)
    _bytes_of: dict[str, bytes] = field(factory=dict, init=False)

    def begin(self) -> bytes:
        return b""

    def run(self, state: bytes, pieces: Sequence[str], final: bool) -> tuple[Sequence[str], bytes]:
        data = state + b"".join(map(self.encoded, pieces))
        text, used = codecs.utf_8_decode(data, "replace", final)
        return [text], data[used:]

    def encoded(self, piece: str) -> bytes:
        """Return the bytes that a piece stands for."""
        # Pieces are entries of the vocabulary, which bounds the cache.
        if (known := self._bytes_of.get(piece)) is not None:
            return known
        try:
            encoded = bytes(self._byte_of[character] for character in piece)
        except KeyError:  # an added token, written as it is
            encoded = piece.encode()
        self._bytes_of[piece] = encoded
        return encoded


@frozen
class Edge:
    """How many leading characters may still be cut, and the trailing ones that are cut if nothing follows."""

    to_cut: int
    held: str = ""


@frozen
class StripText(Step[Edge]):
    """Cuts up to `start` leading and `stop` trailing `content` characters of the whole text."""

    content: str
    start: int
    stop: int

    def begin(self) -> Edge:
        return Edge(self.start)

    def run(self, state: Edge, pieces: Sequence[str], final: bool) -> tuple[Sequence[str], Edge]:
        text, to_cut = "".join(pieces), state.to_cut
        if text and to_cut:
            rest = text[:to_cut].lstrip(self.content) + text[to_cut:]
            to_cut = to_cut - (len(text) - len(rest)) if not rest else 0
            text = rest
        text = state.held + text
        num_held = min(self.stop, len(text) - len(text.rstrip(self.content)))
        keep = len(text) - num_held
        return [text[:keep]], Edge(to_cut, "" if final else text[keep:])


class Decoding:
    """The whole chain of a tokenizer. Shared by its sequences; what one sequence has seen is in its states."""

    def __init__(self, definition: Mapping[str, Any] | None) -> None:
        """Read the `decoder` of a tokenizer.json, as the library writes it.

        Raises:
            CheckpointError: it has a kind of decoder, or an order of them, that cannot run while tokens come in.
        """
        self._steps: tuple[Step[Any], ...] = tuple(_steps(definition))

    def begin(self) -> tuple[Any, ...]:
        """Return the states before the first token."""
        return tuple(step.begin() for step in self._steps)

    def run(self, states: tuple[Any, ...], pieces: Sequence[str], *, final: bool) -> tuple[str, tuple[Any, ...]]:
        """Return the text that is settled once `pieces` have come, and the states after it."""
        after = []
        for step, state in zip(self._steps, states, strict=True):
            pieces, state = step.run(state, pieces, final)
            after.append(state)
        return "".join(pieces), tuple(after)

    def inside(self, piece: str) -> str:
        """Return the text that a piece adds between two words: with its spaces, half a character as U+FFFD."""
        before, after = self._whole(_WORD), self._whole(_WORD, _WORD)
        return self._whole(_WORD, piece, _WORD).removeprefix(before).removesuffix(after.removeprefix(before))

    def _whole(self, *pieces: str) -> str:
        return self.run(self.begin(), pieces, final=True)[0]

    def raw_bytes(self, piece: str) -> bytes | None:
        """Return the bytes of a piece that need not be a text of its own; None where the chain has no such pieces."""
        for step in self._steps:
            if isinstance(step, ByteLevel):
                return step.encoded(piece)
            if isinstance(step, ByteFallback) and (match := step.BYTE.fullmatch(piece)):
                return bytes([int(match[1], 16)])
        return None


def _steps(definition: Mapping[str, Any] | None) -> Iterable[Step[Any]]:
    if definition is None:  # the library joins the tokens with spaces
        yield EachPiece(later=lambda piece: f" {piece}", first=lambda piece: piece)
        return
    fused = False  # whether the steps so far made one piece of the whole text
    for one in _flat(definition):
        kind = one["type"]
        if kind == "Fuse":
            fused = True
        elif fused:
            yield _text_step(one)
        elif kind == "ByteLevel":
            yield ByteLevel()
            fused = True
        else:
            yield _piece_step(one)


def _flat(definition: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
    if definition["type"] != "Sequence":
        yield definition
        return
    for one in definition["decoders"]:
        yield from _flat(one)


def _piece_step(one: Mapping[str, Any]) -> Step[Any]:
    """Return the step of a decoder that sees tokens."""
    match one:
        case {"type": "ByteFallback"}:
            return ByteFallback()
        case {"type": "BPEDecoder", "suffix": suffix}:
            return EndOfWord(suffix)
        case {"type": "Metaspace", "replacement": mark, "prepend_scheme": scheme}:
            return _by_library(decoders.Metaspace(replacement=mark, prepend_scheme=scheme))
        case {"type": "WordPiece", "prefix": prefix, "cleanup": cleanup}:
            return _by_library(decoders.WordPiece(prefix=prefix, cleanup=cleanup))
        case {"type": "Replace", "pattern": pattern, "content": content}:
            old = Regex(pattern["Regex"]) if "Regex" in pattern else pattern["String"]
            return _by_library(decoders.Replace(old, content))
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            strip = StripText(content, start, stop)

            def stripped(piece: str) -> str:
                return "".join(strip.run(strip.begin(), [piece], True)[0])

            return EachPiece(later=stripped, first=stripped)
    raise _unknown(one)


def _text_step(one: Mapping[str, Any]) -> Step[Any]:
    """Return the step of a decoder that sees the whole text as one piece, of which it is shown parts."""
    match one:
        case {"type": "Strip", "content": content, "start": start, "stop": stop}:
            return StripText(content, start, stop)
        case {"type": "Replace", "pattern": {"String": old}, "content": new} if len(old) == 1:

            def replaced(part: str) -> str:
                return part.replace(old, new)

            return EachPiece(later=replaced, first=replaced)
    raise _unknown(one, " after the tokens are joined")


def _by_library(decoder: Any) -> EachPiece:
    """Let the library's own decoder do it, for decoders that look at one token and whether it is the first."""

    @lru_cache(maxsize=2**16)
    def first(piece: str) -> str:
        return str(decoder.decode([piece]))

    @lru_cache(maxsize=2**16)
    def later(piece: str) -> str:
        return str(decoder.decode(["", piece])).removeprefix(prefix)

    prefix = first("")
    return EachPiece(later=later, first=first)


def _unknown(one: Mapping[str, Any], where: str = "") -> CheckpointError:
    return CheckpointError(
        f"tokenizer.decoder: {one['type']!r}{where} is not known here. Known: BPEDecoder, ByteFallback, ByteLevel, "
        "Fuse, Metaspace, Replace, Sequence, Strip, WordPiece; after Fuse or ByteLevel only Strip, and Replace of one "
        "character",
        field="tokenizer.decoder",
    )
