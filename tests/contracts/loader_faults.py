"""Broken loaders, around that of Hugging Face's folders and that of quantized ones."""

import json
import pickle
import struct

import torch
from attrs import evolve, frozen
from safetensors.torch import save_file

from contracts.planted import planting
from intarsia.checkpoints import FolderCheckpoint, ModelFolder, SafetensorsTensor, read_config
from intarsia.defaults.safetensors import SafetensorsLoader, fit
from intarsia.errors import CheckpointError
from intarsia.quantizing.integers import IntegerFormat
from intarsia.testing.loaders import LoaderContract
from intarsia.testing.tiny_tokenizer import save_byte_tokenizer
from intarsia.types import Fit, Provider, Unfit, Weight

FAULTS = []
plant = planting(FAULTS)
MODEL = "model.safetensors"


class Folder:
    """A good loader: Hugging Face's folders. Faults change what it has opened."""

    def __init__(self, path):
        self.path = path

    @staticmethod
    def fit(context):
        # A rank of its own: the loader that comes with Intarsia fits these folders too.
        found = fit(context)
        return Fit(70, found.reason) if isinstance(found, Fit) else found

    def open(self):
        checkpoint = SafetensorsLoader(self.path).open()
        return evolve(checkpoint, tensors=self.changed(dict(checkpoint.tensors)))

    def changed(self, tensors):
        return tensors


class Bits(Folder):
    """A good loader that keeps matrices in 8 bits: a scale a row."""

    def changed(self, tensors):
        return {name: self.kept(one) if name.endswith("_proj.weight") else one for name, one in tensors.items()}

    def kept(self, tensor):
        return Kept(tensor)


@frozen
class Around:
    """A tensor around another."""

    inner: SafetensorsTensor

    def __getattr__(self, name):
        return getattr(self.inner, name)

    name = property(lambda self: self.inner.name)
    shape = property(lambda self: self.inner.shape)
    format = property(lambda self: self.inner.format)
    num_bytes = property(lambda self: self.inner.num_bytes)

    def read(self, out):
        self.inner.read(out)

    def read_slice(self, out, rows, columns):
        self.inner.read_slice(out, rows, columns)


class Kept(Around):
    weight_format = IntegerFormat(8)

    def read_weight(self):
        values = self.inner.load()
        scale = values.abs().amax(1).clamp_min(1e-9) / 127
        return Weight(
            self.weight_format, {"weight": (values / scale[:, None]).round().to(torch.int8), "scale": scale}, self.shape
        )

    def read(self, out):
        out.copy_(self.read_weight().dequantize())

    def read_slice(self, out, rows, columns):
        out.copy_(self.read_weight().dequantize()[rows.start : rows.stop, columns.start : columns.stop])


#: What faults are planted in: the contract finds nothing wrong with these.
SOUND = (Folder, Bits)


def contract(part):
    """Return the contract for a broken loader."""

    class Broken(LoaderContract):
        patience_s = 3.0

        def provider(self):
            return Provider(key="tried", summary="folders", fit=part.fit, build=lambda context: part(context.path))

        def write(self, folder, tensors, config):
            save_file(tensors, folder / MODEL)
            (folder / "config.json").write_text(json.dumps(config))
            return save_byte_tokenizer(folder)

        def stored(self, tensors):
            if not issubclass(part, Bits):
                return tensors
            means = {}
            for name, values in tensors.items():
                scale = values.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 127
                means[name] = (values / scale).round() * scale if name.endswith("_proj.weight") else values
            return means

    return Broken


# --- numbers ----------------------------------------------------------------------------------------------------------


@plant("test_what_was_written_is_read")
class SwapsTwo(Folder):
    """It reads the keys' weights for the values', which have the same shape"""

    def changed(self, tensors):
        keys, values = (f"model.layers.0.self_attn.{one}_proj.weight" for one in "kv")
        return tensors | {keys: evolve(tensors[values], name=keys), values: evolve(tensors[keys], name=values)}


@plant("test_what_was_written_is_read")
class ForgetsNorms(Folder):
    """It lists matrices alone"""

    def changed(self, tensors):
        return {name: one for name, one in tensors.items() if len(one.shape) == 2}


@plant("test_what_was_written_is_read")
class LosesSmallNumbers(Folder):
    """It reads everything through float16"""

    def changed(self, tensors):
        class Tensor(Around):
            def read(self, out):
                half = torch.empty(self.shape, dtype=torch.float16)
                self.inner.read(half)
                out.copy_(half)

        return {name: Tensor(one) for name, one in tensors.items()}


