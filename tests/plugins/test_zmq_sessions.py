"""Streams and sessions: every token once, one end, and nothing left behind."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from intarsia.errors import ExecutionError, InvalidRequestError, OverloadedError
from intarsia.types import Output, Request, SamplingParams, Timings, TokenLogprobs, Usage
from intarsia_zmq.errors import NoSessionError, SlowReaderError
from intarsia_zmq.limits import CLIENT_LIMITS, ServerLimits, SessionLimits
from intarsia_zmq.messages import Hello, read_delta, read_done
from intarsia_zmq.requests import Generate
from intarsia_zmq.sessions import Sessions
from intarsia_zmq.streams import Stream
from intarsia_zmq.wire import Frames, Message, decode


def read(packed: list[Frames]) -> list[Message]:
    return [message for frames in packed for message in decode(frames, CLIENT_LIMITS)]


def output(key: str = "k", choice: int = 0, text: str = "", ids=(), end=None, **more) -> Output:
    if end is not None:
        more = {"usage": Usage(3, 2, 1), "timings": Timings(0.1 + choice, 0.2 + choice, 0.3 + choice), "seed": 7} | more
    return Output(request_id=key, choice=choice, text=text, token_ids=tuple(ids), finish_reason=end, **more)


def stream(**options) -> Stream:
    return Stream(request_id="r", key="k", **options)


# --- one stream -------------------------------------------------------------------------------------------------------


def test_deltas_are_numbered_and_the_end_has_what_all_choices_came_to():
    one = stream(num_choices=2)
    one.take(output(text="a", ids=[1]))
    one.take(output(choice=1, text="b", ids=[2]))
    first = read(one.due())
    assert [(m.kind, m.id, m.seq, m.body) for m in first] == [
        ("delta", "r", 1, {"choice": 0, "text": "a", "token_ids": [1]}),
        ("delta", "r", 2, {"choice": 1, "text": "b", "token_ids": [2]}),
    ]
    one.take(output(end="stop"))
    one.take(output(choice=1, text="c", end="error", error="NaN", usage=None, timings=None))
    *deltas, last = read(one.due())
    assert [(m.seq, read_delta(m).finish_reason) for m in deltas] == [(3, "stop"), (4, "error")]
    done = read_done(last)
    assert (last.kind, last.seq) == ("done", 5)
    assert [(c.finish_reason, c.error, c.text) for c in done.choices] == [("stop", None, ""), ("error", "NaN", "")]
    assert (done.usage, done.timings, done.seed) == (Usage(3, 2, 1), Timings(0.1, 0.2, 0.3), 7)
    assert one.due() == [] and one.ended and not one.settled
    one.acknowledge(5, 0)
    assert one.settled and one.num_bytes == 0


def test_without_credit_a_choices_outputs_are_joined_and_choices_take_turns():
    one = stream(num_choices=3, upto=1)
    for choice in range(3):
        one.take(output(choice=choice, text="a", ids=[1], logprobs=(TokenLogprobs(1, -1.0),)))
    assert [m.body["choice"] for m in read(one.due())] == [0]
    for choice in range(3):
        one.take(output(choice=choice, text="é", ids=[2, 3], logprobs=(TokenLogprobs(2, -2.0), TokenLogprobs(3, -3.0))))
    assert one.due() == []
    order, kept = [], None
    for seq in range(2, 5):
        one.acknowledge(seq - 1, seq)
        (message,) = read(one.due())
        order.append(message.body["choice"])
        kept = message if seq == 2 else kept
        one.take(output(choice=message.body["choice"], text="!"))
    assert order == [1, 2, 0]
    one.acknowledge(0, 100)
    assert [(m.body["choice"], m.body["text"]) for m in read(one.due())] == [(1, "!"), (2, "!"), (0, "!")]
    joined = read_delta(kept)
    assert (joined.text, joined.token_ids, [e.logprob for e in joined.logprobs]) == (
        "aé",
        (1, 2, 3),
        [-1.0, -2.0, -3.0],
    )


def test_what_is_not_streamed_comes_whole_and_needs_no_credit():
    one = stream(num_choices=2, whole=True, upto=0)
    scored = (TokenLogprobs(9, -0.5),)
    one.take(output(text="a", ids=[1], prompt_logprobs=scored))
    one.take(output(choice=1, text="x", ids=range(300)))
    assert one.due() == [] and not one.stalled(10**9)
    one.take(output(text="b", ids=[2], end="length", logprobs=(TokenLogprobs(2, -1.0),)))
    one.take(output(choice=1, end="stop"))
    (message,) = read(one.due())
    done = read_done(message)
    assert [(c.text, c.token_ids) for c in done.choices] == [("ab", (1, 2)), ("x", tuple(range(300)))]
    assert done.choices[0].logprobs == (TokenLogprobs(2, -1.0),) and done.prompt_logprobs == scored
    assert message.seq == 1


def test_an_error_ends_it_at_once_without_credit_and_nothing_follows():
    one = stream(upto=0)
    one.take(output(text="lost"))
    one.fail(ExecutionError("the engine failed"))
    one.fail(SlowReaderError("later"))
    (message,) = read(one.due())
    assert (message.kind, message.seq, message.body["code"]) == ("error", 1, "execution")
    one.take(output(text="late", end="stop"))
    assert one.due() == []
    done = stream()
    done.take(output(end="stop"))
    assert [m.kind for m in read(done.due())] == ["delta", "done"]
    done.fail(ExecutionError("too late"))
    assert done.due() == []


def test_a_request_past_its_deadline_says_so_and_one_that_never_ran_is_aborted():
    one = stream(num_choices=2)
    one.take(output(end="stop"))
    one.overdue = True
    one.abort()
    *_, last = read(one.due())
    assert [c.finish_reason for c in read_done(last).choices] == ["stop", "deadline"]
    other = stream()
    other.abort()
    delta, done = read(other.due())
    assert delta.body["finish_reason"] == read_done(done).choices[0].finish_reason == "abort"


@pytest.mark.parametrize(("received", "upto", "field"), [(3, 0, "received"), (0, 11, "upto"), (2, 13, "upto")])
def test_nonsense_credit_is_refused_and_changes_nothing(received, upto, field):
    one = stream(upto=2, max_window=10)
    for text in "abc":
        one.take(output(text=text))
        one.due()
    with pytest.raises(InvalidRequestError) as caught:
        one.acknowledge(received, upto)
    assert caught.value.field == field
    assert (one.received, one.upto) == (0, 2)
    assert [m.seq for m in read(one.resume(0))] == [1, 2]


def test_credit_never_goes_backwards():
    one = stream(upto=5)
    for text in "abc":
        one.take(output(text=text))
        one.due()
    one.acknowledge(2, 8)
    one.acknowledge(1, 3)
    assert (one.received, one.upto) == (2, 8)
    assert [m.seq for m in read(one.resume(None))] == [3]
    for received in (1, 4):
        with pytest.raises(InvalidRequestError, match=r"received\.r"):
            one.resume(received)


def test_a_stream_is_stalled_after_it_has_wanted_credit_for_so_long():
    one = stream(upto=1, stall_timeout_s=10)
    one.take(output(text="a"))
    one.due()
    assert not one.stalled(0) and not one.stalled(100)  # it has nothing to say
    one.take(output(text="b"))
    assert not one.stalled(100) and not one.stalled(109) and one.stalled(110)
    assert isinstance(one.fault(110), SlowReaderError)
    one.acknowledge(0, 1)
    assert one.stalled(111)  # that granted nothing
    one.resume(None)
    assert not one.stalled(111)  # a client that was cut off has its time again
    one.acknowledge(1, 2)
    assert not one.stalled(500)


def test_what_it_holds_is_counted_and_bounded():
    one = stream(upto=10, buffer_bytes=1000)
    one.take(output(text="é" * 100, ids=range(10)))
    assert one.num_bytes == 200 + 80
    sent = one.due()
    assert one.num_bytes == sum(map(len, sent[0]))
    for _ in range(40):
        one.take(output(text="x" * 30))
    assert one.overfull and one.fault(0).code == "slow_reader"
    one.fail(one.fault(0))
    assert one.num_bytes == sum(map(len, sent[0])) and not one.overfull
    whole = stream(whole=True, buffer_bytes=1000)
    whole.take(output(logprobs=tuple(TokenLogprobs(i, -1.0, ((i, -1.0),) * 5) for i in range(4))))
    assert (whole.fault(0).code, whole.fault(0).field) == ("invalid", "stream")


def test_the_count_follows_the_memory_that_is_really_held():
    one = stream(upto=0)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(5000):
            top = tuple((1000 * i + j, -float(i + j)) for j in range(5))
            one.take(output(text="word ", ids=[1000 + i], logprobs=(TokenLogprobs(i, -float(i), top),)))
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert held / 3 < one.num_bytes < 3 * held


# --- any interleaving -------------------------------------------------------------------------------------------------


class Reader:
    """A client as the page describes it: joins deltas, and asks again for what it has not seen."""

    def __init__(self, num_choices):
        self.seen = 0
        self.text = [""] * num_choices
        self.ids = [[] for _ in range(num_choices)]
        self.terminals = []

    def read(self, packed):
        for message in read(packed):
            self.read_one(message)

    def read_one(self, message):
        assert message.seq == self.seen + 1 and not self.terminals
        self.seen = message.seq
        if message.kind == "delta":
            delta = read_delta(message)
            self.text[delta.choice] += delta.text
            self.ids[delta.choice] += delta.token_ids
        else:
            self.terminals.append(message.kind)


events = st.lists(
    st.one_of(
        st.tuples(st.just("output"), st.integers(0, 2), st.integers(0, 3)),
        st.tuples(st.just("credit"), st.integers(0, 6)),
        st.just(("cut",)),
        st.just(("back",)),
    ),
    max_size=80,
)


@given(events, st.integers(0, 3), st.integers(1, 6), st.booleans())
@settings(max_examples=200)
def test_every_token_comes_once_in_order_and_one_end_whatever_is_cut(program, upto, window, fails):
    one, client = stream(num_choices=3, upto=upto, max_window=window), Reader(3)
    said = [[], [], []]
    lost, connected = [], True
    for number, (what, *args) in enumerate(program):
        if what == "output":
            choice, count = args
            ids = [number * 10 + i for i in range(count)]
            said[choice] += ids
            one.take(output(choice=choice, text="".join(f"<{i}>" for i in ids), ids=ids))
        elif what == "credit" and connected:
            one.acknowledge(client.seen, client.seen + min(args[0], window))
        elif what == "cut":
            # What the server sends from here on is lost on the way, until the client is back.
            connected = False
        elif what == "back" and not connected:
            client.read(one.resume(client.seen))
            connected = True
        sent = one.due()
        (client.read if connected else lost.extend)(sent)
        assert one.seq <= max(upto, one.received + window)
        assert len(one._kept) <= max(upto, window) + 1 and len(one._pending) <= 3
    if fails:
        one.fail(ExecutionError("gone"))
    else:
        for choice in range(3):
            one.take(output(choice=choice, end="stop"))
    if not connected:
        client.read(one.resume(client.seen))
    client.read(one.due())
    for _ in range(10):
        if not client.terminals:
            one.acknowledge(client.seen, client.seen + window)
            client.read(one.due())
    assert client.terminals == (["error"] if fails else ["done"])
    for choice in range(3):
        got = client.ids[choice]
        assert got == said[choice][: len(got)]
        assert client.text[choice] == "".join(f"<{i}>" for i in got)
        assert fails or got == said[choice]
    one.acknowledge(client.seen, 0)
    assert one.settled and one.num_bytes == 0


@given(st.lists(st.integers(0, 400), max_size=60), st.integers(0, 20), st.integers(500, 4000))
def test_what_is_held_never_outgrows_the_buffer_by_more_than_one_output(sizes, upto, buffer_bytes):
    one = stream(upto=upto, buffer_bytes=buffer_bytes)
    for size in sizes:
        one.take(output(text="x" * size, ids=[1]))
        if one.overfull:
            one.fail(one.fault(0))
        one.due()
        # A sent delta has names and numbers around its text.
        assert one.num_bytes <= buffer_bytes + 400 + 8 + 300


# --- sessions ---------------------------------------------------------------------------------------------------------

LIMITS = SessionLimits(heartbeat_s=1, grace_s=10, sessions=3, credit=4, buffer_bytes=10_000, stall_timeout_s=20)


class Server:
    """Sessions with a clock that is turned by hand."""

    def __init__(self, limits=LIMITS, offered=None):
        self.now = 0.0
        self.sessions = Sessions(
            clock=lambda: self.now, limits=limits, offered=offered or ServerLimits(requests=3, credit=8)
        )

    def open(self, connection=b"c1", user="", **hello):
        return self.sessions.open(connection, Hello(**hello), user)

    def start(self, session, request_id="r", **options):
        params = options.pop("params", SamplingParams())
        request = Request(request_id=request_id, prompt="x", params=params)
        return self.sessions.start(session, Generate(request=request, **options))

    def tick(self, seconds, *alive):
        """Let time pass, a second at a time, while some connections are heard."""
        swept = []
        for _ in range(seconds):
            self.now += 1
            for connection in alive:
                self.sessions.hear(connection)
            swept.append(self.sessions.sweep())
        return swept


def test_before_hello_nothing_is_heard_and_after_it_each_client_has_its_own_token():
    server = Server()
    with pytest.raises(NoSessionError, match="hello"):
        server.sessions.hear(b"c1")
    one, two = server.open(b"c1").session, server.open(b"c2").session
    assert server.sessions.hear(b"c1") is one
    assert len(one.token) == len(two.token) == 32 and one.token != two.token
    assert one.token.hex() not in repr(one) and repr(one.token) not in repr(one)


def test_two_clients_use_the_same_id_and_each_gets_its_own():
    server = Server()
    streams = [server.start(server.open(c).session) for c in (b"c1", b"c2")]
    assert streams[0].key != streams[1].key
    sent = server.sessions.deliver([output(s.key, text=t) for s, t in zip(streams, ("one", "two"), strict=True)])
    assert {c: read([f])[0].body["text"] for c, f in sent} == {b"c1": "one", b"c2": "two"}


def test_the_deltas_of_one_step_to_one_client_travel_together():
    server = Server()
    session = server.open().session
    streams = [server.start(session, str(i)) for i in range(3)]
    sent = server.sessions.deliver([output(s.key, text="a") for s in streams])
    assert len(sent) == 1 and len(sent[0][1]) == 1
    assert [m.id for m in read([sent[0][1]])] == ["0", "1", "2"]


def test_a_request_goes_on_while_one_of_its_choices_does():
    server = Server()
    session = server.open().session
    one = server.start(session, params=SamplingParams(n=2))
    server.sessions.deliver([output(one.key, text="a", end="stop")])
    ((_, frames),) = server.sessions.deliver([output(one.key, choice=1, text="b", end="stop")])
    assert [m.kind for m in read([frames])] == ["delta", "done"]
    assert server.sessions.in_flight == 0


def test_a_second_request_with_an_id_in_flight_is_refused_and_the_first_goes_on():
    server = Server()
    session = server.open().session
    first = server.start(session)
    with pytest.raises(InvalidRequestError, match="has not ended") as caught:
        server.start(session)
    assert caught.value.field == "id"
    ((_, frames),) = server.sessions.deliver([output(first.key, text="a", end="stop")])
    assert [m.kind for m in read([frames])] == ["delta", "done"]
    again = server.start(session)  # free once it has ended, confirmed or not
    assert again.key != first.key and session.in_flight == 1
    ((_, frames),) = server.sessions.deliver([output(first.key, text="old"), output(again.key, text="new")])
    assert [(m.seq, m.body["text"]) for m in read([frames])] == [(1, "new")]


def test_a_client_has_so_many_requests_in_flight_and_no_more():
    server = Server()
    session = server.open().session
    streams = [server.start(session, str(i)) for i in range(3)]
    with pytest.raises(OverloadedError, match="3 requests of yours"):
        server.start(session, "3")
    server.start(server.open(b"c2").session, "3")
    server.sessions.deliver([output(streams[0].key, end="stop")])
    server.start(session, "3")


def test_what_was_refused_after_it_was_begun_leaves_nothing():
    server = Server()
    session = server.open().session
    server.sessions.drop(session, server.start(session))
    assert (session.in_flight, server.sessions.in_flight, server.sessions.abandoned()) == (0, 0, [])


def test_sessions_are_limited_and_ones_that_wait_for_nothing_do_not_count():
    server = Server()
    for i in range(3):
        server.open(b"c%d" % i)
    with pytest.raises(OverloadedError, match="3 clients"):
        server.open(b"c9")
    server.sessions.lost(b"c0")
    assert not server.open(b"c9").resumed
    for _ in range(5):
        server.open(b"c9")  # one connection has one session, however often it says hello
    assert len(server.sessions) == 3


def test_a_client_that_is_silent_for_three_heartbeats_is_gone_and_its_requests_run_on():
    server = Server()
    session = server.open().session
    one = server.start(session)
    server.tick(2)
    assert session.connection == b"c1"
    server.tick(1)
    assert session.connection is None and server.sessions.abandoned() == []
    with pytest.raises(NoSessionError):
        server.sessions.hear(b"c1")
    assert server.sessions.deliver([output(one.key, text="meanwhile")]) == []
    opened = server.open(b"c2", token=session.token, received={"r": 0})
    assert opened.resumed and opened.session is session and opened.replaced is None
    assert [m.body["text"] for m in read(opened.again)] == ["meanwhile"]


def test_after_the_grace_time_its_requests_are_cancelled_and_the_token_is_worth_nothing():
    server = Server()
    session = server.open().session
    one, two = server.start(session, "1"), server.start(session, "2")
    server.sessions.deliver([output(two.key, end="stop")])
    server.sessions.lost(b"c1")
    assert not any(s.ended for s in server.tick(9))
    assert [s.ended for s in server.tick(1)] == [[session]]
    assert server.sessions.abandoned() == [one.key] and server.sessions.abandoned() == []
    assert server.sessions.deliver([output(one.key, end="abort")]) == []
    opened = server.open(b"c2", token=session.token)
    assert not opened.resumed and opened.session is not session
    assert (len(server.sessions), server.sessions.in_flight, server.sessions.num_bytes) == (1, 0, 0)


def test_a_resumed_client_gets_all_that_it_has_not_seen_with_the_numbers_that_it_had():
    server = Server()
    session = server.open().session
    one = server.start(session)
    texts = []
    for text in "abcd":
        ((_, frames),) = server.sessions.deliver([output(one.key, text=text)])
        texts.append(frames)
    server.sessions.deliver([output(one.key, text="e", end="stop")])
    opened = server.open(b"c2", token=session.token, received={"r": 2})
    assert opened.replaced == b"c1"
    got = read(opened.again)
    assert [(m.seq, m.body["text"]) for m in got] == [(3, "c"), (4, "d")]  # the window is 4
    frames = server.sessions.credit(session, "r", 4, 8)
    assert [(m.kind, m.seq) for m in read(frames)] == [("delta", 5), ("done", 6)]
    assert session.in_flight == 0 and set(session.streams) == {"r"}
    opened = server.open(b"c3", token=session.token, received={"r": 4})  # cut again: the end was not seen
    assert [(m.kind, m.seq) for m in read(opened.again)] == [("delta", 5), ("done", 6)]
    assert server.sessions.credit(session, "r", 6, 0) == [] and not session.streams
    assert not server.open(b"c4", token=session.token, received={"r": 6}).again


def test_a_resume_with_a_number_that_was_never_sent_ends_that_request_alone():
    server = Server()
    session = server.open().session
    one, two = server.start(session, "1"), server.start(session, "2")
    server.sessions.deliver([output(one.key, text="a"), output(two.key, text="b")])
    got = read(server.open(b"c2", token=session.token, received={"1": 99, "2": 0}).again)
    assert [(m.id, m.kind, m.body.get("code")) for m in got] == [("1", "error", "invalid"), ("2", "delta", None)]
    assert server.sessions.abandoned() == [one.key]


def test_a_token_is_for_its_own_user_and_a_wrong_one_begins_anew():
    server = Server()
    session = server.open(user="alice").session
    server.start(session)
    for hello in ({"user": "mallory"}, {"user": ""}):
        opened = server.open(b"c2", token=session.token, **hello)
        assert not opened.resumed and opened.session is not session
    assert not server.open(b"c2", user="alice", token=bytes(32)).resumed
    assert len(server.sessions) == 2
    assert session.connection == b"c1"
    assert server.open(b"c3", user="alice", token=session.token).resumed


def test_the_newest_connection_has_the_session_and_the_older_one_none():
    server = Server()
    session = server.open().session
    server.open(b"c2", token=session.token)
    with pytest.raises(NoSessionError):
        server.sessions.hear(b"c1")
    assert server.sessions.hear(b"c2") is session
    server.sessions.lost(b"c1")  # the older one closes later: nothing happens
    assert session.connection == b"c2" and session.gone_at is None


def test_a_second_hello_on_a_connection_is_as_on_a_new_one():
    server = Server()
    first = server.open().session
    server.start(first)
    assert server.open(token=first.token).session is first
    second = server.open().session
    assert second is not first and first.gone_at is not None
    assert server.open(b"c2", token=first.token).session is first


def test_goodbye_cancels_at_once():
    server = Server()
    session = server.open().session
    one = server.start(session)
    server.sessions.end(session)
    assert server.sessions.abandoned() == [one.key]
    assert (len(server.sessions), server.sessions.in_flight) == (0, 0)
    with pytest.raises(NoSessionError):
        server.sessions.hear(b"c1")


def test_a_reader_without_credit_ends_with_slow_reader_and_holds_up_nobody():
    server = Server()
    slow, quick = server.open(b"c1").session, server.open(b"c2").session
    one, two = server.start(slow, credit=0), server.start(quick)
    sent = server.sessions.deliver([output(one.key, text="a"), output(two.key, text="a")])
    assert [c for c, _ in sent] == [b"c2"]
    swept = server.tick(30, b"c1", b"c2")
    ((connection, frames),) = [each for one_sweep in swept for each in one_sweep.send]
    (message,) = read([frames])
    assert (connection, message.kind, message.body["code"]) == (b"c1", "error", "slow_reader")
    assert server.sessions.abandoned() == [one.key] and server.sessions.find(two.key) is two


def test_an_answer_that_outgrows_its_buffer_ends_when_it_does_even_if_its_client_is_gone():
    server = Server()
    session = server.open().session
    one = server.start(session, credit=0)
    server.sessions.lost(b"c1")
    server.sessions.deliver([output(one.key, text="x" * 10_001)])
    assert server.sessions.abandoned() == [one.key] and server.sessions.num_bytes == 0
    (message,) = read(server.open(b"c2", token=session.token).again)
    assert (message.kind, message.body["code"]) == ("error", "slow_reader")


def test_a_client_whose_requests_together_hold_too_much_loses_the_largest():
    server = Server(SessionLimits(client_bytes=1000, credit=4))
    session = server.open().session
    small, large = server.start(session, "s", credit=0), server.start(session, "l", credit=0)
    server.sessions.deliver([output(small.key, text="x" * 400), output(large.key, text="x" * 700)])
    ((_, frames),) = server.sessions.sweep().send
    assert [(m.id, m.body["code"]) for m in read([frames])] == [("l", "slow_reader")]
    assert server.sessions.abandoned() == [large.key]
    assert server.sessions.find(small.key) is small


def test_ends_that_nobody_confirms_are_forgotten_in_time_and_never_many():
    server = Server(SessionLimits(heartbeat_s=1, grace_s=10, kept_answers=2))
    session = server.open().session
    for i in range(5):
        server.sessions.deliver([output(server.start(session, str(i)).key, end="stop")])
    assert list(session.streams) == ["3", "4"] and session.in_flight == 0
    server.tick(12, b"c1")
    assert list(session.streams) == ["3", "4"]
    server.tick(1, b"c1")
    assert not session.streams


def test_the_newest_end_is_kept_however_large_and_older_ones_make_room():
    server = Server()  # 10,000 bytes
    session = server.open().session
    for name in "ab":
        server.sessions.deliver([output(server.start(session, name, stream=False).key, text="x" * 9990, end="stop")])
        assert list(session.streams) == [name]
        assert server.sessions.num_bytes > 10_000


def test_a_resume_confirms_ends_too():
    server = Server()
    session = server.open().session
    server.sessions.deliver([output(server.start(session, name).key, end="stop") for name in "ab"])
    opened = server.open(b"c2", token=session.token, received={"a": 2, "b": 1})
    assert list(session.streams) == ["b"] and [(m.id, m.seq) for m in read(opened.again)] == [("b", 2)]


def test_a_hello_again_with_its_own_token_changes_nothing():
    server = Server()
    session = server.open().session
    assert server.open(token=session.token).session is session
    assert server.sessions.hear(b"c1") is session and len(server.sessions) == 1


def test_when_the_engine_fails_every_request_ends_with_an_error_that_says_so():
    server = Server()
    for c in (b"c1", b"c2"):
        server.start(server.open(c).session)
    sent = server.sessions.fail(ExecutionError("the engine failed"))
    assert sorted((c, m.kind, m.body["code"]) for c, f in sent for m in read([f])) == [
        (b"c1", "error", "execution"),
        (b"c2", "error", "execution"),
    ]
    assert server.sessions.in_flight == 0


def test_credit_for_a_request_that_has_ended_is_ignored():
    server = Server()
    assert server.sessions.credit(server.open().session, "nobody", 3, 5) == []


# --- clients that come and go -----------------------------------------------------------------------------------------


class Comings(RuleBasedStateMachine):
    """Clients that open, cut, return, ask, confirm and leave in any order, against an engine of counters."""

    clients = Bundle("clients")

    def __init__(self):
        super().__init__()
        limits = SessionLimits(heartbeat_s=1, grace_s=5, sessions=6, credit=2, stall_timeout_s=6, kept_answers=3)
        self.server = Server(limits, ServerLimits(requests=3, credit=4))
        self.connections = 0
        self.engine: dict[str, int] = {}  # key -> tokens so far
        self.known: list[dict] = []

    @initialize(target=clients)
    def begin(self):
        return self.arrive()

    @rule(target=clients)
    def arrives_too(self):
        return self.arrive()

    def arrive(self):
        self.connections += 1
        connection = b"%d" % self.connections
        try:
            session = self.server.open(connection).session
        except OverloadedError:
            assert len(self.server.sessions) == 6
            return multiple()
        self.known.append({"session": session, "connection": connection, "readers": {}})
        return self.known[-1]

    @rule(client=clients, name=st.sampled_from("abcd"), credit=st.none() | st.integers(0, 4), whole=st.booleans())
    def ask(self, client, name, credit, whole):
        session = client["session"]
        if session.connection is None or client["connection"] != session.connection:
            return
        before = session.streams.get(name)
        try:
            one = self.server.start(session, name, credit=credit, stream=not whole)
        except InvalidRequestError:
            assert before is not None and not before.ended
            return
        except OverloadedError:
            assert session.in_flight == 3
            return
        self.engine[one.key] = 0
        client["readers"][name] = Reader(1)

    @rule(count=st.integers(1, 3), ends=st.booleans())
    def step(self, count, ends):
        outputs = []
        for key in list(self.engine):
            ids = range(self.engine[key], self.engine[key] + count)
            outputs.append(output(key, text="x" * count, ids=ids, end="stop" if ends else None))
            self.engine[key] += count
            if ends:
                del self.engine[key]
        self.arrives(self.server.sessions.deliver(outputs))

    def arrives(self, sent):
        by_connection = {c["connection"]: c for c in self.everyone()}
        for connection, frames in sent:
            client = by_connection[connection]
            for message in read([frames]):
                client["readers"][message.id].read_one(message)

    def everyone(self):
        return [client for client in self.known if client["session"].connection == client["connection"]]

    @rule(client=clients, name=st.sampled_from("abcd"), more=st.integers(0, 4))
    def grant(self, client, name, more):
        session, reader = client["session"], client["readers"].get(name)
        if session.connection != client["connection"] or session.connection is None or reader is None:
            return
        for message in read(self.server.sessions.credit(session, name, reader.seen, reader.seen + more)):
            reader.read_one(message)

    @rule(client=clients)
    def cut(self, client):
        if client["session"].connection == client["connection"]:
            self.server.sessions.lost(client["connection"])

    @rule(client=clients)
    def come_back(self, client):
        self.connections += 1
        connection = b"%d" % self.connections
        received = {name: reader.seen for name, reader in client["readers"].items()}
        try:
            opened = self.server.open(connection, token=client["session"].token, received=received)
        except OverloadedError:
            return
        client["connection"] = connection
        if not opened.resumed:
            assert opened.session is not client["session"] and opened.again == []
            client["session"], client["readers"] = opened.session, {}
        for message in read(opened.again):
            client["readers"][message.id].read_one(message)

    @rule(client=clients)
    def leave(self, client):
        if client["session"].connection == client["connection"]:
            self.server.sessions.end(client["session"])

    @rule(seconds=st.integers(1, 4), heard=st.booleans())
    def wait(self, seconds, heard):
        for _ in range(seconds):
            self.server.now += 1
            for client in self.everyone() if heard else ():
                if client["session"].connection is not None:
                    self.server.sessions.hear(client["connection"])
            self.arrives(self.server.sessions.sweep().send)

    @invariant()
    def the_engine_runs_what_somebody_waits_for_and_nothing_else(self):
        for key in self.server.sessions.abandoned():
            self.engine.pop(key, None)
        assert set(self.engine) == set(self.server.sessions._by_key)

    @invariant()
    def the_books_agree(self):
        sessions = self.server.sessions
        live = list(sessions._by_token.values())
        assert set(sessions._by_connection.values()) == {s for s in live if s.connection is not None}
        for session in live:
            assert (session.connection is None) == (session.gone_at is not None)
            assert set(session.answered) == {name for name, one in session.streams.items() if one.ended}
            assert session.in_flight <= 3 and len(session.answered) <= 3
        for key, (session, one) in sessions._by_key.items():
            assert session.streams[one.request_id] is one and one.key == key

    def teardown(self):
        self.server.tick(20)
        for key in self.server.sessions.abandoned():
            self.engine.pop(key, None)
        assert (len(self.server.sessions), self.server.sessions.in_flight, self.server.sessions.num_bytes) == (0, 0, 0)
        assert not self.server.sessions._by_connection and not self.engine


Comings.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestComings = Comings.TestCase
