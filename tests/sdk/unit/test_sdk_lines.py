"""Lines of a log that arrives in chunks."""

from hypothesis import given
from hypothesis import strategies as st

from cavvy.client import LogChunk
from cavvy.sdk.job import read_lines


def chunk(data: bytes, attempt: int = 1) -> LogChunk:
    return LogChunk(data=data, attempt=attempt, offset=0, over=False)


def lines(*chunks: LogChunk) -> list[str]:
    return [line for part in read_lines(chunks) for line in part]


@given(st.lists(st.text("ab\n\ré")))
def test_lines_do_not_depend_on_the_chunks(parts: list[str]) -> None:
    whole = "".join(parts)
    expected = [line.removesuffix("\r") for line in whole.removesuffix("\n").split("\n")]
    data = whole.encode()
    cut = [data[at : at + 3] for at in range(0, len(data), 3)]  # also within a character
    assert lines(*map(chunk, cut)) == (expected if whole else [])


def test_the_next_attempt_starts_a_line() -> None:
    assert lines(chunk(b"one\ntw"), chunk(b"", 2), chunk(b"three\n", 2)) == ["one", "tw", "three"]


def test_bytes_that_are_no_text_are_replaced() -> None:
    assert lines(chunk(b"a\xff\n")) == ["a\ufffd"]


def test_a_line_is_given_as_soon_as_it_is_complete() -> None:
    parts = read_lines(iter([chunk(b"one\ntwo"), chunk(b"!\n")]))
    assert next(parts) == ["one"]
    assert next(parts) == ["two!"]
