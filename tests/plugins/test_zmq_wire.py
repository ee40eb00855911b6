"""The wire: bytes that are exact, bytes that lie, and the values that bodies are."""

from __future__ import annotations

import base64
import contextlib
import json
import math
import random
import re
import struct
import subprocess
import sys
import time
import tracemalloc
from array import array
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import CheckpointError, ExecutionError, InvalidRequestError, OverloadedError
from intarsia.types import Chat, Output, Request, SamplingParams, Timings, TokenLogprobs, Usage
from intarsia_zmq.errors import CODES, InternalError, MalformedError, UnsupportedError, read_error, write_error
from intarsia_zmq.limits import CLIENT_LIMITS, ServerLimits, WireLimits
from intarsia_zmq.logprobs import read_logprobs, write_logprobs
from intarsia_zmq.messages import (
    Hello,
    Served,
    Welcome,
    delta_body,
    error_message,
    read_credit,
    read_delta,
    read_done,
    read_hello,
    read_welcome,
    write_hello,
    write_welcome,
)
from intarsia_zmq.requests import Generate, read_generate, write_generate
from intarsia_zmq.scan import harmless, scan
from intarsia_zmq.verbs import VERBS, says
from intarsia_zmq.wire import Message, batched, decode, encode, encode_batch, pack

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/wire-protocol.md").read_text("utf-8")
VECTORS = json.loads((ROOT / "docs/wire-vectors.json").read_text("utf-8"))
LIMITS = WireLimits()
SERVER = ServerLimits(prompt_tokens=1000, output_tokens=500, requests=4, credit=64)


def ping(body: bytes) -> bytes:
    return b"\x83\xa1v\x01\xa4kind\xa4ping\xa4body" + body


# --- exact bytes ------------------------------------------------------------------------------------------------------


def test_a_message_is_the_msgpack_map_that_the_page_describes():
    (frame,) = encode(Message("credit", "r1", 0, {"received": 4, "upto": 260}))
    # Written by hand from the msgpack specification.
    expected = (
        "84 a176 01 a46b696e64 a6637265646974 a26964 a27231 a4626f6479 82 a87265636569766564 04 a475 70746f cd0104"
    )
    assert frame.hex() == expected.replace(" ", "")


def _plain(shown):
    """Vectors as a client in another language would read them: by the page, with this project's code left out."""
    if isinstance(shown, dict) and shown.keys() == {"base64"}:
        return base64.b64decode(shown["base64"])
    if isinstance(shown, dict) and shown.keys() == {"blob", "values"}:
        return array({"<i4": "i", "<f4": "f"}[shown["blob"]], shown["values"])
    if isinstance(shown, dict):
        return {key: _plain(value) for key, value in shown.items()}
    return [_plain(each) for each in shown] if isinstance(shown, list) else shown


@pytest.mark.parametrize("vector", VECTORS["valid"], ids=lambda vector: vector["name"])
def test_every_vector_is_written_and_read_to_the_byte(vector):
    frames = [bytes.fromhex(each) for each in vector["frames"]]
    messages = [
        Message(m["kind"], m["id"], m["seq"], _plain(m["body"]))
        for m in vector.get("messages", [vector.get("message")])
    ]
    assert decode(frames, CLIENT_LIMITS) == messages
    assert (encode_batch(messages) if "messages" in vector else encode(messages[0])) == frames


@pytest.mark.parametrize("vector", VECTORS["invalid"], ids=lambda vector: vector["name"])
def test_every_vector_that_is_no_message_is_refused_with_its_code(vector):
    with pytest.raises((MalformedError, UnsupportedError)) as caught:
        decode([bytes.fromhex(each) for each in vector["frames"]], LIMITS)
    assert caught.value.code == vector["code"]


