"""Conversations: DeepSeek's published template, where a template may lie, and what it may not do."""

import json

import pytest

from mla_fx.effects import InputError
from mla_fx.models.chat import ChatTemplate
from mla_fx.models.tokenizer import Tokenizer
from tests.models.test_tokenizer import PUBLISHED, small_vocabulary

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "2+2?"},
]


def render(source, messages=TURNS, **variables):
    return ChatTemplate(source, "file", {"bos_token": "<b>"}).render(messages, **variables)


@pytest.fixture
def made(tmp_path):
    """A directory with a small vocabulary, a configuration, and perhaps a template of its own."""

    def make(jinja=None, **config):
        (tmp_path / "tokenizer.json").write_text(json.dumps(small_vocabulary()))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        return Tokenizer(tmp_path)

    return make


def test_the_published_template():
    """Several turns and a system's, as transformers 4.57 renders them; the numbers are those it gave."""
    tokenizer = Tokenizer(PUBLISHED)
    text = "<｜begin▁of▁sentence｜>Be brief.<｜User｜>Hi<｜Assistant｜>Hello!<｜end▁of▁sentence｜><｜User｜>2+2?"
    assert tokenizer.template.render(TURNS, add_generation_prompt=False) == text
    assert tokenizer.template.render(TURNS) == text + "<｜Assistant｜>"
    tokens = tokenizer.chat(TURNS)
    assert tokens == [0, 7153, 9708, 16, 128803, 23166, 128804, 19923, 3, 1, 128803, 20, 13, 20, 33, 128804]
    assert tokens.count(0) == 1  # written by the template, and not put in front once more


def test_where_a_template_lies(made):
    """Its own file comes first; of several with names the default one."""
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "i"}]
    assert made(chat_template="H").chat(TURNS) == [2]
    assert made(chat_template=named).chat(TURNS) == [3]
    assert made("HH", chat_template="H").chat(TURNS) == [2, 2]


def test_none(made, tmp_path):
    for tokenizer in (made(), made(chat_template=[{"name": "tool_use", "template": "no"}])):
        with pytest.raises(InputError) as raised:
            tokenizer.chat(TURNS)
        assert str(raised.value) == (
            f"chat_template: must be in chat_template.jinja or tokenizer_config.json of {tmp_path}: got none"
        )
    with pytest.raises(
        InputError, match=r"chat_template: must be a text, or a list with a text named 'default': got 3$"
    ):
        made(chat_template=3).chat(TURNS)


def test_what_a_template_is_given():
    assert (
        render("{{ bos_token }}{{ messages | length }}{{ add_generation_prompt }}{{ tools is none }}") == "<b>4TrueTrue"
    )
    assert render("{{ thinking }}", thinking=3) == "3"
    assert render("{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }},{% endfor %}") == (
        "system,user,"
    )
    assert render("{{ {'a': '<é>'} | tojson }}") == '{"a": "<é>"}'
    assert render("{{ strftime_now('%Y') | length }}") == "4"
    assert render("  {% if true %}\nx\n  {% endif %}\n") == "x\n"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('no system') }}", "the template refuses the messages: no system"),
        ("{% if %}", "the template refuses the messages: .*"),
        ("{{ nobody.name }}", "the template refuses the messages: 'nobody' is undefined"),
        ("{{ 1 / 0 }}", "the template failed: ZeroDivisionError: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "the template refuses the messages: access to attribute '__class__' .*"),
        ("{{ messages.append(1) }}", r"the template refuses the messages: access to attribute .* is unsafe\."),
        ("{{ messages[0].clear() }}", r"the template refuses the messages: access to attribute .* is unsafe\."),
        ("{{ range(10 ** 9) | list }}", "the template failed: OverflowError: .*"),
        ("{% include '/etc/passwd' %}", "the template failed: TypeError: no loader for this environment specified"),
    ],
)
def test_what_a_template_may_not_do(source, message):
    before = json.dumps(TURNS)
    with pytest.raises(InputError, match=f"^file: {message}$"):
        render(source)
    assert json.dumps(TURNS) == before


@pytest.mark.parametrize("messages", [[], "Hi", {"role": "user", "content": "Hi"}])
def test_messages_that_are_no_list(messages):
    with pytest.raises(InputError, match=r"^messages: must be a list of at least one: got "):
        render("x", messages)


@pytest.mark.parametrize("message", ["Hi", {"role": "user"}, {"content": "Hi"}, {"role": 3, "content": "Hi"}])
def test_messages_that_are_none(message):
    with pytest.raises(InputError, match=r"^messages: each must have a role and a content: got "):
        render("x", [message])
