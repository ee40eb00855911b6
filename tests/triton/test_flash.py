"""The kernels of `flash` in Triton's interpreter, against float64, over caches whose unused slots hold NaN.

Shape legend: H heads, K kv heads, D head dim.
"""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attending import AttentionRow, as_int8, attend, attention_spec, check
from engines import engine_of
from families import CASES, saved
from intarsia import SamplingParams
from intarsia.hookspecs import hookimpl
from intarsia.testing import poison_cache
from intarsia.types import Provider
from intarsia_flash import kernels
from intarsia_flash.attention import FlashAttention, _readable, reciprocal
from intarsia_flash.kernels import SPLIT, specialisations, tile_for
from intarsia_flash.work import Rows, Splits, Tables, rounded, whole_rows
from interpreting import placeless_products, true_bf16  # noqa: F401

pytestmark = pytest.mark.usefixtures("true_bf16")

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = {"MHA": (2, 2), "GQA": (4, 2), "MQA": (5, 1)}
#: fp32 has tiles of its own; the two of 16 bits have theirs in common.
BITS = [torch.float32, torch.bfloat16]
FACTS = [{}, {"window": 70}, {"soft_cap": 5.0}]
#: (start, length): a first token, a prompt, chunks behind others, single tokens, rows to verify, at edges of splits
ROWS = [(0, 1), (0, 37), (SPLIT - 1, 1), (SPLIT, 1), (SPLIT - 2, 5), (50, 70), (2 * SPLIT + 3, 1), (15, 17)]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


def part_of(spec, dtype=torch.float32, **facts):
    return FlashAttention(name_of(dtype), (spec,), **facts)


def rows(spec, dtype=torch.float32, shapes=ROWS):
    return [AttentionRow.random(spec, *row, seed, dtype) for seed, row in enumerate(shapes)]


