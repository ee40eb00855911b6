"""oneDNN's packed product: the reference up to bf16's rounding, for any number of rows, with and without bias."""

import pytest

from engines import engine_of
from intarsia import SamplingParams
from intarsia.defaults import onednn, provide_kernels
from intarsia.protocols import PartContext
from intarsia.testing.kernels import KernelsContract
from intarsia.types import EngineOptions, Fit, Unfit
from models import tiny_llama

CONTEXT = PartContext(engine=EngineOptions(device="cpu", dtype="bfloat16"), spec=None)
needs_bf16 = pytest.mark.skipif(isinstance(onednn.fit(CONTEXT), Unfit), reason="oneDNN has no bf16 here")


@needs_bf16
class TestOneDnn(KernelsContract):
    def provider(self):
        return next(provider for provider in provide_kernels() if provider.key == "onednn")


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
