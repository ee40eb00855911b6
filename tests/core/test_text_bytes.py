"""The bytes of single tokens, against what each vocabulary says they are and against whole texts."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers.convert_slow_tokenizer import bytes_to_unicode

from intarsia.text import Tokenizer as TextTokenizer
from intarsia.types import TokenizerSpec
from smollm import smollm_tokenizer

_STANDS = bytes_to_unicode()  # GPT-2's own table: byte -> character
_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_SPECIAL = ["<s>", "</s>"]
_PLAIN_ADDED = "<tool>"

_SPM = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
_WORDS = ["▁", "▁▁", "▁Hello", "x", "é", "你好", "▁x y", ".", "n't", "\n", "##ing", "##.", "end</w>"]
_DECODERS = {
    "metaspace": decoders.Metaspace(),
    "metaspace never": decoders.Metaspace(prepend_scheme="never"),
    "gemma": decoders.Sequence(_SPM),
    "llama": decoders.Sequence([*_SPM, decoders.Strip(" ", 1, 0)]),
    "word pieces": decoders.WordPiece(cleanup=False),
    "word pieces, cleaned": decoders.WordPiece(cleanup=True),
    "bpe": decoders.BPEDecoder(),
    "none": None,
}
#: The decoders whose byte tokens are bytes; for others they are texts that look so.
_WITH_BYTES = ("gemma", "llama")


def _tokenizer(tokens: list[str], decoder: object) -> tuple[TextTokenizer, Tokenizer]:
    backend = Tokenizer(models.WordLevel({token: index for index, token in enumerate(tokens)}, unk_token=tokens[-1]))
    backend.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    backend.add_tokens([AddedToken(_PLAIN_ADDED, special=False)])
    if decoder is not None:
        backend.decoder = decoder
    return TextTokenizer.from_spec(TokenizerSpec(backend.to_str())), backend


_TOKENS = [*_SPECIAL, *_BYTES, *_WORDS]
_TOKENIZERS = {name: _tokenizer(_TOKENS, decoder) for name, decoder in _DECODERS.items()}
_LEVEL = [*_SPECIAL, *(_STANDS[byte] for byte in range(256)), "Ġthe", "Ã©", "ðŁĺ", "ĊĊ"]
_BYTE_LEVEL = _tokenizer(_LEVEL, decoders.ByteLevel())


def test_a_byte_level_token_is_the_bytes_that_gpt_2s_table_says():
    tokenizer, _ = _BYTE_LEVEL
    assert [tokenizer.token_bytes(2 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.token_bytes(258 + n) for n in range(4)] == [b" the", "é".encode(), b"\xf0\x9f\x98", b"\n\n"]


@pytest.mark.parametrize("name", _WITH_BYTES)
def test_a_byte_token_is_its_byte_and_a_mark_is_a_space(name):
    tokenizer, _ = _TOKENIZERS[name]
    assert [tokenizer.token_bytes(2 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    texts = [tokenizer.token_bytes(_TOKENS.index(word)).decode() for word in _WORDS]
    assert texts == [word.replace("▁", " ") for word in _WORDS]


@pytest.mark.parametrize(
    ("name", "token", "expected"),
    [
        ("word pieces", "x", b" x"),
        ("word pieces", "##ing", b"ing"),
        ("word pieces", ".", b" ."),
        ("word pieces, cleaned", ".", b"."),
        ("bpe", "end</w>", b"end "),
        ("bpe", "x", b"x"),
        ("none", "x", b" x"),
        ("metaspace", "▁Hello", b" Hello"),
        ("metaspace", "<0x41>", b"<0x41>"),
    ],
)
def test_a_token_has_the_spaces_that_it_has_inside_a_text(name, token, expected):
    tokenizer, _ = _TOKENIZERS[name]
    assert tokenizer.token_bytes(_TOKENS.index(token)) == expected
    assert tokenizer.id_text(_TOKENS.index(token)) == expected.decode()


@pytest.mark.parametrize("name", _DECODERS)
def test_special_tokens_and_ids_outside_the_vocabulary_have_no_bytes_and_added_ones_do(name):
    for tokenizer, backend in (_TOKENIZERS[name], _BYTE_LEVEL):
        outside = (-1, tokenizer.vocab_size, 2**40)
        assert all(tokenizer.token_bytes(one) == b"" for one in (0, 1, *outside))
        assert tokenizer.token_bytes(backend.token_to_id(_PLAIN_ADDED)).strip() == b"<tool>"


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.integers(0, len(_LEVEL)), max_size=30))
def test_byte_level_bytes_one_after_another_are_the_text_for_any_ids(ids):
    tokenizer, backend = _BYTE_LEVEL
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids) == backend.decode(ids)


def _utf8(text: str) -> list[int]:
    return [2 + byte for byte in text.encode()]


_IDS = st.lists(
    st.lists(st.integers(0, 1) | st.integers(258, len(_TOKENS)), min_size=1, max_size=3)
    | st.text(max_size=3).map(_utf8),
    max_size=12,
).map(lambda lists: [one for several in lists for one in several])


@pytest.mark.parametrize("name", _DECODERS)
@settings(max_examples=200, deadline=None)
@given(ids=_IDS)
def test_bytes_one_after_another_are_the_text_but_for_spaces_at_its_ends(name, ids):
    tokenizer, backend = _TOKENIZERS[name]
    if "word pieces" in name:  # a text that begins with a continuation keeps its mark
        ids = [_TOKENS.index("x"), *ids]
    joined = b"".join(map(tokenizer.token_bytes, ids)).decode()
    decoded = backend.decode(ids)
    before, found, after = joined.rpartition(decoded) if decoded else (joined, "", "")
    assert found == decoded
    assert not (before + after).strip(" ")
    assert len(after) <= (name == "bpe")
    assert before == "" or joined.startswith(" ")


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(2, 257), max_size=12))
def test_byte_tokens_that_are_no_utf_8_decode_with_a_replacement_for_each_byte_of_the_run(ids):
    tokenizer, backend = _TOKENIZERS["gemma"]
    joined = b"".join(map(tokenizer.token_bytes, ids))
    try:
        expected = joined.decode()
    except UnicodeDecodeError:
        expected = "\ufffd" * len(joined)
    assert backend.decode(ids) == tokenizer.decode(ids) == expected


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smol():
    return smollm_tokenizer()


def test_every_token_of_smollm2_is_the_bytes_of_its_stand_ins(smol):
    byte_of = {stand: byte for byte, stand in _STANDS.items()}
    backend = Tokenizer.from_str(smol.spec.definition)
    special = {one for one, token in backend.get_added_tokens_decoder().items() if token.special}
    for token, one in backend.get_vocab().items():
        assert smol.token_bytes(one) == (b"" if one in special else bytes(byte_of[stand] for stand in token))
