"""The text of a running sequence: characters whole, stop strings found, the ids that count reported."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from intarsia.text import TextStream
from intarsia.text import Tokenizer as TextTokenizer
from intarsia.types import SamplingParams, TokenizerSpec

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_TOKENS = ["<eos>", "ABC", "DEF", "GH", "I", "J", "▁Hello", ".", "!", "日本", *_BYTES]


def _tokenizer() -> TextTokenizer:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(_TOKENS)}, unk_token="."))
    backend.add_special_tokens([AddedToken("<eos>", special=True)])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer.from_spec(TokenizerSpec(backend.to_str(), eos_ids=(0,)))


_TOKENIZER = _tokenizer()


def _ids(*tokens: str) -> list[int]:
    return [_TOKENS.index(token) for token in tokens]


def _utf8(text: str) -> list[int]:
    return _ids(*(f"<0x{byte:02X}>" for byte in text.encode()))


def _run(ids: list[int], width: int = 1, **params: object) -> tuple[list[str], int | None, bool]:
    """Push ids `width` at a time; return the deltas, how many ids count, and whether a stop string ended the text."""
    stream = TextStream.open(_TOKENIZER, SamplingParams(**params))
    deltas = []
    for start in range(0, len(ids), width):
        text, kept = stream.push(ids[start : start + width])
        deltas.append(text)
        if kept is not None:
            assert stream.stopped
            return [*deltas, stream.finish()], start + kept, True
    deltas.append(stream.finish())
    return deltas, None, stream.stopped


_ALPHABET = _ids("ABC", "DEF", "GH", "I", "J")


@pytest.mark.parametrize("width", [1, 2, 5])
@pytest.mark.parametrize(
    ("stop", "include", "text", "kept"),
    [
        ("DEFGHIJ", False, "ABC", 5),
        ("CDE", False, "AB", 2),
        ("DEFGHIX", False, "ABCDEFGHIJ", None),
        ("DEFGHIJ", True, "ABCDEFGHIJ", 5),
        ("EFG", True, "ABCDEFG", 3),
        (("J", "GHI", "ZZ"), False, "ABCDEF", 4),
    ],
)
def test_a_stop_string_across_tokens_ends_the_text(width, stop, include, text, kept):  # T01
    deltas, counted, stopped = _run(_ALPHABET, width, stop=stop, include_stop=include)
    assert ("".join(deltas), counted, stopped) == (text, kept, kept is not None)


def test_no_delta_shows_the_beginning_of_a_stop_string():  # T01
    deltas, _, _ = _run(_ALPHABET, stop="DEFGHIJ")
    assert not set("".join(deltas)) & set("DEFGHIJ")
    assert _run(_ids("ABC", "DEF", "GH", "!"), stop="DEFGHIJ")[0] == ["ABC", "", "", "DEFGH!", ""]


def test_held_back_text_is_flushed_when_the_sequence_ends_by_length_or_a_stop_token():
    assert _run(_ids("ABC", "DEF"), stop="CDEFG") == (["AB", "", "CDEF"], None, False)


def test_a_stop_token_that_is_kept_shows_its_text_unless_special_tokens_are_skipped():  # T03
    ids = _ids("▁Hello", ".", "<eos>")
    assert "".join(_run(ids, skip_special_tokens=False, include_stop=True)[0]) == "Hello.<eos>"
    assert "".join(_run(ids, include_stop=True)[0]) == "Hello."
    assert "".join(_run(ids[:2])[0]) == "Hello."


def test_ids_after_the_stop_are_not_counted():  # X01
    stream = TextStream.open(_TOKENIZER, SamplingParams(stop="F"))
    assert stream.push(_ids("ABC")) == ("ABC", None)
    assert stream.push(_ids("GH", "DEF", "I", "J")) == ("GHDE", 2)
    assert stream.stopped
    assert stream.finish() == ""


@pytest.mark.parametrize("width", [1, 3])
def test_a_stop_string_that_is_a_byte_token_stops_at_that_token(width):
    """Llama 2 spells a newline as a byte, which the detokenizer holds back: the next byte could spoil it."""
    ids = [*_ids("ABC"), *_utf8("\n"), *_ids("DEF")]
    assert _run(ids, width, stop="\n") == ([*["ABC", "", ""][: 3 if width == 1 else 1], *[""] * (width == 3)], 2, True)
    assert "".join(_run([*_ids("ABC"), *_utf8("😀"), *_ids("DEF")], width, stop="😀")[0]) == "ABC"
    assert _run([*_ids("ABC"), *_utf8("😀"), *_ids("DEF")], width, stop="😀")[1] == 5


def test_a_character_that_is_not_whole_yet_is_no_replacement_character_to_stop_at():
    ids = [*_ids("ABC"), *_utf8("😀"), *_ids("DEF")]
    assert _run(ids, stop="\ufffd") == (["ABC", "", "", "", "", "😀DEF", ""], None, False)


def test_half_a_character_at_the_end_may_complete_a_stop_string_in_finish():
    deltas, kept, stopped = _run([*_ids("ABC"), *_utf8("😀")[:2]], stop="\ufffd")
    assert ("".join(deltas), kept, stopped) == ("ABC", None, True)


def test_characters_of_several_tokens_come_whole():  # D01
    deltas, _, _ = _run([*_ids("▁Hello"), *_utf8("👨\u200d👩\u200d👧"), *_ids("!")])
    assert "".join(deltas) == "Hello👨\u200d👩\u200d👧!"
    assert not any("\ufffd" in delta for delta in deltas)


_RANDOM = st.lists(st.integers(0, len(_TOKENS) - 1) | st.integers(0, 20), max_size=20)


@settings(max_examples=500, deadline=None)
@given(ids=_RANDOM, width=st.integers(1, 6), stop=st.lists(st.text("ABCDEF\n\x01", min_size=1, max_size=4), max_size=3))
def test_pushing_several_ids_at_once_gives_what_pushing_them_singly_gives(ids, width, stop):
    one, several = _run(ids, 1, stop=stop), _run(ids, width, stop=stop)
    assert "".join(one[0]) == "".join(several[0])
    assert one[1:] == several[1:]


@settings(max_examples=500, deadline=None)
@given(ids=_RANDOM, stop=st.lists(st.text("ABCDEF\n\x01", min_size=1, max_size=4), max_size=3))
def test_the_text_is_the_decoded_ids_that_count_cut_at_the_stop_string(ids, stop):
    deltas, kept, stopped = _run(ids, stop=stop)
    whole = _TOKENIZER.decode(ids[:kept])
    assert whole.startswith("".join(deltas))
    assert stopped == any(text in whole for text in stop)
    if not stopped:
        assert "".join(deltas) == whole
    if kept:
        assert not any(text in _TOKENIZER.decode(ids[: kept - 1]) for text in stop)


@settings(max_examples=200, deadline=None)
@given(ids=_RANDOM, skip=st.booleans())
def test_without_stop_strings_the_text_is_the_decoded_ids(ids, skip):
    deltas, kept, stopped = _run(ids, 3, skip_special_tokens=skip)
    assert "".join(deltas) == _TOKENIZER.decode(ids, skip_special_tokens=skip)
    assert (kept, stopped) == (None, False)
