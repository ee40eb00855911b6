"""Detokenizing equals the tokenizers library's one-shot decode, for every kind of decoder and any ids."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models

from intarsia.errors import CheckpointError
from intarsia.text import Tokenizer as TextTokenizer
from intarsia.types import TokenizerSpec

_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_WORDS = [
    "",
    "▁",
    "▁▁",
    "▁x",
    "▁Hello",
    "x",
    " ",
    "  y ",
    "你",
    "é",
    "\ufffd",
    "<0xZZ>",
    "##ing",
    "end</w>",
    "</w>",
    ".",
    " n't",
]
_STANDS = "".join(chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 324)])
_SPECIAL = ["<s>", "</s>"]
_VOCABULARY = list(dict.fromkeys([*_SPECIAL, *_WORDS, *_BYTES, *_STANDS, "ĠHello", "ðŁĺ", "▁<s>"]))
_NEWLINE = _VOCABULARY.index("<0x0A>")

_LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_DECODERS = {
    "none": None,
    "byte level": decoders.ByteLevel(),
    "metaspace": decoders.Metaspace(),
    "metaspace that never strips": decoders.Metaspace(prepend_scheme="never"),
    "gemma": decoders.Sequence(_LLAMA),
    "llama": decoders.Sequence([*_LLAMA, decoders.Strip(" ", 1, 0)]),
    "nested, two leading characters": decoders.Sequence(
        [decoders.Sequence(_LLAMA), decoders.Replace("x", " "), decoders.Strip(" ", 2, 0)]
    ),
    "byte fallback, metaspace": decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    "metaspace, fuse": decoders.Sequence([decoders.Metaspace(), decoders.Fuse()]),
    "strip of each token": decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Strip(" ", 1, 0)]),
    "word pieces": decoders.WordPiece(cleanup=True),
    "bpe": decoders.BPEDecoder(),
}
_IDS = st.lists(
    st.one_of(
        st.integers(0, len(_VOCABULARY) - 1),
        st.sampled_from([_VOCABULARY.index(token) for token in [*_SPECIAL, *_WORDS]]),
        st.sampled_from([_VOCABULARY.index(f"<0x{byte:02X}>") for byte in (0x0A, 0xE4, 0xBD, 0xA0, 0xF0, 0x9F, 0xFF)]),
    ),
    max_size=40,
)


def _backend(decoder: object) -> Tokenizer:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(_VOCABULARY)}, unk_token="x"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    if decoder is not None:
        backend.decoder = decoder
    return backend


_BACKENDS = {name: _backend(decoder) for name, decoder in _DECODERS.items()}
_TOKENIZERS = {name: TextTokenizer.from_spec(TokenizerSpec(backend.to_str())) for name, backend in _BACKENDS.items()}


def _ids(*tokens: str) -> list[int]:
    return [_VOCABULARY.index(token) for token in tokens]


def _stream(tokenizer: TextTokenizer, ids: list[int], *, skip: bool = True, width: int = 1) -> list[str]:
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    return [detokenizer.push(ids[i : i + width]) for i in range(0, len(ids), width)] + [detokenizer.finish()]


@pytest.mark.parametrize("name", _DECODERS)
@settings(max_examples=300, deadline=None)
@given(ids=_IDS, skip=st.booleans(), width=st.integers(1, 5))
def test_joined_deltas_equal_the_librarys_decode_for_any_ids(name, ids, skip, width):
    expected = _BACKENDS[name].decode(ids, skip_special_tokens=skip)
    assert "".join(_stream(_TOKENIZERS[name], ids, skip=skip, width=width)) == expected
    assert _TOKENIZERS[name].decode(ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("stop", [1, 2])
def test_trailing_characters_are_cut_only_where_the_text_ends(stop):
    decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 0, stop)])
    backend = _backend(decoder)
    tokenizer = TextTokenizer.from_spec(TokenizerSpec(backend.to_str()))
    for ids in ([*_ids(" ", "x", " ", " ", "x", " ")], [*_ids("x", "  y ", " ")], _ids("x")):
        assert "".join(_stream(tokenizer, ids)) == backend.decode(ids)
    assert tokenizer.decode([]) == tokenizer.decode(_ids("")) == ""  # where the library itself panics


@settings(max_examples=500)
@given(data=st.binary(max_size=40))
def test_any_bytes_decode_as_rusts_lossy_utf_8_with_byte_level_tokens(data):
    stands = {byte: _STANDS[n] for n, byte in enumerate([*range(33, 127), *range(161, 173), *range(174, 256)])}
    stands |= {byte: chr(256 + n) for n, byte in enumerate(byte for byte in range(256) if byte not in stands)}
    ids = _ids(*(stands[byte] for byte in data))
    assert "".join(_stream(_TOKENIZERS["byte level"], ids)) == _BACKENDS["byte level"].decode(ids)


def test_the_leading_space_of_the_whole_is_stripped_once_and_no_other():  # D04
    vocabulary = {"▁": 0, "▁leading": 1, "▁x": 2, "<unk>": 3}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = TextTokenizer.from_spec(TokenizerSpec(backend.to_str()))
    assert _stream(tokenizer, [0, 1, 2]) == ["", " leading", " x", ""]
    assert tokenizer.decode([0, 1, 2]) == " leading x"
    assert tokenizer.decode([1, 2]) == "leading x"


def test_a_skipped_special_token_does_not_count_as_the_first():
    ids = _ids("<s>", "▁Hello", "▁x")
    assert "".join(_stream(_TOKENIZERS["metaspace"], ids)) == "Hello x"
    assert "".join(_stream(_TOKENIZERS["metaspace"], ids, skip=False)) == "<s> Hello x"


def test_an_old_metaspace_definition_without_a_prepend_scheme_is_read():
    definition = json.loads(_BACKENDS["metaspace"].to_str())
    definition["decoder"] = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": True}
    assert TextTokenizer.from_spec(TokenizerSpec(json.dumps(definition))).decode(_ids("▁x", "▁x")) == "x x"


def test_an_invalid_byte_is_released_at_once():
    deltas = _stream(_TOKENIZERS["llama"], _ids("<0xE4>", "<0xFF>", "<0xE4>", "x"))
    assert deltas == ["", "\ufffd\ufffd", "\ufffd", "x", ""]
    deltas = _stream(_TOKENIZERS["byte level"], _ids("ä", "ä", "½", "ł", "x"))  # E4, then E4 BD and an E5
    assert [len(delta) for delta in deltas] == [0, 1, 0, 1 if deltas[3] else 0, len(deltas[4]), len(deltas[5])]
    assert deltas[1] == "\ufffd"


def test_a_long_run_of_valid_bytes_is_released_within_its_bound():
    ids = _ids(*[f"<0x{byte:02X}>" for byte in "你".encode()] * 200)
    deltas = _stream(_TOKENIZERS["llama"], ids)
    held = 0
    for shown, delta in enumerate(deltas[:-1], start=1):
        held = 0 if delta else held + 1
        assert held < 70, shown
    assert "".join(deltas) == "你" * 200


def test_half_a_character_at_the_end_is_delivered_by_finish():
    deltas = _stream(_TOKENIZERS["byte level"], _ids("x", "ä", "½"))
    assert deltas == ["x", "", "", "\ufffd"]


def test_peek_shows_what_finish_would_and_changes_nothing():
    detokenizer = _TOKENIZERS["llama"].detokenizer()
    assert detokenizer.push(_ids("x", "<0x0A>")) == "x"
    assert detokenizer.peek() == detokenizer.peek() == "\n"
    assert detokenizer.push(_ids("<0xFF>")) == "\ufffd\ufffd"
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["byte level", "llama", "metaspace"])
def test_work_a_token_does_not_grow_with_the_text(name):
    tokenizer = _TOKENIZERS[name]
    ids = _ids("▁Hello", "<0xE4>", "x", "ðŁĺ") * 10_000

    def seconds(count: int) -> float:
        start = time.thread_time()  # others run on this machine
        _stream(tokenizer, ids[:count])
        return (time.thread_time() - start) / count

    seconds(1000)
    assert seconds(len(ids)) < 10 * min(seconds(1000) for _ in range(5))
    assert min(seconds(4000) for _ in range(5)) < 50e-6  # about 3 microseconds on an idle core


@pytest.mark.parametrize(
    ("decoder", "named"),
    [
        (decoders.CTC(), "'CTC'"),
        (decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]), "'Metaspace' after the tokens are joined"),
        (decoders.Sequence([decoders.ByteLevel(), decoders.Replace("ab", "c")]), "'Replace' after"),
    ],
)
def test_a_decoder_that_cannot_stream_is_refused_by_name(decoder, named):
    with pytest.raises(CheckpointError, match=named):
        TextTokenizer.from_spec(TokenizerSpec(_backend(decoder).to_str()))
