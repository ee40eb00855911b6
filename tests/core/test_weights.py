"""Loading weights: nothing missing, unread or misshapen; values, quantizers, progress; and how much memory it takes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attrs import field, frozen

from intarsia.defaults import onednn
from intarsia.errors import CheckpointError, ModelNotFoundError
from intarsia.models.weights import check_tensors, load_weights, num_parameters
from intarsia.ops import resolve
from intarsia.protocols import PartContext
from intarsia.references import find_model
from intarsia.types import DENSE, EngineOptions, Fit, TensorSource, Weight, WeightMap
from models import tiny_llama

MB = 2**20


@frozen(eq=False)
class FakeTensor:
    name: str
    values: torch.Tensor
    format: str = "F32"
    num_bytes: int = 0

    @property
    def shape(self):
        return tuple(self.values.shape)

    def read(self, out):
        assert out.shape == self.values.shape
        out.copy_(self.values)


@frozen(eq=False)
class FakeCheckpoint:
    tensors: dict
    config: dict = field(factory=dict)

    @classmethod
    def of(cls, **shapes):
        generator = torch.Generator().manual_seed(3)
        values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        return cls({name: FakeTensor(name, value) for name, value in values.items()})


SHAPES = {"q": (4, 6), "k": (2, 6), "v": (2, 6), "norm": (6,), "bias_q": (4,), "bias_k": (2,), "down": (6, 4)}
MAP = WeightMap(
    {
        "qkv.weight": TensorSource(("q", "k", "v"), ((4, 6), (2, 6), (2, 6))),
        "qkv.bias": TensorSource(("bias_q", "bias_k"), ((4,), (2,))),
        "norm.weight": TensorSource(("norm",), ((6,),)),
        "down.weight": TensorSource(("down",), ((6, 4),)),
    },
    ignored=("*.inv_freq",),
)


def load(checkpoint, weight_map=MAP, *, dtype=torch.float32, quantizers=(), progress=lambda what, done, total: None):
    device = torch.device("cpu")
    ops = resolve([], str(dtype).removeprefix("torch."), ["dense", *(q.format for q in quantizers)])
    return load_weights(
        checkpoint, weight_map, dtype=dtype, device=device, quantizers=quantizers, ops=ops, progress=progress
    )


# --- what the files hold ----------------------------------------------------------------------------------------------


def test_files_that_hold_exactly_the_models_tensors_pass():
    check_tensors(FakeCheckpoint.of(**SHAPES), MAP)
    check_tensors(FakeCheckpoint.of(**SHAPES, **{"layers.0.inv_freq": (3,)}), MAP)


@pytest.mark.parametrize("name", SHAPES)
def test_a_missing_tensor_is_named(name):
    shapes = {key: shape for key, shape in SHAPES.items() if key != name}
    with pytest.raises(CheckpointError, match=rf"lacks tensors that the model needs: {name}$"):
        check_tensors(FakeCheckpoint.of(**shapes), MAP)


def test_an_unread_tensor_is_named():
    with pytest.raises(CheckpointError, match=r"would not read: extra$"):
        check_tensors(FakeCheckpoint.of(**SHAPES, extra=(1,), **{"a.inv_freq": (1,)}), MAP)


@pytest.mark.parametrize(
    ("name", "shape"), [("q", (6, 4)), ("q", (4, 7)), ("norm", (1, 6)), ("norm", ()), ("down", (6, 0))]
)
def test_a_misshapen_tensor_is_named_with_both_shapes(name, shape):
    with pytest.raises(CheckpointError) as caught:
        check_tensors(FakeCheckpoint.of(**(SHAPES | {name: shape})), MAP)
    assert all(part in str(caught.value) for part in (f"tensor {name} ", str(shape), str(SHAPES[name])))


def test_of_many_missing_tensors_the_first_are_named_and_the_others_counted():
    sources = {f"w{i}": TensorSource((f"t{i}",), ((1,),)) for i in range(9)}
    with pytest.raises(CheckpointError, match=r"t0, t1, t2, t3, t4 and 4 more$"):
        check_tensors(FakeCheckpoint.of(), WeightMap(sources))


# --- what is loaded ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_parts_are_laid_end_to_end_in_the_run_dtype(dtype):
    checkpoint = FakeCheckpoint.of(**SHAPES)
    weights = load(checkpoint, dtype=dtype)
    assert list(weights) == list(MAP.tensors)

    def stored(*names):
        return torch.cat([checkpoint.tensors[name].values for name in names]).to(dtype)

    qkv, down = weights["qkv.weight"], weights["down.weight"]
    assert isinstance(qkv, Weight) and qkv.format is DENSE and qkv.shape == (8, 6)
    assert torch.equal(qkv.dequantize(), stored("q", "k", "v")) and qkv.dequantize().dtype == dtype
    assert torch.equal(down.dequantize(), stored("down"))
    assert torch.equal(weights["qkv.bias"], stored("bias_q", "bias_k"))
    assert torch.equal(weights["norm.weight"], stored("norm")) and weights["norm.weight"].dtype == dtype


def test_progress_grows_and_ends_at_all_parameters():
    told = []
    load(FakeCheckpoint.of(**SHAPES), progress=lambda *facts: told.append(facts))
    done = [facts[1] for facts in told]
    assert done == sorted(set(done)) and len(done) == len(MAP.tensors)
    assert {facts[2] for facts in told} == {done[-1]} == {num_parameters(MAP)} == {4 * 6 + 2 * 12 + 6 + 6 + 24}


@frozen
class FakeFormat:
    name: str

    def dequantize(self, weight):
        raise NotImplementedError

    def shard(self, weight, dim, start, stop):
        raise NotImplementedError


@frozen
class FakeQuantizer:
    format: str
    takes: tuple
    seen: list = field(factory=list)

    def accepts(self, name, shape):
        return name in self.takes

    def num_bytes(self, name, shape):
        return 0

    def quantize(self, name, weight):
        self.seen.append((name, weight.format.name))
        return Weight(FakeFormat(self.format), weight.tensors, weight.shape)


def test_quantizers_are_chained_in_order_on_the_matrices_that_they_accept():
    sparse, int8 = FakeQuantizer("sparse", ("qkv.weight",)), FakeQuantizer("int8", tuple(MAP.tensors))
    weights = load(FakeCheckpoint.of(**SHAPES), quantizers=(sparse, int8))
    assert sparse.seen == [("qkv.weight", "dense")]
    assert int8.seen == [("qkv.weight", "sparse"), ("down.weight", "dense")]
    assert weights["qkv.weight"].format.name == "int8"
    assert isinstance(weights["norm.weight"], torch.Tensor), "vectors are never quantized"


def test_a_tensor_that_cannot_be_read_ends_the_loading():
    class Broken(FakeTensor):
        def read(self, out):
            raise CheckpointError("tensor v: cut short")

    checkpoint = FakeCheckpoint.of(**SHAPES)
    checkpoint.tensors["v"] = Broken("v", torch.zeros(2, 6))
    with pytest.raises(CheckpointError, match="tensor v"):
        load(checkpoint)


# --- memory -----------------------------------------------------------------------------------------------------------

#: Loads the model at argv[1] in the dtype argv[2], alone in a process; prints what anonymous memory it took.
MEASURE = """
import json, os, sys, threading
from pathlib import Path
import psutil, torch
from intarsia.defaults import llama, onednn, safetensors
from intarsia.models.weights import load_weights
from intarsia.ops import resolve
from intarsia.protocols import LoaderContext, PartContext
from intarsia.types import EngineOptions, Fit, Weight
from intarsia_gguf.checkpoint import GgufLoader

