"""2:4 sparse weights by the CPU kernels: the same bits as the dense kernels give on the same numbers, on every path."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engines import engine_of
from intarsia.errors import CompositionError
from intarsia.quantizing.integers import IntegerFormat
from intarsia.quantizing.sparse import compress
from intarsia.testing import poison_cache, prompt_logits
from intarsia.types import Weight, dense
from intarsia_cpu import build, linears, sparse
from intarsia_sparse.quantizer import prune
from models import tiny_llama

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason="there is no C++ compiler")

KINDS = ("float32", "bfloat16", "int8")
#: Outputs and columns: ragged panels, groups and steps, and rows that fill them.
SHAPES = st.tuples(st.integers(1, 130), st.one_of(st.integers(1, 200), st.sampled_from((64, 256, 576))))
ROWS = st.integers(1, 40)
quick = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sparse_weight(kind, outs, ins, seed=0):
    """Pruned at random: groups that keep two numbers, one or none."""
    w = drawn(outs, ins, seed=seed)
    w[torch.rand(outs, ins, generator=torch.Generator().manual_seed(seed)) < 0.2] = 0
    if kind == "int8":
        return prune("w", w, to_int8=True)
    return prune("w", w.to(getattr(torch, kind)))


def same_dense(weight):
    """The same numbers, as the dense kernels read them."""
    if weight.format.values != "int8":
        return dense(weight.dequantize())
    tensors = {"weight": weight.format.numbers(weight).contiguous(), "scale": weight.tensors["scale"]}
    return Weight(IntegerFormat(8), tensors, weight.shape)


def bits(tensor):
    return tensor.contiguous().view(torch.int32 if tensor.dtype == torch.float32 else torch.int16)


@quick
@given(
    shape=SHAPES,
    rows=ROWS,
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(("float32", "bfloat16")),
    has_bias=st.booleans(),
)
def test_results_have_the_bits_of_the_dense_kernels(cpu_path, shape, rows, kind, dtype, has_bias):
    outs, ins = shape
    weight, x = sparse_weight(kind, outs, ins), drawn(rows, ins, seed=1, dtype=getattr(torch, dtype))
    bias = drawn(outs, seed=2) if has_bias else None
    found = linears.linear(x, linears.pack(weight), bias)
    assert torch.equal(bits(found), bits(linears.linear(x, linears.pack(same_dense(weight)), bias)))


@pytest.mark.parametrize("shape", [(30, 36), (7, 34), (64, 64), (100, 576)])
@pytest.mark.parametrize("rows", [1, 3, 17])
def test_products_in_fp32_are_those_of_float64(cpu_path, shape, rows):
    """W01: columns that are no multiple of four, groups of three and four zeros, a bias."""
    weight, bias = sparse_weight("float32", *shape), drawn(shape[0], seed=2)
    x = drawn(rows, shape[1], seed=1)
    right = x.double() @ weight.dequantize().double().T + bias.double()
    assert (linears.linear(x, linears.pack(weight), bias) - right).abs().max() <= 1e-5 * right.abs().max()


@pytest.mark.parametrize("shape", [(100, 130), (96, 576), (7, 33)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_any_batch_and_on_any_threads(cpu_path, kind, shape):
    weight = linears.pack(sparse_weight(kind, *shape))
    x = drawn(150, shape[1], dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32)
    whole = linears.linear(x, weight)
    for start, stop in [(0, 1), (149, 150), (3, 7), (3, 12), (0, 100), (50, 150)]:
        assert torch.equal(linears.linear(x[start:stop], weight), whole[start:stop])
    for threads in (1, 2, 3, 7):
        out = torch.full_like(whole, float("nan"))
        target = linears.OutputStruct(out.data_ptr(), shape[0], linears.is_bf16(out))
        linears.run(linears.struct(weight), x, target, threads=threads)
        assert torch.equal(out, whole)


@pytest.mark.parametrize("ins", [32, 33, 34, 35])
@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_around_rows_is_neither_read_nor_written(cpu_path, kind, ins):
    outs, rows = 50, 5
    weight = linears.pack(sparse_weight(kind, outs, ins))
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    for count in (1, rows):
        around = torch.full((count + 2, ins + 6), float("nan"), dtype=dtype)
        x = around[1:-1, 3:-3]
        x.copy_(drawn(count, ins))
        out = torch.full((count + 2, outs + 6), 7.0, dtype=dtype)
        inner = out[1:-1, 3:-3]
        linears.run(
            linears.struct(weight), x, linears.OutputStruct(inner.data_ptr(), out.stride(0), int(dtype.itemsize == 2))
        )
        assert torch.equal(inner, linears.linear(x.contiguous(), weight)) and inner.isfinite().all()
        inner.fill_(7.0)
        assert (out == 7).all()


@quick
@given(outs=st.integers(1, 120), ins=st.integers(1, 200), kind=st.sampled_from(KINDS))
def test_a_packed_weight_unpacks_to_the_same_bits(outs, ins, kind):
    weight = sparse_weight(kind, outs, ins)
    packed = linears.pack(weight)
    unpacked = linears.unpack(packed)
    assert packed.format.name == "cpu" and unpacked.format == weight.format and unpacked.shape == weight.shape
    assert unpacked.tensors.keys() == weight.tensors.keys()
    for name, tensor in weight.tensors.items():
        assert torch.equal(unpacked.tensors[name], tensor)
    assert torch.equal(packed.rows(torch.tensor([outs - 1])).dequantize(), weight.dequantize()[-1:])


@pytest.mark.parametrize(("kind", "a_group"), [("float32", 8.5), ("bfloat16", 4.5), ("int8", 2.5)])
def test_panels_take_the_bytes_of_the_format(kind, a_group):
    """Of four columns: two numbers and half a byte."""
    panels = linears.pack(sparse_weight(kind, 96, 576)).tensors["panels"]
    assert panels.numel() * panels.element_size() == 96 * 576 / 4 * a_group


def test_every_choice_of_columns_lies_as_the_header_says():
    """The first output keeps columns 1 and 3, the second 0 and 2: by hand."""
    numbers = torch.tensor([[0, 5, 0, -6], [7, 0, 8, 0]], dtype=torch.int8)
    panels = sparse.to_panels(compress("w", numbers, None, torch.ones(2)))
    assert panels.shape == (1, 1, 120)
    assert panels[0, 0, :4].tolist() == [5, 256 - 6, 7, 8]
    assert panels[0, 0, 96].item() == 0b1010 | 0b0101 << 4
    floats = sparse.to_panels(compress("w", numbers.float()))
    assert floats[0, 0].view(torch.uint8)[: 4 * 96].view(torch.float32)[[0, 1, 48, 49]].tolist() == [5, 7, -6, 8]
    # Of 16 outputs a bit each, set where they drop the column: the first 0 and 2, the second 1 and 3. Outputs that are
    # not there drop 2 and 3.
    columns = floats[0, 0, 4 * 96 :].view(torch.int16)[:4] & 7
    assert columns.tolist() == [0b001, 0b010, 0b101, 0b110]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("outs", [50, 48])
def test_gated_panels_hold_the_same_numbers(cpu_path, kind, outs):
    weight = linears.pack(sparse_weight(kind, 2 * outs, 130))
    paired = linears.interleave(weight)
    same = linears.interleave(linears.pack(same_dense(sparse_weight(kind, 2 * outs, 130))))
    for rows in (1, 3, 11):
        x, bias = drawn(rows, 130), drawn(2 * outs, seed=3)
        found, right = torch.empty(rows, outs), torch.empty(rows, outs)
        for target, one in ((found, paired), (right, same)):
            struct = linears.struct(one, bias, gated=True)
            linears.run(struct, x, linears.OutputStruct(target.data_ptr(), outs, 0, 0, 1))
        assert torch.equal(found, right)


def test_half_floats_are_refused_by_name():
    with pytest.raises(CompositionError, match="float16"):
        linears.pack(prune("w", drawn(4, 8, dtype=torch.float16)))


# --- engines ----------------------------------------------------------------------------------------------------------


def sparse_llama(tmp_path, **sizes):
    """Save a model whose layers are 2:4 sparse."""
    path, model = tiny_llama(tmp_path, layers=2, attention_bias=True, mlp_bias=True, **sizes)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and "proj" in name:
            parameter.data = prune("w", parameter.detach()).dequantize()
    model.save_pretrained(path)
    return path


def logits(path, dtype, quantizer, runner, **engine):
    rng = random.Random(7)
    prompt = [rng.randrange(256) for _ in range(70)]
    sections = {"runner": runner, "kernels": "cpu", "cache": {"use": "paged", "memory": "64MiB"}}
    with engine_of(path, engine={"dtype": dtype, **engine}, quantizer=quantizer, **sections) as made:
        poison_cache(made)
        found = prompt_logits(made, prompt)
        poison_cache(made)
        assert torch.equal(prompt_logits(made, prompt, chunk=3), found)
        return found


@pytest.mark.parametrize("runner", ["eager", "cpu_fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [{}, {"hidden": 40, "heads": 5, "kv_heads": 1, "ffn": 33, "head_dim": 10}])
def test_an_engine_gives_the_bits_of_its_sparse_checkpoint(tmp_path, runner, dtype, sizes):
    path = sparse_llama(tmp_path, **sizes)
    right = logits(path, dtype, "none", runner)
    assert torch.equal(logits(path, dtype, {"use": "sparse24"}, runner, threads=2), right)


@pytest.mark.parametrize("runner", ["eager", "cpu_fused"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_with_int8_values_gives_the_bits_of_dense_int8(tmp_path, runner, dtype):
    """Rounded to nearest with a scale of the row's largest / 127, zeros stay zeros: both have the same numbers."""
    path = sparse_llama(tmp_path)
    right = logits(path, dtype, {"use": "int8", "head": False, "group": 0}, runner)
    assert torch.equal(logits(path, dtype, {"use": "sparse24", "values": "int8"}, runner, threads=2), right)
