"""Chat templates: as transformers renders them, in a sandbox, with bounds."""

from __future__ import annotations

import re
import time
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from intarsia.errors import CheckpointError, IntarsiaError, InvalidRequestError
from intarsia.text import ChatTemplate
from intarsia.types import Chat

_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

_CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

_MISTRAL = """{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- set ns = namespace(index=0) %}
{%- for message in loop_messages %}
    {%- if (message["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("After the optional system message, roles must alternate user/assistant") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + message["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- " " + message["content"]|trim + eos_token}}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported") }}
    {%- endif %}
{%- endfor %}
"""

_GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('System role not supported') }}{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' -}}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""

_ODD = """{% macro turn(message, depth=1) -%}
[{{ depth }}|{{ message | tojson }}|{{ message.content ~ depth ~ none }}|{{ 7 * 100000000 + 2 ** 10 }}|{{ 'ab' * 3 }}]
{%- endmacro %}
{% set pairs = dict(a=1, b='é<&>') %}
{% for key, value in pairs.items() | sort %}{{ key }}={{ value | tojson(indent=2) }};{% endfor %}
{% for message in messages if message.role != 'system' %}
  {% if loop.index > 3 %}{% break %}{% endif %}
  {% if message.content == 'skip' %}{% continue %}{% endif %}
  {{ turn(message, loop.index0) }}{{ loop.length }}{{ loop.last }}{{ loop.previtem.content if loop.previtem }}
  {% generation %}{{ message.content | upper | indent(2) }}{% endgeneration %}
{% else %}
nobody
{% endfor %}
{% for n in [[1, [2]], 3] recursive %}{{ loop(n) if n is iterable else n }}{% endfor %}
{{ 'x'.ljust(4) ~ '|' ~ '%5.2f' % 3.14159 ~ '{:>4}'.format(7) }}{% set ns = namespace(a=[]) %}
{% set ns.a = ns.a + [1] %}{{ ns.a }}{{ [4, 5] + [6] }}{{ missing }}
{% set block %} a {{ messages[0].role }}{% endset %}{% set filtered | upper | trim %} b {% endset %}
{{ block ~ filtered }}{% macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}
{% filter upper %}c{% endfilter %}{% call(x) twice() %}<{{ x }}>{% endcall %}
{{ messages | map(attribute='role') | join(',') }}
"""

_TEMPLATES = {"chatml": _CHATML, "llama 3": _LLAMA3, "mistral": _MISTRAL, "gemma": _GEMMA, "odd": _ODD}


def _user(content: object = "Hi", **more: object) -> dict[str, object]:
    return {"role": "user", "content": content, **more}


_CHATS = {
    "one": [_user("  Hello there \n")],
    "system": [
        {"role": "system", "content": "Be brief. é\U0001f600"},
        _user(),
        {"role": "assistant", "content": " ok "},
        _user("skip"),
    ],
    "long": [_user("a<&>'\"\\"), {"role": "assistant", "content": "b"}] * 4 + [_user("last")],
    "two users": [_user("a"), _user("b")],
}


_REFUSED = {("mistral", "two users"), ("gemma", "system")}


def _transformers(template: str, messages: list[dict[str, object]]) -> str:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), **_TOKENS)
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)


@pytest.mark.parametrize("chat", _CHATS)
@pytest.mark.parametrize("name", _TEMPLATES)
def test_a_chat_renders_as_in_transformers(name, chat):
    template, messages = ChatTemplate(_TEMPLATES[name], _TOKENS), _CHATS[chat]
    if (name, chat) in _REFUSED:
        with pytest.raises(TemplateError) as expected:
            _transformers(_TEMPLATES[name], messages)
        with pytest.raises(InvalidRequestError, match=re.escape(str(expected.value))):
            template.render(messages)
    else:
        assert template.render(messages) == _transformers(_TEMPLATES[name], messages)


def test_text_parts_go_to_templates_that_loop_over_them_and_are_joined_for_others():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ChatTemplate(_GEMMA, _TOKENS).render([_user(parts)]) == _transformers(_GEMMA, [_user(parts)])
    assert ChatTemplate(_CHATML, _TOKENS).render([_user(parts)]) == _transformers(_CHATML, [_user("one\ntwo")])


def test_content_of_none_reaches_the_template():
    template = ChatTemplate("{% for m in messages %}{{ 'empty' if m.content is none else m.content }}{% endfor %}", {})
    assert template.render([{"role": "assistant", "content": None}]) == "empty"


