"""The contract of loaders, as tests to inherit.

::

    from intarsia.testing.loaders import LoaderContract

    class TestMine(LoaderContract):
        def provider(self):
            return my_plugin.provide_loaders()[0]

        def write(self, folder, tensors, config):
            return my_plugin.save(folder / "model.mine", tensors, config)

pytest runs the inherited tests. They write a tiny llama through `write`, open it, and compare; then they damage the
files, and want nothing but CheckpointError.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from intarsia.plugins import Registry
from intarsia.protocols import LoaderContext
from intarsia.testing.claims import unclaimed
from intarsia.testing.engines import offering, said, scratch, tiny_config, unharmed
from intarsia.testing.loader_case import Written, files_of, read, same_bits
from intarsia.testing.loader_damage import DamageClaims
from intarsia.types import Checkpoint, Fit, SamplingParams, SliceableTensor, StoredWeight, TokenizerSpec

if TYPE_CHECKING:
    pass

__all__ = ["LoaderContract"]

#: Fields of a config that every part reads.
_SIZES: tuple[str, ...] = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
_SIZES += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
#: Names that a checkpoint can give its dtype.
_DTYPES = ("float64", "float32", "bfloat16", "float16")
#: Ids of a model whose weights, 8 MiB each at its ends, show what is read of them.
_MANY_IDS = 1 << 16


class LoaderContract(DamageClaims):
    """What every loader keeps. Subclass it, name the class `Test...`, say whose provider it is, and write its files.

    What can be said besides, such as `stored`, is in `LoaderCase`.
    """

    # --- numbers ----------------------------------------------------------------------------------------------------

    def test_what_was_written_is_read(self) -> None:
        """Names, shapes and numbers of all tensors are those that were written, and there are no others."""
        with self.written() as written:
            checkpoint = self.opened(written.path)
            listed, wanted = set(checkpoint.tensors), set(written.tensors)
            assert listed == wanted, (
                f"missing: {sorted(wanted - listed)[:4]}, not written: {sorted(listed - wanted)[:4]}"
            )
            for name, tensor in checkpoint.tensors.items():
                values = written.tensors[name]
                assert tensor.name == name, f"{name} calls itself {tensor.name}"
                assert tensor.shape == tuple(values.shape), (
                    f"{name} is {tensor.shape}, and {tuple(values.shape)} was written"
                )
                assert tensor.num_bytes > 0 and tensor.format, (
                    f"{name} has {tensor.num_bytes} bytes of {tensor.format!r}"
                )
                assert same_bits(read(tensor), values), f"{name} has other numbers than were written"

    def test_tensors_are_read_in_any_order_and_again(self) -> None:
        """What is read does not depend on what was read before, in this checkpoint or in another of the same files."""
        with self.written() as written:
            one, other = self.opened(written.path), self.opened(written.path)
            for seed in range(3):
                names = sorted(written.tensors)
                random.Random(seed).shuffle(names)
                for turn, name in enumerate(names):
                    checkpoint = one if turn % 3 else other
                    assert same_bits(read(checkpoint.tensors[name]), written.tensors[name]), (
                        f"{name}, read again, differs"
                    )

    def test_targets_of_any_dtype_and_place_are_filled(self) -> None:
        """`read` converts to the target's dtype, and fills targets that are rows or columns of something larger."""
        import torch

        with self.written() as written:
            for name, tensor in self.opened(written.path).tensors.items():
                for dtype in _DTYPES:
                    values = written.tensors[name].to(getattr(torch, dtype))
                    assert same_bits(read(tensor, dtype), values), f"{name} is read into {dtype} as something else"
                wide = torch.zeros([2 * size for size in tensor.shape])
                target = wide[tuple(slice(1, 2 * size, 2) for size in tensor.shape)]
                unharmed(f"reading {name} into a part of something larger", tensor.read, target)
                assert same_bits(target, written.tensors[name]), f"{name} is not read into every second place"
                target.zero_()
                assert not wide.count_nonzero(), f"reading {name} writes beside its target"

    def test_parts_of_tensors_are_what_the_whole_has_there(self) -> None:
        """Rows and columns that are read alone have the numbers that they have in the whole."""
        import torch

        draws, count = random.Random(1), 0
        with self.written() as written:
            for name, tensor in self.opened(written.path).tensors.items():
                if not isinstance(tensor, SliceableTensor):
                    continue
                for _ in range(6):
                    count += 1
                    rows, columns = (_span(draws, size) for size in (*tensor.shape, 0)[:2])
                    whole = written.tensors[name][rows.start : rows.stop]
                    whole = whole[:, columns.start : columns.stop] if whole.ndim == 2 else whole
                    wide = torch.full((2 * len(rows), *whole.shape[1:]), float("nan"))
                    for out in (torch.full_like(whole, float("nan")), wide[::2]):
                        unharmed(f"reading a part of {name}", tensor.read_slice, out, rows, columns)
                        assert same_bits(out, whole), f"{name}: {rows}, {columns} are others than in the whole"
        if not count:
            unclaimed("its tensors are read whole")

    def test_weights_kept_in_their_bits_stand_for_what_is_read(self) -> None:
        """`read_weight` returns the numbers that `read` gives, in the format and the size that it announced."""
        import torch

        count = 0
        with self.written() as written:
            for name, tensor in self.opened(written.path).tensors.items():
                if not isinstance(tensor, StoredWeight):
                    continue
                count += 1
                weight = unharmed(f"reading {name} in its bits", tensor.read_weight)
                announced = tensor.weight_format
                assert weight.format == announced, f"{name} is {weight.format.name}, and {announced.name} was announced"
                assert weight.shape == tensor.shape, f"{name} is {weight.shape}, and {tensor.shape} was announced"
                size = announced.num_bytes(tensor.shape)
                assert weight.num_bytes == size, f"{name} takes {weight.num_bytes} bytes, and {size} were announced"
                values, found = read(tensor), weight.dequantize().float()
                assert torch.allclose(found, values, rtol=2e-3, atol=float(values.abs().max()) * 2e-3), (
                    f"{name} stands for other numbers in its bits than in floats"
                )
        if not count:
            unclaimed("it keeps no weights in the bits of their files")

    # --- what is read when ------------------------------------------------------------------------------------------

    def test_opening_reads_headers_alone(self) -> None:
        """`fit` and `open` leave the weights where they are: 16 MiB of them are not read."""
        if not sys.platform.startswith("linux"):
            unclaimed("what a process reads is known on Linux alone")
        with self.written() as small:
            self.opened(small.path)
        with self.written(num_ids=_MANY_IDS) as written:
            size, before = _size(written), _touched()
            self.fit(written.path)
            checkpoint = self.opened(written.path)
            shapes = {name: tensor.shape for name, tensor in checkpoint.tensors.items()}
            used = _touched() - before
            assert shapes == {name: tuple(values.shape) for name, values in written.tensors.items()}
            assert used < size // 4, f"opening files of {size} bytes reads {used} of them"

    def test_a_tensor_is_read_alone(self) -> None:
        """Reading a small tensor reads no large one."""
        if not sys.platform.startswith("linux"):
            unclaimed("what a process reads is known on Linux alone")
        with self.written() as small:
            read(self.opened(small.path).tensors["model.norm.weight"])
        with self.written(num_ids=_MANY_IDS) as written:
            checkpoint, size = self.opened(written.path), _size(written)
            before = _touched()
            read(checkpoint.tensors["model.norm.weight"])
            used = _touched() - before
            assert used < size // 4, f"reading 32 numbers reads {used} of {size} bytes"

    def test_files_are_given_back(self) -> None:
        """Once nobody has the checkpoint, no file of it is open or mapped; nor after one that was refused."""
        if not sys.platform.startswith("linux"):
            unclaimed("which files are open is known on Linux alone")
        with self.written() as written:
            checkpoint: Checkpoint | None = self.opened(written.path)
            assert checkpoint is not None
            for tensor in checkpoint.tensors.values():
                read(tensor)
            del tensor
            checkpoint = None
            gc.collect()
            _not_held(written.folder.parent / "own")

    # --- facts ------------------------------------------------------------------------------------------------------

    def test_facts_are_those_that_were_written(self) -> None:
        """The config says what was written, in Hugging Face's spelling; dtype and sampling are what they must be."""
        with self.written() as written:
            checkpoint = self.opened(written.path)
            for name in ("model_type", *_SIZES):
                found, wanted = checkpoint.config.get(name), written.config[name]
                assert found == wanted and type(found) is type(wanted), (
                    f"{name} is {found!r}, and {wanted!r} was written"
                )
            assert checkpoint.dtype in _DTYPES, f"dtype is {checkpoint.dtype!r}, not one of {', '.join(_DTYPES)}"
            assert isinstance(checkpoint.sampling, Mapping), f"sampling is {checkpoint.sampling!r}"
            assert type(checkpoint.keeps_weights) is bool, f"keeps_weights is {checkpoint.keeps_weights!r}"
            again = self.opened(written.path)
            assert again.config == checkpoint.config, "opened again the config is another"

    def test_the_tokenizer_keeps_every_text(self) -> None:
        """Where the files have a tokenizer, texts come back from its ids as they were, and its ids are the model's."""
        from intarsia.text import Tokenizer

        with self.written() as written:
            spec = unharmed("tokenizer", self.opened(written.path).tokenizer)
        if spec is None:
            unclaimed("the files that `write` makes have no tokenizer")
        assert isinstance(spec, TokenizerSpec), f"tokenizer returned {spec!r:.100}, not a TokenizerSpec"
        tokenizer = unharmed("Tokenizer.from_spec", Tokenizer.from_spec, spec)
        for text in self.texts:
            ids = unharmed("encode", tokenizer.encode, text)
            assert all(0 <= token < tokenizer.vocab_size for token in ids), f"{text!r} has ids beyond the vocabulary"
            ids = ids[1:] if spec.add_bos else ids
            assert tokenizer.decode(ids) == text, f"{text!r} comes back as {tokenizer.decode(ids)!r}"
        assert all(token >= 0 for token in spec.eos_ids), f"ids that end an answer: {spec.eos_ids}"

    def test_it_fits_its_own_files_and_no_others(self) -> None:
        """It fits what it can open, with a rank that no other installed loader has, and gives a reason elsewhere."""
        with self.written() as written, scratch() as folder:
            own = self.fit(written.path)
            assert isinstance(own, Fit), f"it does not fit its own files: {own.reason}"
            for offer in Registry.discover().offers("loader").values():
                if offer.provider.key == self.provider().key:
                    continue
                found = offer.provider.fit(LoaderContext(path=written.path))
                assert not isinstance(found, Fit) or found.rank < own.rank, (
                    f"loader {offer.provider.key!r} fits these files too, as well or better: {found.reason}"
                )
            for path in _strangers(folder, written):
                if isinstance(self.fit(path), Fit):
                    unharmed(f"it fits {path.name}, but opening", self.open, path)

    def test_an_engine_answers_from_it(self) -> None:
        """An engine says from these files what it says from Hugging Face's with the same numbers."""
        from safetensors.torch import save_file

        from intarsia.engine import Engine

        with self.written() as written:
            tensors = {name: values.contiguous() for name, values in written.tensors.items()}
            save_file(tensors, written.folder / "model.safetensors", metadata={"format": "pt"})
            if (spec := self.opened(written.path).tokenizer()) is not None:
                (written.folder / "tokenizer.json").write_text(spec.definition, "utf-8")
            params = SamplingParams(temperature=0, max_tokens=16, logprobs=3, ignore_eos=True)
            answers = []
            mine = {"use": str(written.path), "loader": self.provider().key, "weights": "dense", **self.options}
            theirs = {"use": str(written.folder), "loader": "safetensors"}
            for model in (mine, theirs):
                config = tiny_config(written.path) | {"model": model}
                plugins = offering("loader", self.provider())
                with unharmed("an engine", partial(Engine.from_config, config, plugins=plugins)) as engine:
                    done = engine.generate([[1, 2, 3], list(range(40))], params)
                    answers.append([said(one.choices[0]) for one in done])
        assert answers[0] == answers[1], "answers from these files are others than from Hugging Face's"


