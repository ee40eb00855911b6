"""The fused step: every dense family against transformers, bitwise in any company, chunks, pages and threads."""

import copy
import itertools
import random
import types

import attrs
import pytest
import torch

from engines import count_preemptions, engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.errors import CompositionError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import LikeliestRunner
from intarsia.sampling.arithmetic import FAILED, likeliest_ids
from intarsia.testing import poison_cache, prompt_logits
from intarsia.testing.runners import RunnerContract
from intarsia.types import DENSE, MoeSpec, Provider, Row, Unfit, Weight
from intarsia_cpu import build, provide_runners
from intarsia_cpu import runner as fused
from models import tiny_llama

pytestmark = pytest.mark.skipif(build.unavailable() is not None, reason="there is no C++ compiler")

MIXTURES = [case for case in CASES if "mixtral" in case.name or "moe" in case.name]
DENSE_CASES = [case for case in CASES if case not in MIXTURES]
NEW_TOKENS = 12


@attrs.frozen
class Saved:
    case: object
    path: object
    model: object

    def prompt(self):
        """Long enough for rows to be split into blocks."""
        rng = random.Random(7)
        return [rng.randrange(256) for _ in range(min(100, self.case.max_model_len - 1))]

    def engine(
        self,
        *,
        page_size=16,
        memory="64MiB",
        scheduler=None,
        runner="cpu_fused",
        quantizer="none",
        kernels="auto",
        **engine,
    ):
        made = engine_of(
            self.path,
            engine={"max_model_len": self.case.max_model_len} | engine,
            cache={"use": "paged", "page_size": page_size, "memory": memory},
            scheduler=scheduler or {"use": "inflight"},
            runner=runner,
            quantizer=quantizer,
            kernels=kernels,
        )
        poison_cache(made)
        return made


def saved_in(tmp_path_factory, case):
    path = tmp_path_factory.mktemp("fused")
    return Saved(case, path, saved(case, path))


@pytest.fixture(scope="module", params=DENSE_CASES, ids=lambda case: case.name)
def tiny(request, tmp_path_factory):
    return saved_in(tmp_path_factory, request.param)


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return saved_in(tmp_path_factory, DENSE_CASES[0])


@torch.no_grad()
def reference(model, prompt):
    return model(torch.tensor([prompt])).logits[0].float()


def in_any_chunks(tiny, prompt, dtype):
    """The logits of a prompt; asserts that their bits do not depend on chunks, pages and threads."""
    with tiny.engine(dtype=dtype, page_size=16, threads=1) as engine:
        assert engine.explain()["invariance"] == {"level": "bitwise", "by_part": {"runner": "bitwise"}}
        found = prompt_logits(engine, prompt)
        for chunk in (1, 64):
            poison_cache(engine)
            assert torch.equal(prompt_logits(engine, prompt, chunk=chunk), found)
    with tiny.engine(dtype=dtype, page_size=1, threads=2) as engine:
        for chunk in (None, 23):
            poison_cache(engine)
            assert torch.equal(prompt_logits(engine, prompt, chunk=chunk), found)
    return found


def test_logits_equal_transformers_and_are_bitwise_in_any_chunks_pages_and_threads(tiny):
    prompt = tiny.prompt()
    found = in_any_chunks(tiny, prompt, "float32")
    assert float((found - reference(tiny.model, prompt)).abs().max()) <= 1e-4


