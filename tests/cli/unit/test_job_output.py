"""What a terminal gets of the output of a job."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cavvy.cli.view.job_output import EscapeFilter

HOSTILE = [
    b"\x1b]0;title\x07",
    b"\x1b]2;title\x1b\\",
    b"\x1b]52;c;cm0gLXJm\x07",
    b"\x1b]8;;file:///etc\x1b\\",
    b"\x1b[2J",
    b"\x1b[H",
    b"\x1b[1;1H",
    b"\x1b[3A",
    b"\x1b[6n",
    b"\x1b[c",
    b"\x1b[?1049h",
    b"\x1b[21t",
    b"\x1b[?25l",
    b"\x1bc",
    b"\x1b(0",
    b"\x1b#8",
    b"\x1b7",
    b"\x1bPq#0;2;0\x1b\\",
    b"\x1b_Ga=T;AAAA\x1b\\",
    b"\x1b^pm\x1b\\",
    b"\x1bXsos\x1b\\",
    b"\x1b\x1b[2J",
    b"\x1b[1\x1b[2J",
    b"\x1b[>4;2m",
    b"\x1b[?4m",
    b"\x1b[ q",
    b"\x0e",
    b"\x0f",
    b"\x07",
    b"\x05",
    b"\x7f",
    "\x9b2J".encode()[:2],
    "\x9d0;x\x9c".encode()[:2],
]
COLOURS = [b"\x1b[m", b"\x1b[0m", b"\x1b[1;31m", b"\x1b[38;5;196m", b"\x1b[38:2::1:2:3m"]


@pytest.mark.parametrize("code", HOSTILE)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_escape_sequences_do_not_reach_a_terminal(code: bytes, step: int) -> None:
    data = b"before" + code + b"after\n"
    screen = EscapeFilter()
    shown = b"".join(screen.take(data[at : at + step]) for at in range(0, len(data), step))
    assert shown + screen.take(b"", final=True) == b"beforeafter\n"


@pytest.mark.parametrize("code", COLOURS)
@pytest.mark.parametrize("step", [1, 3, 1000])
def test_colours_and_redrawn_lines_are_shown(code: bytes, step: int) -> None:
    data = b"\t50 %\r" + code + "grün 漢字 🎉".encode() + b"\b\x1b[0m\r\n"
    screen = EscapeFilter()
    assert b"".join(screen.take(data[at : at + step]) for at in range(0, len(data), step)) == data


@pytest.mark.parametrize("begin", [b"\x1b]0;", b"\x1bP", b"\x1b[", b"\x1b(", b"\x1b]52;c;"])
def test_a_sequence_without_an_end_hides_only_its_line(begin: bytes) -> None:
    screen = EscapeFilter()
    assert screen.take(begin + b"1" * 100).strip(b"1") == b""
    assert screen.take(b"\nnext line\n") == b"\nnext line\n"
    long = EscapeFilter()
    assert long.take(begin + b"1" * 10_000 + b"shown").endswith(b"shown")


def test_bytes_that_are_not_utf_8_control_no_terminal() -> None:
    screen = EscapeFilter()
    assert screen.take(b"a\x9b2Jb\xff\n") == "a\ufffd2Jb\ufffd\n".encode()


@given(st.lists(st.one_of(st.binary(max_size=9), st.sampled_from([*HOSTILE, *COLOURS]))))
def test_whatever_comes_only_colours_are_left_of_it(parts: list[bytes]) -> None:
    screen = EscapeFilter()
    shown = b"".join(map(screen.take, parts)) + screen.take(b"", final=True)
    text = re.sub(r"\x1b\[[0-9;:]*m", "", shown.decode())
    assert not re.search(r"[\x00-\x07\x0b\x0c\x0e-\x1f\x7f-\x9f]", text)
