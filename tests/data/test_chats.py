"""Chats as texts of a stream: what a tokenizer's template writes, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from flexrank.data.chats import text_of
from flexrank.data.stream import open_texts
from flexrank.errors import FlexrankError
from tiny import WordTokenizer

TOKENIZER = WordTokenizer()


class ChatTokenizer(WordTokenizer):
    """With transformers' own writer of chats."""

    bos_token = "<s>"
    chat_template: str | None = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{% if m.name is defined %} by {{ m.name }}{% endif %};{% endfor %}"
    )

    def get_chat_template(self) -> Any:
        return self.chat_template

    def apply_chat_template(self, messages: Any, chat_template: str, tokenize: bool = True) -> Any:
        from transformers.utils.chat_template_utils import render_jinja_template

        assert not tokenize
        texts, _ = render_jinja_template([messages], chat_template=chat_template, bos_token=self.bos_token)
        return texts[0]


def test_a_chat_is_what_its_template_writes(tmp_path: Path) -> None:
    chats = [[{"role": "user", "content": "one"}, {"role": "assistant", "content": "two", "name": "x"}], [], None]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    parquet.write_table(pyarrow.table({"messages": chats}), tmp_path / "a.parquet")
    for source in ("jsonl", "parquet"):
        texts = list(open_texts(source, str(tmp_path), ChatTokenizer()).texts())
        assert texts == ["[user] one;[assistant] two by x;"]


def test_half_a_character_becomes_a_question_mark(tmp_path: Path) -> None:
    r"""Of a pair of escapes that a file has cut in two; both together are the character."""
    path = tmp_path / "a.jsonl"
    path.write_text(r'{"text": "cut \ud83d"}' + "\n" + r'{"text": "\ude00 \ud83d\ude00 é"}' + "\n")
    assert list(open_texts("jsonl", str(path), TOKENIZER).texts()) == ["cut ?", "? \U0001f600 é"]
    path.write_text(r'{"messages": [{"role": "user", "content": "cut \ud83d"}]}')
    assert list(open_texts("jsonl", str(path), ChatTokenizer()).texts()) == ["[user] cut ?;"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (7, "'c' holds 7; expected text, or a chat"),
        ([{"role": "user"}], "holds .*; expected text, or a chat: a list of messages with role and content"),
        (["one"], "holds .*; expected text, or a chat"),
        ([{"role": "system", "content": "x"}], "the chat template refuses .* \\(no system\\)"),
    ],
)
def test_a_value_that_is_no_text_is_one_line(value: Any, message: str) -> None:
    with pytest.raises(FlexrankError, match=message) as caught:
        text_of(value, "c", ChatTokenizer())
    assert "\n" not in str(caught.value)


def test_a_chat_is_the_same_text_on_every_day() -> None:
    """Llama 3's template writes the date, by which the hash of the text would move the chat to another part."""
    tokenizer = ChatTokenizer()
    tokenizer.chat_template = (
        "{%- if strftime_now is defined %}{%- set day = strftime_now('%d %b %Y') %}{% endif %}"
        "{{ day }}, {{ strftime_now('%A, %Y-%m-%d %H:%M') }}: {{ messages[0].content }}"
    )
    expected = "26 Jul 2024, Friday, 2024-07-26 00:00: x"
    assert text_of([{"role": "user", "content": "x"}], "c", tokenizer) == expected


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{{ 'a'.index('b') }}", "{{ messages[0].none.none }}"])
def test_a_template_that_fails_is_one_line(template: str) -> None:
    tokenizer = ChatTokenizer()
    tokenizer.chat_template = template
    with pytest.raises(FlexrankError, match="data.column 'c': the chat template refuses .*"):
        text_of([{"role": "user", "content": "x"}], "c", tokenizer)


def test_a_chat_needs_a_template() -> None:
    assert text_of([], "c", TOKENIZER) == text_of(None, "c", TOKENIZER) == ""  # of nothing, which templates may refuse
    with pytest.raises(FlexrankError, match="'c' holds chats, and the tokenizer has no chat template; take"):
        text_of([{"role": "user", "content": "x"}], "c", TOKENIZER)
