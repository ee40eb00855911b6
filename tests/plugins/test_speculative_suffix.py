"""The suffix automaton: against brute force, its memory kept apart by salt, and under the contract of drafters."""

from collections import Counter
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines import engine_of
from intarsia.protocols import DraftRequest
from intarsia.types import Entered, Request, SamplingParams
from intarsia_speculative.automaton import ROOT, Automaton
from intarsia_speculative.contract import SuffixContract
from intarsia_speculative.memory import Memory
from intarsia_speculative.options import SuffixOptions
from intarsia_speculative.suffix import SuffixDrafter
from models import tiny_llama

TEXTS = st.lists(st.integers(0, 3), max_size=40)


def entered(ids, sequence_id, salt="", num_prompt=None):
    return Entered(
        sequence_id=sequence_id,
        params=SamplingParams(),
        seed=0,
        token_ids=tuple(ids),
        num_prompt=len(ids) if num_prompt is None else num_prompt,
        salt=salt,
    )


def propose(drafter, ids, sequence_id, wanted=5):
    (draft,) = drafter.propose([DraftRequest(sequence_id=sequence_id, token_ids=list(ids), wanted=wanted)])
    return draft.token_ids


def state_of(automaton, ids):
    state = ROOT
    for token in ids:
        state = automaton._next[state].get(token)
        if state is None:
            return None
    return state


def places(text, part):
    return [i + len(part) for i in range(len(text) - len(part) + 1) if text[i : i + len(part)] == part]


@given(text=TEXTS)
def test_the_automaton_holds_each_substring_with_how_often_and_where_last_it_came(text):
    automaton = Automaton()
    automaton.extend(text)
    for begin in range(len(text)):
        for end in range(begin + 1, min(len(text), begin + 6) + 1):
            state, found = state_of(automaton, text[begin:end]), places(text, text[begin:end])
            assert automaton._count[state] == len(found)
            assert automaton._latest[state] == found[-1]


@given(text=TEXTS, part=st.lists(st.integers(0, 3), min_size=1, max_size=5))
def test_the_automaton_holds_nothing_else(text, part):
    automaton = Automaton()
    automaton.extend(text)
    assert (state_of(automaton, part) is not None) == bool(places(text, part))


@given(text=TEXTS)
def test_the_longest_suffix_that_came_before_is_found(text):
    automaton = Automaton()
    automaton.extend(text)
    longest = max((n for n in range(len(text)) if n and len(places(text, text[-n:])) > 1), default=0)
    state, length = automaton.repeated()
    assert length == longest
    assert state == (state_of(automaton, text[-longest:]) if longest else ROOT)


@given(first=TEXTS, second=TEXTS, heard=TEXTS, split=st.integers(0, 40))
def test_a_match_stays_the_longest_as_it_is_followed_and_stays_true_as_the_automaton_grows(first, second, heard, split):
    automaton = Automaton()
    automaton.extend(first)
    match = (ROOT, 0)
    for token in heard[:split]:
        match = automaton.follow(*match, token)
    known = heard[:split]
    longest = max((n for n in range(len(known) + 1) if not n or places(first, known[-n:])), default=0)
    assert match[1] == longest
    automaton.extend(second)
    state, length = automaton.settle(*match)
    assert length == longest and state == state_of(automaton, known[len(known) - longest :])
    for token in heard[split:]:
        match = automaton.follow(*match, token)
    state, length = automaton.settle(*match)
    assert state == state_of(automaton, heard[len(heard) - length :])


@given(text=st.lists(st.integers(0, 3), min_size=2, max_size=40), n=st.integers(1, 3))
def test_the_likeliest_continuation_is_the_most_frequent_and_of_equals_the_latest(text, n):
    automaton = Automaton()
    automaton.extend(text)
    part = text[:n]
    ends = [end for end in places(text, part) if end < len(text)]
    found = automaton.likeliest(state_of(automaton, part))
    if not ends:
        assert found is None
        return
    counts = Counter(text[end] for end in ends)
    best = max(counts, key=lambda token: (counts[token], max(e for e in ends if text[e] == token)))
    assert found[:2] == (best, counts[best] / len(ends))


def test_states_are_at_most_two_a_token():
    automaton = Automaton()
    automaton.extend([(i * i) % 7 for i in range(5000)])
    assert len(automaton._next) <= 2 * 5000


def test_guesses_go_on_while_they_are_likely_enough():
    text = [8, 1, 2, 3, 4, 9, 1, 2, 3, 5, 7, 1, 2, 3, 4, 6, 1, 2]
    for least, guesses in ((1.0, (3,)), (0.6, (3, 4)), (0.3, (3, 4, 6, 1, 2))):
        drafter = SuffixDrafter(SuffixOptions(min_probability=least))
        drafter.enter(entered(text, ("a", 0)))
        assert propose(drafter, text, ("a", 0)) == guesses


