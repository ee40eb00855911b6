"""SmolLM2's tokenizer against llama.cpp and transformers, and byte-level BPE in general."""

import json
import re
import time
import unicodedata
from pathlib import Path

import jinja2.sandbox
import pytest
from tokenizers import Regex, Tokenizer, pre_tokenizers

from intarsia.errors import CheckpointError
from intarsia_gguf.checkpoint import GgufLoader
from intarsia_gguf.pretokenizers import PRE_TOKENIZERS
from tools import gguf_bytes as gb
from tools.gguf_reference_tokens import texts

GOLDEN = Path(__file__).parents[1] / "data" / "gguf_smollm2_tokens.json"
#: Bytes that have no token in SmolLM2's vocabulary; of those that UTF-8 uses, case K01 of the public bug reports.
MISSING = {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D, 0xC0, 0xC1, 0xF1, 0xF2, *range(0xF5, 0x100)}
CHAT_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 19556, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip


@pytest.fixture(scope="module")
def spec():
    return GgufLoader(gb.smollm2_path()).open().tokenizer()


@pytest.fixture(scope="module")
def smollm2(spec):
    return Tokenizer.from_str(spec.definition)


@pytest.fixture(scope="module")
def golden():
    return json.loads(GOLDEN.read_text())["cases"]


@pytest.fixture(scope="module")
def transformers_smollm2():
    from transformers import AutoTokenizer

    path = gb.smollm2_path()
    return AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


def ids(tokenizer, text):
    return tokenizer.encode(text, add_special_tokens=False).ids


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


def test_smollm2s_ids_equal_llama_cpps(smollm2, golden):
    """With special tokens in a text taken as such, as Hugging Face's tokenizers do."""
    wrong = [(text, ids(smollm2, text), expected) for text, expected, *_ in golden if ids(smollm2, text) != expected]
    assert not wrong
    assert len(golden) > 800
    assert [text for text, *_ in golden] == texts()


def test_special_tokens_in_a_text_are_taken_as_such(smollm2, golden):
    """llama.cpp can also take them as plain text. Where that differs, we do as Hugging Face does."""
    differing = [case for case in golden if len(case) == 3]
    assert len(differing) >= 8
    for text, special, plain in differing:
        assert ids(smollm2, text) == special != plain
        assert re.search(r"<[a-z_|]+>", text)


def test_smollm2s_ids_equal_transformers(smollm2, golden, transformers_smollm2):
    """With the rule that transformers leaves out when it reads a GGUF file.

    SmolLM2's own tokenizer.json cuts out single digits before GPT-2's pattern; llama.cpp does the same. transformers'
    GGUF reader knows no rule for `smollm` and applies GPT-2's alone, which differs where two or more spaces stand in
    front of a digit and for numerals such as U+00BD.
    """
    differing = [text for text, *_ in golden if ids(smollm2, text) != transformers_smollm2(text)["input_ids"]]
    assert all(re.search(r"\s\s[0-9]", text) or "\u00bd" in text for text in differing)
    backend = transformers_smollm2.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), backend.pre_tokenizer]
    )
    assert [text for text, *_ in golden if ids(smollm2, text) != ids(backend, text)] == []
    decoded = [text for text, expected, *_ in golden if smollm2.decode(expected) != backend.decode(expected)]
    assert decoded == []


@pytest.mark.parametrize(
    "text, expected",
    [
        ("in 2024", [254, 216, 34, 32, 34, 36]),
        (" 12345", [216, 33, 34, 35, 36, 37]),
        ("3.14", [35, 30, 33, 36]),
        ("e\u0301", [85, 151, 219]),
        ("<|im_end|>", [2]),
        ("\u0004", []),
        ("Hello", [19556]),
    ],
)
def test_the_ids_of_the_public_cases(text, expected, smollm2):
    assert ids(smollm2, text) == expected


