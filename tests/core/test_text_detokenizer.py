"""Text as it comes: the one-shot decode however ids are split, whole characters, little held back, in little time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from intarsia.text import TextStream
from intarsia.text import Tokenizer as TextTokenizer
from intarsia.text.decoding import LONGEST_BYTE_RUN
from intarsia.types import SamplingParams, TokenizerSpec
from smollm import smollm_tokenizer

_FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_STANDS = [chr(code) for code in [*range(33, 127), *range(161, 173), *range(174, 324)]]
_WORDS = ["▁", "▁Hello", "x", "你", "é", "##ing", "end</w>", ".", " ", "  ", "</w>", "ðŁĺ"]
_TOKENS = list(dict.fromkeys(["<s>", *_WORDS, *_BYTES, *_STANDS]))
_SPM = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
#: Decoder, and the most tokens in a row that may be held back.
_DECODERS = {
    "byte level": (decoders.ByteLevel(), 3),
    "llama": (decoders.Sequence([*_SPM, decoders.Strip(" ", 1, 0)]), LONGEST_BYTE_RUN + 1),
    "gemma": (decoders.Sequence(_SPM), LONGEST_BYTE_RUN),
    "metaspace": (decoders.Metaspace(), 1),
    "word pieces": (decoders.WordPiece(cleanup=True), 1),
    "bpe": (decoders.BPEDecoder(), 1),
    "none": (None, 1),
}


def _tokenizer(decoder: object) -> tuple[TextTokenizer, Tokenizer]:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(_TOKENS)}, unk_token="x"))
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    if decoder is not None:
        backend.decoder = decoder
    return TextTokenizer.from_spec(TokenizerSpec(backend.to_str())), backend


_TOKENIZERS = {name: _tokenizer(decoder) for name, (decoder, _) in _DECODERS.items()}


@pytest.fixture(scope="module")
def smol():
    return smollm_tokenizer()


def _deltas(tokenizer: TextTokenizer, ids: list[int], **params: object) -> list[str]:
    stream = TextStream.open(tokenizer, SamplingParams(**params))
    return [stream.push((one,))[0] for one in ids] + [stream.finish()]


# --- any ids ----------------------------------------------------------------------------------------------------------

_UTF8 = st.text(max_size=4).map(lambda text: [_TOKENS.index(f"<0x{byte:02X}>") for byte in text.encode()])
_ANY = st.lists(st.integers(0, len(_TOKENS) - 1) | st.integers(0, len(_WORDS)), max_size=4)
_IDS = st.lists(_UTF8 | _ANY, max_size=12).map(lambda lists: [one for several in lists for one in several])


@pytest.mark.parametrize("name", _DECODERS)
@settings(max_examples=250, deadline=None)
@given(ids=_IDS.filter(bool), splits=st.lists(st.integers(0, 6), max_size=40), skip=st.booleans())
def test_text_is_the_one_shot_decode_however_ids_are_split(name, ids, splits, skip):
    tokenizer, backend = _TOKENIZERS[name]
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    deltas, rest = [], list(ids)
    for width in splits:  # of no ids too
        deltas.append(detokenizer.push(rest[:width]))
        rest = rest[width:]
        assert backend.decode(ids, skip_special_tokens=skip).startswith("".join(deltas))
    deltas += [detokenizer.push(rest), detokenizer.finish()]
    assert "".join(deltas) == backend.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("name", ["byte level", "llama", "gemma"])
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=12))
def test_no_delta_of_a_valid_text_has_half_a_character(name, text):
    tokenizer, _ = _TOKENIZERS[name]
    if name == "byte level":
        ids = [_LEVEL[byte] for byte in text.encode()]
    else:
        ids = [_TOKENS.index(f"<0x{byte:02X}>") for byte in text.encode()]
    deltas = _deltas(tokenizer, ids)
    shown = text.removeprefix(" ") if name == "llama" else text
    assert "".join(deltas) == shown
    assert sum(delta.count("\ufffd") for delta in deltas) == text.count("\ufffd")


_printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LEVEL = {byte: _TOKENS.index(chr(byte)) for byte in _printable}
_LEVEL |= {byte: _TOKENS.index(chr(256 + n)) for n, byte in enumerate(b for b in range(256) if b not in _printable)}


@pytest.mark.parametrize("name", _DECODERS)
@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(1, len(_TOKENS) - 1), min_size=1, max_size=4), times=st.integers(1, 60))
def test_text_never_stalls(name, ids, times):
    """Nothing is held back for longer than the decoder needs, whatever comes again and again."""
    tokenizer, _ = _TOKENIZERS[name]
    _, most = _DECODERS[name]
    detokenizer, waiting = tokenizer.detokenizer(), 0
    for one in ids * times:
        delta = detokenizer.push((one,))
        waiting = 0 if delta or not detokenizer.peek() else waiting + 1
        assert waiting <= most


# --- D01 --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([19556, 40303, 218, 17], "Hello \U0001f600!"),
        ([18645, 250, 48392, 138], None),
        (None, _FAMILY),
    ],
)
def test_characters_split_over_tokens_come_whole(smol, ids, text):  # D01
    ids = smol.encode(text) if ids is None else ids
    backend = Tokenizer.from_str(smol.spec.definition)
    deltas = _deltas(smol, ids)
    assert "".join(deltas) == backend.decode(ids)
    assert text is None or "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)
    assert (len(ids), len("".join(deltas))) in ((4, 8), (4, 2), (13, 5))


def test_half_a_character_at_the_limit_of_tokens_is_delivered(smol):  # D01
    deltas = _deltas(smol, [19556, 40303])
    assert "".join(deltas) == smol.decode([19556, 40303]) == "Hello \ufffd"
    assert deltas[-1] == "\ufffd"


# --- D04 --------------------------------------------------------------------------------------------------------------


def test_one_leading_space_is_taken_off_and_word_spaces_stay(smol):  # D04
    tokens = ["<unk>", "<s>", "</s>", "▁", "▁leading", "▁x", *"abcdef"]
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token="<unk>"))
    backend.decoder = decoders.Metaspace()
    tokenizer = TextTokenizer.from_spec(TokenizerSpec(backend.to_str()))
    assert "".join(_deltas(tokenizer, [3, 4, 5])) == backend.decode([3, 4, 5]) == " leading x"
    assert "".join(_deltas(smol, [38699])) == " Hello"
    assert "".join(_deltas(smol, [38699] * 3)) == " Hello Hello Hello"
