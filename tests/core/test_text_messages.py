"""What a chat may hold: messages, tools, documents and variables are taken in their form or refused by their path."""

from __future__ import annotations

import enum
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from intarsia.errors import IntarsiaError, InvalidRequestError
from intarsia.prompts import Prompts
from intarsia.text import ChatTemplate
from intarsia.text import Tokenizer as TextTokenizer
from intarsia.types import Chat, Request, TokenizerSpec

_DUMP = "{{ messages | tojson }}|{{ tools | tojson }}|{{ documents | tojson }}|{{ add_generation_prompt }}"
_USER = {"role": "user", "content": "Hi"}
_ASKS = "{% for m in messages %}{% if m.content is none %}-{% else %}{{ m.content }}{% endif %}{% endfor %}"
_LOOPS = "{% for m in messages %}{% for part in m.content | reverse %}{{ part.text }};{% endfor %}{% endfor %}"


def _seen(chat: object) -> list[dict[str, object]]:
    """Return the messages as a template sees them."""
    return json.loads(ChatTemplate("{{ messages | tojson }}", {}).render(chat))


def _called(*calls: object, **more: object) -> dict[str, object]:
    return {"role": "assistant", "tool_calls": list(calls), **more}


# --- the value --------------------------------------------------------------------------------------------------------


def test_a_generation_prompt_is_asked_for_unless_a_message_goes_on():
    assert Chat([_USER]).add_generation_prompt is True
    assert Chat([_USER], continue_final_message=True).add_generation_prompt is False
    assert Chat([_USER], add_generation_prompt=False).add_generation_prompt is False


@pytest.mark.parametrize(
    ("arguments", "named", "field"),
    [
        ({"tools": {"type": "function"}}, "tools: dict is not a list", "tools"),
        ({"tools": ["f"]}, r"tools\[0\]: 'f'", "tools[0]"),
        ({"tools": "f"}, "tools: str", "tools"),
        ({"documents": [3]}, r"documents\[0\]: 3", "documents[0]"),
        (
            {"add_generation_prompt": "yes"},
            "add_generation_prompt: 'yes' is not true or false",
            "add_generation_prompt",
        ),
        ({"add_generation_prompt": None}, "add_generation_prompt: None", "add_generation_prompt"),
        ({"continue_final_message": 1}, "continue_final_message: 1", "continue_final_message"),
        (
            {"continue_final_message": True, "add_generation_prompt": True},
            "add_generation_prompt: true does not go with continue_final_message",
            "add_generation_prompt",
        ),
        ({"variables": ["a"]}, "variables: list", "variables"),
        ({"variables": {"a b": 1}}, "variables: 'a b'", "variables"),
        ({"variables": {3: 1}}, "variables: 3", "variables"),
        ({"variables": {"messages": []}}, r"variables: 'messages' is a field of its own", "variables.messages"),
    ],
)
def test_a_chat_with_a_wrong_field_is_refused_at_birth(arguments, named, field):
    with pytest.raises(InvalidRequestError, match=f"^{named}") as refused:
        Chat([_USER], **arguments)
    assert refused.value.field == field


def test_null_tools_and_documents_are_none_given():
    chat = Chat([_USER], tools=None, documents=None)
    assert chat == Chat([_USER])
    assert ChatTemplate(_DUMP, {}).render(chat).endswith("|null|null|True")
    assert ChatTemplate(_DUMP, {}).render(Chat([_USER], tools=[])).endswith("|null|null|True")


# --- messages ---------------------------------------------------------------------------------------------------------


def test_keys_of_null_and_empty_tool_calls_are_not_given():
    message = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "x": {"y": None}}
    assert _seen([message]) == [{"role": "assistant", "content": "a", "x": {"y": None}}]
    assert _seen([{"role": "assistant", "content": "a", "tool_calls": []}]) == [{"role": "assistant", "content": "a"}]


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_an_assistant_may_say_nothing(content):
    message = {"role": "assistant", **content}
    assert _seen([message]) == [{"role": "assistant"}]
    assert ChatTemplate(_ASKS, {}).render([_USER, message]) == "Hi-"
    assert ChatTemplate(_ASKS.replace("is none", "== none"), {}).render([message]) == "-"


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_who_else_says_nothing_is_refused(role):
    for message in ({"role": role}, {"role": role, "content": None}):
        with pytest.raises(InvalidRequestError, match=r"^messages\[0\]\.content: "):
            _seen([message])


def test_reasoning_goes_by_every_name_that_templates_know():
    for name in ("reasoning_content", "thinking", "reasoning"):
        (turn,) = _seen([{"role": "assistant", "content": "a", name: "why"}])
        assert turn["reasoning_content"] == turn["thinking"] == turn[name] == "why"


