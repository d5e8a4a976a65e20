"""Chat templates render as transformers renders them; hostile ones are stopped."""

from __future__ import annotations

import resource
import time
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.core.api.errors import BrokenModel, UsageError
from octavo.core.loading.chat_template import ChatTemplate

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\nBe kind."},
    {"role": "user", "content": "  Grüß dich! <b>1 & 2</b> 🎉  "},
    {"role": "assistant", "content": "Hello.", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": "é"}}}]},
    {"role": "user", "content": [{"type": "text", "text": "And now?"}]},
]
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
]

# Written for these tests in the styles that published models use.
STYLES = {
    "turns between marks": """
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nDefault<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message.content is string %}
        {{- message.content | trim }}
    {%- else %}
        {%- for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
""",
    "tools, macros and state": """
{% macro show(value, name='v') %}{{ name }}={{ value | tojson(indent=2) }};{% endmacro %}
{%- set ns = namespace(last=-1, seen=[]) -%}
{%- for message in messages[::-1] -%}
    {%- set index = (messages | length - 1) - loop.index0 -%}
    {%- if message.role == "user" and ns.last < 0 %}{% set ns.last = index %}{% endif -%}
    {%- set ns.seen = ns.seen + [message.role] -%}
{%- endfor -%}
{{ bos_token }}last={{ ns.last }} {{ ns.seen | unique | join(', ') | upper }}
{% if tools is defined and tools %}{% for tool in tools %}{{ show(tool.function, name='tool') }}{% endfor %}{% endif %}
{% for message in messages %}
{% if message.tool_calls is defined %}
{% for call in message.tool_calls %}{{ call.function.arguments | tojson }}
{% for key, value in call.function.arguments.items() %}{{ key ~ ':' ~ value }} {% endfor %}
{% endfor %}
{% endif %}
{% endfor %}
""",
    "filters and tests": """
{{- messages | map(attribute='role') | list | join('|') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | first).content.split('\\n') | last }}
{{ messages[0]['content'].startswith('Be') and 'brief' in messages[0].content }}
{{ missing | default('nothing') }} {{ none_value | default('empty', true) }}
{{ 'a-b-c'.replace('-', '+') }} {{ '%s/%d' | format('x', 3) }} {{ 'x\\ny' | indent(2) }}
{{ [3, 1, 2] | sort | string }} {{ [1, 2] | sum }} {{ {'b': 1, 'a': 2} | dictsort | list }}
{{ messages[1].content.strip().title() }} {{ 7 // 2 }} {{ 2 ** 5 }} {{ 'ab' * 2 }} {{ 5 % 3 }}
{%- for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ loop.cycle('x', 'y') }}{{ i }}{% endfor %}
""",
    "generation marks": """
{%- for message in messages %}
{%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}
{%- else %}[{{ message.role }}]{% endif %}
{%- endfor %}{{ eos_token }}
""",
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("prompt", [True, False])
def test_templates_render_as_in_transformers(style: str, prompt: bool) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>", "none_value": None}
    expected, _ = render_jinja_template(
        conversations=[CONVERSATION], tools=TOOLS, chat_template=STYLES[style], add_generation_prompt=prompt, **variables
    )
    got = ChatTemplate(STYLES[style]).render(CONVERSATION, add_generation_prompt=prompt, tools=TOOLS, **variables)
    assert got == expected[0]
    assert len(got) > 20


def render(source: str) -> str:
    return ChatTemplate(source).render([{"role": "user", "content": "hi"}], add_generation_prompt=True)


def test_a_template_that_raises_says_why() -> None:
    source = "{% if messages[0].role != 'system' %}{{ raise_exception('A system message must come first') }}{% endif %}"
    with pytest.raises(UsageError, match="refuses these messages: A system message must come first"):
        render(source)


def test_the_date_is_there() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].content.nothing.more }}", "fails on these messages"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ undefined_function() }}", "'undefined_function' is undefined"),
        ("{% include 'other' %}", "fails on these messages"),
    ],
)
def test_a_template_that_fails_on_the_messages_says_so(source: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}",
        "{{ 'a' | no_such_filter }}",
        "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
        "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
        "x" * (1 << 21),
    ],
    ids=["unclosed", "unknown filter", "deep expression", "deep blocks", "gigantic"],
)
def test_what_is_no_template_is_a_broken_model(source: str) -> None:
    with pytest.raises(BrokenModel, match="chat template"):
        ChatTemplate(source)


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ messages.append }}{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ raise_exception.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ self.__init__.__globals__ }}",
    "{{ ('a'.format).__self__ }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ messages | attr('__class__') | attr('__mro__') }}",
    "{{ dict.fromkeys.__self__.__subclasses__() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_reaches_no_python(source: str) -> None:
    try:
        text = render(source)
    except UsageError:
        return
    assert text == ""  # what may not be reached doesn't exist