def test_the_vectors_are_those_of_the_code(tmp_path):
    run = [sys.executable, str(ROOT / "docs/wire_vectors.py"), "--check"]
    assert subprocess.run(run, check=False).returncode == 0
    copy = tmp_path / "wire_vectors.py"
    copy.write_text((ROOT / "docs/wire_vectors.py").read_text())
    (tmp_path / "wire-vectors.json").write_text("old")
    stale = subprocess.run([sys.executable, str(copy), "--check"], capture_output=True, text=True, check=False)
    assert (stale.returncode, (tmp_path / "wire-vectors.json").read_text()) == (1, "old")
    assert "wire-vectors.json is stale" in stale.stderr


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=8), values, max_size=5), st.integers(0, 2**63))
def test_what_is_sent_is_what_arrives_types_included(body, seq):
    message = Message("ping", "r", seq, body)
    (read,) = decode(encode(message), LIMITS)
    assert read == message
    assert repr(read.body) == repr(body)  # 1, 1.0 and True are equal and not the same


def test_a_pings_body_that_looks_like_a_blob_is_left_alone():
    body = {"x": {"blob": 0, "dtype": "<i4", "n": 1}}
    assert decode([encode(Message("ping", body=body))[0], b"\0\0\0\0"], LIMITS)[0].body == body


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, "\ud800", object(), array("d", [1.0])])
def test_what_msgpack_cannot_say_is_refused_when_it_is_written(value):
    with pytest.raises(InvalidRequestError, match="ping: it cannot be sent"):
        encode(Message("ping", body={"x": value}))


@given(st.lists(st.tuples(st.integers(0, 400), st.booleans()), max_size=40), st.integers(1, 20), st.integers(200, 3000))
def test_batches_hold_what_was_packed_in_order_and_within_limits(sizes, most, num_bytes):
    packed = [
        pack("delta", "r", i + 1, {"text": "x" * n} | ({"token_ids": array("i", [i])} if blob else {}))
        for i, (n, blob) in enumerate(sizes)
    ]
    limits = WireLimits(batch_messages=most, message_bytes=num_bytes, frames=2)
    sent = list(batched(packed, limits))
    read = [message for frames in sent for message in decode(frames, limits.__class__(batch_messages=most, frames=2))]
    assert [message.seq for message in read] == list(range(1, len(sizes) + 1))
    largest = max((sum(map(len, frames)) for frames in packed), default=0)
    for frames in sent:
        assert len(decode(frames, CLIENT_LIMITS)) <= most
        assert sum(map(len, frames)) <= max(num_bytes, largest + 64) + 64


def test_a_batch_put_together_from_packed_messages_has_the_bytes_of_one_written_at_once():
    for count in (2, 15, 16, 300):
        messages = [Message("delta", "r", i, {"choice": 0}) for i in range(1, count + 1)]
        packed = [pack(m.kind, m.id, m.seq, m.body) for m in messages]
        assert list(batched(packed, CLIENT_LIMITS)) == [encode_batch(messages)]


@pytest.mark.parametrize("messages", [None, {}, [], [1], [{}], [{"v": 1, "kind": "batch", "body": {"messages": []}}]])
def test_a_batch_that_holds_no_messages_is_malformed(messages):
    with pytest.raises(MalformedError):
        decode(encode(Message("batch", body={"messages": messages})), CLIENT_LIMITS)


# --- bytes that lie ---------------------------------------------------------------------------------------------------