def test_missing_bytes_are_those_that_have_no_token(smollm2):
    """Each byte as the character that GPT-2's table spells it with."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = smollm2.get_vocab()
    assert {byte for byte, character in bytes_to_unicode().items() if character not in vocab} == MISSING


def test_texts_come_back_from_their_ids(smollm2, golden):
    characters = [chr(code) for code in range(0x200)]
    for text in [*characters, *(text for text, *_ in golden)]:
        if MISSING.isdisjoint(text.encode()):
            assert smollm2.decode(ids(smollm2, text), skip_special_tokens=False) == text


def test_a_megabyte_of_one_letter_takes_linear_time(smollm2):
    def seconds(text):
        started = time.process_time()
        assert smollm2.decode(ids(smollm2, text)) == text
        return time.process_time() - started

    for letter in ("a", " ", "1", "."):
        whole = seconds(letter * 1_000_000)
        assert whole < 20
        # Linear would be 4 times a quarter, quadratic 16 times.
        assert whole < 9 * max(seconds(letter * 250_000), 0.02)


def test_a_chat_of_one_turn_gets_the_templates_system_turn(spec, smollm2):
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    prompt = environment.from_string(spec.chat_template).render(
        messages=[{"role": "user", "content": "Hello"}], add_generation_prompt=True, **spec.special_tokens
    )
    assert ids(smollm2, prompt) == CHAT_IDS


def test_smollm2s_special_ids(spec):
    assert (spec.bos_id, spec.eos_ids, spec.add_bos) == (1, (2,), False)
    assert spec.special_tokens == {
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "pad_token": "<|im_end|>",
    }


def test_special_tokens_are_left_out_of_decoded_text(smollm2):
    assert smollm2.decode([1, 19556, 2]) == "Hello"
    assert smollm2.decode([1, 19556, 2], skip_special_tokens=False) == "<|im_start|>Hello<|im_end|>"


# --- byte-level BPE in general ----------------------------------------------------------------------------------------


def tokenizer_spec(tmp_path, **values):
    """The tiny llama's tokenizer with some keys changed; names without their `tokenizer.ggml.`."""
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file({f"tokenizer.ggml.{name}": value for name, value in values.items()}))
    return GgufLoader(path).open().tokenizer()


def tokenizer(tmp_path, **values):
    return Tokenizer.from_str(tokenizer_spec(tmp_path, **values).definition)


def tokens(*names):
    return (gb.ARRAY, (gb.STRING, list(names)))


def types(*numbers):
    return (gb.ARRAY, (gb.I32, list(numbers)))


def test_a_file_without_a_tokenizer_has_none(tmp_path):
    path = tmp_path / "model.gguf"
    bare = dict.fromkeys(name for name in gb.tiny_metadata() if name.startswith("tokenizer."))
    path.write_bytes(gb.tiny_file(bare))
    assert GgufLoader(path).open().tokenizer() is None
    path.write_bytes(gb.tiny_file({**bare, "tokenizer.ggml.model": (gb.STRING, "none")}))
    assert GgufLoader(path).open().tokenizer() is None


def test_user_defined_tokens_are_matched_whole_and_stay_in_the_text(tmp_path):
    found = tokenizer(
        tmp_path,
        tokens=tokens("<s>", "</s>", "a", "b", "<x y>", "ab"),
        token_type=types(3, 3, 1, 1, 4, 1),
    )
    assert ids(found, "ab<x y>a<s>") == [5, 4, 2, 0]
    assert found.decode([5, 4, 0]) == "ab<x y>"


def test_unused_tokens_are_never_matched(tmp_path):
    found = tokenizer(
        tmp_path, tokens=tokens("<s>", "</s>", "a", "b", "ab", "[PAD5]"), token_type=types(3, 3, 1, 1, 1, 5)
    )
    assert 5 not in ids(found, "[PAD5]")


def test_empty_tokens_are_kept_out(tmp_path):
    found = tokenizer(tmp_path, tokens=tokens("<s>", "</s>", "a", "b", "ab", ""), token_type=types(3, 3, 1, 1, 1, 3))
    assert ids(found, "ab") == [4]


@pytest.mark.parametrize("merge", ["ab", "a ", " ", "", "a b c", "a c", "b a"])
def test_a_malformed_merge_is_refused_by_its_place(merge, tmp_path):
    with pytest.raises(CheckpointError, match="item 1"):
        tokenizer_spec(tmp_path, merges=tokens("a b", merge))


@pytest.mark.parametrize(
    "values, named",
    [
        ({"merges": None}, "tokenizer.ggml.merges"),
        ({"merges": (gb.ARRAY, (gb.U32, [1]))}, "tokenizer.ggml.merges"),
        ({"pre": (gb.STRING, "llama-bp")}, "llama-bpe"),
        ({"pre": (gb.STRING, "zzzz")}, "codeshell, command-r"),
        ({"pre": (gb.U32, 1)}, "tokenizer.ggml.pre"),
        ({"model": (gb.STRING, "bert")}, "Known: gpt2, llama"),
        ({"model": None}, "tokenizer.ggml.model"),
        ({"tokens": None}, "tokenizer.ggml.tokens"),
        ({"add_bos_token": (gb.BOOL, True), "bos_token_id": None}, "bos_token_id"),
        ({"add_space_prefix": (gb.U32, 1)}, "add_space_prefix"),
    ],
)
def test_a_malformed_tokenizer_is_refused_by_name(values, named, tmp_path):
    with pytest.raises(CheckpointError, match=re.escape(named)):
        tokenizer_spec(tmp_path, **values)


