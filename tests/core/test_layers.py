"""A layer's parts against transformers: the mixture of experts, its ties and limits, and what a token's bits rest on.

Shape legend: T tokens, E embed, F ffn, X experts.
"""

import pytest
import torch
from transformers import MixtralConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from intarsia.models.layers import Linear, Mixture
from intarsia.ops import resolve
from intarsia.types import MoeSpec, dense

OPS = resolve([], "float32", ["dense"])
EMBED, FFN = 32, 24


def normal(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def block_of(normalized, num_experts, top_k):
    """Return a mixture of transformers with random weights; Mixtral's shares always sum to 1."""
    sizes = {"hidden_size": EMBED, "num_experts_per_tok": top_k, "num_local_experts": num_experts}
    if normalized:
        block = MixtralSparseMoeBlock(MixtralConfig(**sizes, intermediate_size=FFN))
    else:
        block = Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**sizes, moe_intermediate_size=FFN, norm_topk_prob=False))
    block.experts.config._experts_implementation = "eager"
    for seed, parameter in enumerate(block.parameters()):
        parameter.data = 0.3 * normal(seed, *parameter.shape)
    return block.eval()


def mixture_of(block, normalized, dtype=torch.float32):
    weights = {"m.router.weight": dense(block.gate.weight.detach().to(dtype))}
    experts = block.experts
    for x, (up, down) in enumerate(zip(experts.gate_up_proj.detach(), experts.down_proj.detach(), strict=True)):
        weights[f"m.experts.{x}.gate_up.weight"] = dense(up.to(dtype))
        weights[f"m.experts.{x}.down.weight"] = dense(down.to(dtype))
    spec = MoeSpec(len(experts.gate_up_proj), block.gate.top_k, FFN, "silu", normalized)
    return Mixture.named(weights, "m", spec)


@torch.no_grad()
def reference(block, x_TE):
    return block(x_TE.unsqueeze(0))[0]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (6, 1), (6, 2), (5, 5), (64, 8), (200, 3)])
def test_a_mixture_gives_what_that_of_transformers_gives(normalized, num_experts, top_k):
    block, x = block_of(normalized, num_experts, top_k), normal(9, 37, EMBED)
    found = mixture_of(block, normalized)(OPS, x)
    assert float((found - reference(block, x)).abs().max()) <= 1e-5
    assert float(found.abs().max()) > 0.1


@pytest.mark.parametrize("normalized", [True, False])
def test_experts_that_are_equally_likely_are_chosen_as_transformers_chooses(normalized):
    block, x = block_of(normalized, 7, 3), normal(9, 20, EMBED)
    for ties in (slice(0, 7), slice(2, 5), slice(5, 7)):
        block.gate.weight.data[ties] = block.gate.weight.data[ties][:1].clone()
        found = mixture_of(block, normalized)(OPS, x)
        assert float((found - reference(block, x)).abs().max()) <= 1e-5


@pytest.mark.parametrize("normalized", [True, False])
def test_an_expert_whose_share_is_zero_adds_nothing(normalized):
    block, x = block_of(normalized, 4, 2), normal(9, 12, EMBED)
    x[:, 0] = 1000.0
    block.gate.weight.data[:, 0] = torch.tensor([3.0, 0.0, 0.0, 0.0])
    mixture = mixture_of(block, normalized)
    found = mixture(OPS, x)
    assert float((found - reference(block, x)).abs().max()) <= 1e-5 * float(found.abs().max())
    assert torch.equal(found, mixture.experts[0](OPS, x))


def test_an_expert_that_no_token_goes_to_is_not_run():
    block, x = block_of(True, 3, 1), normal(9, 12, EMBED)
    x[:, 0] = 10.0
    block.gate.weight.data[:, 0] = torch.tensor([0.0, 9.0, 0.0])
    block.experts.down_proj.data[0] = torch.nan
    found = mixture_of(block, True)(OPS, x)
    assert found.isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize(("num_experts", "top_k"), [(6, 2), (5, 5), (130, 8)])
def test_a_token_has_the_same_bits_alone_and_in_any_batch(num_experts, top_k, threads):
    """The others decide how many tokens each expert has, and nothing of what it makes of one; ties included."""
    block, x = block_of(True, num_experts, top_k), normal(9, 300, EMBED)
    block.gate.weight.data[1:4] = block.gate.weight.data[1].clone()
    mixture = mixture_of(block, True)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = torch.cat([mixture(OPS, row.unsqueeze(0)) for row in x])
        for size in (*range(1, 41), 300):
            assert torch.equal(mixture(OPS, x[:size]), alone[:size]), size
            assert torch.equal(mixture(OPS, x[-size:]), alone[-size:]), size
    finally:
        torch.set_num_threads(before)


def test_a_mixture_in_bf16_is_as_near_to_fp32_as_that_of_transformers():
    block, x = block_of(True, 8, 3), normal(9, 200, EMBED).bfloat16()
    for parameter in block.parameters():  # Rounded first, so that all see the same numbers.
        parameter.data = parameter.data.bfloat16().float()
    exact = reference(block, x.float())
    ours = mixture_of(block, True, torch.bfloat16)(resolve([], "bfloat16", ["dense"]), x)
    theirs = reference(block.bfloat16(), x)
    assert ours.dtype == torch.bfloat16
    assert float((ours - exact).abs().mean()) <= 1.1 * float((theirs - exact).abs().mean())


def test_a_tied_head_can_have_a_bias_of_its_own():
    weights = {"embed.weight": dense(normal(0, 5, 4)), "head.bias": normal(1, 5)}
    head = Linear.named(weights, "embed", bias="head")
    x = normal(2, 3, 4)
    expected = x.double() @ weights["embed.weight"].dequantize().double().T + weights["head.bias"].double()
    assert torch.allclose(head(OPS, x).double(), expected, atol=1e-6)
