"""Chats through templates written as popular models' are, against transformers' rendering."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from intarsia.errors import InvalidRequestError
from intarsia.text import ChatTemplate
from intarsia.types import Chat

_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_SOURCES = {path.stem: path.read_text() for path in sorted(Path(__file__).with_name("chat_templates").glob("*.jinja"))}
_TEMPLATES = {name: ChatTemplate(source, _TOKENS) for name, source in _SOURCES.items()}
_REFERENCE = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **_TOKENS)


def _transformers(name: str, chat: Chat) -> str:
    return _REFERENCE.apply_chat_template(
        list(chat.messages),
        tools=list(chat.tools) or None,
        documents=list(chat.documents) or None,
        chat_template=_SOURCES[name],
        tokenize=False,
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        **chat.variables,
    )


def _same(name: str, chat: Chat) -> str | None:
    """Assert that both render the same, or both refuse; return the text."""
    try:
        expected = _transformers(name, chat)
    except Exception as error:
        with pytest.raises(InvalidRequestError) as refused:
            _TEMPLATES[name].render(chat)
        assert chat.continue_final_message or str(error) in str(refused.value)
        return None
    assert _TEMPLATES[name].render(chat) == expected
    return expected


def _user(content: object = "Hi") -> dict[str, object]:
    return {"role": "user", "content": content}


def _call(arguments: object, **more: object) -> dict[str, object]:
    return {"type": "function", "id": "abcdefgh1", "function": {"name": "weather", "arguments": arguments}, **more}


_SYSTEM = {"role": "system", "content": " Be brief. é\U0001f600 "}
_ANSWER = {"role": "assistant", "content": "<think>\nhm\n</think>\n\n ok "}
_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'What it\'s like <in> a "city" & when',
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}}},
            "required": ["city"],
        },
    },
}
_CALLS = {"role": "assistant", "tool_calls": [_call({"city": "Zürich", "days": [1, 2], "at": {"x": None}})]}
_RESULT = {"role": "tool", "name": "weather", "tool_call_id": "abcdefgh1", "content": '{"sun": true}'}
_LAST = {"role": "assistant", "content": "It is  "}

_CHATS = {
    "one": Chat([_user("  Hello there \n")]),
    "system": Chat([_SYSTEM, _user()]),
    "turns": Chat([_SYSTEM, _user(), _ANSWER, _user("a<&>'\"\\"), _ANSWER, _user("last")]),
    "two users": Chat([_user("a"), _user("b")]),
    "no generation prompt": Chat([_user(), _ANSWER], add_generation_prompt=False),
    "tools": Chat([_SYSTEM, _user()], tools=[_TOOL, _TOOL]),
    "tool round": Chat([_user(), _CALLS, _RESULT], tools=[_TOOL]),
    "two results": Chat([_user(), {**_CALLS, "content": "Let me see."}, _RESULT, _RESULT, _ANSWER, _user()]),
    "tools asked elsewhere": Chat([_user()], tools=[_TOOL], variables={"tools_in_user_message": False}),
    "documents": Chat([_user()], documents=[{"title": "A", "text": "b"}, {"title": "C", "text": "d", "n": 1}]),
    "no thinking": Chat([_user()], variables={"enable_thinking": False, "date_string": "1 Jan 2030"}),
    "thinking": Chat([_user()], variables={"enable_thinking": True, "bos_token": "<other>"}),
    "reasoning": Chat([_user(), {**_ANSWER, "reasoning": "why"}, _user(), {**_LAST, "reasoning_content": "how\n"}]),
    "go on": Chat([_user(), _LAST], continue_final_message=True),
    "go on with thoughts": Chat([_user(), _ANSWER], continue_final_message=True),
    "go on as a user": Chat([_SYSTEM, _user(" Once ")], continue_final_message=True),
    "parts": Chat([_user([{"type": "text", "text": "one "}, {"type": "text", "text": " two"}])]),
    "go on with parts": Chat([_user([{"type": "text", "text": "one "}])], continue_final_message=True),
}
#: Where ours takes what transformers does not, as it puts the chat into the form that the template takes.
_OURS = {
    *((name, chat) for name in _SOURCES if name not in ("gemma3",) for chat in ("parts", "go on with parts")),
    ("deepseek", "tool round"),
    ("deepseek", "two results"),
}


@pytest.mark.parametrize("chat", _CHATS)
@pytest.mark.parametrize("name", _SOURCES)
def test_a_popular_template_renders_as_in_transformers(name, chat):
    if (name, chat) in _OURS:
        assert isinstance(_TEMPLATES[name].render(_CHATS[chat]), str)
    else:
        _same(name, _CHATS[chat])


def test_most_of_these_chats_render():
    """So that the test above is not one of errors alone."""
    rendered = {
        (name, chat): _same(name, _CHATS[chat]) for name in _SOURCES for chat in _CHATS if (name, chat) not in _OURS
    }
    refused = {pair for pair, text in rendered.items() if text is None}
    assert len(refused) < len(rendered) / 4
    assert ("gemma", "system") in refused and ("mistral", "two users") in refused
    assert not any(name in ("qwen25", "qwen3", "llama3") and chat == "tool round" for name, chat in refused)


@pytest.mark.parametrize("name", [name for name in _SOURCES if name != "gemma3"])
def test_parts_are_joined_for_a_template_that_takes_text(name):
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    for more in ({}, {"continue_final_message": True}):
        assert _TEMPLATES[name].render(Chat([_user(parts)], **more)) == _transformers(
            name, Chat([_user("one\ntwo")], **more)
        )


@pytest.mark.parametrize("content", [{}, {"content": None}])
@pytest.mark.parametrize("arguments", [{"city": "Zürich"}, '{"city": "Zürich"}'])
def test_a_template_that_writes_arguments_as_they_are_gets_json_text_and_one_that_asks_for_none_gets_it(
    content, arguments
):
    called = {"role": "assistant", "tool_calls": [_call(arguments)], **content}
    text = _TEMPLATES["deepseek"].render([_user(), called, {**_RESULT, "content": "sun"}])
    assert text == (
        '<s><|User|>Hi<|Assistant|><|calls|><|call|>function<|sep|>weather\n```json\n{"city": "Zürich"}\n```'
        "<|end_call|><|outputs|><|output|>sun<|end_output|><|end_outputs|>"
    )


@pytest.mark.parametrize("name", ["qwen25", "qwen3", "llama3", "mistral"])
def test_arguments_as_json_text_render_as_the_object_that_they_say(name):
    value = {"city": "Zürich", "days": [1, {"a": None}]}
    as_text = {"role": "assistant", "content": None, "tool_calls": [_call(json.dumps(value))]}
    as_object = {"role": "assistant", "tool_calls": [_call(value)]}
    assert _TEMPLATES[name].render([_user(), as_text]) == _transformers(name, Chat([_user(), as_object]))


def test_arguments_of_an_empty_text_are_no_arguments():
    called = {"role": "assistant", "tool_calls": [_call("")]}
    assert '"arguments": {}' in _TEMPLATES["qwen25"].render([_user(), called])


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
_TEXTS = st.text(max_size=12) | st.sampled_from(
    ["</think>", "<think>\nx\n</think>\n\ny", " a ", "\n", "<tool_response>"]
)
_FUNCTIONS = st.dictionaries(st.text(max_size=4), _VALUES, max_size=3)


def _calls(arguments: st.SearchStrategy) -> st.SearchStrategy:
    call = st.builds(
        lambda value, name: {**_call(value), "function": {"name": name, "arguments": value}}, arguments, _TEXTS
    )
    return st.lists(call, min_size=1, max_size=2)


def _messages(*, texts: bool) -> st.SearchStrategy:
    """Well-formed chats; where `texts`, arguments are JSON text and content is always there."""
    arguments = (
        _FUNCTIONS.map(lambda value: json.dumps(value).replace("NaN", "1").replace("Infinity", "1"))
        if texts
        else _FUNCTIONS
    )
    said = {"role": st.sampled_from(["user", "assistant", "system", "user"]), "content": _TEXTS}
    called = {"role": st.just("assistant"), "tool_calls": _calls(arguments)} | ({"content": _TEXTS} if texts else {})
    one = (
        st.fixed_dictionaries(said, optional={"reasoning_content": _TEXTS, "name": _TEXTS})
        | st.fixed_dictionaries(called, optional={} if texts else {"content": st.none() | _TEXTS})
        | st.fixed_dictionaries({"role": st.just("tool"), "content": _TEXTS, "tool_call_id": st.just("abcdefgh1")})
    )
    return st.lists(one, min_size=1, max_size=5)


@pytest.mark.parametrize("name", _SOURCES)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), tools=st.lists(st.just(_TOOL), max_size=2), goes_on=st.booleans(), prompts=st.booleans())
def test_random_chats_render_as_in_transformers(name, data, tools, goes_on, prompts):
    messages = data.draw(_messages(texts=name == "deepseek"))
    goes_on = goes_on and bool(messages[-1].get("content"))
    chat = Chat(
        messages,
        tools=tools,
        continue_final_message=goes_on,
        add_generation_prompt=prompts and not goes_on,
        variables=data.draw(st.sampled_from([{}, {"enable_thinking": False}, {"date_string": "x"}])),
    )
    _same(name, chat)