@plant("test_tensors_are_read_in_any_order_and_again")
class ReadsOnce(Folder):
    """It gives a tensor's numbers once: the second time they are 0"""

    def changed(self, tensors):
        seen = set()

        class Tensor(Around):
            def read(self, out):
                if self.name in seen:
                    out.zero_()
                else:
                    self.inner.read(out)
                seen.add(self.name)

        return {name: Tensor(one) for name, one in tensors.items()}


@plant("test_targets_of_any_dtype_and_place_are_filled")
class FillsACopy(Folder):
    """It fills a copy of a target that is not contiguous"""

    def changed(self, tensors):
        class Tensor(Around):
            def read(self, out):
                self.inner.read(out.contiguous())

        return {name: Tensor(one) for name, one in tensors.items()}


@plant("test_targets_of_any_dtype_and_place_are_filled")
class KnowsOneType(Folder):
    """It copies bytes, whatever the target's dtype"""

    def changed(self, tensors):
        class Tensor(Around):
            def read(self, out):
                raw = self.inner.load().view(torch.uint8).flatten()[: out.nbytes]
                out.copy_(raw.view(out.dtype)[: out.numel()].view(out.shape) if raw.numel() == out.nbytes else 0)

        return {name: Tensor(one) for name, one in tensors.items()}


@plant("test_parts_of_tensors_are_what_the_whole_has_there")
class TakesFirstColumns(Folder):
    """Of a part's columns it reads as many from the first on"""

    def changed(self, tensors):
        class Tensor(Around):
            def read_slice(self, out, rows, columns):
                self.inner.read_slice(out, rows, range(len(columns)))

        return {name: Tensor(one) for name, one in tensors.items()}


@plant("test_weights_kept_in_their_bits_stand_for_what_is_read")
class HalvesScales(Bits):
    """In their bits its weights are half as large as in floats"""

    def kept(self, tensor):
        class Tensor(Kept):
            def read_weight(self):
                weight = super().read_weight()
                return evolve(weight, tensors={**weight.tensors, "scale": weight.tensors["scale"] / 2})

            def read(self, out):
                out.copy_(super().read_weight().dequantize())

        return Tensor(tensor)


@plant("test_weights_kept_in_their_bits_stand_for_what_is_read")
class AnnouncesAnother(Bits):
    """It announces another format than it returns"""

    def kept(self, tensor):
        class Tensor(Kept):
            weight_format = IntegerFormat(4, 32)

            def read_weight(self):
                return evolve(super().read_weight(), format=IntegerFormat(8))

        return Tensor(tensor)


# --- what is read when ------------------------------------------------------------------------------------------------


@plant("test_opening_reads_headers_alone")
class ReadsEverything(Folder):
    """It reads all weights when it opens the files"""

    def changed(self, tensors):
        (self.path / MODEL).read_bytes()
        return tensors


@plant("test_a_tensor_is_read_alone")
class ReadsTheFile(Folder):
    """It reads the whole file for each tensor"""

    def changed(self, tensors):
        path = self.path / MODEL

        class Tensor(Around):
            def read(self, out):
                path.read_bytes()
                self.inner.read(out)

        return {name: Tensor(one) for name, one in tensors.items()}


@plant("test_files_are_given_back")
class KeepsFilesOpen(Folder):
    """It keeps a file of every folder that it opened"""

    held = []  # noqa: RUF012

    def open(self):
        checkpoint = super().open()
        self.held.append((self.path / MODEL).open("rb"))
        return checkpoint


# --- facts ------------------------------------------------------------------------------------------------------------


@plant("test_facts_are_those_that_were_written")
class WritesNumbersAsTexts(Folder):
    """The sizes in its config are texts"""

    def open(self):
        checkpoint = super().open()
        return evolve(checkpoint, config={name: str(value) for name, value in checkpoint.config.items()})


@plant("test_facts_are_those_that_were_written")
class KnowsNoDtype(Folder):
    """Its dtype is what the files call it, not a name of a dtype"""

    def open(self):
        checkpoint = super().open()

        class Checkpoint(FolderCheckpoint):
            dtype = "F32"

        return Checkpoint(checkpoint.folder, checkpoint.config, checkpoint.tensors)


@plant("test_the_tokenizer_keeps_every_text")
class LosesSpaces(Folder):
    """Its tokenizer leaves spaces out at the beginning of a text"""

    def open(self):
        checkpoint = super().open()

        class Checkpoint(FolderCheckpoint):
            def tokenizer(self):
                spec = super().tokenizer()
                table = json.loads(spec.definition) | {
                    "normalizer": {"type": "Strip", "strip_left": True, "strip_right": False}
                }
                return evolve(spec, definition=json.dumps(table))

        return Checkpoint(checkpoint.folder, checkpoint.config, checkpoint.tensors)


