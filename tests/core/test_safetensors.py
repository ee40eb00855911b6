"""The safetensors loader: values against the safetensors library, tokenizers against transformers, hostile files."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoTokenizer

from intarsia.defaults.safetensors import build, fit
from intarsia.errors import CheckpointError
from intarsia.protocols import LoaderContext
from intarsia.types import Fit, Unfit
from models import END, edit_json, tiny_llama, tiny_tokenizer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_folder(path):
    return build(LoaderContext(path=path)).open()


def refusal(path):
    with pytest.raises(CheckpointError) as caught:
        open_folder(path)
    return str(caught.value)


def read(tensor, dtype=torch.float32):
    out = torch.full(tensor.shape, float("nan"), dtype=dtype)
    tensor.read(out)
    return out


def folder_of(path, tensors, **config):
    path.mkdir(exist_ok=True)
    save_file(tensors, path / SINGLE)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    return path


def raw(path, header, data=b"", length=None):
    """A folder whose safetensors file is written by hand."""
    path.mkdir(exist_ok=True)
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def shards(path, weight_map, **files):
    """A folder with an index and, for each keyword, a shard `<keyword>.safetensors` with those tensors."""
    path.mkdir(exist_ok=True)
    for stem, tensors in files.items():
        save_file(tensors, path / f"{stem}.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_values_equal_the_safetensors_library_in_every_dtype(tmp_path, stored, out):
    generator = torch.Generator().manual_seed(0)
    # More than one chunk of 1 MiB, rows that do not divide it, and odd shapes.
    shapes = {
        "large": (701, 523),
        "vector": (7,),
        "number": (),
        "empty": (0, 4),
        "row": (1, 300_001),
        "cube": (3, 5, 7),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(stored) for name, shape in shapes.items()}
    checkpoint = open_folder(folder_of(tmp_path, tensors))
    expected = load_file(tmp_path / SINGLE)
    assert checkpoint.tensors.keys() == tensors.keys()
    assert checkpoint.dtype == str(stored).removeprefix("torch.")
    for name, tensor in checkpoint.tensors.items():
        assert tensor.name == name
        assert tensor.shape == shapes[name]
        assert tensor.num_bytes == expected[name].numel() * expected[name].element_size()
        assert torch.equal(read(tensor, out), expected[name].to(out))


def test_a_tensor_can_be_read_into_rows_or_columns_of_another(tmp_path):
    values = torch.randn(700, 600)
    tensor = open_folder(folder_of(tmp_path, {"a": values})).tensors["a"]
    whole = torch.zeros(1500, 1200)
    tensor.read(whole[:700, :600])
    tensor.read(whole[700:1400, 600:])
    assert torch.equal(whole[:700, :600], values)
    assert torch.equal(whole[700:1400, 600:], values)
    assert whole.count_nonzero() == 2 * values.count_nonzero(), "nothing else is written"


def test_the_dtype_is_the_widest_that_is_stored(tmp_path):
    tensors = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones(2), "c": torch.ones(2, dtype=torch.int64)}
    assert open_folder(folder_of(tmp_path, tensors)).dtype == "float32"


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn])
def test_what_is_not_stored_as_plain_floats_is_refused_when_it_is_read(tmp_path, dtype):
    checkpoint = open_folder(folder_of(tmp_path, {"a.weight": torch.ones(2, 2).to(dtype)}))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'a\.weight' is stored as"):
        read(checkpoint.tensors["a.weight"])


def test_a_single_file_and_shards_give_the_same_tensors(tmp_path):
    path, model = tiny_llama(tmp_path)
    sharded = tmp_path / "sharded"
    model.save_pretrained(sharded, max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    one, many = open_folder(path).tensors, open_folder(sharded).tensors
    assert one.keys() == many.keys() == model.state_dict().keys()
    for name, values in model.state_dict().items():
        assert torch.equal(read(one[name]), values)
        assert torch.equal(read(many[name]), values)


# Reads 64 MiB under a limit of 8 MiB more private memory than the target takes; mapped files do not count.
LIMITED = """
import re, resource, sys
from pathlib import Path
import torch
from intarsia.defaults.safetensors import build
from intarsia.protocols import LoaderContext
torch.set_num_threads(1)
tensors = build(LoaderContext(path=Path(sys.argv[1]))).open().tensors
tensors["small"].read(torch.empty(tensors["small"].shape, dtype=torch.bfloat16))
out = torch.zeros(tensors["large"].shape, dtype=torch.bfloat16)
used = int(re.search(r"VmData:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10
resource.setrlimit(resource.RLIMIT_DATA, (used + (8 << 20), resource.RLIM_INFINITY))
tensors["large"].read(out)
resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(out.float().sum().item())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="measured through /proc")
def test_reading_takes_little_memory_beside_the_target(tmp_path):
    path = folder_of(tmp_path, {"large": torch.ones(1 << 14, 1 << 10), "small": torch.ones(8)})
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 1 << 24


def test_a_file_that_shrinks_while_it_is_open_is_an_error_and_no_crash(tmp_path):
    path = folder_of(tmp_path, {"a": torch.randn(100, 100)})
    tensor = open_folder(path).tensors["a"]
    os.truncate(path / SINGLE, 1000)
    with pytest.raises(CheckpointError, match="cut short"):
        read(tensor)


# --- malformed files --------------------------------------------------------------------------------------------------


def test_every_truncation_is_refused(tmp_path):
    path = folder_of(tmp_path, {"a": torch.ones(3, 5), "b": torch.ones(7, dtype=torch.float16)})
    whole = (path / SINGLE).read_bytes()
    for length in range(len(whole)):
        (path / SINGLE).write_bytes(whole[:length])
        assert SINGLE in refusal(path)
    (path / SINGLE).write_bytes(whole + b"\0")
    assert "1 bytes after" in refusal(path)


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "data", "named"),
    [
        ({"a": entry(), "b": entry()}, 8, "tensor 'b' overlaps tensor 'a'"),
        ({"a": entry(), "b": entry(offsets=(4, 12))}, 12, "tensor 'b' overlaps tensor 'a'"),
        ({"a": entry(), "b": entry(offsets=(12, 20))}, 20, "tensor 'b' leaves a gap after tensor 'a'"),
        ({"a": entry(offsets=(4, 12))}, 12, "tensor 'a' leaves a gap after the header"),
        ({"a": entry(offsets=(0, 16), shape=(4,))}, 8, "tensor 'a' has the byte range [0, 16]"),
        ({"a": entry(offsets=(8, 0))}, 8, "tensor 'a' has the byte range"),
        ({"a": entry(offsets=(-8, 0))}, 8, "tensor 'a' has the byte range"),
        ({"a": entry(offsets=(0, 2**64))}, 8, "tensor 'a' has the byte range"),
        ({"a": entry(offsets=(0, 8, 8))}, 8, "tensor 'a' has the byte range"),
        ({"a": entry(offsets=(0.0, 8.0))}, 8, "tensor 'a' has the byte range"),
        ({"a": entry(offsets=(False, 8))}, 8, "tensor 'a' has the byte range"),
        ({"a": entry(shape=(3,))}, 8, "tensor 'a' has 8 bytes; F32 of shape [3] takes 12"),
        ({"a": entry(shape=(2**62, 2**62))}, 8, "tensor 'a' has 8 bytes"),
        ({"a": entry(shape=(-2,))}, 8, "tensor 'a' has the shape [-2]"),
        ({"a": entry(shape=(2.0,))}, 8, "tensor 'a' has the shape [2.0]"),
        ({"a": entry(shape=(True, 2))}, 8, "tensor 'a' has the shape"),
        ({"a": entry(shape=(1,) * 9)}, 4, "tensor 'a' has the shape"),
        ({"a": {"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}}, 8, "tensor 'a' has the shape 2"),
        ({"a": entry(dtype="F33")}, 8, "tensor 'a' has the dtype 'F33'"),
        ({"a": entry(dtype=["F32"])}, 8, "tensor 'a' has the dtype ['F32']"),
        ({"a": entry(dtype=None)}, 8, "tensor 'a' has the dtype None"),
        ({"a": [1]}, 8, "tensor 'a' is described by [1]"),
        ({"\ud800": [1]}, 8, "tensor '\\ud800' is described by [1]"),
        (b'{"a": 1, "a": 1}', 0, "the key 'a' is there twice"),
        (b"[1, 2]", 0, "holds a list"),
        (b'"ab"', 0, "holds a str"),
        (b"{nonsense", 0, "not valid JSON"),
        (b"\xff\xfe{}", 0, "not valid JSON"),
        (b'{"a":' * 20_000, 0, "nested too deep"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "not valid JSON"),
    ],
)
def test_a_malformed_header_is_refused_naming_file_and_tensor(tmp_path, header, data, named):
    message = refusal(raw(tmp_path / "m", header, bytes(data)))
    assert message.startswith(SINGLE)
    assert named in message


@pytest.mark.parametrize("length", [0, 1, 3, 10**6, 100_000_001, 2**63, 2**64 - 1])
def test_an_absurd_header_length_is_refused_at_once(tmp_path, length):
    message = refusal(raw(tmp_path / "m", {"a": entry()}, bytes(8), length=length))
    assert message.startswith(SINGLE)


def test_metadata_is_no_tensor(tmp_path):
    path = raw(tmp_path / "m", {"__metadata__": {"format": "pt"}, "a": entry()}, struct.pack("<2f", 1.5, -2.0))
    tensors = open_folder(path).tensors
    assert read(tensors["a"]).tolist() == [1.5, -2.0]
    assert list(tensors) == ["a"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "not valid JSON"),
        ("[]", "holds a list"),
        ("{", "not valid JSON"),
        ("null", "holds a NoneType"),
        ("{}", "model_type is None"),
        ('{"model_type": 3}', "model_type is 3"),
        ('{"model_type": ""}', "model_type is ''"),
        ('{"model_type": "llama", "model_type": "qwen"}', "'model_type' is there twice"),
        ("[" * 100_000, "nested too deep"),
        (" " * (17 << 20), "more than 16 MiB"),
    ],
    ids=range(10),
)
def test_a_malformed_config_is_refused_by_name(tmp_path, text, named):
    path = folder_of(tmp_path / "m", {"a": torch.ones(2)})
    (path / "config.json").write_text(text)
    message = refusal(path)
    assert message.startswith("config.json")
    assert named in message


