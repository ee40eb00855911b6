"""The runner `cuda_graph`, with captures that record a call and replays that run it over the fixed buffers.

Shape legend: R rows, W pages of the longest row, S slots a page, K kv heads, G query heads a kv head, D head dim.
"""

import types

import pytest
import torch
from attrs import evolve

from engines import engine_of
from fixed_attention import FixedAttention, Tables
from intarsia import SamplingParams
from intarsia.defaults.attention import RowByRowAttention, eager_row
from intarsia.errors import CompositionError, ConfigError, ExecutionError
from intarsia.hookspecs import hookimpl
from intarsia.protocols import InnerRunner, RunnerContext
from intarsia.testing.runners import RunnerContract
from intarsia.types import (
    AttentionSpec,
    CacheGroup,
    CacheLayout,
    DecoderSpec,
    EngineOptions,
    Fit,
    ForwardBatch,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    Provider,
    Unfit,
)
from intarsia_cuda import graphs
from intarsia_cuda.graphs import Bucket, Captured, CudaGraphRunner, buckets, padding_batch
from intarsia_cuda.options import GraphOptions
from models import tiny_llama

PROMPTS = [[5, 9, 2], list(range(40, 77)), [7] * 16, [100, 3, 3, 8, 1] * 5, [1]]
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


class RecordedGraphs:
    """A graph is the call; replaying it writes over what it returned first, as a device does."""

    def __init__(self):
        self.replays = self.captures = 0

    def capture(self, call):
        self.captures += 1
        out = call().clone()

        def replay():
            self.replays += 1
            out.copy_(call())

        return Captured(out, replay)


def faked(graphs_of, attention=FixedAttention):
    """A plugin with the runner over recorded graphs, and attention that it can capture."""

    @hookimpl
    def provide_runners():
        build = lambda context: CudaGraphRunner.build(context, graphs_of)  # noqa: E731
        fit = lambda context: Unfit(why) if (why := graphs.refusal(context)) else Fit(5)  # noqa: E731
        return [Provider(key="recorded", summary="faked", options=GraphOptions, build=build, fit=fit)]

    @hookimpl
    def provide_attention_backends():
        return [Provider(key="fixed", summary="faked", build=lambda _: attention(eager_row))]

    return types.SimpleNamespace(provide_runners=provide_runners, provide_attention_backends=provide_attention_backends)


