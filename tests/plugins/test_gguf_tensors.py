"""Reading tensors: every format, the order of rows in heads, bounded memory, SmolLM2 against transformers."""

import os
import re
import threading
import time

import numpy as np
import psutil
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import _type_traits, dequantize, quantize

from intarsia.errors import CheckpointError
from intarsia_gguf.checkpoint import GgufLoader
from tools import gguf_bytes as gb

QUANTIZED = sorted(_type_traits)


def open_with(tmp_path, tensors):
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file(tensors=[*gb.tiny_tensors(), *tensors]))
    return GgufLoader(path).open().tensors


def read(tensor, dtype=torch.float32):
    out = torch.full(tensor.shape, 7.0, dtype=dtype)
    tensor.read(out)
    return out


def same(left, right):
    """Bit for bit the same numbers; NaN is NaN."""
    return torch.equal(torch.nan_to_num(left, nan=123.0), torch.nan_to_num(right, nan=123.0)) and torch.equal(
        left.isnan(), right.isnan()
    )


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_every_format_reads_as_gguf_dequantizes_it(kind, tmp_path):
    # More rows than one block holds, and the last block is not full.
    group, group_bytes = GGML_QUANT_SIZES[kind]
    rows, columns = 157, 4 * max(group, 256)
    raw = np.random.default_rng(int(kind)).integers(0, 256, (rows, columns // group * group_bytes), dtype=np.uint8)
    tensors = open_with(tmp_path, [("x.weight", (rows, columns), int(kind), raw.tobytes())])
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(dequantize(raw, kind))
    tensor = tensors["x.weight"]
    assert (tensor.format, tensor.shape, tensor.num_bytes) == (kind.name, (rows, columns), raw.nbytes)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert same(read(tensor, dtype), expected.to(dtype))


@pytest.mark.parametrize(
    "name, code",
    [("F32", "<f4"), ("F16", "<f2"), ("F64", "<f8"), ("I8", "i1"), ("I16", "<i2"), ("I32", "<i4"), ("I64", "<i8")],
)
def test_plain_numbers_read_as_they_are(name, code, tmp_path):
    values = (np.random.default_rng(3).standard_normal((300, 257)) * 50).astype(code)
    kind = int(GGMLQuantizationType[name])
    tensor = open_with(tmp_path, [("x.weight", values.shape, kind, values.tobytes())])["x.weight"]
    assert torch.equal(read(tensor), torch.from_numpy(values.astype(np.float32)))


@pytest.mark.parametrize("shape", [(1_000_000,), (5, 200_000), (3, 4, 5), (2, 3, 4, 5), (1, 1)])
def test_any_shape_reads(shape, tmp_path):
    values = np.random.default_rng(4).standard_normal(shape).astype("<f4")
    tensor = open_with(tmp_path, [("x.weight", shape, gb.T_F32, values.tobytes())])["x.weight"]
    assert torch.equal(read(tensor), torch.from_numpy(values))


def test_a_quantized_vector_longer_than_a_block_reads(tmp_path):
    raw = np.random.default_rng(5).integers(0, 256, 34 * 3001, dtype=np.uint8)
    raw[1::34] &= 0x3F  # finite scales
    tensor = open_with(tmp_path, [("x.weight", (32 * 3001,), gb.T_Q8_0, raw.tobytes())])["x.weight"]
    expected = dequantize(raw.reshape(1, -1), GGMLQuantizationType.Q8_0).reshape(-1)
    assert torch.equal(read(tensor), torch.from_numpy(expected))


def test_a_target_that_is_not_contiguous_is_filled(tmp_path):
    values = np.random.default_rng(6).standard_normal((300, 257)).astype("<f4")
    tensor = open_with(tmp_path, [("x.weight", values.shape, gb.T_F32, values.tobytes())])["x.weight"]
    out = torch.zeros(257, 300).T
    tensor.read(out)
    assert torch.equal(out, torch.from_numpy(values))


def test_a_matrix_that_is_stored_the_other_way_round_is_turned(tmp_path):
    # More rows than one block holds.
    values = np.random.default_rng(6).standard_normal((300, 256)).astype("<f4")
    raw = quantize(values, GGMLQuantizationType.Q8_0)
    keys = {f"gpt2.{name.partition('.')[2]}": value for name, value in gb.tiny_metadata().items() if "llama." in name}
    keys["general.architecture"] = (gb.STRING, "gpt2")
    keys["gpt2.attention.layer_norm_epsilon"] = (gb.F32, 1e-5)
    path = tmp_path / "model.gguf"
    stored = ("blk.0.attn_qkv.weight", values.shape, gb.T_Q8_0, raw.tobytes())
    path.write_bytes(gb.tiny_file(keys, [*gb.tiny_tensors()[:1], stored]))
    tensor = GgufLoader(path).open().tensors["transformer.h.0.attn.c_attn.weight"]
    assert (tensor.shape, tensor.num_bytes) == ((256, 300), len(raw.tobytes()))
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType.Q8_0)).T
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(read(tensor, dtype), expected.to(dtype))


