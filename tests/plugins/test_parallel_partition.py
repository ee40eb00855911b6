"""What each rank holds of a model: worked out from its spec alone, before any weights load."""

import random

import numpy as np
import pytest
import torch
from attrs import evolve

import sliced_ranks
from engines import engine_of
from families import CASES, saved
from intarsia.checkpoints import SafetensorsTensor
from intarsia.cli import run
from intarsia.compose import compose
from intarsia.config import load_config
from intarsia.errors import CompositionError
from intarsia.explain import explain
from intarsia.plugins import Registry
from intarsia.testing import prompt_logits
from intarsia.types import DecoderSpec, Demand, Weight
from intarsia_parallel.collectives import TensorGroup
from intarsia_parallel.partition import share_out
from intarsia_parallel.slices import part_of, vocabulary
from models import tiny_llama
from sliced_ranks import SlicedRank


def composed(model, **sections):
    executor = sections.pop("executor")
    engine = {"dtype": "float32", "threads": 1, "max_model_len": 128} | sections.pop("engine", {})
    plain = {"kernels": "torch", "runner": "eager", "attention": "eager", "cache": {"memory": "8MiB"}}
    config = load_config(
        {"model": str(model), **plain, **sections, "engine": engine, "executor": {"use": "held"} | executor}
    )
    return config, compose(config, Registry.discover(config.engine.plugins, [sliced_ranks]))


def spec_of(model) -> DecoderSpec:
    return composed(model, executor={})[1].spec


# --- what does not divide ---------------------------------------------------------------------------------------------


def test_nine_heads_over_two_ranks_are_refused_before_weights_load_with_the_nearest_numbers():
    with pytest.raises(
        CompositionError, match=r"executor\.tp: 2 does not divide the 9 query heads.*executor\.tp = 1 or 3"
    ):
        composed("smollm2", executor={"tp": 2})


def test_nine_ranks_share_heads_but_not_the_feed_forward_of_smollm2():
    with pytest.raises(CompositionError, match=r"9 does not divide the 1536 features.*executor\.tp = 3"):
        composed("smollm2", executor={"tp": 9})


def test_key_value_heads_that_neither_divide_nor_are_divided_are_refused(tmp_path):
    model, _ = tiny_llama(tmp_path, heads=12, kv_heads=4, hidden=48, head_dim=8, ffn=96)
    with pytest.raises(CompositionError, match=r"the 4 key-value heads of layer 0, nor is it a multiple"):
        composed(model, executor={"tp": 6})


def test_more_stages_than_layers_are_refused(tmp_path):
    model, _ = tiny_llama(tmp_path, layers=3)
    with pytest.raises(CompositionError, match=r"executor\.pp: 4 stages are more than the model's 3 layers"):
        composed(model, executor={"pp": 4})


def test_a_rank_that_is_not_there_is_refused(tmp_path):
    model, _ = tiny_llama(tmp_path)
    with pytest.raises(CompositionError, match=r"make 2 ranks, and this is rank 2"):
        composed(model, executor={"tp": 2, "rank": 2})


def test_another_number_of_started_ranks_is_refused(tmp_path, monkeypatch):
    model, _ = tiny_llama(tmp_path)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(CompositionError, match=r"tp = 2 and pp = 1 make 2 ranks, and this is rank 0 of 4"):
        composed(model, executor={"tp": 2})


def test_groups_of_128_columns_that_three_ranks_would_cut_are_refused_by_name():
    """SmolLM2's 576 columns of `out` are 192 a rank, one group and a half."""
    with pytest.raises(CompositionError) as caught:
        composed("smollm2", executor={"tp": 3}, quantizer={"use": "int8", "group": 128})
    message = str(caught.value)
    assert "3 ranks would hold 192 of the 576 columns of layers.0.out.weight" in message
    assert "int8_g128 has groups of 128 columns" in message
    assert "executor.tp = 1" in message