def graph_engine(model, recorded, *, attention="fixed", options=(), **sections):
    runner = {"use": "recorded", "inner": "eager", "buckets": [2, 4], "lengths": [40], **dict(options)}
    sections = {"scheduler": "inflight", "kernels": ["torch"], **sections}
    plugins = sections.pop("plugins", [])
    return engine_of(
        model,
        runner=runner,
        attention=attention,
        engine={"max_model_len": 64},
        plugins=[faked(recorded), *plugins],
        **sections,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_llama(tmp_path_factory.mktemp("model"), layers=2)[0]


def tokens(engine, prompts=PROMPTS):
    return [answer.token_ids for answer in engine.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def expected(model):
    plain = {"runner": "eager", "attention": "eager", "kernels": ["torch"], "scheduler": "inflight"}
    with engine_of(model, engine={"max_model_len": 64}, **plain) as engine:
        return tokens(engine)


# --- engines ----------------------------------------------------------------------------------------------------------


def test_tokens_equal_the_inner_runners_in_every_bucket_and_beyond(model, expected):
    recorded = RecordedGraphs()
    with graph_engine(model, recorded) as engine:
        assert recorded.captures == 4, "each bucket is captured before the first request"
        for count in (1, 2, 3, 4):
            before = recorded.replays
            assert tokens(engine, PROMPTS[:count]) == expected[:count]
            assert recorded.replays - before >= 10
        assert tokens(engine) == expected  # five rows: by the inner runner until one has ended
        assert recorded.captures == 4


def test_padded_rows_harm_nothing_even_where_the_spare_page_is_not_a_number(model, expected):
    from intarsia.testing import poison_cache

    recorded = RecordedGraphs()
    with graph_engine(model, recorded, options={"buckets": [8]}) as engine:
        poison_cache(engine)
        # Fewer and fewer rows in one bucket: what stands behind them are rows of steps before.
        assert tokens(engine) == expected
        assert [tokens(engine, [prompt])[0] for prompt in PROMPTS] == expected
        together = engine.generate(PROMPTS, [evolve(GREEDY, max_tokens=count) for count in (3, 12, 6, 9, 1)])
        lengths = (3, 12, 6, 9, 1)
        assert [answer.token_ids for answer in together] == [
            ids[:count] for ids, count in zip(expected, lengths, strict=True)
        ]
        assert recorded.replays > 40


def test_drafts_are_verified_by_the_inner_runner(model, expected):
    recorded = RecordedGraphs()
    with graph_engine(model, recorded, drafter={"use": "ngram", "adaptive": False}) as engine:
        assert tokens(engine) == expected
        assert [tokens(engine, [prompt])[0] for prompt in PROMPTS] == expected


def test_it_runs_over_a_cache_whose_memory_is_mapped(model, expected):
    from virtual_memory import vmm_plugin

    recorded, (memory, plugin) = RecordedGraphs(), vmm_plugin()
    cache = {"use": "vmm_faked", "memory": "4MiB", "keep": "0"}
    with graph_engine(model, recorded, cache=cache, plugins=[plugin]) as engine:
        assert tokens(engine) == expected
        assert tokens(engine, PROMPTS[:2]) == expected[:2]
        memory.check()
        assert recorded.replays
    memory.assert_clean()


def test_a_graph_holds_flash_attention(model, expected):
    from intarsia_flash.attention import FlashAttention

    @hookimpl
    def provide_attention_backends():
        def build(context):
            return FlashAttention(context.engine.dtype, tuple({layer.attention for layer in context.spec.layers}))

        return [Provider(key="interpreted", summary="flash, in Triton's interpreter", build=build)]

    recorded = RecordedGraphs()
    plugin = types.ModuleType("interpreted")
    plugin.provide_attention_backends = provide_attention_backends
    with graph_engine(model, recorded, attention="interpreted", plugins=[plugin]) as engine:
        assert tokens(engine, PROMPTS[:3]) == expected[:3]
        assert recorded.replays >= 10


def test_a_step_that_cannot_be_captured_ends_the_start_with_what_would_do(model):
    class Refusing:
        def capture(self, call):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(ExecutionError, match=r"'cuda_graph' cannot capture a step of 4 rows: operation not .*'eager'"):
        graph_engine(model, Refusing())


# --- what cannot be captured ------------------------------------------------------------------------------------------


def test_on_a_cpu_it_says_what_it_is_for(model):
    with pytest.raises(CompositionError, match=r"runner: 'cuda_graph' cannot be used here: .* NVIDIA GPUs, and .* cpu"):
        engine_of(model, runner="cuda_graph", attention="eager", kernels=["torch"])


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"attention": "eager"}, r"lays its metadata out anew: RowByRowAttention has no prepare_fixed"),
        ({"options": {"inner": "recorded"}}, r"runner.inner: 'recorded' cannot be used here: it wraps another runner"),
    ],
)
def test_what_cannot_be_captured_is_refused_with_the_reason(model, sections, says):
    with pytest.raises(CompositionError, match=says):
        graph_engine(model, RecordedGraphs(), **sections)


def test_an_inner_runner_that_is_not_there_is_a_mistake_in_the_config(model):
    with pytest.raises(ConfigError, match=r"eagre.*eager"):
        graph_engine(model, RecordedGraphs(), options={"inner": "eagre"})


def context_of(mlp=None, *, provides=(), attention=None, inner=True):
    layer = LayerSpec(AttentionSpec(2, 1, 4, 0.5, None), mlp or MlpSpec(8, "silu"))
    found = InnerRunner(provider=Provider(key="whole", summary="", build=len, provides=provides), build=object)
    return RunnerContext(
        options=GraphOptions(),
        engine=EngineOptions(device="cuda:0", dtype="float32", max_model_len=64),
        spec=DecoderSpec("llama", 16, 8, 64, NormSpec(), tied=True, layers=(layer,)),
        layout=layout(),
        ops=None,
        attention=attention or FixedAttention(eager_row),
        inner=(lambda key: found) if inner else None,
    )