HOSTILE = {
    "keys": ping(b"\xdf" + struct.pack(">I", 10**6)),
    "nested maps": ping(b"\x81\xa1a" * 10**5),
    "nested arrays": ping(b"\x81\xa1a" + b"\x91" * 10**5),
    "600 MB of text": ping(b"\x81\xa1a\xdb" + struct.pack(">I", 600 * 10**6)),
    "600 MB of bytes": ping(b"\x81\xa1a\xc6" + struct.pack(">I", 600 * 10**6)),
    "600 MB of extension": ping(b"\x81\xa1a\xc9" + struct.pack(">I", 600 * 10**6) + b"\x05"),
    "4 G items": ping(b"\x81\xa1a\xdd\xff\xff\xff\xff"),
    # Each array announces as many items as the bytes allow, within the one before: room for all of them is gigabytes.
    "announced within one another": ping(
        b"\x81\xa1a" + (b"\xdd" + struct.pack(">I", 3 * 10**6)) * 1000 + b"\0" * 3 * 10**6
    ),
    "announced small": ping(b"\x81\xa1a" + (b"\xdc\xff\x00") * 900 + b"\0" * 65000),
    # Each byte would be a list of 56 bytes and more.
    "a million empty arrays": ping(b"\x81\xa1a\xdd" + struct.pack(">I", 10**6) + b"\x90" * 10**6),
    "a million empty maps": ping(b"\x81\xa1a" + (b"\xdc\xff\xff" + b"\x80" * 65535) * 15),
    "zeros": bytes(4 << 20),
    "ones": b"\xff" * (4 << 20),
    "never used": b"\xc1" * (4 << 20),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_frame_is_refused_at_no_cost_beyond_its_bytes(name):
    frame = HOSTILE[name]
    best = math.inf
    for _ in range(3):
        begun = time.thread_time()
        with pytest.raises(MalformedError) as caught:
            decode([frame], LIMITS)
        best = min(best, time.thread_time() - begun)
    assert str(caught.value)
    # A look at `limits.values` values at most, however many bytes.
    assert best < 0.25
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            decode([frame], LIMITS)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20 << 20


@pytest.mark.parametrize("bytes_", [64, 1000, 30_000, (1 << 16) - 64])
def test_small_frames_that_are_not_looked_over_make_little(bytes_):
    """The costliest of them: as many announcing arrays as pass, within one another, then empty maps."""
    inner = b"\xdd" + struct.pack(">I", min(bytes_ // 2, 65000))
    frame = (b"\x81\xa1a" + inner * (28 if bytes_ > 500 else 2))[:bytes_].ljust(bytes_, b"\x80")
    assert harmless(frame)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedError):
            decode([frame], LIMITS)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b"\x91" * 11, "nested deeper than 10"),
        (b"\xdc\x00\x07" + bytes(7), "one array announces 7 items; at most 6"),
        (b"\xdd\x00\x00\x00\x05" + bytes(4), "one array announces 5 items and 4 bytes follow"),
        (b"\xdf\x00\x00\x00\x09" + b"\xa1a\x00" * 9, "one map announces 9 items; at most 8"),
        (b"\xde\x00\x03" + bytes(5), "one map announces 3 items and 5 bytes follow"),
        (b"\xd9\x05abcd", "cut short"),
        (b"\xcf" + bytes(7), "cut short"),
        (bytes(2), "1 bytes follow"),
        (b"", "cut short after 0 bytes"),
    ],
)
def test_the_look_ahead_says_itself_what_is_wrong(value, text):
    """A decoder would find it as well, after it has made room."""
    with pytest.raises(MalformedError, match=text):
        scan(value, WireLimits(nesting=10, map_keys=8, array_items=6))


def test_frames_that_are_large_or_announce_much_are_looked_over():
    announcing = b"\xdc\x00\x10"
    assert harmless(announcing * 32) and not harmless(announcing * 33)
    assert harmless(bytes(1 << 16)) and not harmless(bytes((1 << 16) + 1))


def test_a_long_text_and_a_blob_are_no_work():
    text = encode(Message("generate", "r", body={"prompt": "ü" * (1 << 20)}))
    begun = time.thread_time()
    decode(text, LIMITS)
    assert time.thread_time() - begun < 0.1
    with pytest.raises(MalformedError, match=r"\d+ bytes; a message has at most 4194304"):
        decode([text[0], bytes(4 << 20)], LIMITS)


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