def test_the_date_is_todays():
    before = datetime.now().strftime("%Y-%m-%d")
    rendered = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}", {}).render([_user()])
    assert rendered in (before, datetime.now().strftime("%Y-%m-%d"))


def test_special_tokens_cannot_take_the_place_of_the_messages():
    assert ChatTemplate("{{ messages[0].content }}", {"messages": "no"}).render([_user()]) == "Hi"


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "messages: an empty list"),
        ("Hi", "messages: str"),
        (None, "messages: NoneType"),
        ({"role": "user"}, "messages: dict"),
        (["Hi"], r"messages\[0\]: 'Hi'"),
        ([_user(), {"content": "Hi"}], r"messages\[1\].role: None"),
        ([_user(), {"role": 3, "content": "Hi"}], r"messages\[1\].role: 3"),
        ([_user(), _user(), {"role": "user"}], r"messages\[2\].content: it is missing"),
        ([_user(), _user(), _user(5)], r"messages\[2\].content: 5"),
        ([_user({"type": "text", "text": "a"})], r"messages\[0\].content: \{"),
        ([_user([{"type": "image"}])], r"messages\[0\].content\[0\]: \{'type': 'image'\}"),
        ([_user(["a"])], r"messages\[0\].content\[0\]: 'a'"),
        ([_user(b"Hi")], r"messages\[0\].content: b'Hi'"),
        ([_user(tool=object())], r"messages\[0\].tool: <object"),
        ([_user(tool={1: 2})], r"messages\[0\].tool: \{1: 2\}"),
    ],
)
def test_a_malformed_message_is_refused_by_its_path(messages, named):
    with pytest.raises(InvalidRequestError, match=f"^{named}") as refused:
        ChatTemplate(_CHATML, _TOKENS).render(messages)
    assert refused.value.field is not None and refused.value.field.startswith("messages")


def test_a_message_that_holds_itself_is_refused():
    message = _user()
    message["again"] = message
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        ChatTemplate(_CHATML, _TOKENS).render([message])


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.binary(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.integers(), inner, max_size=3),
    max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
    {}, optional={"role": st.sampled_from(["user", "assistant", "system", ""]) | _JSON, "content": st.text() | _JSON}
)


@settings(max_examples=300, deadline=None)
@given(name=st.sampled_from(sorted(_TEMPLATES)), messages=st.lists(_MESSAGE | _JSON, max_size=4) | _JSON)
def test_random_chats_render_or_are_invalid_requests(name, messages):
    template = _COMPILED[name]
    try:
        assert isinstance(template.render(messages), str)
    except IntarsiaError as error:
        assert type(error) is InvalidRequestError


_COMPILED = {name: ChatTemplate(source, _TOKENS) for name, source in _TEMPLATES.items()}


def test_a_templates_own_refusal_is_passed_on():
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        ChatTemplate(_GEMMA, _TOKENS).render([{"role": "system", "content": "x"}])


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ 'a", "{% for x in y %}", "{{ x | no_such_filter }}", "{{ " + "(" * 500 + "1"]
)
def test_a_template_that_does_not_compile_is_reported_when_a_chat_is_asked_for(source):
    template = ChatTemplate(source, {})
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template: it does not compile"):
        template.render([_user()])


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''['__class__'] }}",
        "{{ '' | attr('__class__') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ '{a.__class__}'.format_map({'a': 1}) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__code__ }}",
        "{{ messages | map(attribute='__class__') | list }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{% set n = namespace() %}{% set n.__html__ = 1 %}",
        "{% set n = namespace(__html__=1) %}",
    ],
)
def test_reaching_out_of_the_sandbox_is_an_invalid_request(source):
    with pytest.raises(InvalidRequestError, match="sandbox"):
        ChatTemplate(source, {}).render([_user()])


_SHARING = (
    "{% set n = namespace(a=['x'], b=['x'], t=(1,)) %}{% for i in range(40) %}"
    "{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% set n.t = (n.t, n.t) %}{% endfor %}"
)


