"""Weights kept on disk: found again bit for bit, never stale or damaged, bounded, and safe between processes."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from time import time

import pytest
import torch

from intarsia.quantizing.remembered import RememberedWeights, code_digest, digest
from integer_weights import ROTATED, VARIED, integer_weight

KEY = "0" * 64


@pytest.fixture
def kept(tmp_path):
    return RememberedWeights(tmp_path / "weights")


def never():
    raise AssertionError("it is there")


def same(left, right):
    return (
        left.format == right.format
        and left.shape == right.shape
        and left.tensors.keys() == right.tensors.keys()
        and all(
            left.tensors[key].dtype == right.tensors[key].dtype and torch.equal(left.tensors[key], right.tensors[key])
            for key in left.tensors
        )
    )


@pytest.mark.parametrize("name", [*(layout.name for layout in VARIED), *ROTATED])
def test_a_weight_is_found_again_bit_for_bit(name, kept):
    weight = integer_weight(name, 7, 50, input_scale=True)
    assert kept.get(KEY, lambda: weight) is weight
    again = RememberedWeights(kept.folder).get(KEY, never)
    assert same(again, weight)
    assert torch.equal(again.dequantize(), weight.dequantize())


def test_a_weight_that_is_part_of_another_tensor_is_kept_alone(kept):
    whole = integer_weight("int8", 64, 512)
    part = whole.rows(slice(3, 5))
    kept.get(KEY, lambda: part)
    assert (kept.folder / f"{KEY}.safetensors").stat().st_size < 3000
    assert same(kept.get(KEY, never), part)


def test_what_is_found_may_be_written_to_and_the_file_stays(kept):
    weight = integer_weight("int8", 7, 50)
    kept.get(KEY, lambda: weight)
    kept.get(KEY, never).tensors["weight"].zero_()
    assert same(kept.get(KEY, never), weight)


# --- keys -------------------------------------------------------------------------------------------------------------


def test_a_digest_differs_with_every_bit_dtype_shape_and_option():
    x = torch.arange(24, dtype=torch.float32).view(4, 6)
    flipped = x.clone()
    flipped.view(torch.int32)[2, 3] ^= 1
    parts = [
        (x,), (flipped,), (x.view(6, 4),), (x.view(torch.int32),), (x.bfloat16(),), (x, True), (x, False), (x, None),
        (True, x), (x, "1"), (x, 1), (x, 1.0), (x, x), (),
    ]  # fmt: skip
    assert len({digest(*each) for each in parts}) == len(parts)
    assert digest(x, "a") == digest(x.t().contiguous().t(), "a") == digest(x.clone(), "a")


def test_a_digest_is_of_bits_not_of_equality():
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([torch.nan])) == digest(torch.tensor([torch.nan]))


def test_a_digest_of_code_changes_with_the_code(tmp_path):
    (tmp_path / "a.py").write_text("x = 1")
    before = code_digest(str(tmp_path / "a.py"))
    code_digest.cache_clear()
    assert code_digest(str(tmp_path / "a.py")) == before
    code_digest.cache_clear()
    (tmp_path / "b.py").write_text("")
    assert code_digest(str(tmp_path / "a.py")) != before


def test_the_folder_is_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path))
    assert RememberedWeights().folder == tmp_path / "weights"
    monkeypatch.delenv("INTARSIA_CACHE")
    if sys.platform == "linux":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
        assert RememberedWeights().folder == tmp_path / "x" / "intarsia" / "weights"


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_made_again(kept):
    weight = integer_weight("int4_g32_min", 3, 40)
    kept.get(KEY, lambda: weight)
    path = kept.folder / f"{KEY}.safetensors"
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.unlink()
        path.write_bytes(whole[:length])
        assert same(kept.get(KEY, lambda: weight), weight)
        assert same(kept.get(KEY, never), weight)


def test_a_flipped_bit_anywhere_is_never_taken_for_the_weight(kept):
    weight, made = integer_weight("int4_g32_zero", 3, 40), integer_weight("int4_g32_zero", 3, 40)
    kept.get(KEY, lambda: weight)
    path = kept.folder / f"{KEY}.safetensors"
    whole = path.read_bytes()
    for position in range(0, len(whole), 3):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << position % 8
        path.unlink()
        path.write_bytes(damaged)
        found = kept.get(KEY, lambda: made)
        # A bit of padding may be any.
        assert found is made or same(found, weight)


@pytest.mark.parametrize("content", [b"", b"\xff" * 8, b"hello", b"\x02\0\0\0\0\0\0\0{}", bytes(4096)])
def test_another_file_of_that_name_is_replaced(content, kept):
    weight = integer_weight("int8", 3, 40)
    kept.folder.mkdir()
    (kept.folder / f"{KEY}.safetensors").write_bytes(content)
    assert kept.get(KEY, lambda: weight) is weight
    assert same(kept.get(KEY, never), weight)


def test_a_folder_that_cannot_be_written_is_said_once_and_costs_nothing_else(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    kept = RememberedWeights(tmp_path / "file" / "weights")
    weight = integer_weight("int8", 3, 40)
    with caplog.at_level(logging.WARNING):
        assert kept.get(KEY, lambda: weight) is weight
        assert kept.get(KEY, lambda: weight) is weight
    assert [record.getMessage().count("INTARSIA_CACHE") for record in caplog.records] == [1]


def test_a_disk_that_is_nearly_full_is_left_alone(kept, monkeypatch, caplog):
    free = type("Usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    kept.get(KEY, lambda: integer_weight("int8", 3, 40))
    assert list(kept.folder.iterdir()) == [] and "nearly full" in caplog.text


def test_what_a_maker_raises_comes_out_and_leaves_nothing(kept):
    with pytest.raises(AssertionError, match="it is there"):
        kept.get(KEY, never)
    assert not kept.folder.exists()


# --- room -------------------------------------------------------------------------------------------------------------


def test_what_was_not_used_for_longest_goes(kept):
    weights = {str(i) * 64: integer_weight("int8", 4, 1000, seed=i) for i in range(6)}
    now = time()
    for age, (key, weight) in enumerate(list(weights.items())[:5]):
        kept.get(key, lambda weight=weight: weight)
        os.utime(kept.folder / f"{key}.safetensors", (now - 100 + age,) * 2)
    kept.get("0" * 64, never)  # used again
    size = (kept.folder / f"{KEY}.safetensors").stat().st_size
    small = RememberedWeights(kept.folder, most_bytes=3 * size)
    small.get("5" * 64, lambda: weights["5" * 64])
    assert {path.name[0] for path in kept.folder.iterdir()} == {"5", "0", "4"}


def test_a_file_that_another_process_removes_while_it_is_read_is_made_again(kept, monkeypatch):
    weight = integer_weight("int8", 3, 40)
    kept.get(KEY, lambda: weight)

    def gone_when_mapped(path, *args, **kwargs):
        Path(path).unlink()  # safetensors has read the header of it by now
        return mapped(path, *args, **kwargs)

    mapped = torch.UntypedStorage.from_file
    monkeypatch.setattr("torch.UntypedStorage.from_file", gone_when_mapped)
    assert kept.get(KEY, lambda: weight) is weight
    monkeypatch.undo()
    assert same(kept.get(KEY, never), weight)


def test_what_dead_writers_left_goes_after_an_hour_and_other_files_stay(kept):
    kept.folder.mkdir()
    for name, age in (("old.unfinished", 4000), ("new.unfinished", 10), ("README", 99999)):
        (kept.folder / name).write_text("x")
        os.utime(kept.folder / name, (time() - age,) * 2)
    kept.get(KEY, lambda: integer_weight("int8", 3, 40))
    assert {path.name for path in kept.folder.iterdir()} == {"new.unfinished", "README", f"{KEY}.safetensors"}


# --- several processes ------------------------------------------------------------------------------------------------

WRITER = """
import sys, torch
from pathlib import Path
from intarsia.quantizing.integers import FORMATS
from intarsia.quantizing.remembered import RememberedWeights
from intarsia.types import Weight
layout = next(f for f in FORMATS if f.name == "int8")
kept = RememberedWeights(Path(sys.argv[1]), most_bytes=40_000)
def made(i):
    return Weight(layout, {"weight": torch.full((20, 300), i, dtype=torch.int8), "scale": torch.ones(20)}, (20, 300))
for turn in range(20):
    for i in range(10):
        found = kept.get(f"{i:064d}", lambda: made(i))
        assert (found.tensors["weight"] == i).all() and (found.tensors["scale"] == 1).all()
"""


def test_processes_that_start_at_once_share_a_folder(tmp_path):
    """Four of them, over a folder that has room for six of the ten weights: they remove one another's all the time."""
    command = [sys.executable, "-c", WRITER, str(tmp_path / "weights")]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * 4, said
    assert not "".join(said)
    sizes = [path.stat().st_size for path in (tmp_path / "weights").iterdir()]
    assert sizes and sum(sizes) <= 40_000 + max(sizes)