@pytest.mark.parametrize("filler", [0, 1 << 17])
def test_each_limit_is_exact_on_both_ways_through(filler):
    """Small frames are checked by the decoder and after it, large ones before it."""
    pad = {"pad": "x" * filler}
    limits = WireLimits(nesting=10, map_keys=8, array_items=6, values=100_000)

    def passes(body: dict) -> bool:
        frames = encode(Message("ping", body=body | pad))
        assert harmless(frames[0]) == (filler == 0)
        try:
            decode(frames, limits)
        except MalformedError:
            return False
        return True

    # The message's map is 1, its body 2.
    assert passes({"a": nested(8)})
    assert not passes({"a": nested(9)})
    assert passes({"a": [0] * 6})
    assert not passes({"a": [0] * 7})
    assert passes({"a": dict.fromkeys("abcdefgh")})
    assert not passes({"a": dict.fromkeys("abcdefghi")})


def test_the_number_of_values_is_limited():
    rows = {"a": [["x"] * 100] * 700}
    frames = encode(Message("ping", body=rows))
    assert not harmless(frames[0])
    num_values = 1 + 6 + 2 + 700 + 70_000
    decode(frames, WireLimits(values=num_values))
    with pytest.raises(MalformedError, match=f"more than {num_values - 1} values"):
        decode(frames, WireLimits(values=num_values - 1))


@given(st.binary(max_size=60))
@settings(max_examples=400)
def test_random_bytes_are_refused_or_read_and_never_fail_otherwise(data):
    with contextlib.suppress(MalformedError, UnsupportedError):
        decode([data], LIMITS)


def test_mutated_messages_are_refused_or_read_and_both_ways_through_agree():
    """The look ahead takes what msgpack takes, byte for byte."""
    rng = random.Random(5)
    frames = [bytes.fromhex(vector["frames"][0]) for vector in VECTORS["valid"]]
    for _ in range(6000):
        data = bytearray(rng.choice(frames))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(data))
            how = rng.randrange(3)
            if how == 0:
                data[at] = rng.randrange(256)
            elif how == 1:
                del data[at : at + rng.randint(1, 4)]
            else:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
            if not data:
                data = bytearray(b"\x80")
        blob = bytes(data)
        scanned = _outcome(lambda blob=blob: scan(blob, CLIENT_LIMITS))
        known = _outcome(lambda blob=blob: msgpack.unpackb(blob, strict_map_key=False, unicode_errors="ignore"))
        if scanned is None:
            assert known is None or "unhashable" in known, known
        elif known is None:
            assert "of a type" in scanned or "nested" in scanned, (scanned, blob)
        _outcome(lambda blob=blob: decode([blob], LIMITS))


def _outcome(call):
    try:
        call()
    except (MalformedError, UnsupportedError, ValueError, TypeError) as error:
        return str(error) or type(error).__name__
    return None


# --- the page ---------------------------------------------------------------------------------------------------------


def _rows(header: str) -> list[list[str]]:
    """Return the cells of every table of the page whose header begins so."""
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, flags=re.MULTILINE):
        lines = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()]
        if lines[0][0] == header:
            found += lines[2:]
    return found


def test_the_page_lists_exactly_the_verbs_and_codes_of_the_code():
    words = lambda text: re.findall(r"`(\w+)`", text)  # noqa: E731
    verbs = {words(row[0])[0] for row in _rows("verb")}
    answers = {words(row[2])[0] for row in _rows("verb") if len(row) == 3 and words(row[2])}
    assert verbs | answers | {"batch"} == set(VERBS)
    assert "`batch`" in PAGE
    assert {words(row[0])[0] for row in _rows("code")} == set(CODES)


def test_the_page_names_every_field_of_every_verb():
    bodies: dict[str, str] = {}
    for row in _rows("verb"):
        bodies[re.findall(r"`(\w+)`", row[0])[0]] = row[1] if len(row) == 2 else " ".join(row)
        if len(row) == 3 and (answer := re.match(r"`(\w+)`", row[2])):
            bodies.setdefault(answer[1], row[2])
    for kind, verb in VERBS.items():
        for name in verb.fields if kind != "batch" else ():
            assert f"`{name}`" in bodies[kind], f"{kind}.{name} is not on the page"