@plant("test_it_fits_its_own_files_and_no_others")
class FitsEverything(Folder):
    """It fits whatever it is asked about"""

    @staticmethod
    def fit(context):
        return Fit(90, "why not")


@plant("test_it_fits_its_own_files_and_no_others")
class FitsAsWell(Folder):
    """It fits the files of another loader as well as that one does"""

    fit = staticmethod(fit)


@plant("test_it_fits_its_own_files_and_no_others")
class FailsToFit(Folder):
    """Asked about a path that is not there, it raises"""

    @staticmethod
    def fit(context):
        names = [path.name for path in context.path.iterdir()]
        return Folder.fit(context) if MODEL in names else Unfit(f"no {MODEL}")


@plant("test_an_engine_answers_from_it")
class TurnsSquares(Folder):
    """Square matrices are read the other way round where an engine reads them beside others"""

    def changed(self, tensors):
        class Tensor(Around):
            def read(self, out):
                self.inner.read(out)
                if len(self.shape) == 2 and out._base is not None and self.shape[0] == self.shape[1]:
                    out.copy_(out.t().clone())

        return {name: Tensor(one) for name, one in tensors.items()}


# --- damage -----------------------------------------------------------------------------------------------------------


class Lenient(Folder):
    """Reads the header by itself, and believes it."""

    def open(self):
        if not self.path.is_dir() or not (self.path / MODEL).is_file():
            raise CheckpointError(f"{MODEL} is missing")
        folder = ModelFolder(self.path)
        config = read_config(folder)
        return FolderCheckpoint(folder, config, self.tensors())

    def tensors(self):
        data = (self.path / MODEL).read_bytes()
        try:
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
            return {name: self.tensor(name, one, data[8 + length :]) for name, one in header.items() if name[0] != "_"}
        except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise self.wrong(error) from None

    def wrong(self, error):
        return CheckpointError(f"{MODEL}: {error}")

    def tensor(self, name, entry, data):
        start, stop = entry["data_offsets"]
        return Copied(name, tuple(entry["shape"]), entry["dtype"], stop - start, data[start:stop])


@frozen
class Copied:
    """Bytes; what is missing of them is 0."""

    name: str
    shape: tuple
    format: str
    num_bytes: int
    data: bytes

    def read(self, out):
        data = self.data + bytes(max(0, 4 * out.numel() - len(self.data)))
        out.copy_(torch.frombuffer(bytearray(data), dtype=torch.float32)[: out.numel()].view(out.shape))


@plant("test_a_file_that_is_cut_is_refused")
class FillsUp(Lenient):
    """What is cut off it reads as zeros"""


@plant("test_a_file_that_is_cut_is_refused")
class NamesNoFile(Folder):
    """It says that a file is wrong, and not which one"""

    def open(self):
        try:
            return super().open()
        except CheckpointError:
            raise CheckpointError("the checkpoint is malformed") from None


@plant("test_a_file_that_is_cut_is_refused")
class LetsErrorsOut(Folder):
    """What its reader of JSON raises reaches the user"""

    def open(self):
        json.loads((self.path / "config.json").read_text())
        return super().open()


@plant("test_garbage_is_refused_or_read")
class BelievesSizes(Lenient):
    """It believes the sizes that a header names, whatever the file has"""


@plant("test_garbage_is_refused_or_read")
class DecodesAnything(Folder):
    """It decodes a header that is no text, and fails with what Python says to that"""

    def open(self):
        data = (self.path / MODEL).read_bytes()
        data[8 : 8 + struct.unpack("<Q", data[:8].ljust(8, b"\0"))[0]].decode()
        return super().open()


@plant("test_what_is_missing_is_refused")
class OpensBlindly(Folder):
    """A file that is not there is an error of the system's"""

    def open(self):
        with (self.path / MODEL).open("rb") as file:
            file.read(8)
        return super().open()


@plant("test_nothing_is_run_that_files_hold")
class Unpickles(Folder):
    """What is no safetensors file it tries as a pickle"""

    def open(self):
        try:
            return super().open()
        except CheckpointError:
            pickle.loads((self.path / MODEL).read_bytes())
            raise


@plant("test_nothing_is_run_that_files_hold")
class LoadsWhatIsBeside(Folder):
    """It takes optional settings from a pickle beside the weights"""

    def open(self):
        extra = self.path / "weights.pkl"
        if extra.is_file():
            pickle.loads(extra.read_bytes())
        return super().open()
