"""Malformed GGUF files: every one gives a CheckpointError that names the file, fast and in little memory."""

import struct
import time
import tracemalloc

import numpy as np
import pytest
from tokenizers import Tokenizer

from intarsia.errors import CheckpointError
from intarsia_gguf.checkpoint import GgufLoader
from intarsia_gguf.header import read_header
from tools import gguf_bytes as gb

MAX_SECONDS = 1.0
MAX_BYTES = 100 * 2**20


def refuse(path, raw):
    """Open these bytes; return the message of the CheckpointError that must come, within the limits."""
    path.write_bytes(raw)
    tracemalloc.start()
    started = time.perf_counter()
    try:
        with pytest.raises(CheckpointError) as caught:
            GgufLoader(path).open()
        assert time.perf_counter() - started < MAX_SECONDS
        assert tracemalloc.get_traced_memory()[1] < MAX_BYTES
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.gguf"


@pytest.fixture(scope="module")
def smollm2_header():
    with gb.smollm2_path().open("rb") as file:
        return file.read(1_785_664)


def parts(metadata=None):
    infos, data = gb.place(gb.tiny_tensors())
    return gb.encode({**gb.tiny_metadata(), **(metadata or {})}), infos, data


def with_info(index, **changes):
    """The tiny file with the entry of one tensor written anew."""
    keys, infos, data = parts()
    name, shape, kind, _ = gb.tiny_tensors()[index]
    offset = struct.unpack("<Q", infos[index][-8:])[0]
    entry = {"name": name, "dims": shape[::-1], "kind": kind, "offset": offset, **changes}
    infos[index] = gb.tensor_info(**entry)
    return gb.file_bytes(keys, infos, data)


def nested_arrays(depth):
    """A value that is an array of one array of one array ..."""
    return gb.text("x.nested") + struct.pack("<I", gb.ARRAY) + struct.pack("<IQ", gb.ARRAY, 1) * depth + b"\0" * 64


def extra_key(raw_entry):
    keys, infos, data = parts()
    return gb.file_bytes([*keys, raw_entry], infos, data)


def long_text(length):
    return gb.text("x.text") + struct.pack("<IQ", gb.STRING, length) + b"abc"


def long_array(element, count):
    return gb.text("x.array") + struct.pack("<IIQ", gb.ARRAY, element, count) + bytes(64)


