"""Structured output: what requests may ask, and the masks themselves against independent readers."""

import json
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from itertools import pairwise

import jsonschema
import pytest
import regex
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from intarsia.errors import InvalidRequestError
from intarsia.protocols import PartContext
from intarsia.types import SamplingParams, Unfit
from intarsia_structured import provide_logits_processors
from models import TOKENIZER_SIZE
from structured import (
    EOS,
    KEY,
    PERSON,
    TEXT_EOS,
    allowed,
    ask,
    byte_tokenizer,
    drawn,
    loads,
    opened,
    processor_of,
    text_of,
)


@pytest.fixture(scope="module")
def processor():
    return processor_of()


def refusal(processor, asked, **params):
    with pytest.raises(InvalidRequestError) as caught:
        processor.applies(SamplingParams(logits_processors={KEY: asked}, **params))
    return caught.value


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_a_request_that_asks_for_nothing_is_left_alone(processor):
    assert not processor.applies(SamplingParams())
    assert not processor.applies(SamplingParams(logits_processors={"other": {}}))
    assert processor.applies(ask("json", True))


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        ({"json_shema": {}}, "json_shema", ["Did you mean 'json_schema'"]),
        ({"json_schema": {}, "bogus": 1}, "bogus", ["unknown option"]),
        ({}, "", ["exactly one of", "json_schema", "choice"]),
        ({"regex": "a", "json": True}, "", ["'regex' and 'json'", "exactly one"]),
        ("json", "", ["'json'", "an object"]),
        ({"json_schema": 3}, "json_schema", ["3", "JSON schema"]),
        ({"json_schema": None}, "json_schema", ["None"]),
        ({"json_schema": [1]}, "json_schema", ["[1]"]),
        ({"json_schema": "{'a': 1}"}, "json_schema", ["JSON text", "double quotes"]),
        ({"json_schema": "3"}, "json_schema", ["JSON schema"]),
        ({"json_schema": {"enum": [float("nan")]}}, "json_schema", ["JSON"]),
        ({"json_schema": {"enum": [{1, 2}]}}, "json_schema", ["JSON"]),
        ({"json_schema": {"enum": ["\ud800"]}}, "json_schema", ["surrogate"]),
        ({"json_schema": {"x-guidance": {"item_separator": "z"}}}, "json_schema.x-guidance", ["item_separator"]),
        ({"json_schema": {"x-guidance": {"lenient": 3}}}, "json_schema.x-guidance", ["flags"]),
        ({"regex": ""}, "regex", ["''", "not empty"]),
        ({"regex": 3}, "regex", ["3"]),
        ({"grammar": " "}, "grammar", ["Lark"]),
        ({"grammar": {"root": 1}}, "grammar", ["Lark"]),
        ({"json": False}, "json", ["False", "true"]),
        ({"json": {}}, "json", ["{}", "true"]),
        ({"choice": []}, "choice", ["[]", "a list"]),
        ({"choice": "ab"}, "choice", ["'ab'", "a list"]),
        ({"choice": ["a", 3]}, "choice", ["3"]),
        ({"choice": ["a", ""]}, "choice", ["''"]),
        ({"choice": ["\udfff"]}, "choice", ["surrogate"]),
    ],
)
def test_what_is_malformed_is_refused_by_its_field(processor, asked, field, words):
    error = refusal(processor, asked)
    where = f"sampling.logits_processors.{KEY}" + (f".{field}" if field else "")
    assert error.field == where
    assert str(error).startswith(where)
    for word in words:
        assert word in str(error)


def test_a_long_value_is_cut_in_messages(processor):
    assert len(str(refusal(processor, {"regex": ["x" * 5000]}))) < 300
    assert len(str(refusal(processor, {"y" * 5000: 1}))) < 600


def test_deep_nesting_is_an_error_and_no_crash(processor):
    schema = {}
    for _ in range(5000):
        schema = {"items": schema}
    assert "recursion" in str(refusal(processor, {"json_schema": schema}))
    refusal(processor, {"json_schema": '{"items":' * 60000 + "{}" + "}" * 60000})


def test_a_schema_beyond_the_limit_is_refused():
    small = processor_of(max_schema_bytes=20)
    assert small.applies(ask("regex", "é" * 10))
    error = refusal(small, {"regex": "é" * 10 + "a"})
    assert "21 bytes" in str(error) and "max_schema_bytes" in str(error)