def test_bf16_is_as_near_to_fp32_as_bf16_of_transformers_and_bitwise(tiny):
    prompt = tiny.prompt()
    exact = reference(tiny.model, prompt)
    theirs = reference(copy.deepcopy(tiny.model).to(torch.bfloat16), prompt)
    found = in_any_chunks(tiny, prompt, "bfloat16")
    bound = 1.5 * float((theirs - exact).abs().mean())
    assert float((found - exact).abs().mean()) < bound
    assert float((found - theirs).abs().mean()) < bound


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in build.supported()[1:] if not path.endswith("_vnni")])
@pytest.mark.parametrize("quantizer", ["none", "int8"])
def test_every_path_of_this_cpu_gives_the_same_logits_up_to_rounding(llama, path, quantizer, monkeypatch):
    prompt = llama.prompt()
    for dtype, bound in (("float32", 1e-4), ("bfloat16", 0.05)):
        with llama.engine(dtype=dtype, quantizer=quantizer) as engine:
            expected = prompt_logits(engine, prompt)
        monkeypatch.setenv(build.ISA_VARIABLE, path)
        with llama.engine(dtype=dtype, quantizer=quantizer, threads=2) as engine:
            found = prompt_logits(engine, prompt)
            poison_cache(engine)
            assert torch.equal(prompt_logits(engine, prompt, chunk=7), found)
        monkeypatch.delenv(build.ISA_VARIABLE)
        bound *= 100 if quantizer == "int8" and dtype == "float32" else 1  # a last bit can cross a rounding step
        assert float((found - expected).abs().mean()) <= bound * float(expected.abs().max())


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype"), [("llama with biases", "float32"), ("gemma2", "bfloat16"), ("phi", "bfloat16")]
)
def test_logprobs_have_the_same_bits_alone_in_any_company_and_after_preemption(name, dtype, tmp_path_factory):
    tiny = saved_in(tmp_path_factory, next(case for case in DENSE_CASES if case.name == name))
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (40, 9, 90, 32)]
    params = [
        SamplingParams(max_tokens=NEW_TOKENS, temperature=t, seed=i, ignore_eos=True, logprobs=2, prompt_logprobs=p)
        for i, (t, p) in enumerate([(0, None), (1.1, None), (0, 1), (0.7, None)])
    ]
    with tiny.engine(dtype=dtype, threads=1, invariance="bitwise") as engine:
        page_bytes = engine.parts.layout.page_bytes
        expected = [engine.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    memory = str(page_bytes * tiny.case.max_model_len // 16)
    crowded = {"use": "inflight", "max_tokens": 72}
    with tiny.engine(dtype=dtype, memory=memory, scheduler=crowded, threads=2) as engine:
        preempted = count_preemptions(engine)
        found = engine.generate(prompts * 3, params * 3)
        engine.parts.cache.check_integrity()
        assert preempted
    for one, other in zip(found, expected * 3, strict=True):
        assert one.choices == other.choices
        assert one.prompt_logprobs == other.prompt_logprobs


def test_prompt_logprobs_beside_greedy_rows_are_those_of_a_prompt_alone(llama):
    rng = random.Random(9)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (40, 90, 9, 70)]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    params = [greedy, attrs.evolve(greedy, max_tokens=3, prompt_logprobs=1), greedy, greedy]
    crowded = {"use": "inflight", "max_tokens": 100}
    with llama.engine(threads=1) as engine:
        expected = [engine.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    with llama.engine(scheduler=crowded, threads=2) as engine:
        for one, alone in zip(engine.generate(prompts, params), expected, strict=True):
            assert (one.choices, one.prompt_logprobs) == (alone.choices, alone.prompt_logprobs)
    exact = reference(llama.model, prompts[1]).log_softmax(-1)[range(89), prompts[1][1:]]
    assert [entry.logprob for entry in expected[1].prompt_logprobs[1:]] == pytest.approx(exact.tolist(), abs=1e-4)


def test_greedy_ids_of_a_mixed_batch_equal_what_the_ops_give(llama):
    rng = random.Random(5)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (40, 9, 90, 1)]
    greedy = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    crowded = {"use": "inflight", "max_tokens": 48}
    with llama.engine(runner="eager", scheduler=crowded) as engine:
        expected = [completion.token_ids for completion in engine.generate(prompts, greedy)]
    with llama.engine(scheduler=crowded, threads=2) as engine:
        assert [completion.token_ids for completion in engine.generate(prompts, greedy)] == expected


def test_layers_run_in_ranges_give_what_they_give_together(llama):
    prompt = llama.prompt()
    with llama.engine(threads=2) as engine:
        whole = prompt_logits(engine, prompt)
        executor = engine.parts.executor
        run = executor._stage._runner.run

        def in_ranges(batch, cache, layers, hidden=None):
            assert hidden is None
            hidden = run(batch, cache, range(1))
            before = hidden.clone()
            later = run(batch, cache, range(1, layers.stop), hidden)
            assert torch.equal(hidden, before), "what is handed in is left as it was"
            return later

        executor._stage._runner = types.SimpleNamespace(run=in_ranges, logits=executor._stage._runner.logits)
        poison_cache(engine)
        assert torch.equal(prompt_logits(engine, prompt), whole)


def in_steps(engine, spans, reads):
    """The logits of spans of rows, of which these tokens are read, or all; and those of the token behind each span.

    What comes before a span runs in a step of its own. Pages lie in no order, and in another one in each cache group.
    """
    poison_cache(engine)
    layout, stage = engine.parts.layout, engine.parts.executor._stage
    ids = random.Random(11).choices(range(256), k=128)
    count = 128 // layout.page_size
    orders = [random.Random(seed).sample(range(99), count * len(spans)) for seed in range(len(layout.groups))]
    tables = [tuple(tuple(order[i * count : (i + 1) * count]) for order in orders) for i in range(len(spans))]

    def step(spans, reads):
        rows = [
            Row(sequence_id=(str(i), 0), token_ids=tuple(ids[start:stop]), start=start, pages=tables[i])
            for i, (start, stop) in enumerate(spans)
            if start < stop
        ]
        batch = stage.batch(rows, [row.token_ids for row in rows])
        if reads is None:
            return stage.logits(stage.run(batch), range(len(batch.ids_T)))
        batch = attrs.evolve(batch, read_L=torch.tensor(reads, dtype=torch.int64))
        return stage.logits(stage.run(batch), reads)

    step([(0, start) for start, _ in spans], None if reads is None else [])
    return step(spans, reads), step([(stop, stop + 1) for _, stop in spans], None)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", [1, 2])
def test_tokens_that_are_read_have_the_bits_that_they_have_where_all_are(tiny, dtype, threads):
    longest = tiny.case.max_model_len - 1
    few = [(20, 25), (0, 1), (33, 42)]
    many = [(start, min(stop, longest)) for start, stop in ((20, 90), (0, 1), (0, 100), (33, 70))]
    with tiny.engine(dtype=dtype, threads=threads) as engine:
        for spans in (few, many):  # many run by blocks of rows, and those that are read of them do or do not
            expected, behind = in_steps(engine, spans, None)
            *_, num_tokens = lasts = list(itertools.accumulate(stop - start for start, stop in spans))
            for reads in (
                [last - 1 for last in lasts],
                [lasts[0] - 1],
                range(0, num_tokens, 2),
                range(2, num_tokens),
                [],
            ):
                found, later = in_steps(engine, spans, list(reads))
                assert torch.equal(found, expected[list(reads)])
                assert torch.equal(later, behind), "keys and values are written of all"


def test_the_seconds_of_each_phase_are_told_and_begin_anew(llama):
    with llama.engine(threads=2) as engine:
        runner = engine.parts.executor._stage._runner
        assert runner.measure() == {}
        prompt_logits(engine, llama.prompt())
        seconds = runner.measure()
        assert set(seconds) == set(fused.PHASES)
        assert all(seconds[name] > 0 for name in ("embed", "norm", "qkv", "attention", "out", "up", "down", "head"))
        assert not any(runner.measure().values())


def test_more_rows_of_logits_than_the_head_takes_at_once_are_the_same_rows(tmp_path):
    path, model = tiny_llama(tmp_path)
    prompt = [random.Random(1).randrange(256) for _ in range(300)]
    with engine_of(path, runner="cpu_fused", cache={"use": "paged", "memory": "64MiB"}) as engine:
        found = prompt_logits(engine, prompt)
        assert torch.equal(prompt_logits(engine, prompt, chunk=100), found)
    assert float((found - reference(model, prompt)).abs().max()) <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_likeliest_ids_are_those_of_the_logits(tiny, dtype):
    generator = torch.Generator().manual_seed(3)
    with tiny.engine(dtype=dtype, threads=2) as engine:
        runner = engine.parts.executor._stage._runner
        assert isinstance(runner, LikeliestRunner)
        hidden = torch.randn(300, runner.spec.embed_dim, generator=generator)
        hidden[7] = float("nan")
        rows = torch.randperm(300, generator=generator)
        for num_ids in (runner.spec.vocab_size, runner.spec.vocab_size - 3, 1):
            ids, best = runner.likeliest(hidden, rows, num_ids)
            expected_ids, expected = likeliest_ids(runner.logits(hidden, rows)[:, :num_ids])
            assert torch.equal(ids, expected_ids)
            assert torch.equal(best.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))
            assert ids[rows == 7].tolist() == [FAILED]


