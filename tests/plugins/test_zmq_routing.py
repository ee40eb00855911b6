"""Where a request goes, and what of it goes on when it moves: the router's parts without a socket."""

from __future__ import annotations

import random

import pytest

from intarsia.types import Chat, CompletionChoice, Output, Request, SamplingParams, Timings, TokenLogprobs, Usage
from intarsia_zmq.errors import MalformedError
from intarsia_zmq.handover import Add
from intarsia_zmq.messages import Done
from intarsia_zmq.routing.attempts import Attempt, DivergedError, Job, UnaskedEndError, repeats
from intarsia_zmq.routing.choosing import Candidate, choose
from intarsia_zmq.routing.prefixes import Prefix, Seen, read_prefix

# --- beginnings of prompts --------------------------------------------------------------------------------------------


def blocks(prompt, salt="", size=16, most=64):
    return read_prefix(prompt, salt, size, most).blocks


def shared(one, other):
    """How many leading blocks two prompts share."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def test_prompts_share_as_many_blocks_as_they_share_whole_blocks_of_bytes():
    text = "".join(random.Random(1).choices("abcdef", k=200))
    for cut in (0, 1, 15, 16, 17, 100, 160):
        other = text[:cut] + "#" + text[cut + 1 :]
        assert shared(blocks(text), blocks(other)) == cut // 16
    assert len(blocks(text)) == 200 // 16
    ids = list(range(100))
    assert shared(blocks(ids), blocks([*ids[:50], 7, *ids[51:]])) == 50 * 4 // 16


def test_a_block_in_another_place_or_after_others_is_another_block():
    assert not set(blocks("a" * 16 + "b" * 16)) & set(blocks("b" * 16 + "a" * 16))
    first, second = blocks("a" * 32)
    assert first != second


def test_salts_and_kinds_of_prompts_share_nothing():
    text = "x" * 64
    salted = [blocks(text, salt) for salt in ("", "a", "b")]
    assert len({each[0] for each in salted}) == 3
    assert blocks(text) == blocks(text, "") and not set(blocks("\x05\0\0\0" * 8)) & set(blocks([5] * 8))


def test_a_chat_that_goes_on_shares_all_whole_blocks_that_came_before():
    turns = [{"role": "user", "content": "a" * 100}, {"role": "assistant", "content": "b" * 100}]
    short, long = Chat(turns[:1]), Chat([*turns, {"role": "user", "content": "c"}])
    assert shared(blocks(short), blocks(long)) == len(blocks(short)) > 6
    turned = Chat([{"content": "a" * 100, "role": "user"}])
    assert blocks(turned) == blocks(short), "the order of keys is no part of a message"
    tools = Chat(turns[:1], tools=[{"type": "function", "function": {"name": "f"}}])
    assert shared(blocks(tools), blocks(short)) <= 1, "templates print tools before the messages"


def test_a_prompt_is_looked_at_up_to_a_bound_and_counted_whole():
    prefix = read_prefix([1] * 100_000, "", 16, 10)
    assert len(prefix.blocks) == 10 and prefix.tokens == 100_000
    assert read_prefix("\ud800" * 400, "", 16, 10).tokens == 100, "half a character is no text, and no fault here"


def test_the_ends_of_prompts_are_forgotten_before_their_beginnings():
    seen = Seen(limit=6)
    first, second = Prefix(9, (b"a", b"b", b"c", b"d")), Prefix(9, (b"a", b"x", b"y", b"z"))
    seen.add(first)
    seen.add(second)
    assert len(seen) == 6 and seen.count(second) == 4 and seen.count(first) == 3
    seen.add(Prefix(9, (b"1", b"2", b"3", b"4")))
    assert seen.count(second) == 2 and seen.count(first) == 1
    seen.clear()
    assert seen.count(second) == 0 == len(seen)


# --- the rule ---------------------------------------------------------------------------------------------------------


def candidate(cached=0, queued=0, requests=0, chosen_at=0):
    return Candidate(cached=cached, queued=queued, requests=requests, chosen_at=chosen_at)


@pytest.mark.parametrize(
    ("policy", "candidates", "chosen"),
    [
        # the cost is 1000 less what is cached, more what is queued, and 100 a request
        ("prefix", [candidate(), candidate(cached=900)], 1),
        ("prefix", [candidate(), candidate(cached=900, requests=8)], 1),  # 1000 against 900
        ("prefix", [candidate(), candidate(cached=900, requests=10)], 0),  # 1000 against 1100
        ("prefix", [candidate(queued=500), candidate(cached=300, requests=3)], 1),  # 1500 against 1000
        ("prefix", [candidate(chosen_at=5), candidate(chosen_at=4)], 1),
        ("prefix", [candidate(cached=5000), candidate(cached=1000, chosen_at=1)], 0),  # no more than the prompt
        ("least_loaded", [candidate(requests=1), candidate(cached=900, requests=2)], 0),
        ("least_loaded", [candidate(queued=101), candidate(requests=1)], 1),
        ("round_robin", [candidate(chosen_at=7), candidate(requests=99, chosen_at=3), candidate(chosen_at=9)], 1),
    ],
)
def test_the_smallest_cost_wins_and_then_the_longest_unused(policy, candidates, chosen):
    assert choose(policy, 100, 1000, candidates) == chosen


# --- what goes on -----------------------------------------------------------------------------------------------------


def job(n=1, stream=True, **params):
    request = Request(request_id="key", prompt=[1], params=SamplingParams(**{"n": n, "seed": 1} | params))
    return Job(add=Add(request, 1, 1, 1, stream), request=request, prefix=Prefix(1), since=0.0)


def attempt(one, name="1"):
    made = Attempt(job=one, name=name)
    one.attempt = made
    return made


def entry(token):
    return TokenLogprobs(token, -1.0)


def cut(rng, choice, ids, text, reason="length"):
    """Cut an answer into deltas at places of chance; text lags behind ids, or not."""
    outputs, i, t = [], 0, 0
    while True:
        i2, t2 = min(len(ids), i + rng.randrange(4)), min(len(text), t + rng.randrange(4))
        last = i2 == len(ids) and t2 == len(text)
        outputs.append(
            Output(
                request_id="x",
                choice=choice,
                token_ids=tuple(ids[i:i2]),
                text=text[t:t2],
                logprobs=tuple(map(entry, ids[i:i2])),
                finish_reason=reason if last else None,
            )
        )
        if last:
            return outputs
        i, t = i2, t2


def done(n=1, tokens=0, reason="length", **more):
    choices = tuple(CompletionChoice(text="", token_ids=(), finish_reason=reason) for _ in range(n))
    return Done(choices=choices, usage=Usage(3, tokens, 1), timings=Timings(0.1, 0.2, 0.3), seed=1, **more)


def test_however_often_and_wherever_an_answer_moves_its_client_gets_it_once():
    rng = random.Random(3)
    for _ in range(200):
        n = rng.choice((1, 1, 2, 3))
        answers = [
            ([rng.randrange(50) for _ in range(rng.randrange(1, 30))], "x" * rng.randrange(30)) for _ in range(n)
        ]
        one, got = job(n, logprobs=0), []
        for move in range(rng.randrange(3), -1, -1):
            at = attempt(one)
            mixed = [cut(rng, choice, *answers[choice]) for choice in range(n)]
            while any(mixed) and (move == 0 or rng.random() > 0.05):
                got += at.take(rng.choice([each for each in mixed if each]).pop(0))
            if not any(mixed) and move == 0:
                got += at.end(done(n, sum(len(ids) for ids, _ in answers)))
        for choice, (ids, text) in enumerate(answers):
            said = [output for output in got if output.choice == choice]
            assert [token for output in said for token in output.token_ids] == ids
            assert "".join(output.text for output in said) == text
            assert [each.token_id for output in said for each in output.logprobs] == ids
            assert [output.finish_reason for output in said][-1] == "length"
            assert sum(output.finish_reason is not None for output in said) == 1
        (last,) = [output for output in got if output.usage is not None]
        assert last.usage.completion_tokens == sum(len(ids) for ids, _ in answers) and last is got[-1]
        assert all(output.request_id == "key" for output in got)


def test_times_count_from_when_a_request_was_first_sent():
    one = job()
    at = Attempt(job=one, name="2", late_s=5.0)
    at.take(Output(request_id="x", token_ids=(1,), finish_reason="length"))
    (end,) = at.end(done(tokens=1))
    assert end.timings == Timings(5.1, 5.2, 5.3)
    one = job()
    attempt(one).take(Output(request_id="x", token_ids=(1,)))
    at = Attempt(job=one, name="2", late_s=5.0)
    at.take(Output(request_id="x", token_ids=(1, 2), finish_reason="length"))
    (end,) = at.end(done(tokens=2))
    assert end.timings == Timings(0.1, 0.2, 5.3), "the first token came from another replica"


def begun(one, ids=(5, 6, 7), text="abc"):
    attempt(one).take(Output(request_id="x", token_ids=ids, text=text))
    return attempt(one, "2")


@pytest.mark.parametrize(
    "again",
    [
        Output(request_id="x", token_ids=(5, 6, 8), text="abc"),
        Output(request_id="x", token_ids=(5, 6, 7), text="abd"),
        Output(request_id="x", token_ids=(5, 6, 8, 9)),
        Output(request_id="x", token_ids=(5, 6), text="ab", finish_reason="stop"),
    ],
)
def test_an_answer_that_comes_out_otherwise_is_found_before_anything_new_is_said(again):
    with pytest.raises(DivergedError, match="first 3 tokens"):
        begun(job()).take(again)


def test_what_is_compared_takes_no_more_room_however_long_the_answer_is():
    one = job()
    at = attempt(one)
    for token in range(10_000):
        at.take(Output(request_id="x", token_ids=(token,), text="word "))
    (said,) = one.said
    assert said.num_tokens == 10_000 and set(said._counts) == {"token_ids", "text", "logprobs", "prompt_logprobs"}


def test_an_end_that_nobody_asked_for_and_choices_that_nobody_has_are_faults_of_the_replica():
    with pytest.raises(UnaskedEndError, match="abort"):
        attempt(job()).take(Output(request_id="x", finish_reason="abort"))
    with pytest.raises(UnaskedEndError, match="abort"):
        attempt(job(stream=False)).end(done(reason="abort"))
    for choice in (-1, 1, 10**9):
        with pytest.raises(MalformedError, match="choice"):
            attempt(job()).take(Output(request_id="x", choice=choice))
    at = attempt(job(2))
    at.take(Output(request_id="x", choice=1, finish_reason="stop"))
    with pytest.raises(MalformedError, match="has ended"):
        at.take(Output(request_id="x", choice=1))
    with pytest.raises(MalformedError, match="not ended"):
        at.end(done(2))
    with pytest.raises(MalformedError, match="1 choices, of 2"):
        at.end(done(1))


def test_a_cancelled_answer_that_is_being_repeated_ends_with_what_its_client_has():
    one = job()
    at = begun(one)
    one.cancelled = True
    assert at.take(Output(request_id="x", token_ids=(5,), text="a", finish_reason="abort")) == []
    (end,) = at.end(done(tokens=1, reason="abort"))
    assert (end.token_ids, end.text, end.finish_reason, end.usage.completion_tokens) == ((), "", "abort", 3)


def test_a_whole_answer_is_one_output_a_choice_with_all_that_it_has():
    one = job(2, stream=False)
    choices = tuple(
        CompletionChoice(text=f"t{i}", token_ids=(i, i), finish_reason="stop", logprobs=(entry(i),)) for i in range(2)
    )
    end = Done(choices=choices, usage=Usage(3, 4, 1), timings=Timings(1, 2, 3), seed=9, prompt_logprobs=(entry(4),))
    first, second = attempt(one).end(end)
    assert (first.text, first.token_ids, first.logprobs, first.prompt_logprobs) == (
        "t0",
        (0, 0),
        (entry(0),),
        (entry(4),),
    )
    assert (second.text, second.choice, second.usage, second.seed) == ("t1", 1, Usage(3, 4, 1), 9)


@pytest.mark.parametrize(
    ("params", "same"),
    [
        ({"seed": 0}, True),
        ({"temperature": 0}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0}, True),
        ({}, False),  # None is what the model recommends, which the router does not know
        ({"temperature": 0.5, "top_k": 5}, False),
    ],
)
def test_greedy_and_seeded_requests_repeat(params, same):
    assert repeats(SamplingParams(**params)) is same
