"""The drafter `markov`: the contract of drafters, and what is its own: what it learns, from whom, for how long."""

from collections import Counter
from typing import ClassVar

from hypothesis import given
from hypothesis import strategies as st

from intarsia.protocols import DraftRequest
from intarsia.testing.drafters import DrafterContract
from intarsia.types import Entered, SamplingParams
from intarsia_markov import provide_drafters
from intarsia_markov.chain import Chain
from intarsia_markov.drafter import MarkovDrafter
from intarsia_markov.options import MarkovOptions

TEXTS = st.lists(st.integers(0, 3), max_size=40)


class TestContract(DrafterContract):
    options: ClassVar = {"min_probability": 0.05}  # it guesses often, so that there is something to be wrong

    def provider(self):
        return provide_drafters()[0]


def entered(name, prompt, salt=""):
    return Entered(
        sequence_id=(name, 0),
        params=SamplingParams(),
        seed=0,
        token_ids=tuple(prompt),
        num_prompt=len(prompt),
        salt=salt,
    )


def propose(drafter, name, token_ids, wanted=8):
    (draft,) = drafter.propose([DraftRequest(sequence_id=(name, 0), token_ids=list(token_ids), wanted=wanted)])
    return list(draft.token_ids)


def hear(drafter, name, prompt, answer, salt=""):
    """Let a sequence answer, a token a step, and leave."""
    drafter.enter(entered(name, prompt, salt))
    for stop in range(len(answer) + 1):
        propose(drafter, name, [*prompt, *answer[:stop]])
    drafter.forget((name, 0))


def ask(drafter, token_ids, salt="", wanted=8):
    """Return the guesses for a new sequence of these tokens."""
    drafter.enter(entered("asks", token_ids, salt))
    guesses = propose(drafter, "asks", token_ids, wanted)
    drafter.forget(("asks", 0))
    return guesses


# --- the chain --------------------------------------------------------------------------------------------------------


@given(text=TEXTS, asked=st.lists(st.integers(0, 3), min_size=1, max_size=6))
def test_the_likeliest_token_is_that_of_the_longest_context_that_came_before(text, asked):
    chain = Chain(order=3, max_contexts=10_000, halve_at=10_000)
    chain.learn("", text, 0)
    for length in range(min(3, len(asked)), 0, -1):
        ends = [i for i in range(length, len(text)) if text[i - length : i] == asked[-length:]]
        if ends:
            counts = Counter(text[i] for i in ends)
            token, probability = chain.likeliest("", asked)
            assert counts[token] == max(counts.values())
            assert probability == counts[token] / (len(ends) + len(counts))
            return
    assert chain.likeliest("", asked) is None


def test_what_is_old_fades_and_what_is_new_takes_its_place():
    chain = Chain(order=1, max_contexts=10, halve_at=16)
    for _ in range(1000):
        chain.learn("", [1, 2], 1)
    for _ in range(16):
        chain.learn("", [1, 3], 1)
    token, _ = chain.likeliest("", [1])
    assert token == 3


@given(texts=st.lists(st.tuples(st.sampled_from("ab"), TEXTS), max_size=6), max_contexts=st.integers(1, 9))
def test_memory_is_bounded_whatever_is_learned(texts, max_contexts):
    chain = Chain(order=4, max_contexts=max_contexts, halve_at=4)
    for salt, text in texts:
        chain.learn(salt, text, 0)
        assert len(chain) <= max_contexts
        assert all(sum(followers.values()) < 4 for followers in chain._followers.values())


def test_contexts_that_were_not_met_for_longest_are_forgotten_first():
    chain = Chain(order=1, max_contexts=2, halve_at=100)
    for context in (1, 2, 1, 3):
        chain.learn("", [context, 9], 1)
    assert chain.likeliest("", [2]) is None
    assert chain.likeliest("", [1]) is not None and chain.likeliest("", [3]) is not None


# --- learning ---------------------------------------------------------------------------------------------------------


def test_answers_teach_it_and_prompts_do_not():
    drafter = MarkovDrafter(MarkovOptions())
    for turn in range(4):
        hear(drafter, f"s{turn}", prompt=[1, 2, 3, 4], answer=[5, 6, 7, 8])
    assert ask(drafter, [9, 5]) == [6, 7, 8]
    assert ask(drafter, [9, 4])[:1] == [5]  # an answer's first token follows a prompt
    assert ask(drafter, [9, 1]) == []


def test_a_token_is_learned_once_however_often_a_sequence_enters_and_asks():
    drafter = MarkovDrafter(MarkovOptions())
    drafter.enter(entered("s", [1]))
    for _ in range(5):
        propose(drafter, "s", [1, 2, 3])
        again = entered("s", [1, 2, 3])
        drafter.enter(again)  # after a preemption
    assert drafter.chain.likeliest("", [2]) == (3, 1 / 2)


def test_guesses_stop_where_they_are_less_likely_than_asked_for():
    drafter = MarkovDrafter(MarkovOptions(min_probability=0.5, order=1))
    hear(drafter, "s", prompt=[1], answer=[2, 3])
    assert ask(drafter, [1]) == [2]  # 1/2, and 1/4 with the next
    sure = MarkovDrafter(MarkovOptions(min_probability=0.0, order=1, k=3))
    hear(sure, "s", prompt=[1], answer=[2, 3, 4, 5, 6])
    assert ask(sure, [1]) == [2, 3, 4]
    assert ask(sure, [1], wanted=2) == [2, 3]


# --- tenants ----------------------------------------------------------------------------------------------------------


def test_nothing_is_learned_from_another_salt():
    drafter = MarkovDrafter(MarkovOptions())
    for turn in range(4):
        hear(drafter, f"s{turn}", prompt=[1], answer=[2, 3, 4], salt="a")
    assert ask(drafter, [1], salt="a") == [2, 3, 4]
    for other in ("", "b", "a\0", "A"):
        assert ask(drafter, [1], salt=other) == []


@given(lives=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), TEXTS), max_size=6), asked=TEXTS)
def test_with_room_for_all_a_tenant_is_told_what_it_would_be_told_alone(lives, asked):
    together, alone = (MarkovDrafter(MarkovOptions(min_probability=0.1)) for _ in range(2))
    for turn, (salt, text) in enumerate(lives):
        hear(together, f"s{turn}", [0], text, salt)
        if salt == "a":
            hear(alone, f"s{turn}", [0], text, salt)
    assert ask(together, [0, *asked], "a") == ask(alone, [0, *asked], "a")


def test_a_request_of_a_used_id_has_its_own_salt():
    drafter = MarkovDrafter(MarkovOptions(min_probability=0.0))
    drafter.enter(entered("s", [1], salt="a"))
    propose(drafter, "s", [1, 2, 3])
    drafter.enter(entered("s", [1], salt="b"))
    assert propose(drafter, "s", [1]) == []
    assert drafter.chain.likeliest("a", [2]) == (3, 1 / 2)