def test_groups_that_three_ranks_do_not_cut_are_taken():
    _, parts = composed("smollm2", executor={"tp": 3}, quantizer={"use": "int8", "group": 64})
    assert parts.partition.share.spec.layers[0].attention.num_heads == 3


def test_a_runner_of_whole_models_is_refused_where_ranks_share_one(tmp_path):
    model, _ = tiny_llama(tmp_path)
    with pytest.raises(
        CompositionError, match=r"'cpu_fused' cannot be used here: ranks share the model, and it has no"
    ):
        composed(model, executor={"tp": 2}, runner="cpu_fused")


# --- what is held -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def family(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("family")
    saved(request.param, path)
    return path, composed(path, executor={}, engine={"max_model_len": request.param.max_model_len})[1]


@pytest.mark.parametrize("tp", [2, 4])
def test_ranks_hold_every_number_and_each_once_but_for_shared_key_value_heads(family, tp):
    _, parts = family
    spec = parts.spec
    for name, source in parts.weight_map.tensors.items():
        counts = np.zeros(source.whole, dtype=int)
        shapes = set()
        for rank in range(tp):
            part = part_of(name, source, spec, tp, rank)
            shapes.add(evolve(source, part=part).shape)
            rows = [(0, source.whole[0])] if part is None else part.rows
            columns = slice(None) if part is None or part.columns is None else slice(*part.columns)
            for start, stop in rows:
                if len(source.whole) == 2:
                    counts[start:stop, columns] += 1
                else:
                    counts[start:stop] += 1
        assert len(shapes) == 1, f"{name}: ranks hold {shapes}"
        bias_once = name.endswith(("out.bias", "down.bias"))
        replicated = part_of(name, source, spec, tp, 0) is None and not bias_once
        if replicated:
            assert (counts == tp).all(), name
        elif ".qkv." in name or ".k_norm." in name:
            attention = spec.layers[int(name.split(".")[1])].attention
            queries = attention.num_heads * attention.head_dim if ".qkv." in name else 0
            assert (counts[:queries] == 1).all(), name
            assert (counts[queries:] == max(1, tp // attention.num_kv_heads)).all(), name
        else:
            assert (counts == 1).all(), name


def test_each_rank_s_query_heads_find_their_key_value_head(tmp_path):
    """Of 8 heads over 2, ranks 0 and 1 of four hold key-value head 0, and the others head 1."""
    model, _ = tiny_llama(tmp_path, heads=8, kv_heads=2, head_dim=8)
    parts = composed(model, executor={})[1]
    source = parts.weight_map.tensors["layers.0.qkv.weight"]
    keys = [part_of("layers.0.qkv.weight", source, parts.spec, 4, rank).rows[1] for rank in range(4)]
    assert keys == [(64, 72), (64, 72), (72, 80), (72, 80)]


@pytest.mark.parametrize(("size", "tp"), [(257, 2), (257, 4), (5, 4), (3, 4), (320, 4)])
def test_a_vocabulary_is_cut_in_equal_ranges_filled_up_at_the_end(size, tp):
    parts = [vocabulary(size, tp, rank) for rank in range(tp)]
    assert {part.num_rows for part in parts} == {-(-size // tp)}
    held = [row for part in parts for start, stop in part.rows for row in range(start, stop)]
    assert held == list(range(size))


@pytest.mark.parametrize(
    "quantizer", [None, {"use": "int8", "group": 32}, {"use": "int4", "group": 32}, "sparse24"], ids=str
)
def test_a_rank_loads_exactly_what_is_planned_and_its_slice_of_each_weight(tmp_path, quantizer):
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2, attention_bias=True, mlp_bias=True)
    sections = {"model": str(model)} | ({"quantizer": quantizer} if quantizer else {})
    whole = SlicedRank(sections, {})
    held = [SlicedRank(sections, {"tp": 2}, rank) for rank in range(2)]
    full = whole.stage._runner
    for rank, one in enumerate(held):
        runner = one.stage._runner
        layer, reference = runner.layers[1], full.layers[1]
        rows = part_of(
            "layers.1.gate_up.weight", source_of(whole, "layers.1.gate_up.weight"), whole.parts.spec, 2, rank
        )
        expected = torch.cat([reference.mlp.up.weight.dequantize()[slice(*span)] for span in rows.rows])
        assert torch.equal(layer.mlp.up.weight.dequantize(), expected)
        half = reference.out.weight.dequantize().shape[1] // 2
        assert torch.equal(layer.out.weight.dequantize(), reference.out.weight.dequantize()[:, rank * half :][:, :half])
        assert torch.equal(layer.out.bias, reference.out.bias * (rank == 0))
        assert loaded_bytes(one) == one.parts.weight_bytes


def source_of(rank, name):
    return rank.parts.weight_map.tensors[name]


def loaded_bytes(rank):
    """Count what a runner holds, each tensor once."""
    seen, total = set(), 0

    def walk(value):
        nonlocal total
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Weight):
            for tensor in value.tensors.values():
                walk(tensor)
        elif isinstance(value, torch.Tensor):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size(), "a view of a larger tensor"
            total += value.numel() * value.element_size()
        elif isinstance(value, tuple | list):
            for one in value:
                walk(one)
        elif type(value).__name__ in ("Layer", "Linear", "Norm", "Mlp", "Mixture"):
            for field in type(value).__attrs_attrs__:
                walk(getattr(value, field.name))

    runner = rank.stage._runner
    for part in (runner.embed, runner.positions, runner.layers, runner.norm, runner.head):
        walk(part)
    return total


def test_a_rank_reads_no_more_of_a_file_than_it_holds(tmp_path, monkeypatch):
    """But for what all ranks hold: here norms."""
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=4, vocab=258)
    read, sliced = SafetensorsTensor.read, SafetensorsTensor.read_slice
    whole, slices = [], []
    monkeypatch.setattr(SafetensorsTensor, "read", lambda one, out: (whole.append(one.name), read(one, out))[1])
    monkeypatch.setattr(
        SafetensorsTensor,
        "read_slice",
        lambda one, out, rows, columns: (slices.append(out.numel()), sliced(one, out, rows, columns))[1],
    )
    rank = SlicedRank({"model": str(model)}, {"tp": 2}, 1)
    assert all(name.endswith("norm.weight") for name in whole)
    assert 4 * (sum(slices) + 64 * len(whole)) == rank.parts.weight_bytes


def test_gguf_tensors_are_read_in_their_slices():
    """SmolLM2's rows within heads lie in llama.cpp's order, and its blocks across ranks' edges."""
    whole, held = SlicedRank({"model": "smollm2"}, {}), SlicedRank({"model": "smollm2"}, {"tp": 3}, 1)
    full, part = whole.stage._runner.layers[4], held.stage._runner.layers[4]
    qkv = full.qkv.weight.dequantize()
    rows = [range(3 * 64, 6 * 64), range((9 + 1) * 64, (9 + 2) * 64), range((12 + 1) * 64, (12 + 2) * 64)]
    assert torch.equal(part.qkv.weight.dequantize(), torch.cat([qkv[list(some)] for some in rows]))
    assert torch.equal(part.mlp.down.weight.dequantize(), full.mlp.down.weight.dequantize()[:, 512:1024])
    table = whole.stage._runner.embed.dequantize()
    assert torch.equal(held.stage._runner.embed.dequantize(), table[16384:32768])


def test_stored_formats_of_a_file_are_kept_and_cut():
    sections = {"model": {"use": "smollm2", "weights": "stored"}}
    whole, held = SlicedRank(sections, {}), SlicedRank(sections, {"tp": 3}, 2)
    full, part = whole.stage._runner.layers[0], held.stage._runner.layers[0]
    assert part.out.weight.format.name == full.out.weight.format.name == "int4_g32_min"
    assert torch.equal(part.out.weight.dequantize(), full.out.weight.dequantize()[:, 384:])
    assert loaded_bytes(held) == held.parts.weight_bytes


# --- stages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama with biases", "gemma2", "gpt2", "qwen3_moe in every second layer", "phi tied"])
def test_stages_one_after_another_are_the_whole_model(tmp_path, name):
    case = next(case for case in CASES if case.name == name)
    saved(case, tmp_path / "model")
    prompt = [random.Random(1).randrange(256) for _ in range(21)]
    with engine_of(
        tmp_path / "model", engine={"max_model_len": 128}, kernels="torch", runner="eager", attention="eager"
    ) as one:
        expected = prompt_logits(one, prompt)
    stages = [SlicedRank({"model": str(tmp_path / "model")}, {"pp": 3}, rank) for rank in range(3)]
    layers = [layer for stage in stages for layer in stage.context.partition.share.layers]
    assert layers == list(range(one.parts.spec.num_layers))
    hidden = None
    with torch.inference_mode():
        for stage in stages:
            batch = stage.stage.batch([stage.row("one", prompt)], [prompt])
            hidden = stage.stage.run(batch, hidden)
        assert torch.equal(stages[-1].stage.logits(hidden, range(len(prompt))), expected)
    for stage in stages:
        assert loaded_bytes(stage) == stage.parts.weight_bytes


def test_every_stage_s_cache_has_the_whole_model_s_groups_and_as_many_pages(tmp_path):
    """Page tables of a plan mean the same everywhere, though a stage has no layer of some groups."""
    case = next(case for case in CASES if case.name == "gemma2")
    saved(case, tmp_path / "model")
    parts = [composed(tmp_path / "model", executor={"pp": 7, "rank": rank})[1] for rank in range(7)]
    assert {len(one.layout.groups) for one in parts} == {2}
    assert {one.num_pages for one in parts} == {parts[0].num_pages}
    assert [sum(len(group.layers) for group in one.layout.groups) for one in parts] == [1] * 7
    pinned = parts[0].executor.context.pinned_memory
    again = composed(tmp_path / "model", executor={"pp": 7, "rank": 3}, cache={"memory": pinned})[1]
    assert again.num_pages == parts[0].num_pages


# --- choosing ---------------------------------------------------------------------------------------------------------


def group(rank, num_ids=257):
    return TensorGroup(
        rank=rank, size=2, sequence=False, first_id=129 * rank, num_rows=129, vocab_size=257, num_ids=num_ids
    )


class Wire:
    """Stands for the process group of one rank: what rank 1 sends waits for rank 0."""

    def __init__(self, sent):
        self.sent = sent

    def wait(self):
        return True

    def send(self, tensors, to, tag):
        self.sent.append(tensors[0].clone())
        return self

    def recv(self, tensors, source, tag):
        tensors[0].copy_(self.sent.pop(0))
        return self


def gathered(logits, plain, num_ids=257):
    """Cut logits (L, 257) between two ranks, and gather them again."""
    padded = torch.cat((logits, torch.full((len(logits), 1), 1e9)), dim=1)  # what fills a rank up is never chosen
    sent, demand = [], Demand(rows_L=tuple(range(len(logits))), plain_L=plain)
    for rank in (1, 0):
        one = group(rank, num_ids)
        one.connect(Wire(sent))
        found = one.gather_logits(padded[:, 129 * rank :][:, :129].contiguous(), demand)
        assert (found is None) == (rank == 1)
    assert not sent
    return found


def test_gathered_logits_have_the_vocabulary_s_width_and_only_the_likeliest_where_that_is_all():
    logits = torch.randn(3, 257, generator=torch.Generator().manual_seed(0))
    found = gathered(logits, (False, True, False))
    assert torch.equal(found[[0, 2]], logits[[0, 2]])
    assert found[1].argmax() == logits[1].argmax() and found[1].max() == logits[1].max()
    assert int(found[1].isfinite().sum()) == 1


def test_the_lowest_of_equally_likely_ids_is_found_across_ranks():
    logits = torch.zeros(1, 257)
    logits[0, [200, 100, 128, 129]] = 5.0
    assert int(gathered(logits, (True,)).argmax()) == 100


def test_ids_without_a_token_are_not_the_likeliest():
    logits = torch.zeros(1, 257)
    logits[0, 250], logits[0, 7] = 9.0, 1.0
    assert int(gathered(logits, (True,), num_ids=240).argmax()) == 7
    assert int(gathered(logits, (True,), num_ids=100).argmax()) == 7


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("token", [3, 200])
def test_logits_that_are_not_finite_are_seen_on_the_rank_that_chooses(bad, token):
    logits = torch.zeros(1, 257)
    logits[0, token] = bad
    found = gathered(logits, (True,))
    assert found.isnan().any() if np.isnan(bad) else found.max() == torch.inf


def test_a_row_where_nothing_is_allowed_stays_so():
    assert bool((gathered(torch.full((1, 257), -torch.inf), (True,)) == -torch.inf).all())


# --- explain ----------------------------------------------------------------------------------------------------------


def test_explain_says_who_holds_what_before_anything_starts(tmp_path):
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2, tie=False)
    config, parts = composed(model, executor={"tp": 2, "pp": 2, "sequence": True})
    report = explain(config, parts)["parallel"]
    assert [(one["rank"], one["stage"], one["slice"]) for one in report["ranks"]] == [
        (0, 0, 0),
        (1, 0, 1),
        (2, 1, 0),
        (3, 1, 1),
    ]
    for one in report["ranks"]:
        rank = SlicedRank({"model": str(model)}, {"tp": 2, "pp": 2, "sequence": True}, one["rank"])
        assert one["weights"] == loaded_bytes(rank)
        assert one["cache"] == rank.stage._cache.num_bytes
    assert report["stage"] == 64 * 4 // 2
    assert report["logits"] == {"whole": 129 * 4, "likeliest": 16}


