"""How errors of other libraries are quoted."""

from flexrank.errors import first_line


def test_the_first_line_that_says_something_is_quoted() -> None:
    assert first_line(ValueError("\n  one \ntwo\n")) == "one"
    assert first_line(EOFError(" \n")) == "EOFError"
