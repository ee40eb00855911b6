"""The life of a request on the architecture page: what it names is there, and a request goes that way."""

import re
import sys
from pathlib import Path

import pytest

from engines import engine_of, smollm2_shaped
from intarsia import Request, SamplingParams, protocols
from intarsia.arrivals import Arrivals
from intarsia.engine import Engine
from intarsia.loop import StepLoop
from intarsia.sequence import Sequence

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
LIFE = PAGE.partition("## The life of a request\n")[2].partition("\n## ")[0]
CLASSES = {cls.__name__: cls for cls in (Arrivals, Engine, Sequence, StepLoop)}
#: Named files that the request below has no need of.
OTHERS = {"plugins/intarsia_parallel/executor.py"}
#: What the page's numbered steps speak of, by the file and the end of the name, in their order.
ORDER = [
    ("engine.py", "Engine.generate"),
    ("arrivals.py", "Arrivals.read"),
    ("prompts.py", "Prompts.read"),
    ("loop.py", "StepLoop.enter"),
    ("intarsia_inflight/scheduler.py", ".add"),
    ("loop.py", "StepLoop.turn"),
    ("intarsia_inflight/scheduler.py", ".plan"),
    ("executor.py", ".submit"),
    ("stage.py", "ModelStage.batch"),
    ("defaults/attention.py", ".prepare"),
    ("models/eager.py", ".run"),
    ("defaults/attention.py", ".attend"),
    ("models/eager.py", ".logits"),
    ("choosing.py", "TokenChoosing.choose"),
    ("sampling/sampler.py", ""),
    ("", ".propose"),
    ("executor.py", ".collect"),
    ("sequence.py", "Sequence.accept"),
    ("text/stream.py", ""),
    ("intarsia_paged/allocator.py", ".commit"),
    ("intarsia_inflight/scheduler.py", ".update"),
    ("intarsia_inflight/scheduler.py", ".remove"),
    ("outbox.py", "Outbox.keep"),
    ("completions.py", "collect"),
]


def named():
    return set(re.findall(r"`((?:core|plugins)/[\w/]+\.py)`", LIFE))


@pytest.fixture(scope="module")
def entered(tmp_path_factory):
    """Return which functions of ours run for one request, and for others of all kinds, as files and names, in order."""
    model = smollm2_shaped(tmp_path_factory.mktemp("model"))
    numbers = {"kernels": "torch", "attention": "tiled", "runner": "eager", "scheduler": "inflight", "cache": "paged"}
    seen = []

    def note(frame, event, _):
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if event == "call" and path.startswith(str(ROOT)) and name != "<module>":
            seen.append((path.removeprefix(f"{ROOT}/"), name))

    with engine_of(model, drafter="ngram", **numbers) as engine:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            greedy = SamplingParams(max_tokens=8, temperature=0, stop=["never"])
            engine.generate("Once upon a time once upon a time", greedy)
            once = list(seen)
            list(engine.stream([{"role": "user", "content": "Hi"}], greedy))
            engine.add(Request(request_id="mine", prompt=[1, 2], params=greedy))
            engine.step()
            engine.swap("scheduler", type(engine.config.scheduler)("static"))
            while engine.has_work:
                engine.step()
        finally:
            sys.setprofile(before)
    return once, list(seen)


def test_what_the_page_calls_is_there():
    calls = re.findall(r"`([A-Z]\w+)\.(\w+)`", LIFE)
    assert len(calls) > 15
    for owner, name in calls:
        cls = CLASSES.get(owner) or getattr(protocols, owner)
        assert hasattr(cls, name), f"{owner}.{name}"


def test_every_file_that_the_page_names_has_a_part_in_it(entered):
    _, everything = entered
    assert named() >= OTHERS
    assert named() - {file for file, _ in everything} - OTHERS == set()


def test_a_request_goes_through_the_steps_of_the_page_in_their_order(entered):
    once, _ = entered
    places = []
    for file, name in ORDER:
        after = places[-1] + 1 if places else 0
        found = [
            i for i, (path, called) in enumerate(once) if i >= after and path.endswith(file) and called.endswith(name)
        ]
        assert found, f"no call of {name} in {file} after {ORDER[len(places) - 1]}"
        places.append(found[0])