@pytest.mark.parametrize(
    "values, expected",
    [
        ({}, False),
        ({"add_bos_token": (gb.BOOL, True)}, True),
        ({"pre": (gb.STRING, "llama-bpe")}, True),
        ({"pre": (gb.STRING, "llama-bpe"), "add_bos_token": (gb.BOOL, False)}, False),
        ({"pre": (gb.STRING, "llama-bpe"), "bos_token_id": None}, False),
    ],
)
def test_bos_is_added_as_the_file_or_its_kind_says(values, expected, tmp_path):
    assert tokenizer_spec(tmp_path, **values).add_bos is expected


def test_ends_of_turn_and_message_end_a_generation_too(tmp_path):
    found = tokenizer_spec(tmp_path, eot_token_id=(gb.U32, 4), eom_token_id=(gb.U32, 1))
    assert found.eos_ids == (1, 4)


def test_a_file_without_a_pre_tokenizer_takes_llama_cpps_default(tmp_path):
    assert tokenizer_spec(tmp_path, pre=None) == tokenizer_spec(tmp_path, pre=(gb.STRING, "default"))


# --- pre-tokenizers ---------------------------------------------------------------------------------------------------

SAMPLE = (
    "Hello WORLD camelCase don't DON'T 12345 3.14 caf\u00e9 e\u0301 \u4f60\u597d\u4e16\u754c \u0928\u092e\u0938\u094d "
    "a  b   5\n\n\tx = y**2 // path/to/file\r\n  end!!! \U0001f600 \u00bd \u00b2 $1,000 <tag> `code` "
)


def words(rule, text):
    backend = Tokenizer.from_str(
        json.dumps(
            {
                "version": "1.0",
                "added_tokens": [],
                "normalizer": rule.normalizer(),
                "pre_tokenizer": rule.pre_tokenizer(add_prefix_space=False),
                "post_processor": None,
                "decoder": None,
                "model": {"type": "BPE", "vocab": {}, "merges": []},
            }
        )
    )
    return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_all_of_a_text(name):
    spelled = "".join(word for word, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(SAMPLE))
    found = words(PRE_TOKENIZERS[name], SAMPLE)
    assert "".join(found) == spelled
    assert len(found) > 30


def test_pre_tokenizers_cut_as_transformers_does():
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    compared = [name for name in PRE_TOKENIZERS if name in GGUF_PRE_TOKENIZER_SPLITS]
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o"} <= set(compared)
    for name in compared:
        reference = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[name]), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        expected = [word for word, _ in reference.pre_tokenize_str(SAMPLE)]
        assert words(PRE_TOKENIZERS[name], SAMPLE) == expected, name


@pytest.mark.parametrize(
    "name, text, expected",
    [
        ("gpt-2", "a  5 1234", ["a", "\u0120", "\u01205", "\u01201234"]),
        ("smollm", "a  5 12", ["a", "\u0120\u0120", "5", "\u0120", "1", "2"]),
        ("llama-bpe", "IT'S 12345", ["IT", "'S", "\u0120", "123", "45"]),
        ("dbrx", "IT'S 12345", ["IT", "'S", "\u0120", "123", "45"]),
        ("refact", "a  5 12", ["a", "\u0120\u0120", "5", "\u0120", "1", "2"]),
        ("phi-2", "a  5 1234", ["a", "\u0120", "\u01205", "\u01201234"]),
        ("qwen2", "IT'S 12", ["IT", "'S", "\u0120", "1", "2"]),
        ("tekken", "camelCase", ["camel", "Case"]),
        ("gpt-4o", "camelCase don't 1234", ["camel", "Case", "\u0120don't", "\u0120", "123", "4"]),
        ("deepseek-coder", "ab 12", ["ab", "\u0120", "1", "2"]),
        ("deepseek-v3", "12345 ab", ["123", "45", "\u0120ab"]),
        ("default", "a-b 1234", ["a", "-", "b", "\u0120", "123", "4"]),
    ],
)
def test_pre_tokenizers_cut_these_by_hand(name, text, expected):
    assert words(PRE_TOKENIZERS[name], text) == expected


@pytest.mark.parametrize("name", [name for name, rule in PRE_TOKENIZERS.items() if rule.nfc])
def test_models_that_compose_compose(name, tmp_path):
    found = tokenizer(tmp_path, pre=(gb.STRING, name))
    assert found.normalizer.normalize_str("e\u0301") == unicodedata.normalize("NFC", "e\u0301") == "\u00e9"


def test_a_word_that_is_a_token_needs_no_merges_where_the_model_says_so(tmp_path):
    values = {
        "tokens": tokens("<s>", "</s>", "a", "b", "ab", "aab"),
        "merges": tokens("a b"),
        "token_type": types(3, 3, 1, 1, 1, 1),
    }
    assert ids(tokenizer(tmp_path, pre=(gb.STRING, "llama-bpe"), **values), "aab") == [5]
    assert ids(tokenizer(tmp_path, pre=(gb.STRING, "gpt-2"), **values), "aab") == [2, 4]