def test_ignore_eos_cannot_go_with_a_structure(processor):
    error = refusal(processor, {"json": True}, ignore_eos=True)
    assert error.field == "sampling.ignore_eos" and "complete" in str(error)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        ("json_schema", False, ["schema false"]),
        ("json_schema", {"type": "strng"}, ["strng"]),
        ("json_schema", {"type": "array", "uniqueItems": True}, ["uniqueItems"]),
        ("json_schema", {"minLength": 5, "maxLength": 2, "type": "string"}, ["minLength"]),
        ("json_schema", {"$ref": "file:///etc/passwd"}, ["file:///etc/passwd"]),
        ("json_schema", {"$ref": "#/$defs/none"}, ["cannot be followed"]),
        ("regex", "(a", ["regex"]),
        ("regex", "(?=a)b", ["look-around"]),
        ("regex", r"(a)\1", ["backreferences"]),
        ("grammar", "root ::= (", ["cannot be followed"]),
        ("grammar", 'root ::= "a\\', ["cannot be followed"]),
        ("grammar", "start: missing", ["missing"]),
        ("grammar", "no grammar at all", ["cannot be followed"]),
    ],
)
def test_what_cannot_be_compiled_is_refused_when_it_is_prepared(processor, kind, value, words):
    params = ask(kind, value)
    assert processor.applies(params)
    future = processor.prepare(params)
    assert isinstance(future, Future)
    with pytest.raises(InvalidRequestError) as caught:
        future.result(20)
    assert caught.value.field == f"sampling.logits_processors.{KEY}.{kind}"
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value)) < 500


# --- masks against independent readers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["(a|bc)*d?", r"[0-9]{1,3}(\.[0-9]{1,3}){3}", "x{2,5}y|x{3}z", r"[^\"\\]{2}|q+", "(?i:hello) world!?"]
)
def test_a_regex_allows_the_bytes_that_can_go_on_to_a_match(processor, pattern):
    sequence = opened(processor, ask("regex", pattern))
    tokenizer = byte_tokenizer()
    byte_of = {one: tokenizer.token_bytes(one) for one in range(EOS)}
    for seed in range(6):
        ids, _ = drawn(sequence, seed, most=12, prefer=[one for one, byte in byte_of.items() if byte < b"\x80"])
        for length in range(len(ids) + 1):
            text = text_of(ids[:length])
            may = set(allowed(sequence, ids[:length]))
            for one, byte in byte_of.items():
                if byte < b"\x80":
                    follows = regex.fullmatch(pattern, text + byte.decode(), partial=True) is not None
                    assert (one in may) == follows, (text, byte)
            assert (EOS in may) == (regex.fullmatch(pattern, text) is not None)


SCHEMAS = [
    PERSON,
    {"type": "object", "properties": {"kind": {"enum": ["a", "ab", "abc", "b"]}}, "required": ["kind"]},
    {"enum": ["é", "éé", "日本", "😀", '"', "\\", "\n", 1, None, True, [1], {"a": "ü"}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 4},
    {"anyOf": [{"type": "null"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
    {"type": "integer", "minimum": -5, "maximum": 1000, "multipleOf": 5},
    {"type": "string", "format": "date"},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 1, "maximum": 9}, "maxProperties": 2},
    {"$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}}, "$ref": "#/$defs/node"},
    {"type": "object", "properties": {"ключ": {"const": "знач"}}, "required": ["ключ"], "additionalProperties": False},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "null"}}}], "maxProperties": 1},
    {"type": ["number", "null"], "exclusiveMinimum": 0, "exclusiveMaximum": 1},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: json.dumps(schema)[:40])
def test_an_answer_that_ends_satisfies_its_schema(processor, schema):
    sequence = opened(processor, ask("json_schema", schema))
    ended = 0
    for seed in range(12):
        # Ends are preferred, so that numbers and free strings do not go on and on.
        ids, end = drawn(sequence, seed, prefer=(EOS,) if seed % 2 else (EOS, ord('"') - 33))
        if end:
            ended += 1
            jsonschema.validate(loads(text_of(ids)), schema)
    assert ended >= 4


def test_a_schema_as_json_text_is_the_schema(processor):
    asked = opened(processor, ask("json_schema", json.dumps(PERSON)))
    other = opened(processor, ask("json_schema", PERSON))
    for seed in range(5):
        assert drawn(asked, seed) == drawn(other, seed)