def test_a_config_that_is_not_utf8_is_refused(tmp_path):
    path = folder_of(tmp_path / "m", {"a": torch.ones(2)})
    (path / "config.json").write_bytes(b'{"model_type": "\xff"}')
    assert "not UTF-8" in refusal(path)


# --- shards -----------------------------------------------------------------------------------------------------------


def test_a_tensor_in_two_shards_is_refused_naming_both(tmp_path):
    path = shards(
        tmp_path / "m",
        {"a": "x.safetensors", "b": "y.safetensors"},
        x={"a": torch.ones(2)},
        y={"a": torch.ones(2), "b": torch.ones(2)},
    )
    message = refusal(path)
    assert all(part in message for part in ("'a'", "x.safetensors", "y.safetensors"))


def test_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path):
    path = shards(tmp_path / "m", {"a": "x.safetensors", "b": "x.safetensors"}, x={"a": torch.ones(2)})
    assert "tensor 'b' is not in x.safetensors" in refusal(path)


def test_a_missing_shard_is_refused_by_name(tmp_path):
    path = shards(tmp_path / "m", {"a": "x.safetensors", "b": "y.safetensors"}, x={"a": torch.ones(2)})
    message = refusal(path)
    assert "'b'" in message
    assert "'y.safetensors' is missing" in message