def test_kinds_of_texts_and_numbers_become_plain():
    kind = enum.StrEnum("Role", ["user"])
    template = ChatTemplate("{{ messages[0].role.name is defined }}{{ messages[0].n + 1 }}", {})
    assert template.render([{"role": kind.user, "content": kind.user, "n": enum.IntEnum("N", ["one"]).one}]) == "False2"


@pytest.mark.parametrize("kind", ["image", "image_url", "input_audio", "video", "file", None])
def test_a_part_that_is_no_text_is_refused_by_its_path(kind):
    parts = [{"type": "text", "text": "What is it?"}, {"type": kind, kind or "x": {"url": "https://x/" + "a" * 100}}]
    for template in (_LOOPS, _DUMP):
        with pytest.raises(InvalidRequestError, match=r"^messages\[1\]\.content\[1\]: .*takes text only") as refused:
            ChatTemplate(template, {}).render([_USER, {"role": "user", "content": parts}])
        assert refused.value.field == "messages[1].content[1]"
        assert len(str(refused.value)) < 200


def test_a_filtered_loop_over_content_takes_parts():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert ChatTemplate(_LOOPS, {}).render([{"role": "user", "content": parts}]) == "b;a;"


def test_what_shares_itself_over_and_over_is_refused_soon():
    value: list[object] = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(InvalidRequestError, match="more than 1000000 values"):
        _seen([{**_USER, "x": value}])


_WIDE: list[object] = []
for _ in range(40):
    _WIDE = [_WIDE, _WIDE]


_HARD = {"number": 10**5000, "wide": _WIDE, "wide, keyed": {"a": _WIDE}, "inside": [10**5000], "long": ["x" * 10**6]}


@pytest.mark.parametrize("name", _HARD)
def test_a_value_that_is_hard_to_spell_is_named_shortly(name):
    value = _HARD[name]
    for make in (
        lambda: _seen([value]),
        lambda: _seen([{"role": value, "content": "a"}]),
        lambda: _seen([{"role": "user", "content": value}]),
        lambda: Chat([_USER], tools=[value], continue_final_message=value),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            make()
        assert len(str(refused.value)) < 200


# --- tool calls -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        {"type": "function", "function": {"name": "f", "arguments": '{"a": [1, null]}'}},
        {"name": "f", "arguments": '{"a": [1, null]}'},
    ],
)
def test_arguments_as_text_are_read(call):
    (turn,) = _seen([_called(call)])
    seen = turn["tool_calls"][0]
    assert seen.get("function", seen)["arguments"] == {"a": [1, None]}


@pytest.mark.parametrize(
    ("calls", "named"),
    [
        ("f", r"tool_calls: 'f' is not a list"),
        ({"name": "f"}, r"tool_calls: \{"),
        ([3], r"tool_calls\[0\]: 3"),
        ([{"name": "f"}, {"function": "f"}], r"tool_calls\[1\]\.function: 'f'"),
        ([{"function": {"arguments": {}}}], r"tool_calls\[0\]\.function: "),
        ([{"arguments": {}}], r"tool_calls\[0\]: "),
        ([{"name": "f", "arguments": "{"}], r"tool_calls\[0\]\.arguments: '\{' is not a JSON object"),
        ([{"name": "f", "arguments": "[1]"}], r"tool_calls\[0\]\.arguments: '\[1\]'"),
        ([{"name": "f", "arguments": '{"a": NaN}'}], r"tool_calls\[0\]\.arguments: "),
        ([{"name": "f", "arguments": [1]}], r"tool_calls\[0\]\.arguments: \[1\]"),
        ([{"name": "f", "arguments": 3}], r"tool_calls\[0\]\.arguments: 3"),
        ([{"name": "f", "arguments": '{"a":' + "[" * 50_000}], r"tool_calls\[0\]\.arguments: "),
        ([{"name": "f", "arguments": '{"a":' + "[" * 90 + "]" * 90 + "}"}], r"messages: it is nested deeper"),
        ([{"name": "f", "arguments": '{"a":' + "9" * 5000 + "}"}], r"tool_calls\[0\]\.arguments: "),
    ],
)
def test_a_malformed_tool_call_is_refused_by_its_path(calls, named):
    message = {"role": "assistant", "tool_calls": calls}
    with pytest.raises(InvalidRequestError, match=rf"^(messages\[1\]\.)?{named}"):
        _seen([_USER, message])


@pytest.mark.parametrize("function", ["f", {}, {"name": 3}, None])
def test_a_tool_without_a_name_is_refused(function):
    with pytest.raises(InvalidRequestError, match=r"^tools\[1\]\.function: "):
        _seen(Chat([_USER], tools=[{"name": "flat"}, {"type": "function", "function": function}]))