def test_the_command_line_says_what_each_rank_holds(tmp_path, capsys):
    model, _ = tiny_llama(tmp_path, heads=4, kv_heads=2)
    plain = ("-o", "kernels=torch", "-o", "runner=eager", "-o", "attention=eager")
    executor = "executor={use='parallel',tp=2,pp=2,sequence=true}"
    assert run(["explain", *plain, "-o", f"model={model}", "-o", executor]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 slices x 2 stages, activations sharded along tokens; this is rank 0" in said
    assert said.count("rank 3 layers") == 1
    assert "a row from each slice to the first, 16 if greedy" in said


def test_sums_over_ranks_promise_no_bits_and_a_demand_for_them_is_refused(tmp_path):
    model, _ = tiny_llama(tmp_path)
    sections = {"attention": "tiled", "engine": {"invariance": "bitwise"}}
    assert composed(model, executor={"pp": 2}, **sections)[1].invariance == "bitwise"
    assert composed(model, executor={"tp": 2}, attention="tiled")[1].invariance == "numeric"
    with pytest.raises(CompositionError, match=r"all_reduce of kernels 'parallel' keeps 'numeric'"):
        composed(model, executor={"tp": 2}, **sections)


def test_one_process_has_nothing_to_share(tmp_path):
    model, _ = tiny_llama(tmp_path)
    with engine_of(model, engine={"max_model_len": 64}) as engine:
        assert engine.explain()["parallel"] == {}


def test_shares_follow_from_the_spec_alone():
    spec = spec_of("smollm2")
    shares = share_out(spec, 3, 2)
    assert [share.rank for share in shares] == list(range(6))
    assert sorted(layer for share in shares if share.tp_rank == 0 for layer in share.layers) == list(range(30))
    assert [share.chooses for share in shares] == [False, False, False, True, False, False]
