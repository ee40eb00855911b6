"""oneDNN's packed product: the reference up to bf16's rounding, for any number of rows, with and without bias."""

import pytest
import torch

from engines import engine_of
from intarsia import SamplingParams
from intarsia.defaults import onednn
from intarsia.protocols import PartContext
from intarsia.types import EngineOptions, Fit, Unfit, dense
from models import tiny_llama

CONTEXT = PartContext(engine=EngineOptions(device="cpu", dtype="bfloat16"), spec=None)
needs_bf16 = pytest.mark.skipif(isinstance(onednn.fit(CONTEXT), Unfit), reason="oneDNN has no bf16 here")


@needs_bf16
@pytest.mark.parametrize(("outs", "ins"), [(960, 576), (7, 33), (257, 64), (1, 16)])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 17, 64])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_packed_product_equals_float64(outs, ins, rows, has_bias):
    generator = torch.Generator().manual_seed(outs + rows)
    x, w, b = (torch.randn(*s, generator=generator).bfloat16() for s in ((rows, ins), (outs, ins), (outs,)))
    packed = onednn.pack(dense(w))
    bias = b if has_bias else None
    found = onednn.linear(x, packed, bias)
    right = x.double() @ w.double().T + (b.double() if has_bias else 0)
    # fp32 sums, rounded to bf16 once (2**-9 of the result), and what the sum itself rounds.
    bound = right.abs() * 2**-8 + (x.double().abs() @ w.double().abs().T) * 1e-5 + 1e-6
    assert found.dtype == torch.bfloat16 and ((found.double() - right).abs() <= bound).all()
    assert torch.equal(packed.dequantize(), w)
    assert torch.equal(onednn.linear(x, dense(w), bias), torch.nn.functional.linear(x, w, bias))


def test_it_is_for_bf16_on_cpus_and_says_so():
    for facts in ({"dtype": "float32", "device": "cpu"}, {"dtype": "bfloat16", "device": "cuda"}):
        unfit = onednn.fit(PartContext(engine=EngineOptions(**facts), spec=None))
        assert isinstance(unfit, Unfit) and facts["dtype"] in unfit.reason
    assert isinstance(onednn.fit(CONTEXT), Fit | Unfit)


@needs_bf16
@pytest.mark.parametrize("tie", [False, True])
def test_an_engine_packs_its_weights_once_and_counts_them(tmp_path, tie):
    path, _ = tiny_llama(tmp_path, tie=tie, attention_bias=True, mlp_bias=True)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
    answers = []
    for kernels in ("onednn", "torch"):
        with engine_of(path, engine={"dtype": "bfloat16"}, kernels=kernels) as engine:
            assert engine.explain()["ops"]["linear[dense]"] == kernels
            # A tied head that is packed is a weight of its own, besides the embedding.
            twin = 257 * 64 * 2 if tie and kernels == "onednn" else 0
            parameters = engine.explain()["model"]["parameters"]
            assert engine.parts.weight_bytes == parameters * 2 + twin
            answers.append(engine.generate([[1, 2, 3]], params)[0])
    packed, plain = answers
    assert packed.logprobs[0].logprob == pytest.approx(plain.logprobs[0].logprob, abs=0.1)