def test_json_is_any_object(processor):
    sequence = opened(processor, ask("json", True))
    tokenizer = byte_tokenizer()
    ids = tokenizer.encode('{"a":[1,{"b":null}],"é":"x\\n"}')
    for length in range(len(ids)):
        assert ids[length] in allowed(sequence, ids[:length])
    assert allowed(sequence, ids) == [EOS]
    assert allowed(sequence, []) == tokenizer.encode("{")


@pytest.mark.parametrize(
    "choices", [["a", "ab", "abc", "b"], ["é", "ê", "日", "😀", 'q"\\\n', "\x00"], ["x"], ["yes", "yes"]]
)
def test_a_choice_is_one_of_its_texts(processor, choices):
    sequence = opened(processor, ask("choice", choices))
    seen = set()
    for seed in range(60):
        ids, ended = drawn(sequence, seed)
        assert ended
        seen.add(text_of(ids))
    assert seen == set(choices)


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= expr\nexpr ::= term ("+" term)*\nterm ::= [0-9] | "(" expr ")"\n',
        'start: expr\nexpr: term ("+" term)*\nterm: /[0-9]/ | "(" expr ")"\n',
    ],
    ids=["gbnf", "lark"],
)
def test_a_grammar_is_followed_in_both_syntaxes(processor, grammar):
    sequence = opened(processor, ask("grammar", grammar))
    for seed in range(30):
        ids, ended = drawn(sequence, seed, prefer=(EOS,))
        assert ended
        text = text_of(ids)
        while text != (text := text.replace("(0)", "0")) or regex.search(r"\([0-9+]+\)", text):
            text = regex.sub(r"\([0-9]([+][0-9])*\)", "0", text)
        assert regex.fullmatch(r"[0-9]([+][0-9])*", text), text


# --- a pure function of the ids ---------------------------------------------------------------------------------------

PURE = [
    ask("json_schema", PERSON),
    ask("json", True),
    ask("regex", "(ab|c{2,9})*d"),
    ask("choice", ["a", "ab", "abc", "é"]),
    ask("grammar", 'root ::= "[" root* "]"'),
    ask("grammar", 'start: "x" g "y" n\ng[lazy]: /[a-c]+q/\nn[max_tokens=3]: /[0-9]+/'),
]


@settings(max_examples=60, deadline=None)
@given(
    which=st.integers(0, len(PURE) - 1),
    seed=st.integers(0, 9),
    jumps=st.lists(
        st.tuples(st.integers(0, 40), st.lists(st.integers(0, TOKENIZER_SIZE - 1), max_size=3)), max_size=12
    ),
)
def test_jumps_back_and_forth_equal_a_fresh_matcher(processor, which, seed, jumps):
    params = PURE[which]
    answer, _ = drawn(opened(processor, params), seed, most=40)
    prompt = [7, EOS, 3]
    kept = opened(processor, params, len(prompt))
    for length, strays in jumps:
        ids = [*prompt, *answer[:length], *strays]
        assert allowed(kept, ids) == allowed(opened(processor, params, len(prompt)), ids)


def test_ids_that_break_the_structure_leave_the_ends_alone(processor):
    sequence = opened(processor, ask("regex", "ab"))
    good, bad = byte_tokenizer().encode("ab"), byte_tokenizer().encode("b")
    assert allowed(sequence, bad) == [EOS]
    assert allowed(sequence, [good[0], *bad, *bad]) == [EOS]
    assert allowed(sequence, good[:1]) == good[1:]


# --- ends, padding, whitespace ----------------------------------------------------------------------------------------


def test_every_end_is_allowed_where_the_structure_is_complete_and_none_before():
    both = processor_of((EOS, TEXT_EOS))
    sequence = opened(both, ask("regex", "ab?"))
    a, b = byte_tokenizer().encode("ab")
    assert allowed(sequence, []) == [a]
    assert allowed(sequence, [a]) == sorted([b, EOS, TEXT_EOS])
    assert allowed(sequence, [a, b]) == sorted([EOS, TEXT_EOS])
    assert allowed(sequence, [a, TEXT_EOS]) == allowed(sequence, [a, EOS, b, a]) == sorted([EOS, TEXT_EOS])


