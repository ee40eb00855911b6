"""Sentencepiece vocabularies in GGUF, against the sentencepiece library on models trained here."""

import io
import time

import pytest
import sentencepiece
from tokenizers import Tokenizer

from intarsia.errors import CheckpointError
from intarsia_gguf.checkpoint import GgufLoader
from tools import gguf_bytes as gb
from tools.gguf_reference_tokens import texts

VOCAB_SIZE = 600
CORPUS = [
    "The quick brown fox jumps over the lazy dog.",
    "Once upon a time there was a little girl who lived near the forest with her mother.",
    "def add(a, b):  return a + b   # 12345 67890",
    "It's a test, isn't it? Yes: it's the 3rd test (of 10)!",
    "caf\u00e9 na\u00efve \u4f60\u597d \u041f\u0440\u0438\u0432\u0435\u0442 12 34 56 78 90",
    "Sphinx of black quartz, judge my vow; pack my box with five dozen liquor jugs.",
]


def train(add_prefix, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        model_type="bpe",
        vocab_size=VOCAB_SIZE,
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=add_prefix,
        remove_extra_whitespaces=False,
        split_digits=True,
        allow_whitespace_only_pieces=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.fixture(scope="module")
def processor():
    return train(add_prefix=True)


def metadata(processor, **values):
    """A GGUF file's tokenizer keys as llama.cpp's converter writes them for a sentencepiece model."""
    size = processor.get_piece_size()
    kinds = []
    for index in range(size):
        flags = (processor.is_unknown, processor.is_control, processor.is_unused, processor.is_byte)
        kinds.append(next((kind for flag, kind in zip(flags, (2, 3, 5, 6), strict=True) if flag(index)), 1))
    own = {
        "model": (gb.STRING, "llama"),
        "pre": None,
        "merges": None,
        "tokens": (gb.ARRAY, (gb.STRING, [processor.id_to_piece(index) for index in range(size)])),
        "scores": (gb.ARRAY, (gb.F32, [processor.get_score(index) for index in range(size)])),
        "token_type": (gb.ARRAY, (gb.I32, kinds)),
        "bos_token_id": (gb.U32, processor.bos_id()),
        "eos_token_id": (gb.U32, processor.eos_id()),
        **values,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in own.items()}


def read_spec(path, processor, *, architecture="llama", **values):
    size = processor.get_piece_size()
    tensors = [("token_embd.weight", (size, gb.HIDDEN), gb.T_F32, bytes(size * gb.HIDDEN * 4)), *gb.tiny_tensors()[1:]]
    own = {
        f"{architecture}.{name.partition('.')[2]}": value
        for name, value in gb.tiny_metadata().items()
        if name.startswith("llama.")
    }
    own["general.architecture"] = (gb.STRING, architecture)
    path.write_bytes(gb.tiny_file({**own, **metadata(processor, **values)}, tensors))
    return GgufLoader(path).open().tokenizer()


@pytest.fixture
def spec(processor, tmp_path):
    return read_spec(tmp_path / "spm.gguf", processor)


@pytest.fixture
def tokenizer(spec):
    return Tokenizer.from_str(spec.definition)


def sample():
    """Texts without the characters that sentencepiece keeps for itself."""
    return [text for text in texts() + CORPUS if "\u2581" not in text and "\0" not in text and not has_special(text)]


def has_special(text):
    return any(special in text for special in ("<s>", "</s>", "<unk>"))


def test_ids_equal_sentencepieces(tokenizer, processor):
    wrong = [text for text in sample() if tokenizer.encode(text).ids != processor.encode(text)]
    assert wrong == []
    assert len(sample()) > 800


def test_texts_come_back_from_their_ids(tokenizer, processor):
    for text in sample():
        assert tokenizer.decode(tokenizer.encode(text).ids) == text == processor.decode(processor.encode(text))


def test_without_a_space_prefix_ids_equal_a_model_without_one(tmp_path):
    bare = train(add_prefix=False)
    spec = read_spec(tmp_path / "spm.gguf", bare, add_space_prefix=(gb.BOOL, False))
    tokenizer = Tokenizer.from_str(spec.definition)
    assert [text for text in sample() if tokenizer.encode(text).ids != bare.encode(text)] == []
    assert all(tokenizer.decode(tokenizer.encode(text).ids) == text for text in sample())


def test_runs_of_white_space_that_are_tokens_as_gemmas_are_matched_whole(tmp_path):
    """llama.cpp's converter marks them as user-defined, and writes their spaces as such."""
    runs = ["\u2581\u2581", "\u2581\u2581\u2581", "\n", "\n\n", "\t"]
    gemma = train(add_prefix=False, user_defined_symbols=runs)
    found = metadata(gemma)
    tokens, kinds = (list(found[f"tokenizer.ggml.{name}"][1][1]) for name in ("tokens", "token_type"))
    for run in runs:
        kinds[gemma.piece_to_id(run)] = 4
        tokens[gemma.piece_to_id(run)] = run.replace("\u2581", " ")
    spec = read_spec(
        tmp_path / "spm.gguf",
        gemma,
        add_space_prefix=(gb.BOOL, False),
        tokens=(gb.ARRAY, (gb.STRING, tokens)),
        token_type=(gb.ARRAY, (gb.I32, kinds)),
    )
    tokenizer = Tokenizer.from_str(spec.definition)
    cases = ["a  b", "   fox\n\n\tdog", "\n\n\n", "def add(a, b):\n  return a + b", " the fox", "ends in two  "]
    for text in [*cases, *sample()]:
        assert tokenizer.encode(text).ids == gemma.encode(text)
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_phi3s_special_tokens_take_the_white_space_behind_them_along(processor, tmp_path):
    """As its own tokenizer.json says, and llama.cpp has it: a turn is `<|user|>`, a line feed and the text."""
    marks = {3: "<|user|>", 4: "<|end|>", 5: "<|endoftext|>"}
    found = metadata(processor)
    tokens, kinds = (list(found[f"tokenizer.ggml.{name}"][1][1]) for name in ("tokens", "token_type"))
    for index, text in marks.items():
        tokens[index], kinds[index] = text, 3
    values = {"tokens": (gb.ARRAY, (gb.STRING, tokens)), "token_type": (gb.ARRAY, (gb.I32, kinds))}
    plain = Tokenizer.from_str(read_spec(tmp_path / "llama.gguf", processor, **values).definition)
    phi3 = Tokenizer.from_str(read_spec(tmp_path / "phi3.gguf", processor, architecture="phi3", **values).definition)
    fox = plain.encode("fox").ids
    assert phi3.encode("<|user|>\nfox<|end|> \n<|endoftext|>").ids == [3, *fox, 4, 5]
    assert phi3.encode("<|endoftext|>\nfox").ids == plain.encode("<|endoftext|>\nfox").ids
    assert plain.encode("<|user|>\nfox").ids != [3, *fox]


def test_special_tokens_in_a_text_are_taken_as_such(tokenizer, processor):
    """Hugging Face's way; sentencepiece itself takes them as plain text."""
    assert tokenizer.encode("</s>").ids == [processor.eos_id()]
    assert tokenizer.encode("a</s>b").ids == [*processor.encode("a"), processor.eos_id(), *processor.encode("b")]
    assert tokenizer.decode([processor.bos_id(), *processor.encode("fox")]) == "fox"


def test_bos_is_added_unless_the_file_says_no(spec, processor, tmp_path):
    assert spec.add_bos and spec.bos_id == processor.bos_id() and spec.eos_ids == (processor.eos_id(),)
    assert not read_spec(tmp_path / "no.gguf", processor, add_bos_token=(gb.BOOL, False)).add_bos


def test_special_ids_have_sentencepieces_defaults(processor, tmp_path):
    spec = read_spec(tmp_path / "spm.gguf", processor, bos_token_id=None, eos_token_id=None)
    assert (spec.bos_id, spec.eos_ids) == (1, (2,))
    assert spec.special_tokens["bos_token"] == "<s>"


@pytest.mark.parametrize(
    "values, named",
    [
        ({"scores": None}, "scores"),
        ({"unknown_token_id": (gb.U32, 10**6)}, "unknown_token_id"),
        ({"scores": (gb.ARRAY, (gb.I32, [0] * 3))}, "scores"),
    ],
)
def test_a_malformed_vocabulary_is_refused_by_name(values, named, processor, tmp_path):
    with pytest.raises(CheckpointError, match=named):
        read_spec(tmp_path / "spm.gguf", processor, **values)


def test_a_piece_of_absurd_length_is_refused(processor, tmp_path):
    pieces = [processor.id_to_piece(index) for index in range(processor.get_piece_size())]
    pieces[-1] = "x" * 100_000
    with pytest.raises(CheckpointError, match="characters"):
        read_spec(tmp_path / "spm.gguf", processor, tokens=(gb.ARRAY, (gb.STRING, pieces)))


def test_a_long_text_takes_linear_time(tokenizer):
    started = time.perf_counter()
    assert len(tokenizer.encode("fox " * 100_000).ids) > 100_000
    assert time.perf_counter() - started < 20