def layout(groups=1):
    return CacheLayout(
        order="PSKD",
        format="float32",
        entry_bytes=4,
        page_size=4,
        groups=tuple(CacheGroup(kind="full", layers=(i,), num_kv_heads=1, head_dim=4) for i in range(groups)),
    )


def test_a_dense_model_on_a_gpu_is_captured():
    assert isinstance(graphs.fit(context_of()), Fit)


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"mlp": MoeSpec(8, 2, 4, "silu")}, "layer 0 sends tokens to 8 experts"),
        ({"provides": ("attention",)}, "runner.inner: 'whole' brings its own attention"),
        ({"attention": RowByRowAttention(eager_row)}, "RowByRowAttention has no prepare_fixed"),
        ({"inner": False}, "it wraps another runner and is not wrapped itself"),
    ],
)
def test_each_refusal_has_its_reason(facts, says):
    found = graphs.fit(context_of(**facts))
    assert isinstance(found, Unfit) and says in found.reason


# --- buffers ----------------------------------------------------------------------------------------------------------


class Mirror:
    """An inner runner whose residual stream is all that it was given, a column each."""

    def __init__(self):
        self.runs = []

    def run(self, batch, cache, layers, hidden_TE=None):
        self.runs.append((batch, layers))
        if not isinstance(batch.attention, Tables):
            return torch.full((len(batch.ids_T), 1), -5)
        tables = torch.cat(batch.attention.pages, dim=1)
        columns = torch.stack([batch.ids_T, batch.positions_T, *batch.slots_T, batch.attention.lengths_R], dim=1)
        return torch.cat([columns, tables], dim=1)

    def logits(self, hidden_TE, rows_L):
        return hidden_TE[rows_L].float()


class Pages:
    """A cache of ten pages and the spare one, which is page 10."""

    def __init__(self):
        self.keys, self.moves = torch.zeros(11, 4, 1, 4), []

    def layer(self, index):
        return self

    def move(self, moves):
        self.moves += moves


def runner_of(num_groups=2, rows=(2, 4), lengths=(8,)):
    recorded = RecordedGraphs()
    made = CudaGraphRunner(
        inner=Mirror(),
        attention=FixedAttention(eager_row),
        layout=layout(num_groups),
        device=torch.device("cpu"),
        graphs=recorded,
        buckets=buckets(rows, lengths, 16),
    )
    cache = Pages()
    warm_up = decoding([0], [0])
    made.run(evolve(warm_up, attention=made.prepare(warm_up, made.layout)), cache, range(2))
    return made, cache