BOMBS = {
    "empty loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop that prints": "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "a huge range": "{{ range(10 ** 12) | list }}",
    "macros that call macros": "{% macro a0() %}x{% endmacro %}"
    + "".join(f"{{% macro a{i + 1}() %}}{{{{ a{i}() }}}}{{{{ a{i}() }}}}{{% endmacro %}}" for i in range(60))
    + "{{ a60() }}",
    "a macro that calls itself": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "blocks that print blocks": "".join(
        f"{{% block b{i} %}}{f'{{{{ self.b{i + 1}() }}}}' * 8 if i < 9 else 'x'}{{% endblock %}}" for i in range(10)
    ),
    "a recursive loop": "{% for i in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}",
    "doubling with ~": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "doubling with +": "{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "doubling a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "nesting a list": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "nesting a tuple": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = (n.x, n.x) %}{% endfor %}{{ n.x }}",
    "nesting a dict": "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set n.x = {'a': n.x, 'b': n.x} %}{% endfor %}{{ n.x | tojson }}",
    "nesting by dict()": "{% set n = namespace(x=1) %}{% for i in range(60) %}"
    "{% set n.x = dict(a=n.x, b=n.x) %}{% endfor %}{{ n.x | tojson }}",
    "namespaces many times": "{% set n = namespace(x='a' * 1000000) %}{{ ([n] * 100000) | string }}",
    "a namespace in itself": "{% set n = namespace() %}{% set n.a = [n, n] %}{{ n }}",
    "repeating a text": "{{ 'a' * 10 ** 10 }}",
    "repeating a list": "{{ ([1] * 10 ** 10) | length }}",
    "a tower of powers": "{{ 10 ** (10 ** 10) }}",
    "a wide format": "{{ '%9999999999d' | format(1) }}",
    "a wide % operator": "{{ '%(a)9999999999d' % {'a': 1} }}",
    "a computed width": "{{ '%*d' % (9999999999, 1) }}",
    "a wide str.format": "{{ '{:9999999999}'.format(1) }}",
    "a wide indent": "{{ 'a\nb' | indent(9999999999) }}",
    "json with a wide indent": "{{ messages | tojson(indent=9999999999) }}",
    "padding": "{{ 'a'.ljust(9999999999) }}",
    "replacing": "{% set a = 'a' * 1000000 %}{{ a.replace('a', a) }}",
    "the replace filter": "{% set a = 'a' * 1000000 %}{{ a | replace('a', a) }}",
    "joining": "{% set a = 'a' * 1000000 %}{{ ([a] * 1000) | join }}",
    "joining with a long text": "{% set a = 'a' * 1000000 %}{{ a.join(a) }}",
    "mapping a replacement": "{% set b = 'a' * 1000000 %}{{ (['a'] * 1000000) | map('replace', 'a', b) | list | length }}",
    "a long macro many times": "{% macro f() %}" + "x" * 100_000 + "{% endmacro %}"
    "{% for i in range(99999) %}{% set x = f() %}{% endfor %}",
    "searching a list again and again": "{% set l = [1] * 190000 %}{% for i in range(99999) %}"
    "{% if 2 in l %}{% endif %}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_template_that_explodes_is_stopped(bomb: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    with pytest.raises(UsageError, match=r"was stopped|fails on these messages"):
        render(BOMBS[bomb])
    assert time.process_time() - start < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10  # KiB


def test_a_long_conversation_is_no_bomb() -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": f"message {index} " * 200} for index in range(1000)]
    for source in STYLES.values():
        text = ChatTemplate(source).render(messages, add_generation_prompt=True, tools=TOOLS)
        assert text
    assert "message 999" in ChatTemplate(STYLES["turns between marks"]).render(messages, add_generation_prompt=True)


def test_each_rendering_has_a_budget_of_its_own() -> None:
    template = ChatTemplate("{% for i in range(90000) %}{% endfor %}{{ messages[0].content }}")
    for _ in range(4):
        assert template.render([{"role": "user", "content": "hi"}], add_generation_prompt=False) == "hi"


def test_templates_may_not_change_what_they_are_given() -> None:
    messages = [{"role": "user", "content": "hi", "parts": [1]}]
    with pytest.raises(UsageError):
        ChatTemplate("{{ messages[0].parts.append(2) }}").render(messages, add_generation_prompt=False)
    assert messages == [{"role": "user", "content": "hi", "parts": [1]}]
