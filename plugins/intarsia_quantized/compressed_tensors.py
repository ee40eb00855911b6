"""Folders of compressed-tensors with whole numbers of 4 and 8 bits, as its version 0.20 and llm-compressor write them.

| format | tensor | dtype | shape | |
| --- | --- | --- | --- | --- |
| `int-quantized`, `naive-quantized` | `weight` | int8 | (N, C) | q, signed |
| `pack-quantized` | `weight_packed` | int32 | (N, ceil(C bits / 32)) | q + 2^(bits - 1), from the lowest bits up |
| | `weight_shape` | int64 | (2,) | N, C |
| all | `weight_scale` | float | (N, 1), (N, G), or one number | |
| all, not symmetric | `weight_zero_point` | int8 | as the scale | signed |
| `pack-quantized`, not symmetric | `weight_zero_point` | int32 | (ceil(N bits / 32), G) | packed, down rows |
| all, ordered by activations | `weight_g_idx` | int32 | (C,) | the group of each column |

The weight is (q - zero) * scale. Scales that the folder stores for activations are not used: activations get one a
token as they come. Nor are those of a key-value cache.

Shape legend: N out features, C in features, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from attrs import evolve

from intarsia.checkpoints import SafetensorsTensor
from intarsia.errors import CheckpointError
from intarsia.families import Fields
from intarsia.quantizing.integers import pack_nibbles
from intarsia.types import StoredTensor
from intarsia_quantized import sparse24
from intarsia_quantized.modules import SCALES, Module, bytes_of, centred, group_of, modules, unsigned
from intarsia_quantized.options import QuantizedOptions
from intarsia_quantized.schemes import Scheme, Schemes
from intarsia_quantized.stored import Grouped, Layout, stored

_HOLDERS = ("weight_packed", "weight")
_PARTS = ("weight_packed", "weight", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx")
#: Tensors beside quantized ones that nothing here depends on.
_UNUSED = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_CACHE = ("q_scale", "k_scale", "v_scale", "q_zero_point", "k_zero_point", "v_zero_point")


def decode(
    tensors: Mapping[str, SafetensorsTensor], fields: Fields, options: QuantizedOptions
) -> dict[str, StoredTensor]:
    """Return a model's tensors by their plain names.

    Raises:
        CheckpointError: the config has a value that is not known, or does not fit its tensors.
    """
    sparse = _has_sparse(fields)
    schemes = Schemes.read(fields) if fields.has("config_groups") or not sparse else Schemes((), frozenset())
    has_cache = fields.has("kv_cache_scheme")
    found: dict[str, StoredTensor] = {}
    for module in modules(tensors).values():
        if sparse and "compressed" in module.tensors:
            found[f"{module.name}.weight"] = _sparse(module, schemes)
            if (bias := module.tensors.get("bias")) is not None:
                found[bias.name] = bias
            continue
        if sparse and "bitmask" in module.tensors:
            raise CheckpointError(f"tensor {module.name}.bitmask is there without {module.name}.compressed")
        quantized = _is_quantized(module)
        if quantized:
            found[f"{module.name}.weight"] = _matrix(module, schemes, options)
        for part, tensor in module.tensors.items():
            if part in (*_PARTS, *_UNUSED) and quantized:
                continue
            if part in (*_PARTS, *_UNUSED) and part != "weight":
                raise CheckpointError(f"tensor {tensor.name!r} is there, and {module.name}.weight is not quantized")
            if not (part in _CACHE and has_cache):
                found[tensor.name] = tensor
    return found


def _has_sparse(fields: Fields) -> bool:
    """Whether some matrices are 2:4 sparse, in the legacy format."""
    sparsity = fields.table("sparsity_config")
    if not sparsity.values:
        return False
    kind: str = sparsity.choice("format", {"dense": "dense", sparse24.LEGACY: sparse24.LEGACY})
    return kind == sparse24.LEGACY


def _sparse(module: Module, schemes: Schemes) -> StoredTensor:
    """Return a 2:4 sparse matrix; its whole numbers have a scale a row."""
    if unknown := sorted(module.tensors.keys() - {*sparse24.LEGACY_PARTS, *_UNUSED, "bias"}):
        raise CheckpointError(f"tensor {module.name}.{unknown[0]} is not known beside {module.name}.compressed")
    tensor = sparse24.legacy(module)
    if "weight_scale" in module.tensors:
        fitting = [one for one in schemes.schemes if one.bits == 8 and one.group is None and one.symmetric]
        schemes.of(module.name, fitting)
    return tensor


def _is_quantized(module: Module) -> bool:
    """Whether a module's weight is; refuse what is quantized otherwise than here."""
    if "weight_global_scale" in module.tensors:
        raise CheckpointError(f"tensor {module.name}.weight_global_scale is of a format that is not read")
    packed, plain = "weight_packed" in module.tensors, module.tensors.get("weight")
    if packed and plain is not None:
        raise CheckpointError(f"{module.name} has both weight and weight_packed")
    return packed or (plain is not None and plain.format == "I8")