def test_of_equal_logits_the_lowest_id_is_likeliest_and_without_finite_ones_none_is(llama):
    with llama.engine(threads=2) as engine:
        runner = engine.parts.executor._stage._runner
        rows, vocab = torch.arange(2), runner.spec.vocab_size
        ids, best = runner.likeliest(torch.zeros(2, runner.spec.embed_dim), rows, vocab)
        assert (ids.tolist(), best.tolist()) == ([0, 0], [0.0, 0.0])
        ids, _ = runner.likeliest(torch.full((2, runner.spec.embed_dim), torch.inf), rows, vocab)
        assert ids.tolist() == [FAILED] * 2


@pytest.mark.parametrize("sizes", [{"hidden": 40, "heads": 5, "kv_heads": 1, "ffn": 33, "head_dim": 10}, {"ffn": 1}])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sizes_that_divide_nothing_are_right(tmp_path, sizes, dtype):
    path, model = tiny_llama(tmp_path, attention_bias=True, mlp_bias=True, **sizes)
    prompt = [random.Random(1).randrange(256) for _ in range(70)]
    options = {"runner": "cpu_fused", "cache": {"use": "paged", "memory": "64MiB"}}
    with engine_of(path, engine={"dtype": dtype, "threads": 2}, **options) as engine:
        poison_cache(engine)
        found = prompt_logits(engine, prompt)
        poison_cache(engine)
        assert torch.equal(prompt_logits(engine, prompt, chunk=3), found)
    exact = reference(model, prompt)
    bound = 1e-4 if dtype == "float32" else 0.05 * float(exact.abs().max())
    assert float((found - exact).abs().max()) <= bound