def test_a_shard_in_a_folder_below_is_fine(tmp_path):
    path = shards(tmp_path / "m", {"a": "sub/x.safetensors"})
    (path / "sub").mkdir()
    save_file({"a": torch.ones(2)}, path / "sub/x.safetensors")
    assert read(open_folder(path).tensors["a"]).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("weight_map", [[], {}, None, "x.safetensors", [["a", "x.safetensors"]], 5])
def test_a_weight_map_that_is_no_object_is_refused(tmp_path, weight_map):
    message = refusal(shards(tmp_path / "m", weight_map, x={"a": torch.ones(2)}))
    assert message.startswith(f"{INDEX}: weight_map is")


# Prints every path that is opened while a folder is loaded, then how that ended.
AUDIT = """
import sys
from pathlib import Path
from intarsia.defaults.safetensors import build
from intarsia.errors import CheckpointError
from intarsia.protocols import LoaderContext
opened = []
sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
try:
    checkpoint = build(LoaderContext(path=Path(sys.argv[1]))).open()
    checkpoint.tokenizer()
    import torch
    for tensor in checkpoint.tensors.values():
        tensor.read(torch.empty(tensor.shape))
    ended = "loaded"
except CheckpointError as error:
    ended = str(error)
print(*opened, sep="\\n")
print(ended)
"""


