"""Write docs/wire-vectors.json: messages of the wire protocol with their exact bytes, and bytes that are none.

`python docs/wire_vectors.py` writes it; with `--check` it writes nothing and exits 1 where it is stale.
"""

from __future__ import annotations

import argparse
import base64
import json
import struct
import sys
from array import array
from pathlib import Path
from typing import Any

from intarsia_zmq.errors import MalformedError, UnsupportedError
from intarsia_zmq.limits import CLIENT_LIMITS, WireLimits
from intarsia_zmq.verbs import VERBS
from intarsia_zmq.wire import VERSION, Message, decode, encode, encode_batch

PATH = Path(__file__).parent / "wire-vectors.json"

TOKEN = bytes(range(32))
WELCOME: dict[str, Any] = {
    "version": 1,
    "server": {"name": "intarsia", "version": "0.1.0"},
    "model": {"name": "smollm2", "family": "llama", "vocab_size": 49152, "max_model_len": 8192, "chat": True},
    "composition": {"hash": "3f1c"},
    "limits": {
        "message_bytes": 4194304,
        "prompt_tokens": 8191,
        "output_tokens": 8192,
        "requests": 256,
        "credit": 1024,
    },
    "heartbeat_s": 5.0,
    "grace_s": 30.0,
    "credit": 256,
    "token": TOKEN,
    "resumed": True,
    "requests": ["a", "b"],
}
USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "cached_tokens": 0}
TIMINGS = {"queued_s": 0.001, "first_token_s": 0.0625, "total_s": 0.125}
LOGPROBS = [{"token_id": 3681, "logprob": -0.25, "top": [[3681, -0.25], [260, -2.5]]}]
COLUMNS = {
    "token_ids": array("i", [3681, 30]),
    "logprobs": array("f", [-0.25, -1.5]),
    "top": 1,
    "top_ids": array("i", [3681, 30]),
    "top_logprobs": array("f", [-0.25, -1.5]),
}
DONE: dict[str, Any] = {
    "choices": [{"index": 0, "finish_reason": "length"}],
    "usage": USAGE,
    "timings": TIMINGS,
    "seed": 42,
}
GENERATE: dict[str, Any] = {
    "prompt": "The capital of France is",
    "sampling": {"max_tokens": 2, "temperature": 0.0, "stop": ["\n"], "logprobs": 2},
    "stream": True,
    "priority": -1,
    "cache_salt": "tenant",
    "deadline_s": 2.5,
    "credit": 16,
}
CHAT = {
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
    "tools": [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}],
    "variables": {"enable_thinking": False},
}
WHOLE = DONE | {
    "choices": [
        {"index": 0, "finish_reason": "stop", "text": " Paris", "token_ids": [3681], "logprobs": LOGPROBS},
        {"index": 1, "finish_reason": "error", "error": {"code": "execution", "message": "NaN"}},
    ],
    "prompt_logprobs": COLUMNS,
}
ERROR = {"code": "invalid", "field": "sampling.top_p", "message": "2 is not from 0 to 1", "retry_after_s": None}