def open_mixture(tmp_path, tensors, num_experts=3):
    keys = {"llama.expert_count": (gb.U32, num_experts), "llama.expert_used_count": (gb.U32, 2)}
    path = tmp_path / "model.gguf"
    path.write_bytes(gb.tiny_file(keys, [*without_attention(), *tensors]))
    return GgufLoader(path).open().tensors


def without_attention():
    return [tensor for tensor in gb.tiny_tensors() if ".attn_" not in tensor[0]]


def test_each_expert_of_a_stack_is_a_tensor(tmp_path):
    # More rows than one block holds.
    values = np.random.default_rng(7).standard_normal((3, 300, 256)).astype("<f4")
    raw = quantize(values, GGMLQuantizationType.Q8_0)
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType.Q8_0))
    stacks = {
        "ffn_gate_exps": ("w1",),
        "ffn_down_exps": ("w2",),
        "ffn_up_exps": ("w3",),
        "ffn_gate_up_exps": ("w1", "w3"),
    }
    for stack, names in stacks.items():
        tensors = open_mixture(tmp_path, [(f"blk.0.{stack}.weight", values.shape, gb.T_Q8_0, raw.tobytes())])
        for expert in range(3):
            for name, half in zip(names, expected[expert].chunk(len(names)), strict=True):
                tensor = tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.weight"]
                assert torch.equal(read(tensor), half)
                assert tensor.num_bytes == raw.nbytes // 3 // len(names)


@pytest.mark.parametrize(
    "name, shape, kind, said",
    [
        ("ffn_gate_exps", (2, 4, 8), gb.T_F32, "not the matrices of 3 experts"),
        ("ffn_gate_exps", (12, 8), gb.T_F32, "not the matrices of 3 experts"),
        ("ffn_gate_up_exps", (3, 5, 8), gb.T_F32, "not the matrices of 3 experts"),
        ("attn_qkv", (15, 8), gb.T_F32, "has 15 rows, not the 16 of attn_q, attn_k, attn_v"),
    ],
)
def test_a_stack_of_another_shape_is_refused(name, shape, kind, said, tmp_path):
    tensor = (f"blk.0.{name}.weight", shape, kind, bytes(4 * int(np.prod(shape))))
    with pytest.raises(CheckpointError, match=re.escape(said)) as caught:
        open_mixture(tmp_path, [tensor])
    assert f"blk.0.{name}.weight" in str(caught.value)


def test_a_quantized_bias_that_cannot_be_cut_is_refused(tmp_path):
    raw = quantize(np.zeros((1, 32), "<f4"), GGMLQuantizationType.Q8_0).tobytes()
    path = tmp_path / "model.gguf"
    keys = {"llama.attention.key_length": (gb.U32, 8), "llama.attention.value_length": (gb.U32, 8)}
    path.write_bytes(gb.tiny_file(keys, [*without_attention(), ("blk.0.attn_qkv.bias", (32,), gb.T_Q8_0, raw)]))
    with pytest.raises(CheckpointError, match=r"'blk.0.attn_qkv.bias' is Q8_0, whose groups of 32 numbers"):
        GgufLoader(path).open()


def as_llama_cpp_orders(weight, num_heads):
    """Rows as llama.cpp wants them, written out: of a head, first i, then i + half, for each i."""
    head_dim = weight.shape[0] // num_heads
    half = head_dim // 2
    order = [head * head_dim + part * half + i for head in range(num_heads) for i in range(half) for part in (0, 1)]
    return weight[order]