def audited(path):
    """Load a folder in a process of its own; return what it opened and how it ended."""
    done = subprocess.run([sys.executable, "-c", AUDIT, str(path)], capture_output=True, text=True, check=True)
    *opened, ended = done.stdout.splitlines()
    return opened, ended


@pytest.fixture
def decoys(tmp_path):
    """A model's folder with valid files around it that it must not read."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for path in (outside / "x.safetensors", tmp_path / "x.safetensors"):
        save_file({"b": torch.ones(2)}, path)
    (outside / "config.json").write_text('{"model_type": "llama"}')
    tiny_tokenizer().save_pretrained(outside)
    path = shards(tmp_path / "model", {}, ok={"a": torch.ones(2)})
    (path / "sub").mkdir()
    (path / "link.safetensors").symlink_to(outside / "x.safetensors")
    (path / "away").symlink_to(outside)
    (path / "loop.safetensors").symlink_to(path / "loop.safetensors")
    (path / "device.safetensors").symlink_to("/dev/zero")
    os.mkfifo(path / "fifo.safetensors")
    (path / "folder.safetensors").mkdir()
    return path


@pytest.mark.parametrize(
    "entry",
    [
        "../x.safetensors",
        "../outside/x.safetensors",
        "/etc/hostname",
        "{outside}/x.safetensors",
        "sub/../../x.safetensors",
        "sub/../ok.safetensors",
        "./ok.safetensors",
        "sub//x.safetensors",
        "..\\x.safetensors",
        "sub\\..\\..\\x.safetensors",
        "C:x.safetensors",
        "C:\\x.safetensors",
        "//host/share/x.safetensors",
        "file:///etc/hostname",
        "..",
        ".",
        "/",
        "",
        5,
        None,
        True,
        ["ok.safetensors"],
        {"file": "ok.safetensors"},
        "link.safetensors",
        "away/x.safetensors",
        "loop.safetensors",
        "device.safetensors",
        "fifo.safetensors",
        "folder.safetensors",
        "ok.safetensors\0",
        "\ud800.safetensors",
        "x" * 5000 + ".safetensors",
        "config.json",
        "pytorch_model.bin",
        "~/x.safetensors",
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_index_entry_that_leads_out_of_the_folder_is_refused_by_name(decoys, entry):
    if isinstance(entry, str):
        entry = entry.replace("{outside}", str(decoys.parent / "outside"))
    (decoys / INDEX).write_text(json.dumps({"weight_map": {"a": "ok.safetensors", "b.weight": entry}}))
    message = refusal(decoys)
    assert "the entry of 'b.weight'" in message
    assert repr(entry)[:60] in message


def test_nothing_outside_the_folder_is_opened(decoys):
    for entry in ("../x.safetensors", "sub/../../x.safetensors", "link.safetensors", "away/x.safetensors"):
        (decoys / INDEX).write_text(json.dumps({"weight_map": {"a": "ok.safetensors", "b": entry}}))
        opened, ended = audited(decoys)
        assert repr(entry) in ended
        assert f"{decoys}/config.json" in opened, "the hook works"
        assert not {str(decoys.parent / "x.safetensors"), str(decoys.parent / "outside/x.safetensors")} & set(opened)
        assert not [path for path in opened if path.endswith("/x.safetensors")]
        assert f"{decoys}/ok.safetensors" not in opened, "every entry is judged before a shard is opened"


@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"]
)
def test_no_file_of_the_folder_may_link_out_of_it(tmp_path, name):
    path, _ = tiny_llama(tmp_path, layers=1)
    outside = tmp_path / "outside"
    outside.write_text((path / name).read_text())
    (path / name).unlink()
    (path / name).symlink_to(outside)
    opened, ended = audited(path)
    assert name in ended
    assert "outside the model's folder" in ended
    assert str(outside) not in opened


def test_links_within_the_folder_are_fine(tmp_path):
    path = folder_of(tmp_path / "m", {"a": torch.ones(2)})
    (path / SINGLE).rename(path / "real.safetensors")
    (path / SINGLE).symlink_to("real.safetensors")
    (tmp_path / "link").symlink_to(path)
    assert audited(path)[1] == audited(tmp_path / "link")[1] == "loaded"


def cached(tmp_path, blob):
    """A folder as huggingface_hub's cache has it, whose weights link to `blob`, relative to the cache."""
    snapshot = tmp_path / "hub" / "models--owner--name" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text('{"model_type": "llama"}')
    target = tmp_path / "hub" / blob
    target.parent.mkdir(parents=True, exist_ok=True)
    save_file({"a": torch.ones(2)}, target)
    (snapshot / SINGLE).symlink_to(os.path.relpath(target, snapshot))
    return snapshot