def _matrix(module: Module, schemes: Schemes, options: QuantizedOptions) -> StoredTensor:
    holder = next(name for name in _HOLDERS if name in module.tensors)
    shape = _shape(module, holder)
    scale = module.need("weight_scale", holder, SCALES)
    fitting = [
        scheme for scheme in schemes.schemes if scheme.holder == holder and _fits(module, scheme, shape, scale.shape)
    ]
    scheme = schemes.of(module.name, fitting)
    layout = Layout(scheme.bits, shape, scheme.group, scheme.symmetric, options.resolve(scheme.activations))
    permuted = _group_of(module, scheme, layout)
    if permuted is not None:
        layout = evolve(layout, ordered=False)

    def decode() -> Grouped:
        numbers = _numbers(module, holder, layout)
        values = module.tensors["weight_scale"].load()
        return Grouped(numbers, _a_row(values, layout), _zeros(module, layout, values.shape), permuted)

    kind = "PACKED" if holder == _HOLDERS[0] else "INT"
    return stored(f"{module.name}.weight", layout, kind, module.num_bytes(_PARTS), decode)


def _shape(module: Module, holder: str) -> tuple[int, int]:
    """Return (N, C)."""
    if holder == "weight":
        outs, ins = module.need(holder, holder, ("I8",), (None, None)).shape
        return outs, ins
    outs, words = module.need(holder, holder, ("I32",), (None, None)).shape
    tensor = module.need("weight_shape", holder, ("I64", "I32"), (2,))
    rows, ins = tensor.load().tolist()
    # 8 bits take a word for 4 columns, and 4 bits one for 8.
    if rows != outs or not 1 <= ins <= words * 8:
        raise CheckpointError(f"tensor {tensor.name!r} says {rows} by {ins}; {holder} has the shape {(outs, words)}")
    return outs, ins


def _fits(module: Module, scheme: Scheme, shape: tuple[int, int], scale: tuple[int, ...]) -> bool:
    """Whether a scheme's tensors would have these shapes."""
    outs, ins = shape
    words = -(-ins * scheme.bits // 32)
    if scheme.holder == "weight_packed" and module.tensors["weight_packed"].shape[1] != words:
        return False
    if scheme.whole:
        return scale in ((), (1,), (1, 1))
    if scheme.group is None:
        return scale in ((outs, 1), (outs,))
    return scale == (outs, -(-ins // scheme.group))


def _group_of(module: Module, scheme: Scheme, layout: Layout) -> torch.Tensor | None:
    """Return the group of each column, or None where they are in order."""
    if "weight_g_idx" not in module.tensors:
        return None
    if not scheme.permutes:
        raise CheckpointError(f"tensor {module.name}.weight_g_idx is there, and no actorder of the config asks for it")
    tensor = module.need("weight_g_idx", "weight_scale", ("I32", "I64"), (layout.shape[1],))
    return group_of(tensor, layout.num_groups, layout.group_columns)


def _numbers(module: Module, holder: str, layout: Layout) -> torch.Tensor:
    """Return q as the formats in memory store it."""
    stored_numbers, columns = module.tensors[holder].load(), layout.shape[1]
    if holder == "weight":
        if layout.bits == 8:
            return stored_numbers
        if stored_numbers.numel() and not bool((stored_numbers.amin() >= -8) & (stored_numbers.amax() <= 7)):
            raise CheckpointError(f"tensor {module.name}.weight has numbers beyond the 4 bits that the config says")
        return pack_nibbles(stored_numbers + 8)
    packed = bytes_of(stored_numbers)
    if layout.bits == 8:
        return centred(packed[:, :columns].contiguous())
    numbers = packed[:, : -(-columns // 2)].contiguous()
    if columns % 2:
        numbers[:, -1] = (numbers[:, -1] & 15) | (8 << 4)
    return numbers


def _a_row(values: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return scales (N, G), of which the file may have fewer where they are equal."""
    outs = layout.shape[0]
    return values.reshape(1, 1).expand(outs, 1) if values.numel() == 1 else values.reshape(outs, layout.num_groups)


def _zeros(module: Module, layout: Layout, scale: torch.Size) -> torch.Tensor | None:
    """Return the zero points (N, G) in the numbers' own count, or None where there are none."""
    part = "weight_zero_point"
    if part not in module.tensors:
        if layout.symmetric:
            return None
        raise CheckpointError(f"tensor {module.name}.weight_scale is there without {module.name}.{part}")
    (outs, _), half = layout.shape, 1 << (layout.bits - 1)
    if module.tensors[part].format == "I32":
        words = module.need(part, "weight_scale", ("I32",), (-(-outs * layout.bits // 32), layout.num_groups)).load()
        signed = unsigned(words.t(), layout.bits)[:, :outs].t().to(torch.int16) - half
    else:
        signed = _a_row(module.need(part, "weight_scale", ("I8",), tuple(scale)).load(), layout).to(torch.int16)
    if layout.symmetric:
        if bool(signed.any()):
            raise CheckpointError(f"tensor {module.name}.{part} has numbers other than 0, and the config is symmetric")
        return None
    if bool((signed < -half).any()) or bool((signed >= half).any()):
        raise CheckpointError(f"tensor {module.name}.{part} has numbers beyond {layout.bits} bits")
    return signed + half if layout.bits == 4 else signed