def test_each_verb_is_for_one_side_but_for_models():
    assert [kind for kind in VERBS if says(kind, "client") and says(kind, "server")] == ["models"]
    assert says("generate", "client") and not says("delta", "client") and not says("nonsense", "client")


def test_the_package_loads_neither_torch_nor_numpy():
    files = (ROOT / "plugins/intarsia_zmq").glob("*.py")
    modules = sorted(path.stem for path in files if path.stem not in ("__init__", "contract"))  # tests run the latter
    imports = "".join(f"import intarsia_zmq.{name}\n" for name in modules)
    code = f"{imports}import sys\nprint(sorted({{'torch', 'numpy', 'jinja2', 'tokenizers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# --- generate ---------------------------------------------------------------------------------------------------------


def generate(**body) -> Message:
    return decode(encode(Message("generate", "r", body={"prompt": "Hi"} | body)), LIMITS)[0]


def test_a_generate_is_the_request_that_it_says():
    asked = read_generate(
        generate(
            prompt=[1, 2, 3],
            sampling={"max_tokens": 7, "temperature": 0, "stop": ["a"], "logit_bias": {"5": -1.5}},
            stream=False,
            priority=-3,
            cache_salt="s",
            deadline_s=2,
            credit=64,
        ),
        SERVER,
    )
    params = SamplingParams(max_tokens=7, temperature=0, stop=("a",), logit_bias={5: -1.5})
    request = Request(request_id="r", prompt=[1, 2, 3], params=params, priority=-3, cache_salt="s")
    assert asked == Generate(request=request, stream=False, deadline_s=2, credit=64)


def test_what_a_request_may_take_is_told_to_admission():
    assert read_generate(generate(prompt=[1] * 30, sampling={"n": 3, "max_tokens": 50}), SERVER).tokens == 30 + 150
    assert read_generate(generate(prompt="x" * 400, sampling={"max_tokens": 50}), SERVER).tokens == 100 + 50
    chat = read_generate(generate(prompt={"messages": [{"content": "x" * 400}]}, sampling={"max_tokens": 50}), SERVER)
    assert 150 <= chat.tokens < 200


def test_what_a_generate_leaves_out_has_its_default_and_the_servers_limit_of_tokens():
    asked = read_generate(generate(), SERVER)
    assert (asked.stream, asked.deadline_s, asked.credit) == (True, None, None)
    assert asked.request.params == SamplingParams(max_tokens=500)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Hi", "Hi"),
        ([1, 2], [1, 2]),
        (list(range(400)), list(range(400))),
        ([{"role": "user", "content": "Hi"}], Chat([{"role": "user", "content": "Hi"}])),
        (
            Chat([{"role": "user"}], tools=[{"name": "f"}], documents=[{"text": "d"}], variables={"think": True}),
            Chat([{"role": "user"}], tools=[{"name": "f"}], documents=[{"text": "d"}], variables={"think": True}),
        ),
        (
            Chat([{"role": "assistant", "content": "I"}], continue_final_message=True),
            Chat([{"role": "assistant", "content": "I"}], continue_final_message=True),
        ),
        (Chat([{"role": "user"}], add_generation_prompt=False), Chat([{"role": "user"}], add_generation_prompt=False)),
    ],
)
def test_what_a_client_writes_is_what_the_server_reads(prompt, expected):
    params = SamplingParams(
        max_tokens=5,
        temperature=0.5,
        seed=2**64 - 1,
        logit_bias={3: 1.0},
        stop="x",
        stop_token_ids=[4],
        n=3,
        logprobs=0,
    )
    request = Request(request_id="é", prompt=prompt, params=params, priority=2, cache_salt="s")
    sent = encode(write_generate(Generate(request=request, stream=False, deadline_s=1.5, credit=9)))
    asked = read_generate(decode(sent, LIMITS)[0], SERVER)
    assert asked.request.prompt == expected
    assert asked.request.params == params
    assert (asked.request.priority, asked.request.cache_salt, asked.stream) == (2, "s", False)
    assert (asked.deadline_s, asked.credit, asked.request.request_id) == (1.5, 9, "é")