def decoding(ids, starts, base=0):
    """Rows of one token each; those of group g have pages that begin at base + 100 g."""
    pages = tuple(
        tuple(tuple(base + 100 * g + 10 * r + i for i in range(start // 4 + 1)) for r, start in enumerate(starts))
        for g in range(2)
    )
    return ForwardBatch(
        ids_T=torch.tensor(ids),
        positions_T=torch.tensor(starts),
        slots_T=tuple(torch.tensor([t[-1] * 4 + s % 4 for t, s in zip(ts, starts, strict=True)]) for ts in pages),
        bounds=tuple(range(len(ids) + 1)),
        starts=tuple(starts),
        pages=pages,
        logits_L=torch.arange(len(ids)),
    )


def step(made, cache, batch, layers=range(2), hidden=None):
    return made.run(evolve(batch, attention=made.prepare(batch, made.layout)), cache, layers, hidden)


def what_it_was_given(batch, max_len):
    width = max_len // 4
    return [
        [
            int(batch.ids_T[r]),
            batch.starts[r],
            *(int(slots[r]) for slots in batch.slots_T),
            batch.starts[r] + 1,
            *(page for tables in batch.pages for page in (*tables[r], *(tables[r][-1],) * (width - len(tables[r])))),
        ]
        for r in range(batch.num_rows)
    ]


@pytest.mark.parametrize(
    ("starts", "max_len"), [([3], 8), ([7, 0], 8), ([2, 5, 1], 8), ([1, 1, 1, 1], 8), ([8], 16), ([0, 15, 3], 16)]
)
def test_every_number_of_a_step_reaches_the_graph(starts, max_len):
    made, cache = runner_of()
    for base, first_id in ((0, 11), (1000, 50)):
        batch = decoding(range(first_id, first_id + len(starts)), starts, base)
        found = step(made, cache, batch)
        assert found.tolist() == what_it_was_given(batch, max_len)
    assert made.graphs.replays == 2 and made.graphs.captures == 4


def test_rows_behind_a_step_are_padding_again_after_a_larger_one():
    made, cache = runner_of(rows=(4,))
    step(made, cache, decoding([1, 2, 3, 4], [1, 2, 3, 4]))
    step(made, cache, decoding([9], [5]))
    batch = made.inner.runs[-1][0]
    assert batch.attention.host[:2] == (4, 8)
    assert batch.ids_T.tolist() == [9, 0, 0, 0] and batch.positions_T.tolist() == [5, 0, 0, 0]
    assert [slots.tolist()[1:] for slots in batch.slots_T] == [[-1] * 3] * 2
    assert batch.attention.lengths_R.tolist() == [6, 1, 1, 1]
    assert [table[1:].tolist() for table in batch.attention.pages] == [[[10, 10]] * 3] * 2, "the spare page"


def test_the_spare_page_is_a_number_before_anything_reads_it():
    _, cache = runner_of()
    assert [(move.kind, move.target, move.group) for move in cache.moves] == [("zero", 10, 0), ("zero", 10, 1)]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        (decoding(range(5), [0] * 5), "more rows than any bucket"),
        (decoding([1], [16]), "longer than any bucket"),
        (evolve(decoding([1, 2], [0, 0]), bounds=(0, 2), starts=(0,), pages=(((0,),),) * 2), "a row of two tokens"),
        (decoding([], []), "no rows"),
    ],
)
def test_other_batches_go_to_the_inner_runner_as_they_are(batch, why):
    made, cache = runner_of()
    found = step(made, cache, batch)
    assert made.graphs.replays == 0, why
    assert found.tolist() == [[-5]] * len(batch.ids_T)


def test_layers_in_the_middle_are_not_replayed_and_fewer_layers_have_a_graph_of_their_own():
    made, cache = runner_of()
    batch = decoding([1, 2], [3, 4])
    assert step(made, cache, batch, range(1, 2), torch.zeros(2, 1)).tolist() == [[-5]] * 2
    assert made.graphs.replays == 0
    for _ in range(2):
        assert step(made, cache, batch, range(1)).tolist() == what_it_was_given(batch, 8)
    assert (made.graphs.captures, made.graphs.replays) == (5, 2)
    assert made.inner.runs[-1][1] == range(1)


def test_another_cache_is_captured_anew():
    made, _ = runner_of()
    batch = decoding([1, 2], [3, 4])
    step(made, Pages(), batch)
    assert made.graphs.captures == 8


def test_logits_are_the_inner_runners():
    made, _ = runner_of()
    assert made.logits(torch.eye(3), torch.tensor([2, 0])).tolist() == [[0, 0, 1], [1, 0, 0]]


def test_buckets_come_in_order_with_the_models_length_last():
    assert buckets([4, 1, 4], [32, 8, 99], 32) == (Bucket(1, 8), Bucket(1, 32), Bucket(4, 8), Bucket(4, 32))


def test_a_batch_of_padding_writes_to_the_spare_page_alone():
    batch = padding_batch(3, 2, 10, torch.device("cpu"))
    assert batch.num_rows == 3 and batch.bounds == (0, 1, 2, 3) and batch.pages == (((10,),) * 3,) * 2
    assert [slots.tolist() for slots in batch.slots_T] == [[-1] * 3] * 2


@pytest.mark.parametrize(("name", "value"), [("buckets", []), ("buckets", [0]), ("lengths", [0])])
def test_wrong_options_are_named(model, name, value):
    with pytest.raises(ConfigError, match=name):
        graph_engine(model, RecordedGraphs(), options={name: value})


# --- the contract -----------------------------------------------------------------------------------------------------


class TestRecorded(RunnerContract):
    """Graphs that are recorded calls, in buckets that some batches fit and others do not."""

    options = {"inner": "eager", "buckets": [2, 4, 8], "lengths": [24]}  # noqa: RUF012
    sections = {"attention": "fixed"}  # noqa: RUF012

    def provider(self):
        return faked(RecordedGraphs()).provide_runners()[0]

    def plugins(self):
        return [types.SimpleNamespace(provide_attention_backends=faked(None).provide_attention_backends)]