@pytest.mark.parametrize(
    ("name", "dtype", "quantizer"),
    [
        ("llama with biases", "bfloat16", "int8"),
        ("olmo2", "bfloat16", "int4"),
        ("phi", "float32", "int4"),
        ("gpt2", "float32", "int8"),
    ],
)
def test_quantized_weights_give_what_the_ops_give_and_are_bitwise(name, dtype, quantizer, tmp_path_factory):
    tiny = saved_in(tmp_path_factory, next(case for case in DENSE_CASES if case.name == name))
    prompt = tiny.prompt()
    with tiny.engine(dtype=dtype, runner="eager", quantizer=quantizer, kernels="cpu") as engine:
        expected = prompt_logits(engine, prompt)
    with tiny.engine(dtype=dtype, quantizer=quantizer, threads=1) as engine:
        found = prompt_logits(engine, prompt)
    with tiny.engine(dtype=dtype, quantizer=quantizer, kernels="cpu", threads=2) as engine:
        for chunk in (7, None):
            poison_cache(engine)
            assert torch.equal(prompt_logits(engine, prompt, chunk=chunk), found)
    # What is quantized differs in its last bits, which can cross a rounding step: a few steps of the activations'.
    error = (found - expected).abs()
    assert float(error.mean()) <= (0.003 if dtype == "float32" else 0.02) * float(expected.abs().max())


# --- composition ------------------------------------------------------------------------------------------------------


