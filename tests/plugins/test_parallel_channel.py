"""Plans as bytes, links between ranks, and checksums of what ranks were told."""

import socket
import struct
import threading
import time

import msgpack
import pytest

from intarsia.errors import ExecutionError
from intarsia.types import (
    PENDING,
    BatchPlan,
    CacheMove,
    Entered,
    Row,
    RowResult,
    SamplingParams,
    StepResult,
    TokenLogprobs,
    Want,
)
from intarsia_parallel.channel import Link, LinkClosedError, Listener, connect, new_token, pack
from intarsia_parallel.checksums import Ledger
from intarsia_parallel.plans import pack_plan, pack_result, read_plan, read_result

PARAMS = SamplingParams(
    max_tokens=10**30,
    min_tokens=3,
    temperature=0.7,
    top_k=5,
    top_p=0.9,
    seed=2**64 - 1,
    logit_bias={3: -1.5, 1: 2.0},
    banned_token_ids=(7, 8),
    banned_words=("one", "half \ud800 of a character"),
    stop=("end",),
    logprobs=2,
    prompt_logprobs=0,
    logits_processors={"grammar": {"schema": {"type": "object", "properties": {"a": [1, None, True]}}, 1: "number"}},
)
PLAN = BatchPlan(
    rows=(
        Row(sequence_id=("r1", 0), token_ids=(5, 6, 7), start=16, want=Want.NONE, pages=((1, -1, 3), (2,))),
        Row(
            sequence_id=("r2", 3),
            token_ids=(9, PENDING, 2**31 - 1),
            start=0,
            num_drafts=2,
            drafts_wanted=4,
            pages=((4,), ()),
        ),
    ),
    preempted=(("r4", 0),),
    entered=(
        Entered(
            sequence_id=("r1", 0),
            params=PARAMS,
            seed=2**64 - 1,
            token_ids=tuple(range(300)),
            num_prompt=200,
            stop_ids=frozenset({2, 0}),
            salt="\ud800",
        ),
    ),
    left=(("r5", 1), ("r6", 0)),
    moves=(
        CacheMove("copy", 3, 2, 1),
        CacheMove("zero", 4),
        CacheMove("swap_out", 0, 5),
        CacheMove("swap_in", 5, 0, 1),
    ),
)


def test_a_plan_is_read_as_it_was_sent():
    packed = pack_plan(PLAN)
    read = read_plan(packed.data)
    assert not packed.refused
    assert read.rows == PLAN.rows and read.moves == PLAN.moves
    assert read.left == PLAN.left and read.preempted == PLAN.preempted
    (entered,), (sent,) = read.entered, PLAN.entered
    for name in ("sequence_id", "seed", "token_ids", "num_prompt", "stop_ids", "salt"):
        assert getattr(entered, name) == getattr(sent, name)
    for name in ("temperature", "top_k", "seed", "logit_bias", "banned_token_ids", "banned_words", "stop", "logprobs"):
        assert getattr(entered.params, name) == getattr(PARAMS, name), name
    assert entered.params.prompt_logprobs == 0 and entered.params.presence_penalty == 0.0
    assert entered.params.logits_processors == PARAMS.logits_processors
    assert entered.params.max_tokens == 2**63 - 1, "a limit beyond 64 bits is no limit"


def test_equal_plans_have_equal_bytes_and_an_empty_plan_is_read_as_one():
    assert pack_plan(PLAN).data == pack_plan(read_plan(pack_plan(PLAN).data)).data
    assert read_plan(pack_plan(BatchPlan()).data) == BatchPlan()


def test_parameters_that_cannot_be_sent_fail_their_own_sequence_alone():
    odd = SamplingParams(temperature=0, logits_processors={"mine": object()})
    plan = BatchPlan(
        entered=tuple(
            Entered(sequence_id=(name, 0), params=params, seed=1, token_ids=(1,), num_prompt=1)
            for name, params in (("odd", odd), ("even", SamplingParams(top_k=3)))
        )
    )
    packed = pack_plan(plan)
    assert list(packed.refused) == [("odd", 0)] and "logits_processors" in packed.refused["odd", 0]
    first, second = read_plan(packed.data).entered
    assert first.params == SamplingParams(temperature=0) and second.params == SamplingParams(top_k=3)