path, dtype, packs = Path(sys.argv[1]), getattr(torch, sys.argv[2]), sys.argv[3] == "packed"
loader = GgufLoader(path) if path.is_file() else safetensors.build(LoaderContext(path=path))
checkpoint, family = loader.open(), llama.FAMILY
names = frozenset(checkpoint.tensors)
weight_map = family.weight_map(family.spec(checkpoint.config, names), names)

# As an engine would: in bf16, weights are laid out for oneDNN as they come, where it computes in bf16.
context = PartContext(engine=EngineOptions(device="cpu", dtype=sys.argv[2]), spec=None)
sets = [("onednn", onednn.build(context).kernels())] if isinstance(onednn.fit(context), Fit) else []
ops = resolve(sets, sys.argv[2], ["dense", "packed"])

class Format:
    name = "packed"

class Packer:
    format = "packed"
    def accepts(self, name, shape): return True
    def quantize(self, name, weight):
        packed = torch.empty(weight.shape, dtype=torch.int8)
        for row, out in zip(weight.dequantize(), packed): out.copy_(row)
        return Weight(Format(), {"packed": packed}, weight.shape)

def load(names, progress):
    part = type(weight_map)({name: weight_map.tensors[name] for name in names})
    return load_weights(checkpoint, part, dtype=dtype, device=torch.device("cpu"),
                        quantizers=[Packer()] if packs else [], ops=ops, progress=progress)