BIG = float("1e308") * 10


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**31]}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [{"role": "user", "content": "x"}]}, "prompt"),
        ({"prompt": [1] * 1001}, "prompt"),
        ({"prompt": {}}, "prompt.messages"),
        ({"prompt": {"messages": []}}, "prompt.messages"),
        ({"prompt": {"messages": "Hi"}}, "prompt.messages"),
        ({"prompt": {"messages": [{"content": b"x"}]}}, "prompt.messages[0].content"),
        ({"prompt": {"messages": [{}], "tool": []}}, "prompt.tool"),
        ({"prompt": {"messages": [{}], "tools": ["f"]}}, "prompt.tools[0]"),
        ({"prompt": {"messages": [{}], "variables": {"messages": 1}}}, "prompt.variables.messages"),
        ({"sampling": []}, "sampling"),
        ({"sampling": {"temprature": 1}}, "sampling.temprature"),
        ({"sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": BIG}}, "sampling.temperature"),
        ({"sampling": {"temperature": "1"}}, "sampling.temperature"),
        ({"sampling": {"temperature": b"1"}}, "sampling.temperature"),
        ({"sampling": {"top_p": 2}}, "sampling.top_p"),
        ({"sampling": {"top_p": -math.inf}}, "sampling.top_p"),
        ({"sampling": {"min_p": 1.5}}, "sampling.min_p"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ({"sampling": {"presence_penalty": 3}}, "sampling.presence_penalty"),
        ({"sampling": {"top_k": -2}}, "sampling.top_k"),
        ({"sampling": {"top_k": BIG}}, "sampling.top_k"),
        ({"sampling": {"n": 0}}, "sampling.n"),
        ({"sampling": {"n": True}}, "sampling.n"),
        ({"sampling": {"max_tokens": 501}}, "sampling.max_tokens"),
        ({"sampling": {"min_tokens": 501}}, "sampling.min_tokens"),
        ({"sampling": {"stop": b"ab"}}, "sampling.stop"),
        ({"sampling": {"stop": {"a": 1}}}, "sampling.stop"),
        ({"sampling": {"stop_token_ids": b"ab"}}, "sampling.stop_token_ids"),
        ({"sampling": {"logit_bias": {"x": 1}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {"9" * 5000: 1}}}, "sampling.logit_bias"),
        ({"sampling": {"logit_bias": {"1": math.nan}}}, "sampling.logit_bias"),
        ({"sampling": {"logits_processors": {"x": [b""]}}}, "sampling.logits_processors.x[0]"),
        ({"sampling": {"self": 1}}, "sampling.self"),
        ({"stream": 1}, "stream"),
        ({"priority": 1.0}, "priority"),
        ({"priority": True}, "priority"),
        ({"cache_salt": "x" * 257}, "cache_salt"),
        ({"cache_salt": None}, "cache_salt"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"deadline_s": math.nan}, "deadline_s"),
        ({"deadline_s": math.inf}, "deadline_s"),
        ({"credit": -1}, "credit"),
        ({"credit": 65}, "credit"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_generate_names_the_field_by_its_path(body, field):
    with pytest.raises(InvalidRequestError) as caught:
        read_generate(generate(**body), SERVER)
    assert caught.value.field == field
    assert field.startswith(str(caught.value).split(":")[0])
    assert str(caught.value).startswith(next(iter(body)))


def test_an_unknown_sampling_key_gets_the_nearest_and_an_unknown_body_key_nothing():
    with pytest.raises(InvalidRequestError, match="Did you mean 'temperature'"):
        read_generate(generate(sampling={"temprature": 1}), SERVER)
    read_generate(generate(from_the_future=1), SERVER)


@pytest.mark.parametrize("request_id", ["", "x" * 257, "a\nb"])
def test_a_generate_without_a_usable_id_is_refused(request_id):
    with pytest.raises((MalformedError, InvalidRequestError), match=r"^id: "):
        read_generate(decode(encode(Message("generate", request_id, 0, {"prompt": "Hi"})), LIMITS)[0], SERVER)


def test_a_prompt_and_its_ids_can_be_a_blob():
    (message,) = decode(encode(Message("generate", "r", 0, {"prompt": array("i", [7] * 300)})), LIMITS)
    assert read_generate(message, SERVER).request.prompt == [7] * 300
    (message,) = decode(encode(Message("generate", "r", 0, {"prompt": array("i", [-7])})), LIMITS)
    with pytest.raises(InvalidRequestError, match="prompt"):
        read_generate(message, SERVER)
    (message,) = decode(encode(Message("generate", "r", 0, {"prompt": array("f", [7])})), LIMITS)
    with pytest.raises(InvalidRequestError, match="prompt"):
        read_generate(message, SERVER)


# --- greetings, answers, errors ---------------------------------------------------------------------------------------


def test_greetings_come_back_as_they_were():
    hello = Hello(versions=(1, 2), client={"name": "c"}, token=b"t" * 32, received={"r": 3})
    assert read_hello(decode(encode(write_hello(hello)), LIMITS)[0]) == hello
    served = Served(
        server={"name": "i"}, model={"name": "m"}, composition={"hash": "h"}, limits=SERVER, heartbeat_s=2.0
    )
    welcome = Welcome(served=served, token=b"t" * 32, resumed=True, requests=("a",))
    assert read_welcome(decode(encode(write_welcome(welcome)), CLIENT_LIMITS)[0]) == welcome


@pytest.mark.parametrize(
    ("body", "kind", "field"),
    [
        ({}, InvalidRequestError, "versions"),
        ({"versions": 1}, InvalidRequestError, "versions"),
        ({"versions": [2, "1", None]}, UnsupportedError, "versions"),
        ({"versions": [1], "token": b"short"}, InvalidRequestError, "token"),
        ({"versions": [1], "token": "t" * 32}, InvalidRequestError, "token"),
        ({"versions": [1], "received": {"a": -1}}, InvalidRequestError, "received.a"),
        ({"versions": [1], "received": {"a": True}}, InvalidRequestError, "received.a"),
        ({"versions": [1], "received": []}, InvalidRequestError, "received"),
        ({"versions": [1], "client": "x"}, InvalidRequestError, "client"),
    ],
)
def test_a_wrong_hello_names_the_field(body, kind, field):
    with pytest.raises(kind) as caught:
        read_hello(Message("hello", body=body))
    assert caught.value.field == field


def test_a_hello_of_another_version_can_be_read():
    frame = msgpack.packb({"v": 9, "kind": "hello", "body": {"versions": [9, 1]}})
    assert read_hello(decode([frame], LIMITS)[0]).versions == (9, 1)


def test_a_credit_is_two_counts():
    assert read_credit(Message("credit", "r", body={"upto": 5})) == (0, 5)
    with pytest.raises(InvalidRequestError, match="received"):
        read_credit(Message("credit", "r", body={"received": -1}))


entries = st.builds(
    TokenLogprobs,
    st.integers(0, 2**31 - 1),
    st.floats(-100, 0, width=32),
    st.lists(st.tuples(st.integers(0, 2**31 - 1), st.floats(-100, 0, width=32)), max_size=3).map(tuple),
)


@given(st.lists(entries, max_size=6), st.integers(1, 120))
@settings(max_examples=60)
def test_logprobs_come_back_as_they_were_few_or_many(some, times):
    many = some * times
    body = {"logprobs": write_logprobs(many)} if many else {}
    (message,) = decode(encode(Message("delta", "r", 1, body)), CLIENT_LIMITS)
    assert read_delta(message).logprobs == tuple(many)


def test_many_logprobs_are_columns_and_cost_four_bytes_a_number():
    many = [TokenLogprobs(i, -0.5, ((i, -0.5), (1, -1.5))) for i in range(1000)]
    frames = encode(Message("delta", "r", 1, {"logprobs": write_logprobs(many)}))
    assert [len(frame) for frame in frames[1:]] == [4000, 4000, 8000, 8000]
    assert len(frames[0]) < 400


@pytest.mark.parametrize(
    "written", [[1], [{"token_id": 1}], {"top": 1}, {"a": 1}, "x", [{"token_id": 1, "logprob": 0, "top": [1]}]]
)
def test_wrong_logprobs_are_malformed(written):
    with pytest.raises(MalformedError, match="logprobs"):
        read_logprobs(written, "logprobs")


def test_a_delta_is_the_output_that_it_was():
    body = delta_body(2, "é", range(300), [TokenLogprobs(1, -1.0)], [TokenLogprobs(2, -2.0, ((2, -2.0),))], "stop")
    (message,) = decode(encode(Message("delta", "r", 3, body)), CLIENT_LIMITS)
    assert read_delta(message) == Output(
        request_id="r",
        choice=2,
        text="é",
        token_ids=tuple(range(300)),
        logprobs=(TokenLogprobs(1, -1.0),),
        prompt_logprobs=(TokenLogprobs(2, -2.0, ((2, -2.0),)),),
        finish_reason="stop",
    )


def test_a_done_is_read_and_a_wrong_one_is_malformed():
    vector = next(each for each in VECTORS["valid"] if each["name"] == "done of what was not streamed")
    done = read_done(decode([bytes.fromhex(each) for each in vector["frames"]], CLIENT_LIMITS)[0])
    assert [(c.text, c.finish_reason, c.error) for c in done.choices] == [
        (" Paris", "stop", None),
        ("", "error", "NaN"),
    ]
    assert done.usage == Usage(5, 2, 0) and done.timings == Timings(0.001, 0.0625, 0.125) and done.seed == 42
    assert done.prompt_logprobs[1] == TokenLogprobs(30, -1.5, ((30, -1.5),))
    for choices in ([1], [{}], [{"index": "x"}, {"index": 1}]):
        with pytest.raises(MalformedError):
            read_done(Message("done", "r", 1, {"choices": choices, "usage": {}, "timings": {}, "seed": 0}))


@pytest.mark.parametrize("code", CODES)
def test_an_error_comes_back_as_what_it_was(code):
    kind = CODES[code]
    sent = kind("what", retry_after_s=2.5) if kind is OverloadedError else kind("what", field="a.b")
    (message,) = decode(encode(error_message(sent, "r")), LIMITS)
    got = read_error(message.body)
    assert (type(got), got.code, str(got), got.field) == (kind, code, "what", sent.field)
    assert getattr(got, "retry_after_s", None) == getattr(sent, "retry_after_s", None)
    assert message.id == "r"


def test_faults_of_the_servers_own_are_internal_and_say_nothing_of_others():
    assert write_error(KeyError("another client's prompt"))["code"] == "internal"
    assert "prompt" not in write_error(KeyError("another client's prompt"))["message"]
    assert write_error(CheckpointError("bad file"))["code"] == "internal"
    assert write_error(ExecutionError("x" * 10**6))["message"].startswith("xxx")
    assert len(write_error(ExecutionError("x" * 10**6))["message"]) < 1100
    encode(Message("error", body=write_error(InvalidRequestError("\ud800", field="\ud800"))))


def test_an_error_of_a_later_version_is_still_an_error():
    got = read_error({"code": "sunspots", "message": "bright", "field": 5})
    assert isinstance(got, InternalError) and "sunspots: bright" in str(got)
    assert isinstance(read_error({}), InternalError)
