"""Prompt lookup: against a search of the whole sequence, and under the contract of drafters."""

import time
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import engine_of, scripted_engine
from intarsia.errors import ConfigError
from intarsia.protocols import DraftRequest
from intarsia.types import Entered, SamplingParams
from intarsia_speculative.contract import NgramContract
from intarsia_speculative.ngram import NgramDrafter, continuation
from intarsia_speculative.options import NgramOptions
from models import tiny_llama

ONE = ("one", 0)


def entered(ids, sequence_id=ONE, salt=""):
    params = SamplingParams()
    return Entered(sequence_id=sequence_id, params=params, seed=0, token_ids=tuple(ids), num_prompt=len(ids), salt=salt)


def propose(drafter, ids, wanted=5, sequence_id=ONE):
    (draft,) = drafter.propose([DraftRequest(sequence_id=sequence_id, token_ids=ids, wanted=wanted)])
    return draft.token_ids


def searched(ids, wanted, min_n, max_n):
    """The same by a search of the whole sequence."""
    for n in range(max_n, min_n - 1, -1):
        for begin in range(len(ids) - n - 1, -1, -1):
            if n < len(ids) and ids[begin : begin + n] == ids[-n:]:
                out = list(ids)
                for i in range(wanted):
                    out.append(out[begin + n + i])
                return tuple(out[len(ids) :])
    return ()


@given(
    ids=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    split=st.integers(0, 60),
    wanted=st.integers(1, 8),
    sizes=st.tuples(st.integers(1, 3), st.integers(0, 3)),
)
def test_it_proposes_what_a_search_of_the_whole_sequence_finds(ids, split, wanted, sizes):
    min_n, max_n = sizes[0], sum(sizes)
    drafter = NgramDrafter(NgramOptions(min_n=min_n, max_n=max_n))
    drafter.enter(entered(ids[: max(1, split)]))
    assert propose(drafter, ids, wanted) == searched(ids, wanted, min_n, max_n)


def test_the_longest_match_comes_before_the_latest():
    ids = [1, 2, 3, 50, 9, 3, 60, 1, 2, 3]
    assert propose(NgramDrafter(NgramOptions(min_n=1, max_n=3)), ids, 1) == (50,)
    assert propose(NgramDrafter(NgramOptions(min_n=1, max_n=1)), ids, 1) == (60,)


def test_of_equal_matches_the_latest_is_taken():
    assert propose(NgramDrafter(NgramOptions(min_n=2, max_n=3)), [1, 2, 7, 1, 2, 8, 1, 2], 1) == (8,)


def test_what_repeats_itself_is_proposed_past_the_end():
    assert propose(NgramDrafter(NgramOptions()), [1, 1, 1], 5) == (1, 1, 1, 1, 1)
    assert continuation([7, 8, 9], 1, 5) == (8, 9, 8, 9, 8)


def test_nothing_is_proposed_where_nothing_came_before():
    assert propose(NgramDrafter(NgramOptions()), [1, 2, 3, 4]) == ()
    assert propose(NgramDrafter(NgramOptions()), [1]) == ()


def test_sequences_that_enter_again_or_anew_are_told_apart():
    drafter = NgramDrafter(NgramOptions())
    drafter.enter(entered([1, 2, 3, 1, 2]))
    assert propose(drafter, [1, 2, 3, 1, 2], 1) == (3,)
    drafter.enter(entered([1, 2, 3, 1, 2, 3]))  # after a preemption
    assert propose(drafter, [1, 2, 3, 1, 2, 3, 1, 2], 2) == (3, 1)
    drafter.enter(entered([1, 2, 9, 1, 2]))  # another one of the same id
    assert propose(drafter, [1, 2, 9, 1, 2], 1) == (9,)
    drafter.forget(ONE)
    assert propose(drafter, [1, 2]) == () and drafter.grade(("gone", 0)) == 0