process = psutil.Process()
def anonymous():
    info = process.memory_info()
    return info.rss - info.shared

load(["norm.weight", "layers.0.out.weight"], lambda *_: None)  # what reading imports is no weight
start = peak = anonymous()
def sample(*_):
    global peak
    peak = max(peak, anonymous())
done = threading.Event()
def watch():
    while not done.wait(0.001): sample()
thread = threading.Thread(target=watch)
thread.start()
weights = load(list(weight_map.tensors), sample)
done.set()
thread.join()
sizes = [w.num_bytes if isinstance(w, Weight) else w.numel() * w.element_size() for w in weights.values()]
largest = max(torch.Size(s.shape).numel() for s in weight_map.tensors.values()) * dtype.itemsize
print(json.dumps({"grown": peak - start, "weights": sum(sizes), "largest": largest}))
"""


def measure(path, dtype, quantizer="none"):
    command = [sys.executable, "-c", MEASURE, str(path), dtype, quantizer]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check_memory(facts, kept=20 * MB):
    """The weights and one tensor, and what the allocator keeps."""
    assert facts["weights"] <= facts["grown"] + 2 * MB, "what was measured cannot be true"
    assert facts["grown"] <= facts["weights"] + facts["largest"] + kept, facts


@pytest.fixture(scope="module")
def smollm2():
    try:
        return find_model("smollm2")
    except ModelNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def middling(tmp_path_factory):
    folder = tmp_path_factory.mktemp("middling")
    path, _ = tiny_llama(folder, hidden=512, ffn=2048, layers=6, heads=8, kv_heads=8, vocab=8192, max_len=64)
    assert sum(file.stat().st_size for file in Path(path).glob("*.safetensors")) > 100 * MB
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_a_gguf_takes_the_weights_and_one_tensor_of_memory(smollm2, dtype):
    facts = measure(smollm2, dtype)
    context = PartContext(engine=EngineOptions(device="cpu", dtype=dtype), spec=None)
    # Laid out for oneDNN, the tied head is a weight of its own.
    twin = 49152 * 576 if isinstance(onednn.fit(context), Fit) else 0
    assert facts["weights"] == (134_515_008 + twin) * (4 if dtype == "float32" else 2)
    check_memory(facts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_a_folder_takes_the_weights_and_one_tensor_of_memory(middling, dtype):
    check_memory(measure(middling, dtype))


def test_quantizing_while_loading_takes_the_packed_weights_and_one_dense_tensor(middling):
    facts = measure(middling, "float32", "packed")
    assert facts["weights"] < 40 * MB < facts["largest"] + 40 * MB
    # Dense tensors come and go between packed ones that stay. glibc gives blocks back to the system one by one only
    # above a threshold that it raises to 32 MB; all of these are smaller.
    check_memory(facts, kept=20 * MB + 32 * MB)