#: Numbers before and behind each tensor: more than a page of any test's cache.
MARGIN = 1 << 16


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """What a kernel does not write stays NaN, and so is all memory around a tensor: a page -1, and one too many."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def full(tensor):
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -1 if tensor.dtype.is_signed else 255)

    def surrounded(*size, **facts):
        shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
        count = int(np.prod(shape, dtype=np.int64))
        return full(empty(count + 2 * MARGIN, **facts))[MARGIN : MARGIN + count].view(list(shape))

    monkeypatch.setattr(torch, "empty", surrounded)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *size, **facts: full(new_empty(self, *size, **facts)))


def run(spec, sequences, dtype=torch.float32, splits=True, **facts):
    return attend(part_of(spec, dtype, splits=splits), spec, sequences, **facts)


# --- against float64 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("splits", "heads"), [(True, "MHA"), (True, "GQA"), (True, "MQA"), (False, "GQA")])
def test_every_row_equals_float64(dtype, splits, heads):
    spec = attention_spec(*HEADS[heads], 40)
    sequences = rows(spec, dtype)
    check(run(spec, sequences, dtype, splits, scatter=1), sequences, spec)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 192, 256])
def test_heads_of_any_width_in_eights(dtype, head_dim):
    spec = attention_spec(2, 1, head_dim)
    sequences = rows(spec, dtype, [(0, 70), (SPLIT + 5, 1), (30, 3)])
    check(run(spec, sequences, dtype), sequences, spec)


@pytest.mark.parametrize("order", ["PSKD", "PKSD"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 100, 128])
def test_pages_of_any_size_can_lie_anywhere_and_unused_slots_are_not_read(order, page_size):
    spec = attention_spec(3, 1, 16)
    sequences = rows(spec, torch.float16, [(0, 1), (130, 70), (SPLIT + 7, 2), (63, 1)])
    for scatter in (None, 2):
        outs = run(spec, sequences, torch.float16, order=order, page_size=page_size, scatter=scatter)
        check(outs, sequences, spec)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [1, 20, 64, SPLIT + 9, 5000])
def test_a_query_sees_the_last_keys_of_its_window(dtype, window):
    spec = attention_spec(3, 1, 16, window=window)
    sequences = rows(spec, dtype)
    check(run(spec, sequences, dtype, page_size=8), sequences, spec)


@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("soft_cap", [0.5, 50.0])
@pytest.mark.parametrize("window", [None, 7])
def test_soft_caps_bend_the_scores(splits, soft_cap, window):
    spec = attention_spec(3, 1, 32, window=window, soft_cap=soft_cap)
    sequences = rows(spec, shapes=[(0, 37), (SPLIT + 3, 1), (30, 70)])
    outs = run(spec, sequences, splits=splits)
    check(outs, sequences, spec)
    plain = run(evolve(spec, soft_cap=None), sequences, splits=splits)
    assert not torch.allclose(outs[0], plain[0], atol=1e-6 if soft_cap > 5 else 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("order", "facts"), [("PSKD", {}), ("PKSD", {"window": 20}), ("PKSD", {"soft_cap": 5.0, "window": 300})]
)
def test_int8_entries_are_read_as_what_they_stand_for(dtype, order, facts):
    spec = attention_spec(*([4, 2] if order == "PSKD" else [3, 1]), 40, **facts)
    assert "int8" in part_of(spec, dtype).formats
    sequences = rows(spec, dtype)
    outs = run(spec, sequences, dtype, order=order, scatter=3, cache_dtype=torch.int8)
    for out, sequence in zip(outs, sequences, strict=True):
        # A value is rounded to fp16 once more, when it is multiplied by its scale: half a unit of 2**-10.
        check([out], [as_int8(sequence)], spec)


ANY_BATCH = (
    st.sampled_from(DTYPES),
    st.tuples(st.integers(1, 2), st.integers(1, 5)),
    st.integers(1, 16).map(lambda pieces: 8 * pieces),
    st.lists(st.tuples(st.integers(0, 2 * SPLIT), st.integers(1, 90)), min_size=1, max_size=2),
    st.one_of(st.none(), st.integers(1, SPLIT + 40)),
    st.sampled_from(["PSKD", "PKSD"]),
    st.integers(1, 130),
    st.one_of(st.none(), st.integers(0, 9)),
    st.booleans(),
)


def check_batch(dtype, heads, head_dim, shapes, window, order, page_size, scatter, splits):
    spec = attention_spec(heads[0] * heads[1], heads[0], head_dim, window=window)
    sequences = rows(spec, dtype, shapes)
    outs = run(spec, sequences, dtype, splits, order=order, page_size=page_size, scatter=scatter)
    check(outs, sequences, spec)


few = settings(deadline=None, max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])


@few
@given(*ANY_BATCH)
def test_any_batch_equals_float64(dtype, heads, head_dim, shapes, window, order, page_size, scatter, splits):
    check_batch(dtype, heads, head_dim, shapes, window, order, page_size, scatter, splits)


@pytest.mark.slow
@settings(few, max_examples=100)
@given(*ANY_BATCH)
def test_any_of_many_batches_equals_float64(dtype, heads, head_dim, shapes, window, order, page_size, scatter, splits):
    check_batch(dtype, heads, head_dim, shapes, window, order, page_size, scatter, splits)


@pytest.mark.parametrize("scale", [0.01, 1.0])
def test_scores_are_multiplied_by_the_scale_of_the_spec(scale):
    spec = evolve(attention_spec(4, 2, 16), scale=scale)
    sequences = rows(spec)
    check(run(spec, sequences), sequences, spec)


#: One in prefill, and one whose splits are merged.
LARGE = [(9, 70), (SPLIT + 9, 1)]


def test_large_scores_do_not_overflow():
    spec = attention_spec(4, 2, 16)
    large = [evolve(row, queries=row.queries * 1e4, keys=row.keys * 1e4) for row in rows(spec, shapes=LARGE)]
    check(run(spec, large), large, spec)


def test_more_query_heads_a_kv_head_than_a_tile_has():
    spec = attention_spec(71, 1, 16)
    sequences = rows(spec, shapes=[(SPLIT + 3, 1), (5, 2), (0, 9)])
    check(run(spec, sequences), sequences, spec)


def test_what_is_not_a_number_among_a_rows_own_keys_shows_in_that_row_alone():
    spec = attention_spec(4, 2, 16)
    sick, well = rows(spec, torch.bfloat16, [(20, 3), (70, 3)])
    sick.keys[5, 0, 3] = torch.nan
    outs = run(spec, [well, sick, well], torch.bfloat16)
    assert outs[1][:, :2].isnan().all() and outs[1][:, 2:].isfinite().all()
    for out in (outs[0], outs[2]):
        check([out], [well], spec)


def test_a_batch_of_no_tokens_is_no_work():
    spec = attention_spec(4, 2, 16)
    assert run(spec, [AttentionRow.random(spec, 3, 0, 0)])[0].shape == (0, 4, 16)


def test_queries_that_do_not_begin_at_16_bytes_are_read_all_the_same():
    spec = attention_spec(2, 1, 8)
    part, sequence = part_of(spec, torch.bfloat16), AttentionRow.random(spec, 3, 2, 0, torch.bfloat16)
    shifted = torch.empty(2 * 2 * 8 + 1, dtype=torch.bfloat16)[1:].view(2, 2, 8).copy_(sequence.queries)
    assert shifted.data_ptr() % 16
    assert torch.equal(_readable(shifted), sequence.queries) and not _readable(shifted).data_ptr() % 16
    assert _readable(sequence.queries) is sequence.queries
    check(attend(part, spec, [sequence]), [sequence], spec)


# --- what a row's bits depend on --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "splits", "facts"),
    [
        (torch.float32, True, {"window": 70}),
        (torch.bfloat16, True, {}),
        (torch.float16, True, {"soft_cap": 5.0}),
        (torch.bfloat16, False, {"window": 70}),
    ],
)
def test_a_row_has_the_same_bits_alone_and_among_any_neighbours(dtype, splits, facts):
    spec = attention_spec(3, 1, 40, **facts)
    assert part_of(spec, dtype, splits=splits).invariance(name_of(dtype)) in ("neighbours", "bitwise")
    sequences = rows(spec, dtype)
    alone = [run(spec, [sequence], dtype, splits)[0] for sequence in sequences]
    rng = random.Random(1)
    among = rng.sample(range(len(sequences)), len(sequences))
    layout = {"order": "PSKD", "page_size": rng.choice([8, 100]), "scatter": 1}
    outs = run(spec, [sequences[i] for i in among], dtype, splits, **layout)
    for i, out in zip(among, outs, strict=True):
        assert torch.equal(out, alone[i]), (sequences[i].start, sequences[i].length)


@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("facts", FACTS)
def test_without_splits_the_bits_are_the_same_in_any_chunks(dtype, facts):
    spec = attention_spec(3, 1, 40, **facts)
    assert part_of(spec, dtype, splits=False).invariance(name_of(dtype)) == "bitwise"
    whole = AttentionRow.random(spec, 0, 150, 7, dtype)
    (bits,) = run(spec, [whole], dtype, False)
    rng = random.Random(2)
    for chunk in (1, 37, 64):
        pieces = whole.chunks(chunk)
        some = rng.sample(pieces, min(2, len(pieces)))
        for piece, out in zip(some, run(spec, some, dtype, False, page_size=rng.choice([8, 16])), strict=True):
            assert torch.equal(out, bits[piece.start : piece.start + piece.length]), (chunk, piece.start)


@pytest.mark.usefixtures("placeless_products")
@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("facts", FACTS[:2])
def test_among_rows_that_decode_the_bits_are_the_same_in_any_chunks(dtype, facts):
    """A token alone, and the same one among drafts, behind the edge of a split too."""
    spec = attention_spec(3, 1, 40, **facts)
    whole = AttentionRow.random(spec, 0, 2 * SPLIT + 6, 7, dtype)
    places = [SPLIT - 3, 2 * SPLIT - 2]
    cut = [[whole.cut(at, at + 1) for at in range(begin, begin + 6)] for begin in places]
    for begin, alone in zip(places, cut, strict=True):
        (bits,) = run(spec, [whole.cut(begin, begin + 6)], dtype)
        assert torch.equal(torch.cat(run(spec, alone, dtype)), bits), begin


# --- engines ----------------------------------------------------------------------------------------------------------


class Interpreted:
    """A plugin whose attention is the kernels', on CPU tensors."""

    @hookimpl
    def provide_attention_backends(self):
        def build(context):
            return FlashAttention(context.engine.dtype, tuple(layer.attention for layer in context.spec.layers))

        return [Provider(key="interpreted", summary="the kernels in the interpreter", build=build)]