def test_a_snapshot_in_the_hub_cache_may_link_to_its_own_blobs(tmp_path):
    assert audited(cached(tmp_path, "models--owner--name/blobs/abcd"))[1] == "loaded"


def test_a_snapshot_in_the_hub_cache_may_link_to_the_shared_blobs_of_the_cache(tmp_path):
    assert audited(cached(tmp_path, f"blobs/ab/ab{'0' * 62}"))[1] == "loaded"


@pytest.mark.parametrize(
    "blob",
    [
        "models--owner--other/blobs/abcd",
        "models--owner--name/other/abcd",
        "models--owner--name/blobs/deeper/abcd",
        "blobs/ab/secret",
        f"blobs/cd/ab{'0' * 62}",
        "../outside",
    ],
)
def test_a_snapshot_in_the_hub_cache_may_link_to_nothing_else(tmp_path, blob):
    opened, ended = audited(cached(tmp_path, blob))
    assert "outside the model's folder" in ended
    assert not [path for path in opened if path.endswith(Path(blob).name)]


def test_a_link_to_a_blob_that_is_gone_is_refused(tmp_path):
    snapshot = cached(tmp_path, "models--owner--name/blobs/abcd")
    (tmp_path / "hub/models--owner--name/blobs/abcd").unlink()
    assert "links to a file that does not exist" in refusal(snapshot)


# --- which folders fit ------------------------------------------------------------------------------------------------


def test_a_folder_with_config_and_safetensors_fits(tmp_path):
    assert isinstance(fit(LoaderContext(path=folder_of(tmp_path / "m", {"a": torch.ones(2)}))), Fit)


@pytest.mark.parametrize(
    ("names", "named"),
    [
        ([], "no model.safetensors"),
        (["config.json"], "no model.safetensors"),
        ([SINGLE], "no config.json"),
        (["config.json", "model-00001-of-00002.safetensors"], "model-00001-of-00002.safetensors"),
        (["config.json", "adapter_model.safetensors"], "adapter_model.safetensors"),
    ],
)
def test_a_folder_that_lacks_a_file_is_unfit_and_says_which(tmp_path, names, named):
    for name in names:
        (tmp_path / name).touch()
    found = fit(LoaderContext(path=tmp_path))
    assert isinstance(found, Unfit)
    assert named in found.reason
    assert named in refusal(tmp_path)


def test_a_file_is_unfit(tmp_path):
    (tmp_path / "x.gguf").touch()
    found = fit(LoaderContext(path=tmp_path / "x.gguf"))
    assert isinstance(found, Unfit)
    assert "x.gguf is a file" in found.reason


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt", "consolidated.00.PTH"])
def test_a_pickle_checkpoint_is_refused_and_never_run(tmp_path, name):
    marker = tmp_path / "marker"
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    # Protocol 0 by hand: calling open(marker, "w") on load.
    (folder / name).write_bytes(f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode())
    for path in (folder, folder / name):
        found = fit(LoaderContext(path=path))
        assert isinstance(found, Unfit)
        assert name in found.reason
        assert "run any code" in found.reason
        assert "safetensors" in found.reason
        opened, ended = audited(path)
        assert "run any code" in ended
        assert not [path for path in opened if path.endswith(name)]
    assert not marker.exists()