def spoilt_plans():
    """Yield (what is wrong, bytes), each with one change to a valid plan."""
    data = pack_plan(PLAN).data

    def changed(*path, to):
        plan = msgpack.unpackb(data, unicode_errors="surrogatepass")
        inner = plan
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = to
        return msgpack.packb(plan, unicode_errors="surrogatepass")

    yield "cut", data[:-1]
    yield "empty", b""
    yield "trailing", data + b"\x00"
    yield "no list", msgpack.packb({"rows": []})
    yield "4 fields", msgpack.packb([[], [], [], []])
    yield "row of text", changed(0, 0, to="row")
    yield "request id is a number", changed(0, 0, 0, to=5)
    yield "choice below 0", changed(0, 0, 1, to=-1)
    yield "choice is true", changed(0, 0, 1, to=True)
    yield "ids of 3 bytes", changed(0, 0, 2, to=b"abc")
    yield "ids are a list", changed(0, 0, 2, to=[1, 2])
    yield "start is a float", changed(0, 0, 3, to=1.0)
    yield "more drafts than tokens", changed(0, 1, 4, to=3)
    yield "unknown want", changed(0, 0, 6, to="some")
    yield "unknown move", changed(4, 0, 0, to="erase")
    yield "unknown parameter", changed(2, 0, 2, to=msgpack.packb({"heat": 1}))
    yield "parameter out of range", changed(2, 0, 2, to=msgpack.packb({"top_p": 2.0}))
    yield "parameters are no map", changed(2, 0, 2, to=msgpack.packb([1]))
    yield "nested without end", changed(2, 0, 2, to=b"\x91" * 100_000)
    yield "seed below 0", changed(2, 0, 3, to=-1)


@pytest.mark.parametrize(("what", "data"), [pytest.param(*each, id=each[0]) for each in spoilt_plans()])
def test_what_is_no_plan_is_refused(what, data):
    with pytest.raises(ExecutionError, match="plan: it cannot be read"):
        read_plan(data)


def test_a_result_is_read_as_it_was_sent_to_the_last_bit():
    third = 1 / 3
    result = StepResult(
        rows=(
            RowResult(
                sequence_id=("r1", 0),
                token_ids=(1, 2),
                logprobs=(TokenLogprobs(1, -third, ((1, -third), (4, -2.5))), TokenLogprobs(2, -1e-300)),
                prompt_logprobs=(TokenLogprobs(9, -0.0),),
                drafts=(3, 4, 5),
            ),
            RowResult(sequence_id=("r2", 1), error="it failed \ud800"),
        ),
        target_s=third,
        draft_s=0.0,
        draft_error="the drafter failed",
        swapped=1 << 40,
        swap_s=0.25,
        spent={"runner.eager": (third, 7), "core.sampler": (0.0, 0)},
    )
    assert read_result(pack_result(result)) == result


def test_what_is_no_result_is_refused():
    data = pack_result(StepResult(rows=(RowResult(sequence_id=("r", 0)),)))
    short, wrong = msgpack.packb([[], 0.0, 0.0]), msgpack.packb([[["r", 0]], 0.0, 0.0, None, 0, 0.0, []])
    spent = msgpack.packb([[], 0.0, 0.0, None, 0, 0.0, [["runner.eager", 1.0]]])
    for spoilt in (data[:-1], b"", short, wrong, spent):
        with pytest.raises(ExecutionError, match="result: it cannot be read"):
            read_result(spoilt)


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def ends():
    left, right = tcp_pair()
    made = Link(left, 1.0), Link(right, 1.0)
    yield made
    for link in made:
        link.close()


def tcp_pair():
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        return left, server.accept()[0]