def test_an_end_that_is_a_text_is_no_part_of_a_string():
    quote = ord("}") - 33
    assert byte_tokenizer().token_bytes(quote) == b"}"
    for ids in ([quote], [quote, EOS]):
        sequence = opened(processor_of(tuple(ids)), ask("regex", "[a-z}]{2}"))
        assert not set(ids) & set(allowed(sequence, []))


def test_padded_ids_are_forbidden():
    padded = processor_of(num_ids=TOKENIZER_SIZE + 30)
    sequence = opened(padded, ask("regex", "(.|\n)*"))
    assert max(allowed(sequence, [], size=TOKENIZER_SIZE + 100)) == EOS
    logits = torch.zeros(TOKENIZER_SIZE + 100)
    sequence.process([], logits)
    assert (logits[TOKENIZER_SIZE:] == -torch.inf).all()


def test_allowed_logits_keep_their_bits(processor):
    sequence = opened(processor, ask("regex", "[a-m]"))
    logits = torch.randn(TOKENIZER_SIZE, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sequence.process([], logits)
    left = logits.isfinite()
    assert int(left.sum()) == 13
    assert torch.equal(logits[left], before[left])
    nothing = torch.full((TOKENIZER_SIZE,), torch.nan)
    sequence.process([], nothing)
    assert nothing.isnan().any(), "the sampler is to find that the model failed"


@pytest.mark.parametrize(("most", "longest"), [(0, 0), (1, 1), (8, 8)])
def test_whitespace_is_bounded(most, longest):
    sequence = opened(processor_of(max_whitespace=most), ask("json_schema", PERSON))
    tokenizer = byte_tokenizer()
    spaces = [one for one in range(EOS) if tokenizer.token_bytes(one) in (b" ", b"\n", b"\t", b"\r")]
    runs = set()
    for seed in range(4):
        ids, ended = drawn(sequence, seed, prefer=spaces)
        text = text_of(ids)
        assert ended and text[0] == "{" and text[-1] == "}"
        jsonschema.validate(loads(text), PERSON)
        runs |= {len(run) for run in regex.findall(r"\s+", regex.sub(r'"[^"]*"', '""', text))}
    assert max(runs, default=0) == longest


def test_names_of_special_tokens_can_be_asked_for_in_lark(processor):
    two = processor_of((TEXT_EOS,))
    sequence = opened(two, ask("grammar", 'start: "a" <|end|> "b"'))
    a, b = byte_tokenizer().encode("ab")
    assert allowed(sequence, [a]) == [EOS]
    assert allowed(sequence, [a, EOS]) == [b]


# --- compiling, aside -------------------------------------------------------------------------------------------------


def test_what_was_compiled_is_at_hand_the_second_time():
    few = processor_of(cache_size=2)
    first = few.prepare(ask("regex", "a1"))
    first.result()
    assert few.prepare(ask("regex", "a1")) is None
    live = few.open(ask("regex", "a1"), 0)
    for pattern in ("a2", "a3"):
        few.prepare(ask("regex", pattern)).result()
    del first
    # Dropped from the cache, but a sequence still follows it.
    assert few.prepare(ask("regex", "a1")) is None
    assert allowed(few.open(ask("regex", "a1"), 0), []) == allowed(live, [])
    # Dropped, and nobody has it: compiled again, in `open` too.
    assert allowed(few.open(ask("regex", "a2"), 0), []) == allowed(live, [])


def test_equal_requests_at_once_compile_once(processor):
    params = ask("regex", "(once|only)+")
    futures = [processor.prepare(params) for _ in range(8)]
    assert len({id(future) for future in futures if future is not None}) <= 1


@pytest.mark.timeout(60)
def test_what_is_compiled_before_it_is_asked_for_again_waits_for_nobody(monkeypatch):
    quick = processor_of()

    def at_once(work):
        future = Future()
        future.set_result(work())
        return future

    monkeypatch.setattr(quick.compiler._pool, "submit", at_once)
    quick.prepare(ask("regex", "b1"))
    assert quick.prepare(ask("regex", "b1")) is None


#: What ends a naive compiler: by time, by memory, by the stack, by size.
PATHOLOGICAL = {
    "never ends": ("grammar", "start: A\nA: /.*a.{300}/ & /.*b.{299}/ & ~/.*c.{280}/"),
    "overflows the stack": (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(9000)) + '\nr9000: "a"',
    ),
    "overflows it by references": (
        "json_schema",
        {"$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(9000)}, "$ref": "#/$defs/d0"},
    ),
    "doubles": ("grammar", "start: A0\n" + "\n".join(f"A{i}: A{i + 1} A{i + 1}" for i in range(60)) + '\nA60: "a"'),
    "chains terminals": (
        "grammar",
        "root ::= r0\n" + "\n".join(f"r{i} ::= r{i + 1}" for i in range(3000)) + '\nr3000 ::= "a"',
    ),
    "repeats": ("regex", "a?" * 20000 + "a" * 20000),
    "deep brackets": ("regex", "(" * 20000 + "a" + ")" * 20000),
    "deep schema": ("json_schema", '{"items":' * 900 + "{}" + "}" * 900),
    "combinations": (
        "json_schema",
        {"allOf": [{"anyOf": [{"properties": {f"a{i}_{j}": {"type": "null"}}} for j in range(8)]} for i in range(12)]},
    ),
}


@pytest.mark.parametrize("name", PATHOLOGICAL)
def test_a_pathological_structure_ends_with_an_error_and_the_process_lives(name):
    kind, value = PATHOLOGICAL[name]
    bounded = processor_of(timeout_s=3.0, max_schema_bytes=4 << 20)
    beats, stop = [], threading.Event()

    def beat():
        while not stop.wait(0.005):
            beats.append(time.perf_counter())

    opened(bounded, ask("regex", "warm"))
    pulse = threading.Thread(target=beat)
    pulse.start()
    began = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        bounded.prepare(ask(kind, value)).result(30)
    took = time.perf_counter() - began
    stop.set()
    pulse.join()
    assert took < 8
    assert max((b - a for a, b in pairwise(beats)), default=0) < 1.0, "other threads stood still"
    assert len(str(caught.value)) < 500
    assert allowed(opened(bounded, ask("regex", "after")), []) == byte_tokenizer().encode("a")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("regex", "(a{1,1000}){1,1000}"),
        ("regex", "(a|b)*a(a|b){60}"),
        ("regex", "(a+)+(b+)+c"),
        ("json_schema", {"enum": [f"value{i}" for i in range(20000)]}),
        ("json_schema", {"type": "array", "items": {"type": "null"}, "minItems": 1000, "maxItems": 100000}),
        ("grammar", 'start: e\ne: e e | "a" | "aa"'),
        ("grammar", "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(60)) + '\na60: "a"'),
    ],
)
def test_what_is_hard_elsewhere_and_compiles_here_is_quick_at_each_step(kind, value):
    bounded = processor_of(max_schema_bytes=1 << 20)
    sequence = opened(bounded, ask(kind, value))
    ids = []
    for _ in range(60):
        began = time.perf_counter()
        may = allowed(sequence, ids)
        assert time.perf_counter() - began < 0.5
        ids.append(may[0])
        if may == [EOS]:
            break


