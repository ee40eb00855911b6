"""A client's session without a socket, joined to the server's half by a pipe that is cut."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import InvalidRequestError, OverloadedError
from intarsia.types import Output, Request, SamplingParams
from intarsia_zmq.calls import Call, ConnectionLostError
from intarsia_zmq.connection import Connection
from intarsia_zmq.errors import MalformedError
from intarsia_zmq.limits import CLIENT_LIMITS, ServerLimits, SessionLimits
from intarsia_zmq.messages import Done
from intarsia_zmq.requests import Generate
from intarsia_zmq.wire import Message, decode, encode
from wire_server import Double, idle

LIMITS = SessionLimits(heartbeat_s=1, grace_s=10, credit=4, stall_timeout_s=1000)


class Joined:
    """A connection and a server, a pipe each way, and a clock that is turned by hand."""

    def __init__(self, limits=LIMITS, offered=None, timeout_s=50.0):
        self.now, self.cuts = 0.0, 0
        self.connection = Connection(clock=lambda: self.now, timeout_s=timeout_s)
        self.options = {"clock": lambda: self.now, "limits": limits, "offered": offered or ServerLimits(credit=8)}
        self.server = Double(**self.options)
        self.to_server, self.to_client, self.got = [], [], {}
        self.connect()

    def connect(self):
        self.cuts += 1
        self.to_server, self.to_client = [], []
        self.connection.connect()
        self.flush()

    def cut(self):
        """What is on the way is lost, and both sides learn of it."""
        self.server.sessions.lost(b"%d" % self.cuts)
        self.connection.lost("cut")
        self.connect()

    def flush(self):
        self.to_server += self.connection.outgoing
        self.connection.outgoing.clear()

    def hear(self, count=10**6):
        """The server hears so many messages."""
        name = b"%d" % self.cuts
        for _ in range(min(count, len(self.to_server))):
            self.send(self.server.hear(name, self.to_server.pop(0)))

    def read(self, count=10**6):
        """The client reads so many messages."""
        for _ in range(min(count, len(self.to_client))):
            self.keep(self.connection.receive(self.to_client.pop(0)))
        self.flush()

    def send(self, sent):
        self.to_client += [frames for name, frames in sent if name == b"%d" % self.cuts]

    def step(self):
        self.send(self.server.step())

    def keep(self, events):
        for name, said in events.items():
            self.got.setdefault(name, []).extend(said)

    def settle(self, rounds=30, take=True):
        """Let everything arrive, and read all that comes."""
        for _ in range(rounds):
            self.flush()
            self.hear()
            self.step()
            self.read()
            if self.connection.broken is not None:
                self.cut()
            if take:
                for name in list(self.connection._calls):
                    self.connection.take(name, self.deltas(name) - self.connection._calls[name].taken)

    def deltas(self, name):
        return len([e for e in self.got.get(name, ()) if isinstance(e, Output)])

    def ids(self, name):
        return [i for e in self.got.get(name, ()) if isinstance(e, Output) for i in e.token_ids]

    def start(self, name, first=0, count=5, credit=None, params=None):
        request = Request(request_id=name, prompt=[first, count], params=params or SamplingParams())
        self.connection.start(Call.of(Generate(request=request, credit=credit), self.now))

    def say(self, message):
        self.keep(self.connection.receive(encode(message)))


def ends(events):
    return [type(e).__name__ for e in events if not isinstance(e, Output)]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.integers(1, 40), st.sampled_from([None, 1, 3])),
        st.just(("round",)),
        st.just(("round",)),
        st.tuples(st.just("hear"), st.integers(1, 3)),
        st.tuples(st.just("read"), st.integers(1, 3)),
        st.tuples(st.just("take"), st.integers(0, 5), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 5)),
        st.just(("step",)),
        st.just(("cut",)),
    ),
    min_size=20,
    max_size=80,
)


@given(actions)
@settings(max_examples=300, deadline=None)
def test_no_delta_is_lost_or_doubled_and_nothing_is_left_wherever_the_pipe_is_cut(program):
    joined, asked, cancelled = Joined(), {}, set()
    for what, *args in program:
        if what == "start" and len(asked) < 6:
            count, credit = args
            name = str(len(asked))
            asked[name] = list(range(100 * len(asked), 100 * len(asked) + count))
            joined.start(name, asked[name][0], count, credit)
        elif what == "take":
            name = str(args[0] % max(len(asked), 1))
            call = joined.connection._calls.get(name)
            if call is not None:
                joined.connection.take(name, min(args[1], joined.deltas(name) - call.taken))
        elif what == "cancel" and str(args[0]) in asked:
            joined.connection.cancel(str(args[0]))
            cancelled.add(str(args[0]))
        elif what == "round":
            joined.flush()
            joined.hear()
            joined.step()
            joined.read()
        elif what in ("hear", "read"):
            getattr(joined, what)(*args)
        elif what in ("step", "cut"):
            getattr(joined, what)()
        joined.flush()
        for name, call in joined.connection._calls.items():
            window = call.window(LIMITS.credit)
            unread = joined.deltas(name) - call.taken
            assert call.cancelled or unread <= window, "more came than was granted"
    joined.settle(rounds=60)
    for name, ids in asked.items():
        if name not in cancelled:
            # Sent again after MAX_TRIES cuts before its first delta, a request is given up, and says so.
            if ends(joined.got[name]) == ["ConnectionLostError"]:
                assert joined.ids(name) == []
            else:
                assert joined.ids(name) == ids and ends(joined.got[name]) == ["Done"]
        else:
            assert joined.ids(name) == ids[: len(joined.ids(name))] and len(ends(joined.got.get(name, []))) <= 1
    assert joined.connection.is_idle and joined.connection._events == {}
    assert idle(joined.server) == {"running": 0, "in flight": 0, "bytes": 0}


def test_a_connection_begins_with_the_token_and_what_was_received_and_nothing_else():
    joined = Joined()
    joined.start("a", 0, 0)
    joined.start("b", 0, 0)
    joined.settle(rounds=3)
    seqs = {name: joined.deltas(name) for name in "ab"}
    assert min(seqs.values()) > 0
    joined.connection.take("a", 4)
    joined.connection.cancel("b")
    joined.connection.lost("cut")
    joined.connection.connect()
    (frames,) = joined.connection.outgoing
    (hello,) = decode(frames, CLIENT_LIMITS)
    assert hello.kind == "hello" and hello.body["received"] == seqs
    assert hello.body["token"] == joined.connection.welcome.token


def test_an_end_whose_confirmation_was_lost_is_confirmed_when_it_comes_again():
    joined = Joined()
    joined.start("a", 0, 3)
    joined.settle(rounds=2)
    while joined.connection._calls:
        joined.hear()
        joined.step()
        joined.read()
        joined.connection.take("a", joined.deltas("a"))
    assert ends(joined.got["a"]) == ["Done"] and joined.server.sessions.num_bytes > 0
    joined.cut()  # before the server hears of it
    joined.settle(rounds=3)
    assert ends(joined.got["a"]) == ["Done"] and idle(joined.server)["bytes"] == 0


def test_requests_that_never_came_are_sent_again_in_their_order():
    joined = Joined()
    joined.hear()
    joined.read()
    for name in "abc":
        joined.start(name, 0, 3)
    joined.flush()
    joined.cut()
    joined.start("d", 0, 3)
    joined.settle()
    assert [asked.request.request_id for asked in joined.server.asked] == list("abcd")


def test_a_request_that_never_came_and_was_cancelled_is_not_sent_again():
    joined = Joined()
    joined.hear()
    joined.read()
    joined.start("a", 0, 3)
    joined.flush()
    joined.connection.cancel("a")
    joined.server = Double(**joined.options)
    joined.cut()
    joined.settle(rounds=3)
    assert joined.server.asked == [] and joined.connection.is_idle


def test_after_a_cut_a_reader_that_had_read_its_window_gets_the_next():
    """The grant was on the way when the connection broke."""
    joined = Joined()
    joined.start("a", 0, 12)
    joined.settle(rounds=6, take=False)
    joined.connection.take("a", 4)
    joined.flush()
    joined.cut()
    joined.settle(rounds=6, take=False)
    assert joined.deltas("a") == 8 and joined.connection._calls["a"].granted == 8


def test_a_grant_goes_by_what_was_read_and_not_by_what_came():
    joined = Joined()
    joined.start("a", 0, 100)
    joined.settle(rounds=6, take=False)
    joined.connection.take("a", 2)
    joined.settle(rounds=6, take=False)
    assert joined.deltas("a") == 6


def test_a_cancelled_request_with_much_to_say_and_many_choices_ends_whatever_its_window():
    joined = Joined()
    joined.start("a", 0, 0, credit=1, params=SamplingParams(n=7))
    joined.settle(rounds=4, take=False)
    assert joined.deltas("a") == 1
    joined.connection.cancel("a")
    joined.flush()
    joined.hear()
    # The double aborts the first choice alone: let the others end, with something to say each.
    stream = joined.server.sessions._by_token[next(iter(joined.server.sessions._by_token))].streams["a"]
    joined.send(joined.server.sessions.deliver([_said(stream.key, choice) for choice in range(1, 7)]))
    joined.settle(rounds=20, take=False)
    assert joined.connection.is_idle and idle(joined.server)["bytes"] == 0


def _said(key, choice):
    return Output(request_id=key, choice=choice, text="more", finish_reason="abort")


def test_a_request_that_begins_again_begins_with_its_window():
    joined = Joined()
    joined.start("a", 0, 100, credit=2)
    joined.settle(rounds=1, take=False)
    joined.connection._calls["a"].granted = 50
    joined.flush()
    joined.server = Double(**joined.options)
    joined.cut()
    joined.settle(rounds=6, take=False)
    assert joined.deltas("a") == 2 and joined.connection._calls["a"].granted == 2


def test_what_is_asked_before_the_session_is_open_is_sent_after_the_greeting():
    joined = Joined()
    joined.start("a", 10, 2)
    joined.connection.ask("q", joined.connection.question("models", "q", {}))
    assert [decode(f, CLIENT_LIMITS)[0].kind for f in joined.to_server] == ["hello"]
    joined.settle()
    assert joined.ids("a") == [10, 11] and joined.got["q"][0]["models"][0]["name"] == "canned"
    assert joined.server.heard[0] == "hello"


def test_a_reader_that_takes_nothing_gets_a_window_and_no_more():
    joined = Joined()
    joined.start("a", 0, 100)
    joined.settle(take=False)
    assert joined.deltas("a") == 4
    joined.settle(rounds=120)
    assert joined.ids("a") == list(range(100)) and ends(joined.got["a"]) == ["Done"]


def test_credit_is_said_once_in_half_a_window_and_not_for_each_delta():
    joined = Joined(limits=evolve(LIMITS, credit=8))
    joined.start("a", 0, 200)
    joined.settle(rounds=250)
    said = joined.server.heard.count("credit")
    assert joined.ids("a") == list(range(200)) and 200 / 8 <= said <= 200 / 4 + 1


def test_a_cancelled_request_is_heard_of_no_more_and_its_end_is_not_held_up_by_credit():
    joined = Joined()
    joined.start("a", 0, 0)
    joined.settle(take=False)
    heard = len(joined.got["a"])
    joined.connection.cancel("a")
    joined.settle(rounds=5)
    assert len(joined.got["a"]) == heard and joined.connection.is_idle
    assert idle(joined.server) == {"running": 0, "in flight": 0, "bytes": 0}


@pytest.mark.parametrize("cancel", [False, True], ids=["waited for", "cancelled"])
def test_a_request_that_was_given_up_while_there_was_no_connection_ends_on_the_next(cancel):
    joined = Joined(timeout_s=2)
    joined.start("a", 0, 0)
    joined.settle(rounds=3, take=False)
    if cancel:
        joined.connection.cancel("a")  # its word of that is lost
    joined.server.sessions.lost(b"%d" % joined.cuts)
    joined.connection.lost("cut")
    joined.now += 3
    joined.keep(joined.connection.tick())
    joined.keep(joined.connection.tick())
    assert ends(joined.got["a"]) == ([] if cancel else ["ConnectionLostError"])
    joined.connect()
    joined.settle(rounds=10, take=False)
    assert joined.connection.is_idle and idle(joined.server) == {"running": 0, "in flight": 0, "bytes": 0}
    assert ends(joined.got["a"]) == ([] if cancel else ["ConnectionLostError"])


def test_after_the_grace_time_a_request_that_said_something_is_lost_and_one_that_did_not_begins_again():
    joined = Joined()
    joined.start("said", 0, 100)
    joined.settle(rounds=3)
    joined.start("silent", 50, 3)
    joined.flush()
    joined.server = Double(**joined.options)  # it was started anew
    joined.cut()
    joined.settle()
    assert ends(joined.got["said"]) == ["ConnectionLostError"] and "forgotten" in str(joined.got["said"][-1])
    assert joined.ids("silent") == [50, 51, 52] and ends(joined.got["silent"]) == ["Done"]


def test_a_request_that_kills_its_server_is_not_sent_for_ever():
    joined = Joined()
    joined.start("a", 0, 5)
    for _ in range(10):
        joined.hear()
        joined.read()
        joined.hear()  # it dies of this
        joined.server = Double(**joined.options)
        joined.cut()
    joined.settle()
    assert isinstance(joined.got["a"][0], ConnectionLostError) and "4 times" in str(joined.got["a"][0])
    assert joined.connection.is_idle


def test_more_requests_than_a_client_may_have_wait_here():
    joined = Joined(offered=ServerLimits(requests=2))
    for name in "abcde":
        joined.start(name, 0, 3)
    most = 0
    for _ in range(20):
        joined.settle(rounds=1)
        most = max(most, joined.server.sessions.in_flight)
    assert most == 2 and all(ends(joined.got[name]) == ["Done"] for name in "abcde")


def test_a_window_beyond_the_servers_is_cut_to_it():
    joined = Joined(offered=ServerLimits(credit=5))
    joined.start("a", 0, 20, credit=100)
    joined.settle(take=False)
    assert joined.deltas("a") == 5


def test_a_message_that_would_close_the_connection_is_never_sent():
    joined = Joined(offered=ServerLimits(message_bytes=2000))
    request = Request(request_id="a", prompt="x" * 3000)
    joined.connection.start(Call.of(Generate(request=request), 0))
    joined.settle(rounds=3)
    (error,) = joined.got["a"]
    assert isinstance(error, InvalidRequestError) and "2000" in str(error)
    assert "generate" not in joined.server.heard


def test_what_no_server_reads_is_refused_before_it_is_sent():
    deep = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="prompt"):
        Call.of(Generate(request=Request(request_id="a", prompt=[{"role": "user", "content": deep}])), 0)
    bias = dict.fromkeys(range(5000), 1.0)
    params = SamplingParams(logit_bias=bias)
    with pytest.raises(InvalidRequestError):
        Call.of(Generate(request=Request(request_id="a", prompt=[1], params=params)), 0)


def test_a_gap_in_the_numbers_makes_a_new_connection_and_what_is_missing_comes():
    joined = Joined()
    joined.start("a", 0, 8)
    for _ in range(2):  # hello and welcome, generate
        joined.hear()
        joined.read()
    joined.step()
    joined.to_client.clear()
    joined.step()
    joined.read()
    assert joined.connection.broken == "request 'a': message 2 came after 0" and joined.ids("a") == []
    joined.settle()
    assert joined.ids("a") == list(range(8)) and joined.cuts == 2


def test_a_number_that_came_before_is_not_read_twice():
    joined = Joined()
    joined.start("a", 0, 3)
    joined.settle(rounds=2, take=False)
    before = joined.ids("a")
    assert before
    joined.say(Message("delta", "a", 1, {"choice": 0, "text": "again", "token_ids": [0]}))
    assert joined.ids("a") == before and joined.connection.broken is None


def test_gaps_again_and_again_end_the_request():
    joined = Joined()
    joined.start("a", 0, 0)
    joined.settle(rounds=2)
    for seq in range(1000, 1008):
        joined.say(Message("delta", "a", seq, {"choice": 0}))
        if joined.connection.broken is not None:
            joined.cut()
            joined.hear()
            joined.read(1)
    assert ends(joined.got["a"]) == ["MalformedError"]


@pytest.mark.parametrize(
    "frames",
    [[b""], [b"\x45"], [b"GET / HTTP/1.1"], encode(Message("welcome", "", 0, {"version": 1}))],
    ids=["empty", "number", "http", "half a welcome"],
)
def test_a_server_that_says_what_is_no_message_is_left_for_a_new_connection(frames):
    joined = Joined()
    joined.hear()
    if frames[0][:1] == b"\x45" or len(frames[0]) < 20:
        joined.read()
    assert joined.connection.receive(frames) == {}
    assert joined.connection.broken is not None


def test_a_body_that_is_wrong_ends_that_request_and_no_other():
    joined = Joined()
    joined.start("a", 0, 0)
    joined.start("b", 10, 3)
    joined.settle(rounds=1)
    joined.hear()
    seq = joined.connection._calls["a"].seq
    joined.say(Message("delta", "a", seq + 1, {"text": 5}))
    assert isinstance(joined.got["a"][-1], MalformedError)
    joined.settle()
    assert joined.ids("b") == [10, 11, 12]


def test_kinds_and_fields_that_are_not_known_are_ignored():
    joined = Joined()
    joined.start("a", 0, 3)
    joined.hear()
    joined.read()
    joined.say(Message("novelty", "a", 0, {"x": 1}))
    joined.say(Message("novelty", "", 0, {}))
    joined.settle()
    assert joined.ids("a") == [0, 1, 2]


def test_a_refusal_ends_the_request_with_its_type_and_its_hint():
    joined = Joined()
    joined.start("a", 0, 3)
    joined.hear()
    joined.read()
    body = {"code": "overloaded", "field": None, "message": "full", "retry_after_s": 2.5}
    joined.say(Message("error", "a", 0, body))
    (error,) = joined.got["a"]
    assert isinstance(error, OverloadedError) and error.retry_after_s == 2.5
    assert joined.connection._calls == {}


def test_a_server_that_opens_no_session_is_asked_again_and_named_in_the_end():
    joined = Joined(timeout_s=10.0)
    joined.start("a", 0, 3)
    body = {"code": "overloaded", "field": None, "message": "4096 clients", "retry_after_s": 1.0}
    joined.say(Message("error", "", 0, body))
    assert joined.connection.broken is not None and joined.got == {}
    joined.now = 11.0
    joined.keep(joined.connection.tick())
    assert isinstance(joined.got["a"][0], OverloadedError)
    other = Joined()
    other.start("a", 0, 3)
    other.say(Message("error", "", 0, {"code": "unsupported", "message": "only version 9"}))
    assert "only version 9" in str(other.got["a"][0])


def test_without_a_connection_calls_end_after_the_time_limit_counted_from_when_both_are_true():
    joined = Joined(timeout_s=10.0)
    joined.start("a", 0, 0)
    joined.settle(rounds=2)
    joined.now = 100.0
    joined.connection.lost("cut")
    joined.keep(joined.connection.tick())
    joined.now = 109.0
    joined.start("b", 0, 3)
    joined.keep(joined.connection.tick())
    assert ends(joined.got["a"]) == []
    joined.now = 111.0
    joined.keep(joined.connection.tick())
    assert ends(joined.got["a"]) == ["ConnectionLostError"] and "b" not in joined.got
    joined.now = 119.5
    joined.keep(joined.connection.tick())
    assert "10 s: cut" in str(joined.got["b"][0])


def test_it_pings_every_heartbeat_and_finds_a_server_silent_after_three():
    joined = Joined()
    joined.hear()
    joined.read()
    for _ in range(5):
        joined.now += 1.0
        assert joined.connection.tick() == {}
        joined.flush()
        assert joined.connection.wait_s() <= 1.0
        joined.hear()
        joined.read()
    assert joined.server.heard.count("ping") == 5 and joined.connection.broken is None
    joined.now += 3.0
    joined.connection.tick()
    assert "said nothing for 3.0 s" in joined.connection.broken


def test_questions_are_asked_again_on_a_new_connection_and_end_after_the_time_limit():
    joined = Joined(timeout_s=10.0)
    joined.hear()
    joined.read()
    joined.connection.ask("q", joined.connection.question("tokenize", "q", {"text": "hi"}))
    joined.flush()
    joined.cut()
    joined.settle(rounds=3)
    assert joined.got["q"] == [{"token_ids": [104, 105]}]
    joined.connection.ask("late", joined.connection.question("stats", "late", {}))
    for joined.now in (5.0, 10.0):
        joined.say(Message("pong", "", 0, {"state": "ready"}))
        joined.keep(joined.connection.tick())
    assert "no answer within 10 s" in str(joined.got["late"][0])


def test_no_session_leads_to_a_new_connection_and_ends_nothing():
    joined = Joined()
    joined.start("a", 0, 6)
    joined.settle(rounds=2)
    joined.say(Message("error", "a", 0, {"code": "no_session", "message": "say hello"}))
    assert joined.connection.broken is not None
    joined.settle()
    assert joined.ids("a") == list(range(6)) and isinstance(joined.got["a"][-1], Done)