def test_what_repeats_itself_is_proposed_past_the_end():
    drafter = SuffixDrafter(SuffixOptions(min_match=1))
    drafter.enter(entered([1, 1, 1], ("a", 0)))
    assert propose(drafter, [1, 1, 1], ("a", 0)) == (1, 1, 1, 1, 1)


def test_a_match_shorter_than_asked_for_proposes_nothing():
    text = [1, 2, 3, 9, 2, 3]
    for min_match, guesses in ((2, (9, 2)), (3, ())):
        drafter = SuffixDrafter(SuffixOptions(min_match=min_match))
        drafter.enter(entered(text, ("a", 0)))
        assert propose(drafter, text, ("a", 0), wanted=2) == guesses


def answered(drafter, name, salt, prompt, answer):
    drafter.enter(entered(prompt, (name, 0), salt))
    propose(drafter, [*prompt, *answer], (name, 0))
    drafter.forget((name, 0))


def test_earlier_answers_are_proposed_and_their_prompts_are_not():
    drafter = SuffixDrafter(SuffixOptions())
    answered(drafter, "a", "", [50, 51, 52], [1, 2, 3, 4, 5])
    drafter.enter(entered([9, 1, 2], ("b", 0)))
    assert propose(drafter, [9, 1, 2], ("b", 0), wanted=2) == (3, 4)
    drafter.enter(entered([9, 50, 51], ("c", 0)))
    assert propose(drafter, [9, 50, 51], ("c", 0)) == ()


def test_answers_of_another_salt_are_never_proposed():
    """Nor does a match reach from one answer into the next."""
    drafter = SuffixDrafter(SuffixOptions())
    answered(drafter, "a", "mine", [7], [1, 2, 3, 4, 5])
    answered(drafter, "b", "mine", [7], [6, 6, 8])
    for salt, guesses in (("mine", (5,)), ("", ()), ("yours", ())):
        drafter.enter(entered([9, 3, 4], ("c" + salt, 0), salt))
        assert propose(drafter, [9, 3, 4], ("c" + salt, 0)) == guesses


@given(answers=st.lists(st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 9), max_size=30)), max_size=40))
def test_memory_is_bounded_and_drops_the_oldest(answers):
    memory = Memory(64)
    for salt, ids in answers:
        memory.add(salt, ids)
        assert memory.num_tokens <= 64
    held = [part for salt in "ab" for part in memory.of(salt)]
    assert sum(part.num_tokens for part in held) == memory.num_tokens
    if answers and answers[-1][1]:
        salt, ids = answers[-1]
        assert state_of(memory.of(salt)[-1], ids[-15:]) is not None


def test_no_memory_keeps_nothing():
    memory = Memory(0)
    memory.add("", [1, 2, 3])
    assert memory.num_tokens == 0 and not memory.of("")


def test_a_sequence_that_was_preempted_reads_on():
    drafter = SuffixDrafter(SuffixOptions())
    drafter.enter(entered([1, 2, 3, 1, 2], ("a", 0)))
    drafter.enter(entered([1, 2, 3, 1, 2, 3], ("a", 0), num_prompt=5))
    assert propose(drafter, [1, 2, 3, 1, 2, 3, 1], ("a", 0), wanted=2) == (2, 3)
    drafter.forget(("a", 0))
    assert drafter.memory.num_tokens == 3  # 3, 1 and the end


def test_the_salt_of_a_request_reaches_the_drafter(tmp_path):
    """A tiny random model says the same again: of an equal salt it is drafted from the first token on."""
    path, _ = tiny_llama(tmp_path, layers=1)
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)
    with engine_of(path, drafter={"use": "suffix", "adaptive": False, "k": 4}) as engine:

        def accepted(name, salt):
            before = engine.stats()["speculation"]["accepted"]
            engine.add(Request(request_id=name, prompt=[1, 2, 3], params=params, cache_salt=salt))
            while engine.has_work:
                engine.step()
            return engine.stats()["speculation"]["accepted"] - before

        first, again, other = accepted("a", "x"), accepted("b", "x"), accepted("c", "y")
    assert again >= 20
    assert other == first < 10


class TestSuffixContract(SuffixContract):
    pass


@pytest.mark.slow
class TestSuffixWithoutControl(SuffixContract):
    options: ClassVar = {"k": 8, "min_match": 1, "adaptive": False}
    repeats: ClassVar = True
