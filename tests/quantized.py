"""Quantized folders whose bytes are made here by hand, with what they stand for in float64.

Every packing is written out number by number, as the formats' own documents describe it.
"""

import json

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from intarsia.protocols import LoaderContext
from intarsia_quantized.loader import build
from intarsia_quantized.options import QuantizedOptions

#: Where AutoAWQ puts eight outputs in a word: number i from the lowest bits is the output of this index.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_rows(numbers, bits, order=None):
    """Pack unsigned numbers (R, W) along their columns into int32 words, the first in the lowest bits."""
    per_word = 32 // bits
    rows, columns = numbers.shape
    words = np.zeros((rows, -(-columns // per_word)), np.uint64)
    for column in range(columns):
        place = column % per_word
        source = column if order is None else column - place + order[place]
        words[:, column // per_word] |= numbers[:, source].astype(np.uint64) << np.uint64(bits * place)
    return words.astype(np.uint32).view(np.int32)


def as_tensor(array, dtype=None):
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if dtype is None else tensor.to(dtype)


def random_matrix(outs, ins, *, bits, group, symmetric, seed=0, dtype=torch.float16, group_of=None):
    """Return q from 0 (N, C), zero points (N, G), scales (N, G) in a dtype, and the matrix in float64."""
    rng = np.random.default_rng(seed)
    groups = 1 if group is None else -(-ins // group)
    q = rng.integers(0, 1 << bits, (outs, ins))
    middle = 1 << (bits - 1)
    zero = np.full((outs, groups), middle) if symmetric else rng.integers(0, 1 << bits, (outs, groups))
    scale = torch.from_numpy(rng.uniform(0.001, 0.02, (outs, groups))).to(dtype)
    index = np.arange(ins) // (group or ins) if group_of is None else group_of
    exact = (q - zero[:, index]) * scale.double().numpy()[:, index]
    return q, zero, scale, exact


def gptq_tensors(name, q, zero, scale, *, bits, group, less_one=True, group_of=None):
    """Return the tensors of a GPTQ module."""
    ins = q.shape[1]
    stored = (zero - 1) % (1 << bits) if less_one else zero
    index = np.arange(ins) // (group or ins) if group_of is None else group_of
    return {
        f"{name}.qweight": as_tensor(pack_rows(q, bits).T),
        f"{name}.qzeros": as_tensor(pack_rows(stored.T, bits)),
        f"{name}.scales": scale.t().contiguous(),
        f"{name}.g_idx": as_tensor(index.astype(np.int32)),
    }


def awq_tensors(name, q, zero, scale):
    """Return the tensors of an AWQ module."""
    return {
        f"{name}.qweight": as_tensor(pack_rows(q.T, 4, AWQ_ORDER)),
        f"{name}.qzeros": as_tensor(pack_rows(zero.T, 4, AWQ_ORDER)),
        f"{name}.scales": scale.t().contiguous(),
    }


def packed_tensors(name, q, zero, scale, *, bits, symmetric):
    """Return the tensors of a `pack-quantized` module."""
    tensors = {
        f"{name}.weight_packed": as_tensor(pack_rows(q, bits)),
        f"{name}.weight_shape": torch.tensor(q.shape),
        f"{name}.weight_scale": scale,
    }
    if not symmetric:
        tensors[f"{name}.weight_zero_point"] = as_tensor(pack_rows(zero.T, bits).T)
    return tensors


def weights(bits=4, *, group=None, symmetric=True, strategy=None, **also):
    """Return the arguments of weights in a compressed-tensors config."""
    return {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": strategy or ("channel" if group is None else "group"),
        "group_size": group,
        "dynamic": False,
        **also,
    }


#: Activations rounded a token.
TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


def compressed_config(arguments, *, form="pack-quantized", inputs=None, targets=("Linear",), ignore=("lm_head",)):
    """Return the config of a compressed-tensors folder with one group."""
    group = {"targets": list(targets), "weights": arguments, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def folder_of(path, tensors, quantization, *, key="quantization_config", **config):
    """Save a folder."""
    path.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps({"model_type": "llama", **config, key: quantization}))
    return path


def open_folder(path, **options):
    """Open a folder by the loader `quantized`."""
    return build(LoaderContext(path=path, options=QuantizedOptions(**options))).open()


def read(tensor, dtype=torch.float32):
    out = torch.full(tensor.shape, float("nan"), dtype=dtype)
    tensor.read(out)
    return out


def quantize_folder(path, replace):
    """Replace linear weights of a saved model's layers by quantized ones; return the float tensors that they stand for.

    Args:
        path: of the folder.
        replace: (module name, its weight (N, C)) -> (tensors, the weight that they stand for).
    """
    tensors = load_file(path / "model.safetensors")
    dense = dict(tensors)
    for name in list(tensors):
        module = name.removesuffix(".weight")
        if name.endswith("_proj.weight"):
            made, dense[name] = replace(module, tensors.pop(name))
            tensors |= made
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return dense