@pytest.mark.parametrize(
    "use",
    [
        "{{ n.a }}",
        "{{ n }}",
        "{{ n.a ~ 'x' }}",
        "{{ n.a | tojson }}",
        "{{ n.a | join }}",
        "{{ n.a | pprint }}",
        "{{ [n.a] | map('string') | list }}",
        "{{ [{'k': n.a}] | map(attribute='k') | join }}",
        "{{ '%s' % n.a }}",
        "{{ '%s' | format(n.a) }}",
        "{{ '{}'.format(n.a) }}",
        "{{ {'k': n.a}.items() }}",
        "{{ n.a == n.b }}",
        "{{ n.a in [n.b] }}",
        "{{ n.a is eq(n.b) }}",
        "{{ [n.a] | select('eq', n.b) | list }}",
        "{{ [n.a, n.b] | sort }}",
        "{{ [{'k': n.a}, {'k': n.b}] | groupby('k') }}",
        "{{ [n.a].count(n.b) }}",
        "{{ {n.t: 1} }}",
        "{{ {}[n.t] }}",
        "{{ raise_exception(n.a) }}",
        "{% macro f(x) %}{{ x }}{% endmacro %}{{ f(n.a) }}",
        "{% for i in range(40) %}{% set n.a = (n.a + n.a) | batch(2) | list %}{% endfor %}{{ n.a }}",
    ],
)
def test_lists_that_hold_one_another_many_times_are_stopped_before_they_are_written_out(use):
    began = time.monotonic()
    with pytest.raises(InvalidRequestError, match="is stopped: a value of size"):
        ChatTemplate(_SHARING + use, {}).render([_user()])
    assert time.monotonic() - began < 10  # where they are not, one takes minutes and all memory


def test_lists_that_are_not_written_out_may_hold_what_they_like():
    assert ChatTemplate(_SHARING + "{{ n.a | length }}{{ n.a[0] | first | count }}", {}).render([_user()]) == "22"


@pytest.mark.parametrize(
    "use",
    [
        "{{ tools is none }}",
        "{{ 1 if tools is not none and tools }}",
        "{{ tools | length }}",
        "{{ (tools | first)['type'] == m.role }}",
        "{% macro f(x) %}{% endmacro %}{{ f(tools) }}",
    ],
)
def test_what_templates_ask_of_each_message_does_not_look_through_all_tools(use):
    schema = {"properties": {f"p{index}": {"type": "string"} for index in range(100)}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}] * 50
    chat = Chat([_user()] * 1000, tools=tools)
    began = time.thread_time()
    ChatTemplate("{% for m in messages %}" + use + "{% endfor %}", {}).render(chat)
    assert time.thread_time() - began < 1  # looking through them takes seconds


def test_a_template_cannot_change_the_callers_messages():
    messages = [_user(tags=["a"])]
    template = ChatTemplate("{% set _ = dict(messages[0], role='x') %}{% set messages = [] %}done", {})
    assert template.render(messages) == "done"
    assert messages == [_user(tags=["a"])]


_NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "source",
    [
        _NESTED.replace("BODY", ""),
        _NESTED.replace("BODY", "{% continue %}"),
        _NESTED.replace("BODY", "x" * 1000),
        "{% for a in range(99999) if range(99999) | list | length < 0 %}{% endfor %}",
        "{% macro f(n) %}{% for a in range(50) %}{{ f(n + 1) }}{% endfor %}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
        "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% for a in range(9) recursive %}{% if loop.depth < 30 %}{{ loop(range(9)) }}{% endif %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s + n.s %}{% endfor %}",
        "{% set n = namespace(s=[1]) %}{% for a in range(99) %}{% set n.s = n.s * 2 %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for a in range(99) %}{% set n.s = n.s * n.s %}{% endfor %}",
        "{% set n = namespace(s=3) %}{% for a in range(99) %}{% set n.s = n.s ** 999 %}{% endfor %}",
        "{% macro f(s) %}{{ s }}{{ s }}{% endmacro %}"
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = f(n.s) %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}{% endfor %}",
        "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = [n.s, n.s] | join %}{% endfor %}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 10 ** 9 * 'x' }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ [1] | slice(10 ** 9) | list }}",
        "{{ 'x'.ljust(10 ** 9) }}",
        "{{ range(10 ** 9) }}",
    ],
)
def test_a_template_that_takes_too_much_is_stopped_soon(source):
    template = ChatTemplate(source, {})
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError, match=r"chat template is stopped|RecursionError|Range too big"):
        template.render([_user()])
    assert time.perf_counter() - start < 20  # the limit is 3 seconds, on a machine of its own


def test_a_rendering_that_was_stopped_leaves_the_next_one_its_whole_budget():
    source = "{% for a in range(messages[0].content | length) %}{% for b in range(99999) %}{% endfor %}{% endfor %}ok"
    template = ChatTemplate(source, {})
    with pytest.raises(InvalidRequestError):
        template.render([_user("x" * 50)])
    assert template.render([_user("x")]) == template.render([_user("x")]) == "ok"


def test_a_chat_of_many_long_turns_is_not_stopped():
    messages = [_user("word " * 100)] * 10_000
    assert len(ChatTemplate(_CHATML, {}).render(messages)) > 5_000_000
