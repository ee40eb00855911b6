"""What docs/wire-protocol.md says of control and events is what a server does; what docs/serving.md shows runs."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import msgpack
import pytest
import zmq

from intarsia_zmq.control import KINDS
from intarsia_zmq.options import Limits, ZmqOptions
from serving import FakeEngine, Peer, eventually, serving

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "wire-protocol.md").read_text("utf-8")
SHOWN = re.findall(r"^```python\n(.*?)^```$", (DOCS / "serving.md").read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
CONTROL, EVENTS = (
    re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)[1]
    for title in ("Control", "Events")
)


def words(text):
    return set(re.findall(r"`([\w.]+)`", text))


def paragraph(section, begins):
    (found,) = [each for each in section.split("\n\n") if each.startswith(begins)]
    return found


def rows(section, header):
    table = re.search(rf"^\| {header} \|.*\n\|.*\n((?:\|.*\n)+)", section, flags=re.MULTILINE)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


@pytest.mark.parametrize("code", SHOWN)
def test_the_python_that_the_guide_shows_streams_and_answers(code, capsys, tmp_path):
    class Speaking(FakeEngine):
        def _output(self, request, choice, ids, end):
            return attrs.evolve(super()._output(request, choice, ids, end), text="".join(map(str, ids)))

    with serving(tmp_path, Speaking) as running:
        exec(compile(code.replace("tcp://127.0.0.1:5555", running.address), "serving.md", "exec"), {})
    assert capsys.readouterr().out == "".join(map(str, range(16))) + "".join(map(str, range(8))) + "\n"
    assert len(SHOWN) == 2


def test_the_page_lists_every_control_verb_and_each_is_answered_as_it_says(tmp_path):
    listed = {row[0].strip("` "): row[2] for row in rows(CONTROL, "control verb")}
    assert set(listed) == set(KINDS)
    with serving(tmp_path) as running:
        for kind, answer in listed.items():
            if kind != "shutdown":
                asked = {"slot": "scheduler", "use": "static"} if kind == "swap" else {}
                assert f"`{running.control(kind, **asked).kind}`" in answer, kind
                running.control("resume")
        assert running.control("shutdown").kind == "status"
        assert running.join() is None


def test_the_page_lists_every_figure_of_the_status(tmp_path):
    with serving(tmp_path) as running, Peer(running.address, hello=True) as peer:
        peer.generate("a", max_tokens=1, sampling={"top_p": 7})
        peer.generate("b", max_tokens=1)
        peer.until_end("b")
        peer.send_raw(b"no message")
        eventually(lambda: running.control("status").body.get("malformed"))
        status = running.control("status").body
        assert status.keys() <= words(paragraph(CONTROL, "`status` has"))
        assert (status["requests"], status["refused_requests"]) == (1, 1)


def test_the_page_lists_exactly_the_options_that_can_change_while_clients_are_here(tmp_path):
    default = attrs.asdict(ZmqOptions(), recurse=False)
    limits = attrs.asdict(default.pop("limits"))
    with serving(tmp_path) as running:
        answer = running.control("reload", options={**default, "limits": limits}).body
    assert set(answer["applied"]) | set(answer["restart"]) == {*default, *(f"limits.{name}" for name in limits)}
    said = words(paragraph(CONTROL, "`reload` rereads").split("A value that is wrong")[0])
    assert said - {"reload"} == set(answer["applied"])


def test_the_page_lists_every_topic_and_field_of_events(tmp_path):
    listed = {row[0].strip("` "): words(row[1]) for row in rows(EVENTS, "topic")}
    always = words(re.search(r"^\| topic \|.*$", EVENTS, flags=re.MULTILINE)[0]) - {"seq"}
    with serving(tmp_path, events=f"ipc://{tmp_path}/events", limits=Limits(requests=4)) as running:
        subscriber = zmq.Context.instance().socket(zmq.SUB)
        subscriber.linger = 0
        subscriber.subscribe(b"")
        subscriber.connect(running.server.addresses["events"])
        with Peer(running.address, hello=True) as peer:
            while not subscriber.poll(50):  # until it has subscribed
                peer.generate(max_tokens=2)
                peer.until_end()
            figures = set(peer.ask("stats").body["engine"])
        seen = {}
        while subscriber.poll(300):
            topic, data = subscriber.recv_multipart()
            message = msgpack.unpackb(data)
            assert message["kind"] == "event" and "id" not in message and message["seq"] == message["body"]["number"]
            seen.setdefault(topic.decode(), set()).update(message["body"])
        subscriber.close()
    assert seen.keys() <= listed.keys() == {"step", "cache", "request"}
    for topic, names in seen.items():
        assert always <= names, topic
    assert seen["step"] - always <= listed["step"] | figures
    assert seen["request"] - always <= listed["request"]