@pytest.mark.parametrize("name", ["gemma2", "qwen2 with windows"])
def test_an_engine_over_the_kernels_gives_the_ids_of_the_oracle(name, tmp_path):
    """Windows whose pages were given back beside full layers, caps, chunks and rows that decode in one step."""
    saved(next(case for case in CASES if case.name == name), tmp_path)
    rng = random.Random(7)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (33, 9)]
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    found = []
    for attention in ("eager", "interpreted"):
        with engine_of(
            tmp_path,
            engine={"max_model_len": 128},
            cache={"use": "paged", "memory": "16MiB", "page_size": 8},
            scheduler={"use": "inflight", "max_tokens": 20},
            attention=attention,
            kernels="torch",
            runner="eager",
            plugins=[Interpreted()],
        ) as engine:
            poison_cache(engine)
            found.append([one.token_ids for one in engine.generate(prompts, params)])
    assert found[0] == found[1]


# --- the work of a step -----------------------------------------------------------------------------------------------


@given(st.integers(1, 5000), st.lists(st.integers(0, 2**30), min_size=1, max_size=30))
def test_multiplying_by_the_reciprocal_divides(page_size, numbers):
    magic, shift = reciprocal(page_size)
    assert -(2**31) <= magic < 0
    edges = [n // page_size * page_size + d for n in numbers for d in (0, page_size - 1)]
    for x in [*numbers, *edges]:
        assert ((2 * x * (magic + 2**32)) >> 32) >> shift == x // page_size


@given(
    st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 40)), min_size=1, max_size=8),
    st.integers(1, 9),
    st.one_of(st.none(), st.integers(1, 2000)),
)
def test_pieces_of_work_cover_every_query_and_key_that_it_sees_once(shapes, group_size, window):
    bounds = [0, *np.cumsum([count for _, count in shapes]).tolist()]
    whole = Rows.of(bounds, [start for start, _ in shapes])
    tables = Tables.of([range(start + count) for start, count in shapes])
    decoded = whole.decoded(group_size)
    splits = Splits.of(whole, tables, decoded, group_size, 16, SPLIT, window)
    found = set()
    for first, count, start, begin, tile, number, _, _ in splits.items.tolist():
        row = bounds.index(first + count) - 1
        assert (start, count, begin) == (*shapes[row], tables.begins[row])
        for packed in range(tile * 16, min((tile + 1) * 16, count * group_size)):
            entry = (first + packed // group_size, packed % group_size, number)
            assert entry not in found
            found.add(entry)
    expected = set()
    for r, (start, count) in enumerate(shapes):
        if decoded[r] and count:
            lowest = 0 if window is None else max(0, start - window + 1) // SPLIT
            numbers = range(lowest, -(-(start + count) // SPLIT))
            expected |= {(bounds[r] + q, g, n) for q in range(count) for g in range(group_size) for n in numbers}
    assert found == expected
    places = [item[6] for item in splits.items.tolist() if item[6] >= 0]
    assert sorted(places) == list(range(splits.num_slots))
    tiles = whole_rows(whole, tables, ~decoded, group_size, 128).tolist()
    covered = {(t[0], t[4]) for t in tiles}
    assert len(covered) == len(tiles)
    assert covered == {
        (bounds[r], tile)
        for r, (_, count) in enumerate(shapes)
        if not decoded[r]
        for tile in range(-(-count * group_size // 128))
    }


def test_counts_are_rounded_up_to_few_sizes():
    sizes = [rounded(n) for n in range(5000)]
    assert all(n <= size < n + max(16, n / 4) for n, size in enumerate(sizes) if n)
    assert sizes[0] == 0 and len(set(sizes)) < 40 and not any(size % 16 for size in sizes)


def test_a_step_of_equal_grids_takes_the_place_of_another():
    """What a CUDA graph replays: tensors that stay where they are, filled with another step's numbers."""
    spec = attention_spec(4, 2, 16)
    first, second = (rows(spec, shapes=shapes) for shapes in ([(SPLIT, 1), (9, 70)], [(SPLIT + 40, 1), (20, 65)]))
    part, kept = part_of(spec), []

    class Replayed:
        def prepare(self, batch, layout):
            ready = part.prepare(batch, layout)
            if kept:
                kept[0].refill(ready)
                return kept[0]
            kept.append(ready)
            return ready

        attend = staticmethod(part.attend)

    for sequences in (first, second, first):
        check(attend(Replayed(), spec, sequences), sequences, spec)


@pytest.mark.parametrize("facts", [{}, {"window": 300}], ids=["all keys", "a window"])
@pytest.mark.parametrize("splits", [True, False])
@pytest.mark.parametrize("heads", [(4, 2), pytest.param((20, 1), marks=pytest.mark.slow)], ids=str)
def test_decoding_steps_of_any_lengths_fill_the_same_buffers(heads, splits, facts):
    """As CUDA graphs replay them: the first step's tensors hold every later step's numbers."""
    spec, most = attention_spec(*heads, 16, **facts), 3 * SPLIT + 10
    part, kept = part_of(spec, splits=splits), []

    class Replayed:
        def prepare(self, batch, layout):
            ready = part.prepare_fixed(batch, layout, most)
            if kept:
                kept[0].refill(ready)
                return kept[0]
            kept.append(ready)
            return ready

        attend = staticmethod(part.attend)

    for lengths in ([1, 1, 1], [most, SPLIT, SPLIT + 1], [2, 2 * SPLIT + 7, 600]):
        sequences = rows(spec, shapes=[(length - 1, 1) for length in lengths])
        mixed = attend(Replayed(), spec, sequences)
        check(mixed, sequences, spec)
        alone = attend(part, spec, sequences)
        assert all(map(torch.equal, mixed, alone))  # the same work, whatever room there is


def test_steps_over_fixed_buffers_share_the_memory_of_partial_results():
    spec = attention_spec(4, 2, 16)
    part, kept = part_of(spec), []

    class Kept:
        def prepare(self, batch, layout):
            kept.append(part.prepare_fixed(batch, layout, 4 * SPLIT))
            return kept[-1]

        attend = staticmethod(part.attend)

    for count in (8, 2):
        attend(Kept(), spec, rows(spec, shapes=[(SPLIT, 1)] * count))
    [first], [second] = (list(each.work.values()) for each in kept)
    assert first.partials.data_ptr() == second.partials.data_ptr() and first.sums.data_ptr() == second.sums.data_ptr()
    assert first.partials.numel() > second.partials.numel()


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("roomy", [True, False])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_heads_of_every_width_in_eights_have_a_tile_whose_queries_do_not_depend_on_entries(dtype, kind, roomy):
    spec = attention_spec(2, 1, 8)
    entries = FlashAttention(dtype, (spec,)).formats
    for head_dim in range(8, 257, 8):
        tiles = [tile_for(kind, dtype, entry, head_dim, roomy=roomy) for entry in entries]
        assert len({tile.queries for tile in tiles}) == 1
        assert kind == "prefill" or tiles[0].queries == kernels.DECODED_TILE
        for tile in tiles:
            assert tile.head_dim >= head_dim and SPLIT % tile.keys == 0 and tile in kernels.FORMS


#: Compiles every form for what it is for, and prints the shared memory that each takes.
COMPILE = """
import json
from intarsia.gpu_kernels import compile_for
from intarsia_flash.kernels import specialisations
print(json.dumps([[f.name, c, compile_for(f, c).shared] for f in specialisations() for c in f.capabilities]))
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_forms_take_no_more_shared_memory_than_the_devices_have_that_they_are_chosen_for():
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", COMPILE]
    out = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    taken = json.loads(out)
    assert {name for name, _, _ in taken} == {form.name for form in specialisations()}
    for name, capability, shared in taken:
        assert shared <= (kernels.LEAST_ROOM if capability < 90 else kernels.ROOM), (name, capability)
