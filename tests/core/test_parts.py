"""Reading parts of tensors, and cutting them out of weights."""

import pytest
import torch
from attrs import frozen
from safetensors.torch import save_file

from intarsia.checkpoints import ModelFolder, open_tensors
from intarsia.models.parts import cut, read_part
from intarsia.quantizing.integers import FORMATS, IntegerFormat, pack_nibbles
from intarsia.quantizing.sparse import compress
from intarsia.types import Part, TensorSource, Weight, dense


@frozen
class Files:
    tensors: dict


@pytest.fixture
def files(tmp_path):
    generator = torch.Generator().manual_seed(0)
    made = {
        "q": torch.randn(6, 10, generator=generator),
        "k": torch.randn(4, 10, generator=generator).bfloat16(),
        "b": torch.randn(8, generator=generator),
        "t": torch.randn(10, 6, generator=generator).half(),
    }
    save_file(made, tmp_path / "model.safetensors")
    return Files(open_tensors(ModelFolder(tmp_path))), made


@pytest.mark.parametrize("columns", [None, (0, 3), (2, 9), (9, 10)])
@pytest.mark.parametrize("rows", [((0, 10),), ((1, 3),), ((5, 8),), ((0, 2), (4, 7), (9, 10))])
def test_a_part_is_what_the_whole_has_there_across_stored_tensors(files, rows, columns):
    checkpoint, made = files
    source = TensorSource(("q", "k"), ((6, 10), (4, 10)), part=Part(rows, columns))
    whole = torch.cat((made["q"], made["k"].float()))
    expected = torch.cat([whole[start:stop] for start, stop in rows])
    expected = expected if columns is None else expected[:, slice(*columns)]
    found = read_part(checkpoint, source, torch.float32)
    assert found.shape == source.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize("columns", [None, (3, 7)])
def test_a_part_of_a_transposed_matrix_is_read_the_other_way_round(files, columns):
    checkpoint, made = files
    source = TensorSource(("t",), ((10, 6),), transposed=True, part=Part(((1, 2), (4, 6)), columns))
    expected = made["t"].float().t()[[1, 4, 5]]
    expected = expected if columns is None else expected[:, slice(*columns)]
    assert torch.equal(read_part(checkpoint, source, torch.float32), expected)


def test_padding_is_zeros_and_an_offset_is_added_to_what_is_stored_alone(files):
    checkpoint, made = files
    source = TensorSource(("b",), ((8,),), offset=1.0, part=Part(((6, 8),), padding=3))
    assert torch.equal(read_part(checkpoint, source, torch.float32), torch.cat((made["b"][6:] + 1, torch.zeros(3))))
    nothing = TensorSource(("b",), ((8,),), part=Part((), padding=8))
    assert torch.equal(read_part(checkpoint, nothing, torch.float32), torch.zeros(8))


class WholeAlone:
    """A stored tensor that can be read whole alone."""

    def __init__(self, tensor):
        self.tensor, self.shape = tensor, tuple(tensor.shape)
        self.name, self.format, self.num_bytes = "w", "F32", tensor.numel() * 4

    def read(self, out):
        out.copy_(self.tensor)


def test_a_tensor_that_cannot_be_read_in_slices_is_cut():
    tensor = torch.arange(24.0).view(4, 6)
    source = TensorSource(("w",), ((4, 6),), part=Part(((1, 3),), (2, 5)))
    found = read_part(Files({"w": WholeAlone(tensor)}), source, torch.float32)
    assert torch.equal(found, tensor[1:3, 2:5])


def integers(layout, outs=6, ins=256):
    generator = torch.Generator().manual_seed(1)
    numbers = torch.randint(0, 16, (outs, ins), generator=generator)
    groups = 1 if layout.group is None else ins // layout.group
    scale = torch.rand(outs, groups, generator=generator)
    stored = pack_nibbles(numbers) if layout.bits == 4 else numbers.to(torch.int8)
    tensors = {"weight": stored, "scale": scale[:, 0] if layout.group is None else scale.half()}
    if layout.offset == "zero":
        tensors["zero"] = torch.randint(0, 16, (outs, groups), generator=generator).to(torch.uint8)
    if layout.offset == "min":
        tensors["min"] = -scale.half()
    return Weight(layout, tensors | {"input_scale": torch.rand(ins, generator=generator)}, (outs, ins))


def sparse():
    numbers = torch.randn(6, 256, generator=torch.Generator().manual_seed(2)).view(6, -1, 4)
    return compress("w", (numbers * torch.tensor([1.0, 0.0, 1.0, 0.0])).view(6, 256))


WEIGHTS = {one.name: one for one in FORMATS if one.activations == "int8"} | {"dense": None, "sparse24": None}


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_cut_weight_stands_for_the_part_of_the_whole(name):
    layout = WEIGHTS[name]
    weight = sparse() if name == "sparse24" else dense(torch.randn(6, 256)) if layout is None else integers(layout)
    part = Part(((0, 1), (3, 5)), (128, 256), padding=1)
    found = cut(weight, part)
    assert found.shape == (4, 128)
    assert torch.equal(found.dequantize()[:3], weight.dequantize()[[0, 3, 4], 128:])
    assert bool(found.dequantize().isfinite().all())
    for tensor in found.tensors.values():
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size(), "a view of the whole"


def test_a_whole_weight_stays_itself():
    weight = integers(IntegerFormat(8, 32))
    assert cut(weight, None) is weight
