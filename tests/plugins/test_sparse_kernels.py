"""Sparse tensor cores: when the kernels fit, how weights are padded and packed. The products themselves need a GPU."""

import pytest
import torch
from torch.sparse._semi_structured_conversions import (
    sparse_semi_structured_from_dense_cutlass,
    sparse_semi_structured_to_dense_cutlass,
)

from intarsia.errors import CompositionError
from intarsia.protocols import PartContext
from intarsia.testing.claims import claims
from intarsia.testing.kernels import KernelsContract
from intarsia.types import EngineOptions, Fit, Unfit
from intarsia_sparse import kernels, provide_kernels
from intarsia_sparse.quantizer import prune


def drawn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def fit(device="cuda:0", dtype="bfloat16"):
    [provider] = provide_kernels()
    return provider.fit(PartContext(engine=EngineOptions(device=device, dtype=dtype), spec=None, options=None))


@pytest.mark.parametrize(("device", "dtype"), [("cpu", "bfloat16"), ("cuda:0", "float32"), ("mps", "float16")])
def test_it_is_refused_elsewhere(device, dtype):
    found = fit(device, dtype)
    assert isinstance(found, Unfit) and f"runs {dtype} on {device}" in found.reason


class Contract(KernelsContract):
    def provider(self):
        return provide_kernels()[0]


def test_where_it_does_not_fit_its_contract_claims_nothing_and_says_why():
    for claim in claims(Contract):
        with pytest.raises(pytest.skip.Exception, match="it fits no engine here: it is for float16"):
            getattr(Contract(), claim.name)()


@pytest.mark.parametrize(
    ("capability", "has_library", "reason"),
    [
        ((8, 0), True, None),
        ((9, 0), True, None),
        ((7, 5), True, "compute capability 8.0 or more, and cuda:0 has 7.5"),
        ((8, 6), False, "without cuSPARSELt"),
    ],
)
def test_it_fits_gpus_with_sparse_tensor_cores(monkeypatch, capability, has_library, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: has_library)
    found = fit()
    assert isinstance(found, Fit) if reason is None else reason in found.reason


@pytest.mark.parametrize("shape", [(64, 64), (30, 36), (7, 34), (130, 65)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_what_is_padded_is_what_torch_compresses_without_loss(shape, dtype):
    """torch's own conversion, which runs on CPUs, keeps every number of ours: groups of two, one and none."""
    w = drawn(*shape, dtype=dtype)
    w[:, ::3] = 0
    weight = prune("w", w)
    whole = kernels.padded(weight.dequantize())
    assert whole.shape == tuple(-(-side // 64) * 64 for side in shape)
    again = sparse_semi_structured_to_dense_cutlass(*sparse_semi_structured_from_dense_cutlass(whole))
    assert torch.equal(again[: shape[0], : shape[1]], weight.dequantize())
    assert not again[shape[0] :].any() and not again[:, shape[1] :].any()


@pytest.mark.parametrize("shape", [(64, 64), (7, 34)])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 5])
def test_products_of_padded_weights_are_those_of_the_weight(monkeypatch, shape, has_bias, rows):
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: dense)  # needs CUDA
    weight = prune("w", drawn(*shape))
    packed = kernels.pack(weight)
    x, bias = drawn(rows, shape[1], seed=1), drawn(shape[0], seed=2) if has_bias else None
    found = kernels.linear(x, packed, bias)
    assert found.shape == (rows, shape[0]) and found.is_contiguous()
    assert torch.allclose(found, torch.nn.functional.linear(x, weight.dequantize(), bias), atol=1e-5)
    assert torch.allclose(kernels.linear(x, weight, bias), found, atol=1e-5)
    assert packed.shape == shape and packed.format.name == kernels.PACKED


def test_what_is_packed_is_not_cut(monkeypatch):
    monkeypatch.setattr(torch.sparse, "to_sparse_semi_structured", lambda dense: dense)
    packed = kernels.pack(prune("w", drawn(8, 8)))
    with pytest.raises(CompositionError, match="before it is packed"):
        packed.rows(slice(2))
    with pytest.raises(CompositionError, match="before it is packed"):
        packed.shard(0, 0, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("shape", [(576, 1536), (7, 34)])
@pytest.mark.parametrize("rows", [1, 8, 100])
def test_products_on_a_gpu_are_those_of_float64(shape, rows):
    weight = prune("w", drawn(*shape, dtype=torch.bfloat16).cuda())
    x, bias = drawn(rows, shape[1], dtype=torch.bfloat16).cuda(), drawn(shape[0], dtype=torch.bfloat16).cuda()
    packed = kernels.pack(weight)
    right = x.double() @ weight.dequantize().double().T + bias.double()
    assert torch.equal(packed.dequantize(), weight.dequantize())
    assert (kernels.linear(x, packed, bias) - right).abs().max() <= 2**-6 * right.abs().max()
