"""Chats become the texts that transformers' own tokenizers make of them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from prefixd.base.errors import InvalidArgumentError
from prefixd.serving.text.chat_template import Chat, ChatTemplate

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" + system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
THINKS = (
    "{%- set ns = namespace(last=0) -%}{% for message in messages %}{% set ns.last = loop.index0 %}"
    "{% if loop.index0 > 5 %}{% break %}{% endif %}{{ message.role }}: {{ message | tojson }}"
    "{% generation %}{{ message.content }}{% endgeneration %}\n{% endfor %}{{ ns.last }} {{ dict(a=1) }}"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    "{% if tools %}TOOLS{% endif %}"
)
PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content | selectattr('type', 'equalto', "
    "'image') %}<image>{% endfor %}{% for part in message.content | selectattr('type', 'equalto', 'text') %}"
    "{{ part.text }}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
TALK = [
    {"role": "system", "content": " Be <b>brief</b> & kind. "},
    {"role": "user", "content": "Grüß Gott 🙂"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Again"},
]


def chat(*messages: dict[str, Any], begin_answer: bool = True, **variables: Any) -> Chat:
    return Chat(messages, 0, variables, begin_answer)


@pytest.mark.parametrize("template", [CHATML, LLAMA, THINKS])
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
@pytest.mark.parametrize("begin_answer", [False, True])
def test_a_chat_is_rendered_as_transformers_does(template: str, variables: dict[str, Any], begin_answer: bool) -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    expected = tokenizer.apply_chat_template(
        TALK, chat_template=template, tokenize=False, add_generation_prompt=begin_answer, **variables
    )
    ours = ChatTemplate(template, {"bos_token": "<s>", "eos_token": "</s>"})
    assert ours.render(chat(*TALK, begin_answer=begin_answer, **variables)) == expected


def test_content_is_given_in_the_form_that_a_template_reads() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = [{"type": "image"}, {"type": "text", "text": "c"}]
    of_parts, of_both, of_text = (ChatTemplate(source, {}) for source in (PARTS, BOTH, CHATML))
    assert of_parts.render(chat({"role": "u", "content": "text"})) == "[u]text"
    assert of_parts.render(chat({"role": "u", "content": parts}, {"role": "u", "content": image})) == "[u]ab[u]<image>c"
    assert of_both.render(chat({"role": "u", "content": "text"}, {"role": "u", "content": parts})) == "[u]text[u]ab"
    text = of_text.render(chat({"role": "u", "content": parts}, begin_answer=False))
    assert text == "<|im_start|>u\na\nb<|im_end|>\n", "joined by lines"


def test_an_image_gets_the_tokens_that_the_model_wants() -> None:
    template = ChatTemplate(BOTH.replace("<image>", "<begin>"), {}, ["<begin>", "<soft>", "<end>"])
    image = {"role": "u", "content": [{"type": "image"}, {"type": "text", "text": "<soft>"}]}
    assert template.render(chat(image)) == "[u]\n\n<begin><soft><end>\n\n<soft>"
    whole = ChatTemplate(BOTH.replace("<image>", "<begin><soft><end>"), {}, ["<begin>", "<soft>", "<end>"])
    assert whole.render(chat({"role": "u", "content": [{"type": "image"}]})) == "[u]<begin><soft><end>"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[7].content }}", "UndefinedError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ dict.__base__.__subclasses__() }}", "UndefinedError"),
        ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.x }}", "Error"),
        ("{% for i in range(10000000000) %}{% endfor %}", "OverflowError"),
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_one_line(source: str, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        ChatTemplate(source, {}).render(chat(*TALK))
    assert "the model's chat template does not take these messages" in str(caught.value)
    assert "\n" not in str(caught.value)