def test_messages_arrive_whole_and_in_order_whatever_their_size(ends):
    left, right = ends
    bodies = [b"", b"x", b"y" * 3_000_000, b"z" * 17]
    sender = threading.Thread(target=lambda: [left.send("data", data=body) for body in bodies])
    sender.start()
    received = []
    while len(received) < len(bodies):
        received += right.wait(5)
    sender.join()
    assert [message.body["data"] for message in received] == bodies
    assert {message.kind for message in received} == {"data"}


def test_an_end_that_is_gone_is_told_apart_from_one_that_is_silent(ends):
    left, right = ends
    assert right.wait(0.05) == []
    left.send("last", number=1)
    left.close()
    assert [message.kind for message in right.wait(1)] == ["last"], "what was said before the end is heard"
    with pytest.raises(LinkClosedError):
        right.wait(1)


def test_an_end_that_takes_nothing_does_not_hold_the_sender_up_for_ever(ends):
    left, _ = ends
    begun = time.monotonic()
    with pytest.raises(LinkClosedError, match="took nothing for 1 s"):
        left.send("data", data=b"x" * 100_000_000)
    assert time.monotonic() - begun < 5


def test_heartbeats_wait_for_nobody_and_leave_what_follows_whole(ends):
    left, right = ends
    with left._sending:
        left.send_if_free(pack("beat"))  # another thread is sending
    left.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    right.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    begun = time.monotonic()
    for _ in range(50_000):
        left.send_if_free(pack("beat"))
    assert time.monotonic() - begun < 20
    received = right.wait(1)
    assert 0 < len(received) < 50_000, "those that would have waited were not sent"
    left.send("data", number=7)
    while received[-1].kind == "beat":
        received = right.wait(1)
    assert received[-1].body == {"number": 7}


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<I", 1 << 31),
        struct.pack("<I", 3) + b"\x81\xa1\x61",
        struct.pack("<I", 1) + b"\xc1",
        struct.pack("<I", 1) + msgpack.packb(5),
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_what_is_no_message_ends_the_link(ends, data):
    left, right = ends
    left.connection.send(data)
    with pytest.raises(LinkClosedError):
        right.wait(1)


def test_ranks_are_let_in_by_their_token_and_strangers_are_not():
    token = new_token()
    listener = Listener("127.0.0.1", token, 1.0)
    try:
        for stranger in (b"\x00" * 16, b""):
            link = connect("127.0.0.1", listener.port, stranger, 1, 1.0)
            assert listener.accept() is None
            with pytest.raises(LinkClosedError):
                link.wait(1)
        raw = socket.create_connection(("127.0.0.1", listener.port))
        raw.sendall(struct.pack("<I", 1 << 20))  # longer than a greeting may be
        assert listener.accept() is None
        raw.close()
        connect("127.0.0.1", listener.port, token, 3, 1.0, pid=77)
        rank, link, facts = listener.accept()
        assert rank == 3 and facts["pid"] == 77
        link.close()
    finally:
        listener.close()


def test_a_link_to_nobody_is_an_error_that_says_where():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(LinkClosedError, match=f"127.0.0.1 port {port}"):
        connect("127.0.0.1", port, b"", 1, 1.0)


# --- checksums --------------------------------------------------------------------------------------------------------


def told(*plans):
    ledger = Ledger()
    for plan in plans:
        data = pack_plan(plan).data
        ledger.note(data, read_plan(data))
    return ledger.checksum()


def test_ranks_that_were_told_the_same_have_the_same_checksum():
    after = BatchPlan(left=(("r1", 0),))
    assert told(PLAN, after) == told(PLAN, after)
    assert told(PLAN) != told(PLAN, after) != told(after, PLAN)
    assert told(PLAN) != told()


def test_a_page_table_that_differs_changes_the_checksum_even_where_the_bytes_were_the_same():
    data = pack_plan(PLAN).data
    one, other = Ledger(), Ledger()
    one.note(data, PLAN)
    row = PLAN.rows[0]
    other.note(
        data,
        BatchPlan(rows=(Row(sequence_id=row.sequence_id, token_ids=(5, 6, 7), start=16, pages=((1, -1, 4), (2,))),)),
    )
    assert one.checksum() != other.checksum()