def test_a_pickle_beside_safetensors_stays_unread(tmp_path):
    path = folder_of(tmp_path / "m", {"a": torch.ones(2)})
    (path / "pytorch_model.bin").write_bytes(b"x")
    opened, ended = audited(path)
    assert ended == "loaded"
    assert not [name for name in opened if name.endswith(".bin")]


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def saved(path, **tokens):
    """Save a folder with a tokenizer; return it and the loader's view."""
    folder_of(path, {"a": torch.ones(2)}, eos_token_id=7)
    tiny_tokenizer().save_pretrained(path)
    if tokens:
        edit_json(path / "tokenizer_config.json", **tokens)
    return path


def spec_of(path):
    spec = open_folder(path).tokenizer()
    assert spec is not None
    return spec


def post_process(path, single, **special):
    """Give tokenizer.json a post-processor."""
    table = json.loads((path / "tokenizer.json").read_text())
    processor = processors.TemplateProcessing(single=single, pair="$A $B", special_tokens=list(special.items()))
    table["post_processor"] = json.loads(processor.__getstate__())
    (path / "tokenizer.json").write_text(json.dumps(table))


def test_without_tokenizer_json_there_is_none(tmp_path):
    assert open_folder(folder_of(tmp_path / "m", {"a": torch.ones(2)})).tokenizer() is None


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bos_token": "A"},
        {"bos_token": {"__type": "AddedToken", "content": "A"}, "pad_token": "B", "unk_token": "C"},
        {"bos_token": None, "eos_token": "Z"},
    ],
    ids=str,
)
def test_special_tokens_equal_transformers(tmp_path, changes):
    path = saved(tmp_path / "m", **changes)
    spec, reference = spec_of(path), AutoTokenizer.from_pretrained(path)
    assert spec.definition == (path / "tokenizer.json").read_text()
    assert spec.special_tokens == reference.special_tokens_map
    assert spec.bos_id == reference.bos_token_id
    assert spec.chat_template == reference.chat_template


def test_the_older_special_tokens_map_is_read_as_transformers_reads_it(tmp_path):
    path = saved(tmp_path / "m", eos_token="Z")
    (path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "A"}, "eos_token": "B"}))
    spec, reference = spec_of(path), AutoTokenizer.from_pretrained(path)
    assert spec.special_tokens == reference.special_tokens_map == {"bos_token": "A", "eos_token": "B"}
    edit_json(path / "tokenizer_config.json", added_tokens_decoder={})
    spec, reference = spec_of(path), AutoTokenizer.from_pretrained(path)
    assert spec.special_tokens == reference.special_tokens_map == {"eos_token": "Z"}


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [2, 0]}, 7, (2, 0)),
        ({"eos_token_id": [2, 2, 0]}, 7, (2, 0)),
        ({"eos_token_id": 0}, 7, (0,)),
        ({"eos_token_id": None}, 7, (7,)),
        ({"eos_token_id": []}, [7, 8], (7, 8)),
        ({}, 7, (7,)),
        (None, [7, 8], (7, 8)),
        (None, None, (256,)),
    ],
)
def test_what_ends_a_generation_comes_from_the_nearest_file(tmp_path, generation, config, expected):
    path = saved(tmp_path / "m")
    edit_json(path / "config.json", eos_token_id=config)
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    assert spec_of(path).eos_ids == expected


@pytest.mark.parametrize("ids", ["2", [2, "0"], True, -1, [1.0], {"a": 1}, list(range(2000))], ids=range(7))
def test_eos_ids_that_are_none_are_refused(tmp_path, ids):
    path = saved(tmp_path / "m")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
        spec_of(path)