def _span(draws: random.Random, size: int) -> range:
    """Return some numbers below a size, one after another; none of none."""
    first = draws.randrange(size) if size else 0
    return range(first, draws.randrange(first, size) + 1 if size else 0)


def _size(written: Written) -> int:
    """Return the bytes of the loader's files."""
    return sum(path.stat().st_size for path in files_of(written))


def _touched() -> int:
    """Return the bytes that this process has read, and those of mapped files that it looks at."""
    io, status = Path("/proc/self/io"), Path("/proc/self/status")
    fields = dict(line.split(":", 1) for line in (io.read_text() + status.read_text()).splitlines() if ":" in line)
    return int(fields["rchar"]) + (int(fields["RssFile"].split()[0]) << 10)


def _not_held(root: Path) -> None:
    """Raise AssertionError where this process has a file below a folder open or mapped."""
    real = str(root.resolve())
    held = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if real in line]
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue  # that of the listing itself
        held += [target] if target.startswith(real) else []
    assert not held, f"{Path(held[0]).name} is still held, although nobody has the checkpoint any more"


def _strangers(folder: Path, written: Written) -> list[Path]:
    """Make files that are none of most formats, and return them: Hugging Face's folder among them."""
    empty, pickles = folder / "empty", folder / "pickles"
    for each in (empty, pickles):
        each.mkdir()
    (pickles / "config.json").write_text('{"model_type": "llama"}')
    (pickles / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    text, nothing, archive = folder / "model.txt", folder / "nothing.bin", folder / "model.zip"
    text.write_text("hello")
    nothing.write_bytes(b"")
    archive.write_bytes(b"PK\x05\x06" + bytes(18))
    return [empty, pickles, text, nothing, archive, folder / "missing", written.folder]