def test_rows_of_q_and_k_come_back_in_hugging_faces_order(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=6, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_bias=True, mlp_bias=True, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    state = {name: torch.randn(value.shape) for name, value in model.state_dict().items()}
    renames = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    tensors = []
    for name, value in state.items():
        stored = (
            as_llama_cpp_orders(value, 4 if "q_proj" in name else 2)
            if ("q_proj" in name or "k_proj" in name)
            else value
        )
        for long, short in renames.items():
            name = name.replace(long, short)
        tensors.append((name, tuple(value.shape), gb.T_F32, stored.numpy().tobytes()))
    metadata = {
        "llama.block_count": (gb.U32, 2),
        "llama.embedding_length": (gb.U32, 64),
        "llama.feed_forward_length": (gb.U32, 32),
        "llama.attention.head_count": (gb.U32, 4),
        "llama.attention.head_count_kv": (gb.U32, 2),
    }
    path = tmp_path / "llama.gguf"
    path.write_bytes(gb.tiny_file(metadata, tensors))
    checkpoint = GgufLoader(path).open()
    assert set(checkpoint.tensors) == set(state)
    assert all(torch.equal(read(checkpoint.tensors[name]), value) for name, value in state.items())
    assert checkpoint.config["attention_bias"] and checkpoint.config["mlp_bias"]
    assert not checkpoint.config["tie_word_embeddings"]


def test_rows_are_put_in_order_across_blocks(tmp_path):
    heads, head_dim, columns = 37, 64, 320
    weight = torch.randn(heads * head_dim, columns)
    metadata = {"llama.attention.key_length": (gb.U32, head_dim), "llama.attention.value_length": (gb.U32, head_dim)}
    tensors = [tensor for tensor in gb.tiny_tensors() if "attn_q" not in tensor[0] and "attn_k" not in tensor[0]]
    stored = as_llama_cpp_orders(weight, heads).contiguous()
    tensors.append(("blk.0.attn_q.weight", tuple(weight.shape), gb.T_F32, stored.numpy().tobytes()))
    path = tmp_path / "wide.gguf"
    path.write_bytes(gb.tiny_file(metadata, tensors))
    assert torch.equal(read(GgufLoader(path).open().tensors["model.layers.0.self_attn.q_proj.weight"]), weight)


def test_q_rows_that_are_no_whole_heads_are_refused(tmp_path):
    tensors = [tensor for tensor in gb.tiny_tensors() if "attn_q.weight" not in tensor[0]]
    path = tmp_path / "odd.gguf"
    path.write_bytes(gb.tiny_file(tensors=[*tensors, ("blk.0.attn_q.weight", (6, 8), gb.T_F32, bytes(192))]))
    with pytest.raises(CheckpointError, match=r"attn_q\.weight"):
        GgufLoader(path).open()


@pytest.mark.parametrize(
    "name", ["blk.00.attn_q.weight", "blk.0.attn_q.scale", "blk.0.other.weight", "token_embd.x.weight"]
)
def test_an_unknown_name_stays_as_it_is(name, tmp_path):
    assert name in open_with(tmp_path, [(name, (4, 8), gb.T_F32, bytes(128))])


def test_names_that_mean_one_tensor_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="both"):
        open_with(tmp_path, [("model.norm.weight", (8,), gb.T_F32, bytes(32))])


def test_a_file_that_is_cut_while_open_is_an_error(tmp_path):
    tensors = open_with(tmp_path, [("x.weight", (1000, 64), gb.T_F32, bytes(256_000))])
    with (tmp_path / "model.gguf").open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CheckpointError, match=r"x\.weight"):
        read(tensors["x.weight"])


# --- SmolLM2 ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2():
    return GgufLoader(gb.smollm2_path()).open()


def test_smollm2s_weights_and_config_equal_transformers(smollm2):
    """Compared with what `from_pretrained(gguf_file=...)` loads, which itself asks for the accelerate package."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    path = str(gb.smollm2_path())
    config = LlamaConfig(**smollm2.config)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    loaded = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    state = loaded["tensors"]
    assert set(smollm2.tensors) == set(state)
    assert all(torch.equal(read(tensor), state[name]) for name, tensor in smollm2.tensors.items())
    ours, theirs = config.to_dict(), LlamaConfig(**loaded["config"]).to_dict()
    # What transformers adds has no place in a config.json, or is not read from it.
    for extra in ("architectures", "_model_name_or_path", "unk_token_id"):
        ours.pop(extra, None)
        theirs.pop(extra, None)
    assert ours == theirs
    assert smollm2.config["architectures"] == ["LlamaForCausalLM"]


def test_smollm2_is_dequantized_in_seconds_on_one_thread(smollm2):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        out = torch.empty(max(np.prod(tensor.shape) for tensor in smollm2.tensors.values()))
        started = time.process_time()
        for tensor in smollm2.tensors.values():
            tensor.read(out[: int(np.prod(tensor.shape))].view(tensor.shape))
        assert time.process_time() - started < 1.5
    finally:
        torch.set_num_threads(threads)


class AnonymousPeak:
    """The most anonymous memory that the process has above its start, sampled by a thread."""

    def __enter__(self):
        self.process, self.done = psutil.Process(os.getpid()), threading.Event()
        self.start = self.peak = self.anonymous()
        self.thread = threading.Thread(target=self.sample)
        self.thread.start()
        return self

    def anonymous(self):
        info = self.process.memory_info()
        return info.rss - info.shared

    def sample(self):
        while not self.done.wait(0.001):
            self.peak = max(self.peak, self.anonymous())

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()

    @property
    def grown(self):
        return self.peak - self.start


def test_reading_uses_a_few_megabytes_beside_the_target(smollm2):
    embedding = smollm2.tensors["model.embed_tokens.weight"]
    out = torch.zeros(embedding.shape)
    embedding.read(out)
    with AnonymousPeak() as peak:
        for _ in range(3):
            embedding.read(out)
    # The tensor is 113 MB in float32; blocks are 256 KB and there are a handful of temporaries.
    assert peak.grown < 8 * 2**20


def test_opening_reads_no_weights(smollm2):
    with AnonymousPeak() as peak:
        again = GgufLoader(gb.smollm2_path()).open()
    assert len(again.tensors) == len(smollm2.tensors) == 272
    assert peak.grown < 60 * 2**20