#: name -> message
VALID: dict[str, Message] = {
    "hello": Message("hello", body={"versions": [1], "client": {"name": "example", "version": "1.0"}}),
    "hello that resumes": Message(
        "hello", body={"versions": [1, 2], "client": {}, "token": TOKEN, "received": {"a": 7, "b": 0}}
    ),
    "welcome": Message("welcome", body=WELCOME),
    "ping": Message("ping", body={"sent_at": 1.5, "n": 2**63}),
    "ping without a body": Message("ping"),
    "pong": Message("pong", body={"echo": {"sent_at": 1.5, "n": 2**63}, "step_age_s": 0.25, "state": "ready"}),
    "pong of an idle server": Message("pong", body={"echo": {}, "step_age_s": None, "state": "ready"}),
    "bye": Message("bye"),
    "generate from text": Message("generate", "a", body=GENERATE),
    "generate from ids": Message("generate", "b", body={"prompt": [504, 3575, 282], "stream": False}),
    "generate from a blob of ids": Message("generate", "c", body={"prompt": array("i", range(300))}),
    "generate from a chat": Message("generate", "ü-1", body={"prompt": CHAT}),
    "delta": Message("delta", "a", 1, {"choice": 0, "text": " Paris", "token_ids": [3681], "logprobs": LOGPROBS}),
    "delta that ends a choice": Message("delta", "a", 2, {"choice": 1, "text": "é", "finish_reason": "stop"}),
    "delta with blobs": Message("delta", "a", 3, {"choice": 0, "token_ids": array("i", [1, 2]), "logprobs": COLUMNS}),
    "done": Message("done", "a", 4, DONE),
    "done of what was not streamed": Message("done", "b", 1, WHOLE),
    "error of a request": Message("error", "a", 5, ERROR | {"code": "slow_reader", "field": None}),
    "error that refuses a request": Message("error", "c", body=ERROR | {"code": "overloaded", "retry_after_s": 0.5}),
    "error of a message": Message("error", body=ERROR),
    "cancel": Message("cancel", "a"),
    "credit": Message("credit", "a", body={"received": 4, "upto": 260}),
    "tokenize": Message("tokenize", "q1", body={"text": "Hello"}),
    "tokens": Message("tokens", "q1", body={"token_ids": [19556]}),
    "detokenize": Message("detokenize", "q2", body={"token_ids": [19556], "skip_special_tokens": True}),
    "text": Message("text", "q2", body={"text": "Hello"}),
    "models, the question": Message("models", "q3"),
    "models, the answer": Message("models", "q3", body={"models": [WELCOME["model"]]}),
    "explain": Message("explain", "q4"),
    "explained": Message("explained", "q4", body={"model": {"name": "smollm2"}}),
    "stats": Message("stats"),
    "figures": Message("figures", body={"engine": {"steps": 12}, "server": {"sessions": 1}}),
    "replay": Message("replay", "q5", body={"from": 17}),
    "events": Message("events", "q5", body={"events": [{"n": 17, "kind": "step"}], "first": 3}),
}
STATUS: dict[str, Any] = {
    "state": "ready",
    "alive": True,
    "step_age_s": None,
    "sessions": 1,
    "in_flight": 2,
    "waiting": 0,
    "waiting_bytes": 0,
    "kept_bytes": 300,
    "requests": 7,
}
STEP = {"number": 17, "topic": "step", "time": 1.5, "seconds": 0.25, "outputs": 2, "running": 2, "waiting": 0}
#: Of the control socket and of the events socket, where an event's topic comes before these frames.
ELSEWHERE: dict[str, Message] = {
    "control: status, the question": Message("status", "1"),
    "control: status, the answer": Message("status", "1", body=STATUS),
    "control: drain": Message("drain", "2"),
    "control: pause": Message("pause", "3"),
    "control: resume": Message("resume", "4"),
    "control: shutdown": Message("shutdown", "5", body={"now": True}),
    "control: reload": Message(
        "reload", "6", body={"options": {"grace_s": 60, "limits": {"requests": 8, "credit": 2}}}
    ),
    "control: reloaded": Message(
        "reloaded", "6", body={"applied": ["grace_s", "limits.requests"], "restart": ["limits.credit"]}
    ),
    "control: swap": Message("swap", "7", body={"slot": "scheduler", "use": "static", "options": {"max_batch": 4}}),
    "control: swapped": Message(
        "swapped",
        "7",
        body={
            "slot": "scheduler",
            "before": "inflight",
            "after": "static",
            "time": 1.5,
            "seconds": 0.0625,
            "sequences": 3,
            "kept": 2,
        },
    ),
    "control: a swap that is refused": Message(
        "error",
        "7",
        body={"code": "config", "field": "scheduler", "message": "scheduler: no part 'statik'.", "retry_after_s": None},
    ),
    "events: a step": Message("event", seq=17, body=STEP),
}
#: name -> messages of one batch
BATCHES: dict[str, list[Message]] = {
    "batch": [VALID["delta"], Message("delta", "z", 9, {"choice": 0, "text": "!"}), VALID["done"]],
    "batch with blobs": [
        Message("delta", "a", 1, {"choice": 0, "token_ids": array("i", [1, 2])}),
        Message("delta", "b", 1, {"choice": 0, "token_ids": array("i", [3])}),
    ],
}


def _map(**entries: bytes) -> bytes:
    """Return a map whose values are msgpack already."""
    return bytes([0x80 + len(entries)]) + b"".join(_text(key) + value for key, value in entries.items())


def _text(text: str) -> bytes:
    return bytes([0xA0 + len(text)]) + text.encode()


def _ping(body: bytes, **more: bytes) -> bytes:
    return _map(**{"v": b"\x01", "kind": _text("ping"), "body": body} | more)