def refusal(path, *plugins, **sections):
    with pytest.raises(CompositionError) as caught:
        engine_of(path, runner="cpu_fused", plugins=list(plugins), **sections)
    assert "'cpu_fused' cannot be used here" in str(caught.value)
    return str(caught.value)


def test_mixtures_are_refused_by_their_layer(tmp_path_factory):
    tiny = saved_in(tmp_path_factory, MIXTURES[0])
    assert "layer 0 is a mixture of 6 experts" in refusal(tiny.path)


def test_dtypes_that_it_does_not_compute_in_are_refused(llama):
    assert "it computes in float32 or bfloat16, and the engine runs float16" in refusal(
        llama.path, engine={"dtype": "float16"}
    )


def test_without_a_compiler_it_says_so(llama, monkeypatch):
    monkeypatch.setattr(fused, "compiler", lambda: None)
    monkeypatch.setattr(fused, "unavailable", lambda: "no compiler")
    assert "no compiler" in refusal(llama.path)


def test_a_backend_cannot_be_named_beside_it(llama):
    with pytest.raises(CompositionError, match="runner 'cpu_fused' brings its own"):
        engine_of(llama.path, runner="cpu_fused", attention="eager")


@attrs.frozen
class Odd:
    """A weight format that no kernel of ours knows."""

    name: str = "odd"
    format: str = "odd"

    def accepts(self, name, shape):
        return name.endswith("qkv.weight")

    def num_bytes(self, name, shape):
        return 4 * shape[0] * shape[1]

    def quantize(self, name, weight):
        return Weight(self, weight.tensors, weight.shape)

    def dequantize(self, weight):
        return DENSE.dequantize(weight)

    def shard(self, weight, dim, start, stop):
        raise NotImplementedError


def test_weight_formats_that_it_does_not_read_are_refused_by_name(llama):
    provider = Provider(key="odd", summary="", build=lambda _: Odd())
    plugin = types.SimpleNamespace(provide_quantizers=hookimpl(lambda: [provider], specname="provide_quantizers"))
    assert "it does not read weights in the format odd" in refusal(llama.path, plugin, quantizer="odd")


def test_what_it_is_asked_decides_and_nothing_else():
    """`fit` reads the context alone: a layer's heads, the cache's order and format, the device."""
    attention = types.SimpleNamespace(head_dim=256)
    layer = types.SimpleNamespace(mlp=None, attention=attention)
    engine = types.SimpleNamespace(device="cpu", dtype="bfloat16")
    layout = types.SimpleNamespace(order="PKSD", format="bfloat16")
    ops = types.SimpleNamespace(choices={"linear[dense]": None, "embedding[odd]": None})

    def asked(**changes):
        context = {"engine": engine, "layout": layout, "ops": ops, "spec": types.SimpleNamespace(layers=(layer,))}
        return fused.fit(types.SimpleNamespace(**context | changes))

    def changed(value, **changes):
        return types.SimpleNamespace(**vars(value) | changes)

    assert not isinstance(asked(), Unfit)
    wide = changed(layer, attention=types.SimpleNamespace(head_dim=264))
    mixture = changed(layer, mlp=MoeSpec(num_experts=3, top_k=1, ffn_dim=4, activation="silu"))
    for changes, reason in (
        ({"spec": types.SimpleNamespace(layers=(layer, wide))}, "layer 1 has heads of 264"),
        ({"spec": types.SimpleNamespace(layers=(layer, mixture))}, "layer 1 is a mixture of 3 experts"),
        ({"layout": changed(layout, order="PSKD")}, "in the order PKSD, not PSKD"),
        ({"layout": changed(layout, format="float32")}, "bfloat16, not in float32"),
        ({"engine": changed(engine, device="cuda:0")}, "the engine runs on cuda:0"),
    ):
        found = asked(**changes)
        assert isinstance(found, Unfit) and reason in found.reason


# --- the contract -----------------------------------------------------------------------------------------------------


class TestFused(RunnerContract):
    def provider(self):
        return provide_runners()[0]