@pytest.mark.parametrize("flag", [None, False])
@pytest.mark.parametrize("single", [None, "A $A", "$A", "A $A B", "$A B"])
def test_a_bos_is_added_where_transformers_adds_it(tmp_path, single, flag):
    path = saved(tmp_path / "m", bos_token="A", **({} if flag is None else {"add_bos_token": flag}))
    if single:
        tokenizer = tiny_tokenizer()
        post_process(path, single, A=tokenizer.convert_tokens_to_ids("A"), B=tokenizer.convert_tokens_to_ids("B"))
    spec, reference = spec_of(path), AutoTokenizer.from_pretrained(path)
    assert spec.add_bos == (reference("xy").input_ids[0] == reference.bos_token_id)
    assert spec.bos_id == reference.bos_token_id


def test_the_flag_asks_for_a_bos_too(tmp_path):
    path = saved(tmp_path / "m", bos_token="A", add_bos_token=True)
    assert spec_of(path).add_bos
    edit_json(path / "tokenizer_config.json", bos_token=None)
    assert not spec_of(path).add_bos, "there is none to add"


def test_a_bos_that_only_the_post_processor_knows_is_found(tmp_path):
    path = saved(tmp_path / "m")
    post_process(path, "A $A", A=tiny_tokenizer().convert_tokens_to_ids("A"))
    spec = spec_of(path)
    assert spec.add_bos
    assert spec.bos_id == AutoTokenizer.from_pretrained(path)("x").input_ids[0]


@pytest.mark.parametrize(
    ("file", "setting", "expected"),
    [
        ("of the file", None, "of the file"),
        ("of the file", "of the setting", "of the file"),
        (None, "of the setting", "of the setting"),
        (None, [{"name": "rag", "template": "no"}, {"name": "default", "template": "yes"}], "yes"),
        (None, [{"name": "rag", "template": "no"}], None),
        (None, None, None),
    ],
)
def test_the_chat_template_is_taken_from_either_place(tmp_path, file, setting, expected):
    path = saved(tmp_path / "m", chat_template=setting)
    (path / "chat_template.jinja").unlink()
    if file:
        (path / "chat_template.jinja").write_text(file)
    assert spec_of(path).chat_template == expected
    template = AutoTokenizer.from_pretrained(path).chat_template
    assert (template.get("default") if isinstance(template, dict) else template) == expected


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("tokenizer.json", "{", "not valid JSON"),
        ("tokenizer.json", "[]", "holds a list"),
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 3}}', "not a tokenizer"),
        ("tokenizer.json", "[" * 100_000, "nested too deep"),
        ("tokenizer_config.json", "[]", "holds a list"),
        ("tokenizer_config.json", '{"bos_token": 5}', "bos_token is 5"),
        ("tokenizer_config.json", '{"chat_template": 5}', "chat_template is 5"),
        ("tokenizer_config.json", '{"chat_template": [5]}', "chat_template"),
        ("tokenizer_config.json", '{"chat_template": [{"name": []}]}', "chat_template"),
        ("special_tokens_map.json", "nonsense", "not valid JSON"),
        ("generation_config.json", "[1]", "holds a list"),
        ("chat_template.jinja", "x" * (5 << 20), "more than 4 MiB"),
    ],
    ids=lambda value: value[:30],
)
def test_a_malformed_tokenizer_file_is_refused_by_name(tmp_path, name, text, named):
    path = saved(tmp_path / "m")
    if name == "tokenizer_config.json":
        (path / "chat_template.jinja").unlink()
    (path / name).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        spec_of(path)
    assert str(caught.value).startswith(name)
    assert named in str(caught.value)


def test_a_tokenizer_that_makes_the_library_panic_is_refused(tmp_path):
    path = saved(tmp_path / "m")
    post_process(path, "A $A", A=32)
    table = json.loads((path / "tokenizer.json").read_text())
    table["post_processor"]["single"][0]["SpecialToken"]["id"] = "gone"
    (path / "tokenizer.json").write_text(json.dumps(table))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer"):
        spec_of(path)


def test_the_tiny_tokenizer_round_trips_text(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(saved(tmp_path / "m"))
    for text in ("Hello, world!", "naïve 日本 🙂\n\t", f"a{END}b"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