#: name -> (frames, code of the error that answers them)
INVALID: dict[str, tuple[list[bytes], str]] = {
    "no bytes": ([b""], "malformed"),
    "HTTP": ([b"GET / HTTP/1.1\r\n\r\n"], "malformed"),
    "a number": ([b"\x45"], "malformed"),
    "an array": ([b"\x93\x01\x02\x03"], "malformed"),
    "an empty map": ([b"\x80"], "malformed"),
    "no kind": ([_map(v=b"\x01")], "malformed"),
    "no version": ([_map(kind=_text("ping"))], "malformed"),
    "version 2": ([_map(v=b"\x02", kind=_text("ping"))], "unsupported"),
    "a version that is true": ([_map(v=b"\xc3", kind=_text("ping"))], "malformed"),
    "an id with a line break": ([_map(v=b"\x01", kind=_text("cancel"), id=_text("a\nb"))], "malformed"),
    "an id of 257 characters": ([_map(v=b"\x01", kind=_text("cancel"), id=b"\xda\x01\x01" + b"a" * 257)], "malformed"),
    "a negative seq": ([_ping(b"\x80", seq=b"\xff")], "malformed"),
    "a body that is an array": ([_ping(b"\x90")], "malformed"),
    "a byte after the end": ([_ping(b"\x80") + b"\xc0"], "malformed"),
    "cut short": ([_ping(b"\x80")[:-1]], "malformed"),
    "a map that announces 1000000 keys": ([_ping(b"\xdf" + struct.pack(">I", 10**6))], "malformed"),
    "a text that announces 600 MB": ([_ping(_map(t=b"\xdb" + struct.pack(">I", 600 * 10**6)))], "malformed"),
    "nested 100 deep": ([_ping(_map(t=b"\x91" * 100 + b"\xc0"))], "malformed"),
    "text that is not UTF-8": ([_ping(_map(t=b"\xa2\xff\xfe"))], "malformed"),
    "half a surrogate pair": ([_ping(_map(t=b"\xa3\xed\xa0\x80"))], "malformed"),
    "an extension type": ([_ping(_map(t=b"\xd4\x05\x00"))], "malformed"),
    "a timestamp": ([_ping(_map(t=b"\xd6\xff\x00\x00\x00\x01"))], "malformed"),
    "the byte that msgpack never uses": ([_ping(_map(t=b"\xc1"))], "malformed"),
    "a key twice": ([_ping(b"\x82\xa1a\x01\xa1a\x02")], "malformed"),
    "a key that is a number": ([_ping(b"\x81\x01\x01")], "malformed"),
    "a key that is bytes": ([_ping(b"\x81\xc4\x01a\x01")], "malformed"),
    "a blob that is not there": ([*encode(VALID["generate from a blob of ids"])[:1], b""], "malformed"),
    "nine frames": ([_ping(b"\x80"), *[b"\0\0\0\0"] * 8], "malformed"),
    "a batch from a client": (encode_batch([Message("ping"), Message("ping")]), "malformed"),
}


def shown(value: Any) -> Any:
    """Return a value as JSON has it: bytes as {"base64": ...}, what travels as a blob as {"blob": dtype, "values"}."""
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, array):
        return {"blob": {"i": "<i4", "f": "<f4"}[value.typecode], "values": value.tolist()}
    if isinstance(value, dict):
        return {key: shown(each) for key, each in value.items()}
    return [shown(each) for each in value] if isinstance(value, list) else value


def _as_json(message: Message) -> dict[str, Any]:
    return {"kind": message.kind, "id": message.id, "seq": message.seq, "body": shown(message.body)}


def _hex(frames: list[bytes]) -> list[str]:
    return [frame.hex() for frame in frames]


def page() -> str:
    """Return the file."""
    assert {each.kind for each in VALID.values()} | {"batch"} == set(VERBS), "a verb has no vector"
    valid: list[dict[str, Any]] = []
    for name, message in (VALID | ELSEWHERE).items():
        frames = encode(message)
        assert decode(frames, CLIENT_LIMITS) == [message], name
        valid.append({"name": name, "message": _as_json(message), "frames": _hex(frames)})
    for name, messages in BATCHES.items():
        frames = encode_batch(messages)
        assert decode(frames, CLIENT_LIMITS) == messages, name
        valid.append({"name": name, "messages": [_as_json(each) for each in messages], "frames": _hex(frames)})
    invalid = [{"name": n, "frames": _hex(frames), "code": code} for n, (frames, code) in INVALID.items()]
    for name, (frames, code) in INVALID.items():
        assert refusal(frames) == code, name
    return json.dumps({"version": VERSION, "valid": valid, "invalid": invalid}, indent=1, ensure_ascii=False) + "\n"


def refusal(frames: list[bytes]) -> str | None:
    """Return the code with which a server refuses frames; None where it takes them."""
    try:
        decode(frames, WireLimits())
    except (MalformedError, UnsupportedError) as error:
        return error.code
    return None


def main() -> int:
    """Write the file, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where the file is stale")
    check: bool = parser.parse_args().check
    text = page()
    if PATH.exists() and PATH.read_text("utf-8") == text:
        return 0
    if check:
        print(f"docs/{PATH.name} is stale: run `make docs`", file=sys.stderr)
        return 1
    PATH.write_text(text, "utf-8")
    print(f"docs/{PATH.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