# --- going on ---------------------------------------------------------------------------------------------------------

_TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.mark.parametrize("content", ["It is", " It is  \n", "a</>b"])
def test_the_last_message_is_left_open(content):
    chat = Chat([_USER, {"role": "assistant", "content": content}], continue_final_message=True)
    assert ChatTemplate(_TURNS, {}).render(chat) == f"<user>Hi</><assistant>{content}"
    trimming = ChatTemplate(_TURNS.replace("m.content", "m.content | trim"), {})
    assert trimming.render(chat) == f"<user>Hi</><assistant>{content.strip()}"


@pytest.mark.parametrize(
    "message", [{"role": "assistant", "content": ""}, _called({"name": "f"}), {"role": "assistant"}]
)
def test_a_message_that_says_nothing_cannot_go_on_or_stays_as_it_is(message):
    chat = Chat([_USER, message], continue_final_message=True)
    if message.get("content") == "":
        assert ChatTemplate(_TURNS, {}).render(chat) == "<user>Hi</><assistant>"
    else:
        with pytest.raises(InvalidRequestError, match=r"^continue_final_message: the last message has no content"):
            ChatTemplate(_TURNS, {}).render(chat)


@pytest.mark.parametrize("content", ["'x'", "m.content | upper | replace('CONTINUE', '')", "m.content[:2]"])
def test_a_template_that_loses_the_last_message_cannot_go_on(content):
    chat = Chat([{"role": "assistant", "content": "long text"}], continue_final_message=True)
    with pytest.raises(InvalidRequestError, match=r"^continue_final_message: the model's chat template"):
        ChatTemplate(_TURNS.replace("m.content", content), {}).render(chat)


# --- variables and prompts --------------------------------------------------------------------------------------------


def test_variables_reach_the_template_and_take_the_place_of_special_tokens_alone():
    template = ChatTemplate("{{ bos_token }}{{ flag }}{{ messages | length }}", {"bos_token": "<s>", "flag": "?"})
    assert template.render(Chat([_USER], variables={"flag": [1]})) == "<s>[1]1"
    assert template.render(Chat([_USER], variables={"bos_token": "<b>"})) == "<b>?1"
    with pytest.raises(InvalidRequestError, match=r"^variables\.flag: <object"):
        template.render(Chat([_USER], variables={"flag": object()}))


def test_a_chat_is_a_prompt_of_its_own():
    backend = Tokenizer(models.WordLevel({"Hi": 0, "<a>": 1}, unk_token="Hi"))
    spec = TokenizerSpec(
        backend.to_str(), chat_template="{{ messages[0].content }}{{ '!' if not add_generation_prompt }}"
    )
    prompts = Prompts(TextTokenizer.from_spec(spec), 2, 10)
    chat = Chat([_USER])
    assert prompts.split(chat) == [chat]
    assert prompts.split([chat, "Hi"]) == [chat, "Hi"]
    assert prompts.read(Request(request_id="a", prompt=chat))[0] == [0]
    with pytest.raises(InvalidRequestError, match="a chat, and this model has no tokenizer"):
        Prompts(None, 2, 10).read(Request(request_id="a", prompt=chat))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
_ANY = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool"]) | _JSON},
    optional={
        "content": st.text() | _JSON | st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
        "tool_calls": st.lists(st.fixed_dictionaries({"function": _JSON | st.fixed_dictionaries({"name": st.text()})}))
        | st.lists(st.fixed_dictionaries({"name": st.text(), "arguments": _JSON | st.text()})),
        "reasoning": _JSON,
    },
)


@settings(max_examples=200, deadline=None)
@given(
    messages=st.lists(_ANY | _JSON, max_size=4) | _JSON,
    fields=st.fixed_dictionaries(
        {},
        optional={
            "tools": st.lists(_JSON, max_size=2) | _JSON,
            "documents": _JSON,
            "variables": st.dictionaries(st.sampled_from(["a", "messages", "b c"]), _JSON, max_size=2) | _JSON,
            "continue_final_message": st.booleans() | _JSON,
            "add_generation_prompt": st.booleans() | _JSON,
        },
    ),
    source=st.sampled_from([_DUMP, _ASKS, _LOOPS, _TURNS]),
)
def test_random_chats_render_or_are_invalid_requests(messages, fields, source):
    try:
        assert isinstance(ChatTemplate(source, {}).render(Chat(messages, **fields)), str)
    except IntarsiaError as error:
        assert type(error) is InvalidRequestError
        assert error.field