def test_a_trial_that_was_killed_is_started_again():
    lone = processor_of()
    opened(lone, ask("regex", "a"))
    sandbox = lone.compiler._sandboxes.get()
    sandbox._process.kill()
    sandbox._process.wait()
    lone.compiler._sandboxes.put(sandbox)
    opened(lone, ask("regex", "b"))


def test_the_trials_process_ends_with_its_processor():
    lone = processor_of()
    opened(lone, ask("regex", "a"))
    sandbox = lone.compiler._sandboxes.get()
    process = sandbox._process
    lone.compiler._sandboxes.put(sandbox)
    assert process.poll() is None
    del lone, sandbox
    assert process.wait(10) is not None


def test_the_plugin_is_listed_without_what_is_heavy():
    code = (
        "import intarsia_structured as plugin, sys; plugin.provide_logits_processors();"
        "print(sorted({'torch', 'numpy', 'llguidance'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_model_without_an_end_or_a_tokenizer_has_no_structured_output():
    (provider,) = provide_logits_processors()
    for tokenizer, word in [(None, "tokenizer"), (byte_tokenizer(()), "end-of-sequence")]:
        fit = provider.fit(PartContext(spec=None, num_ids=TOKENIZER_SIZE, tokenizer=tokenizer))
        assert isinstance(fit, Unfit) and word in fit.reason