def test_a_token_costs_the_same_in_a_long_sequence():
    """A rescan would take as many times as long as the sequence has become longer: here 64 times."""
    ids = [(i * i) % 997 for i in range(64_000)]

    def seconds(length):
        drafter = NgramDrafter(NgramOptions())
        drafter.enter(entered(ids[:length]))
        best = float("inf")
        for turn in range(5):
            begun = time.thread_time()
            for i in range(100):
                propose(drafter, ids[: length + 1 + turn * 100 + i] if length < 2000 else _Prefix(ids, length, turn, i))
            best = min(best, time.thread_time() - begun)
        return best

    assert seconds(60_000) < 20 * seconds(1000)


class _Prefix:
    """The first tokens of a list, without a copy: as an executor's own list would be."""

    def __init__(self, ids, length, turn, i):
        self.ids, self.length = ids, length + 1 + turn * 100 + i

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.ids[index.start : self.length]


@pytest.mark.parametrize(("wrong", "names"), [({"k": 0}, "k"), ({"min_n": 5}, "max_n"), ({"min_n": 0}, "min_n")])
def test_options_out_of_range_are_refused_by_name(tmp_path, wrong, names):
    path, _ = tiny_llama(tmp_path, layers=1)
    with pytest.raises(ConfigError, match=names):
        engine_of(path, drafter={"use": "ngram", **wrong})


class TestNgramContract(NgramContract):
    pass


@pytest.mark.slow
class TestNgramWithoutControl(NgramContract):
    options: ClassVar = {"k": 8, "min_n": 1, "adaptive": False}
    repeats: ClassVar = True


@pytest.mark.parametrize("use", ["ngram", "suffix"])
def test_id_zero_as_a_bonus_token_is_no_rejection(tmp_path, use):
    """X02: the scripted answer repeats its prompt, and ends in zeros."""
    path, _ = tiny_llama(tmp_path, layers=1)
    prompt, script = [1, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0]
    options = {"use": use, "k": 4, "adaptive": False}
    with scripted_engine(path, script, prompt_tokens=3, drafter=options) as engine:
        (answer,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=16, logprobs=2, ignore_eos=True))
        assert answer.token_ids == (*script, 0, 0, 0, 0)
        assert len(answer.logprobs) == 16
        figures = engine.stats()["speculation"]
    assert figures["accepted"] > 4 and figures["tokens_per_step"] > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("k", range(1, 9))
@pytest.mark.parametrize("use", ["ngram", "suffix"])
def test_answers_of_a_mixed_batch_are_those_of_plain_decoding(tmp_path, use, k):
    path, _ = tiny_llama(tmp_path, layers=2)
    prompts = [[1, 1, 1], [5, 6, 7, 5, 6, 7, 5], list(range(30)), [9, 8] * 20]
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=4, max_tokens=40, n=2),
        SamplingParams(temperature=0, max_tokens=40, frequency_penalty=0.4),
        SamplingParams(temperature=0.2, seed=7, max_tokens=40, top_p=0.9),
    ]
    for order in (0, 1, 2):
        mix = [*params[order:], *params[:order]]
        with engine_of(path) as plain, engine_of(path, drafter={"use": use, "k": k, "adaptive": False}) as drafting:
            wanted = [[c.token_ids for c in one.choices] for one in plain.generate(prompts, mix)]
            assert [[c.token_ids for c in one.choices] for one in drafting.generate(prompts, mix)] == wanted
            assert drafting.stats()["speculation"]["drafted"]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("use", ["ngram", "suffix"])
def test_smollm2_says_what_it_says_without_a_drafter(use, k):
    code = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n"
    prompts = [code + code, "The capital of France is", "one two three one two three one two"]
    params = [
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(temperature=0.8, seed=42, max_tokens=24),
        SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.1),
    ]
    short = {"max_model_len": 512}
    drafter = {"use": use, "k": k}
    with engine_of("smollm2", engine=short) as plain, engine_of("smollm2", engine=short, drafter=drafter) as drafting:
        wanted = [one.token_ids for one in plain.generate(prompts, params)]
        assert [one.token_ids for one in drafting.generate(prompts, params)] == wanted
        assert drafting.stats()["speculation"]["accepted"] > 5
