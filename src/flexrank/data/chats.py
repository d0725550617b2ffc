"""Texts of a corpus's rows: plain ones, and chats as the tokenizer's template formats them."""

import datetime
from typing import Any

from flexrank.data.text import BYTE_ORDER_MARK, Tokenizer, encodable
from flexrank.errors import FlexrankError, first_line, short_repr

#: Templates may write the date. A text's hash decides in which part of a corpus it is, so the date is always the one
#: that Llama 3's template falls back to.
DAY = datetime.datetime(2024, 7, 26)
DIRECTIVES = "".join(f"|replace('%{one}', '{DAY.strftime(f'%{one}')}')" for one in "aAbBdHIjmMpSyY")
CLOCK = f"{{%- macro strftime_now(format) -%}}{{{{ format{DIRECTIVES} }}}}{{%- endmacro %}}"


def text_of(value: Any, column: str, tokenizer: Tokenizer) -> str:
    """A text without outer whitespace, or a chat as the chat template formats it; "" for None and for an empty chat.

    The bos token that templates begin with is removed, because batches add it to every text.
    """
    if value is None or value == [] or isinstance(value, str):
        return encodable(value or "").removeprefix(BYTE_ORDER_MARK).strip()
    if not isinstance(value, list) or not all(isinstance(one, dict) and {"role", "content"} <= {*one} for one in value):
        wanted = "expected text, or a chat: a list of messages with role and content"
        raise FlexrankError(f"data.column {column!r} holds {short_repr(value)}; {wanted}")
    if getattr(tokenizer, "chat_template", None) is None:
        right = "take a model whose tokenizer has one, or a column of plain text"
        raise FlexrankError(f"data.column {column!r} holds chats, and the tokenizer has no chat template; {right}")
    writer: Any = tokenizer
    # If one message of a file has a key, all others get it with None, which templates treat as a value.
    messages = [{key: part for key, part in one.items() if part is not None} for one in value]
    try:
        text = writer.apply_chat_template(messages, chat_template=CLOCK + writer.get_chat_template(), tokenize=False)
    except Exception as error:  # a template is a program of its own
        refusal = f"the chat template refuses {short_repr(value)} ({first_line(error)})"
        raise FlexrankError(f"data.column {column!r}: {refusal}") from error
    return encodable(text.removeprefix(getattr(tokenizer, "bos_token", None) or ""))