MALFORMED = {
    "magic": (lambda: gb.tiny_file(magic=b"GGML"), "GGML"),
    "magic swapped": (lambda: gb.tiny_file(magic=b"FUGG"), "FUGG"),
    "version 0": (lambda: gb.tiny_file(version=0), "version 0"),
    "version 1": (lambda: gb.tiny_file(version=1), "version 1"),
    "version 99": (lambda: gb.tiny_file(version=99), "version 99"),
    "byte-swapped": (lambda: gb.tiny_file(version=3 << 24), "big-endian"),
    "n_tensors": (lambda: gb.tiny_file(num_tensors=2**60), str(2**60)),
    "n_tensors one more": (lambda: gb.tiny_file(num_tensors=12), "tensor"),
    "n_kv": (lambda: gb.tiny_file(num_keys=2**60), str(2**60)),
    "n_kv one less": (lambda: gb.tiny_file(num_keys=16), "tensor"),
    "text length 2**63": (lambda: extra_key(long_text(2**63)), "x.text"),
    "text length 2**64-1": (lambda: extra_key(long_text(2**64 - 1)), "x.text"),
    "text not UTF-8": (lambda: extra_key(gb.key("x.text", gb.STRING, b"\xff\xfe")), "UTF-8"),
    "key not UTF-8": (lambda: extra_key(gb.key(b"\xff", gb.U32, 1)), "UTF-8"),
    "empty key": (lambda: extra_key(gb.key("", gb.U32, 1)), "empty"),
    "key too long": (lambda: extra_key(gb.key("k" * 70000, gb.U32, 1)), "70000"),
    "key twice": (lambda: extra_key(gb.key("llama.block_count", gb.U32, 1)), "twice"),
    "value type 13": (lambda: extra_key(gb.text("x.odd") + struct.pack("<II", 13, 0)), "13"),
    "value type 2**32-1": (lambda: extra_key(gb.text("x.odd") + b"\xff" * 8), "x.odd"),
    "bool 2": (lambda: extra_key(gb.text("x.odd") + struct.pack("<IB", gb.BOOL, 2)), "bool"),
    "array items 2**63": (lambda: extra_key(long_array(gb.U8, 2**63)), "x.array"),
    "array of texts 2**40": (lambda: extra_key(long_array(gb.STRING, 2**40)), "x.array"),
    "array of type 99": (lambda: extra_key(long_array(99, 1)), "99"),
    "array of arrays": (lambda: extra_key(nested_arrays(1)), "array of arrays"),
    "array of arrays 10000 deep": (lambda: extra_key(nested_arrays(10_000)), "array of arrays"),
    "no tensors": (lambda: gb.tiny_file(tensors=[]), "no tensors"),
    "n_dims 0": (lambda: with_info(0, num_dims=0), "0 dimensions"),
    "n_dims 5": (lambda: with_info(0, dims=(8, 6, 1, 1, 1)), "5 dimensions"),
    "n_dims 10**6": (lambda: with_info(0, num_dims=10**6), "1000000"),
    "dimension 0": (lambda: with_info(0, dims=(8, 0)), "(0, 8)"),
    "dimension 2**42+1": (lambda: with_info(0, dims=(8, 2**42 + 1)), str(2**42 + 1)),
    "dimensions whose product is 2**64": (lambda: with_info(0, dims=(2**32, 2**32)), "cannot hold"),
    "dimension 2**64-1": (lambda: with_info(0, dims=(2**64 - 1, 2**64 - 1)), "cannot hold"),
    "type 4": (lambda: with_info(0, kind=4), "tensor type 4"),
    "type 999": (lambda: with_info(0, kind=999), "999"),
    "type that cannot be dequantized": (
        lambda: gb.tiny_file(tensors=[*gb.tiny_tensors(), ("x.weight", (32,), 9, bytes(40))]),
        "Q8_1",
    ),
    "offset unaligned": (lambda: with_info(0, offset=1), "alignment"),
    "offset past the end": (lambda: with_info(0, offset=2**40), "token_embd.weight"),
    "offset 2**64-32": (lambda: with_info(0, offset=2**64 - 32), "token_embd.weight"),
    "offset overlapping": (lambda: with_info(1, offset=32), "overlap"),
    "name empty": (lambda: with_info(1, name=""), "empty"),
    "name twice": (lambda: with_info(1, name="token_embd.weight"), "twice"),
    "name twice after renaming": (lambda: with_info(1, name="model.norm.weight"), "model.norm.weight"),
    "name too long": (lambda: with_info(1, name="n" * 300), "300"),
    "alignment 0": (lambda: gb.tiny_file({"general.alignment": (gb.U32, 0)}), "alignment"),
    "alignment 3": (lambda: gb.tiny_file({"general.alignment": (gb.U32, 3)}), "power of two"),
    "alignment 2**31": (lambda: gb.tiny_file({"general.alignment": (gb.U32, 2**31)}), "power of two"),
    "alignment a float": (lambda: gb.tiny_file({"general.alignment": (gb.F32, 32.0)}), "float32"),
    "scores stored as uint8": (
        lambda: gb.tiny_file({"tokenizer.ggml.scores": (gb.ARRAY, (gb.U8, [0] * 6))}),
        "tokenizer.ggml.scores",
    ),
    "scores not numbers": (
        lambda: gb.tiny_file({"tokenizer.ggml.scores": (gb.ARRAY, (gb.F32, [float("nan")] * 6))}),
        "not a number",
    ),
    "scores too few": (lambda: gb.tiny_file({"tokenizer.ggml.scores": (gb.ARRAY, (gb.F32, [0.0]))}), "6 tokens"),
    "tokens fewer than the vocabulary": (
        lambda: gb.tiny_file({"tokenizer.ggml.tokens": (gb.ARRAY, (gb.STRING, gb.VOCAB[:5]))}),
        "token_embd.weight",
    ),
    "tokens more than the vocabulary": (
        lambda: gb.tiny_file({"tokenizer.ggml.tokens": (gb.ARRAY, (gb.STRING, [*gb.VOCAB, "x"]))}),
        "7 items",
    ),
    "tokens as numbers": (
        lambda: gb.tiny_file({"tokenizer.ggml.tokens": (gb.ARRAY, (gb.I32, [1] * 6))}),
        "tokenizer.ggml.tokens",
    ),
    "token twice": (
        lambda: gb.tiny_file({"tokenizer.ggml.tokens": (gb.ARRAY, (gb.STRING, [*gb.VOCAB[:5], "a"]))}),
        "'a' twice",
    ),
    "token types as text": (lambda: gb.tiny_file({"tokenizer.ggml.token_type": (gb.STRING, "3")}), "token_type"),
    "token type 7": (
        lambda: gb.tiny_file({"tokenizer.ggml.token_type": (gb.ARRAY, (gb.I32, [7] * 6))}),
        "unknown type 7",
    ),
    "bos outside the vocabulary": (lambda: gb.tiny_file({"tokenizer.ggml.bos_token_id": (gb.U32, 6)}), "bos_token_id"),
    "eos negative": (lambda: gb.tiny_file({"tokenizer.ggml.eos_token_id": (gb.I32, -1)}), "eos_token_id"),
    "eot outside the vocabulary": (lambda: gb.tiny_file({"tokenizer.ggml.eot_token_id": (gb.U32, 99)}), "99"),
    "add_bos as a number": (lambda: gb.tiny_file({"tokenizer.ggml.add_bos_token": (gb.U32, 1)}), "not a bool"),
    "template as a number": (lambda: gb.tiny_file({"tokenizer.chat_template": (gb.U32, 1)}), "not a text"),
    "block_count 0": (lambda: gb.tiny_file({"llama.block_count": (gb.U32, 0)}), "llama.block_count"),
    "block_count a float": (lambda: gb.tiny_file({"llama.block_count": (gb.F32, 1.0)}), "float32"),
    "block_count 2**31": (lambda: gb.tiny_file({"llama.block_count": (gb.U32, 2**31 - 1)}), "tensors"),
    "block_count missing": (lambda: gb.tiny_file({"llama.block_count": None}), "missing"),
    "block_count an array": (lambda: gb.tiny_file({"llama.block_count": (gb.ARRAY, (gb.U32, [1]))}), "array"),
    "head_count 0": (lambda: gb.tiny_file({"llama.attention.head_count": (gb.U32, 0)}), "head_count"),
    "head_count 3": (lambda: gb.tiny_file({"llama.attention.head_count": (gb.U32, 3)}), "head_count"),
    "head_count_kv 0": (lambda: gb.tiny_file({"llama.attention.head_count_kv": (gb.U32, 0)}), "head_count_kv"),
    "head_dim odd": (lambda: gb.tiny_file({"llama.attention.head_count": (gb.U32, 8)}), "odd"),
    "embedding_length differs": (lambda: gb.tiny_file({"llama.embedding_length": (gb.U32, 16)}), "token_embd.weight"),
    "epsilon NaN": (
        lambda: gb.tiny_file({"llama.attention.layer_norm_rms_epsilon": (gb.F32, float("nan"))}),
        "epsilon",
    ),
    "rope base 0": (lambda: gb.tiny_file({"llama.rope.freq_base": (gb.F32, 0.0)}), "freq_base"),
    "rope base infinite": (lambda: gb.tiny_file({"llama.rope.freq_base": (gb.F32, float("inf"))}), "freq_base"),
    "architecture a number": (lambda: gb.tiny_file({"general.architecture": (gb.U32, 1)}), "general.architecture"),
    "architecture missing": (lambda: gb.tiny_file({"general.architecture": None}), "general.architecture"),
    "embedding missing": (lambda: gb.tiny_file(tensors=gb.tiny_tensors()[1:]), "token_embd.weight"),
    "empty file": (lambda: b"", "empty"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_with_what_is_wrong(name, path):
    make, expected = MALFORMED[name]
    assert expected in refuse(path, make())


def test_the_file_that_the_malformed_ones_are_made_from_opens(path):
    path.write_bytes(gb.tiny_file())
    checkpoint = GgufLoader(path).open()
    assert len(checkpoint.tensors) == 11
    assert Tokenizer.from_str(checkpoint.tokenizer().definition).encode("ab a").ids == [4, 5, 2]


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(version, path):
    path.write_bytes(gb.tiny_file(version=version))
    assert read_header(path).version == version


def test_every_truncation_is_refused(path):
    raw = gb.tiny_file()
    started = time.perf_counter()
    for length in range(len(raw)):
        path.write_bytes(raw[:length])
        with pytest.raises(CheckpointError) as caught:
            GgufLoader(path).open()
        assert str(path) in str(caught.value)
    assert time.perf_counter() - started < MAX_SECONDS * 20


def test_a_cut_inside_the_last_padding_is_refused_and_no_padding_at_all_is_not(path):
    last = ("x.weight", (3,), gb.T_F32, bytes(12))
    raw = gb.tiny_file(tensors=[*gb.tiny_tensors(), last])
    path.write_bytes(raw[:-20])
    assert len(GgufLoader(path).open().tensors) == 12
    for cut in range(1, 20):
        path.write_bytes(raw[:-cut])
        with pytest.raises(CheckpointError, match="cut short"):
            GgufLoader(path).open()


def test_truncations_of_a_real_header_are_refused(path, smollm2_header):
    random = np.random.default_rng(1)
    for length in random.integers(0, len(smollm2_header), 40):
        path.write_bytes(smollm2_header[:length])
        started = time.perf_counter()
        with pytest.raises(CheckpointError):
            GgufLoader(path).open()
        assert time.perf_counter() - started < MAX_SECONDS


def test_changed_bytes_give_a_checkpoint_error_or_a_checkpoint_that_works(path):
    """Seeded fuzzing: one to three bytes changed anywhere in front of the tensor data."""
    import torch

    raw = gb.tiny_file()
    header_bytes = len(raw) - len(gb.place(gb.tiny_tensors())[1])
    random = np.random.default_rng(2)
    refused = 0
    for _ in range(1500):
        changed = bytearray(raw)
        for position in random.integers(0, header_bytes, random.integers(1, 4)):
            changed[position] = random.choice([0, 1, 0x7F, 0x80, 0xFF, random.integers(256)])
        path.write_bytes(changed)
        try:
            checkpoint = GgufLoader(path).open()
            spec = checkpoint.tokenizer()
            for tensor in checkpoint.tensors.values():
                tensor.read(torch.empty(tensor.shape))
        except CheckpointError as error:
            assert str(path) in str(error)
            refused += 1
            continue
        if spec is not None:
            Tokenizer.from_str(spec.definition).encode("ab <s>")
    assert 250 < refused < 1500


def test_a_k_quant_with_576_columns_is_refused_by_name(path):
    tensors = [*gb.tiny_tensors(), ("blk.0.wide.weight", (4, 576), gb.T_Q4_K, bytes(144 * 9))]
    message = refuse(path, gb.tiny_file(tensors=tensors))
    assert "blk.0.wide.weight" in message and "576" in message and "256" in message and "Q4_K" in message


def test_a_row_of_48_in_q4_1_is_refused_by_name(path):
    tensors = [*gb.tiny_tensors(), ("blk.0.narrow.weight", (2, 48), gb.T_Q4_1, bytes(60))]
    message = refuse(path, gb.tiny_file(tensors=tensors))
    assert "blk.0.narrow.weight" in message and "48" in message and "32" in message


def test_texts_that_would_fill_the_memory_are_refused(path, monkeypatch):
    monkeypatch.setattr("intarsia_gguf.header.MAX_TEXT_BYTES", 1000)
    assert "memory" in refuse(path, extra_key(gb.key("x.text", gb.STRING, "x" * 1000)))
    assert "memory" in refuse(path, extra_key(gb.key("x.texts", gb.ARRAY, (gb.STRING, ["x" * 100] * 10))))


def test_arrays_that_would_fill_the_memory_are_refused(path, monkeypatch):
    monkeypatch.setattr("intarsia_gguf.header.MAX_ARRAY_ITEMS", 100)
    assert "accepted" in refuse(path, extra_key(gb.key("x.array", gb.ARRAY, (gb.U8, [0] * 90))))


def test_a_part_of_a_split_model_is_refused(path):
    assert "split" in refuse(path, gb.tiny_file({"split.count": (gb.U16, 3)}))


def test_smollm2s_header_is_read_fast():
    best = min(_timed(gb.smollm2_path()) for _ in range(3))
    assert best < 0.3


def _timed(path):
    started = time.perf_counter()
    header = read_header(path)
    elapsed = time.perf_counter() - started
    assert len(header.tensors) == 272
    assert len(header.metadata["tokenizer.ggml.tokens"].content) == 49152
    return elapsed
