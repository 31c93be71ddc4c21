"""Lines that a program draws again, such as progress bars, while a job is followed on a terminal."""

import os
import sys
import tty
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.unit.test_cli_follow import read_screen
from tests.unit.cli_client import make_job

from cavvy.cli.view.screen import RedrawnLines, open_screen
from cavvy.domain.tasks import TaskSpec

UP = "\x1b[A"


def shown(chunks: Iterable[str]) -> tuple[list[str], list[str]]:
    """The finished and the unfinished lines after these chunks."""
    lines = RedrawnLines()
    finished = [line for chunk in chunks for line in lines.take(chunk.encode())]
    return finished, lines.unfinished()


def test_the_newest_state_of_a_bar_is_its_line() -> None:
    assert shown(["start\n", "\r  0%|  |", "\r 10%|# |", "\r"]) == (["start"], [" 10%|# |"])
    assert shown(["\r 10%|# |", "\r100%|##|\n", "done\r\n"]) == (["100%|##|", "done"], [])
    # rich, pip and others erase the line; Keras goes back with backspaces
    assert shown(["a long line\r\x1b[2Kshort", "\r\x1b[Kx"]) == ([], ["x"])
    assert shown(["1/9", "\x08" * 3 + "\r2/9", "\x08" * 3, "3/9"]) == ([], ["3/9"])
    assert shown(["work |", "\x08/", "\x08-"]) == ([], ["work -"])


def test_an_unfinished_line_keeps_its_colors_and_characters() -> None:
    assert shown(["\x1b[3", "2mgreen\x1b[0m", "\r\x1b[31mred\x1b[0m"]) == (
        [],
        ["\x1b[31mred\x1b[0m"],
    )
    lines = RedrawnLines()
    whole = "█é".encode()
    for at in range(len(whole)):
        lines.take(whole[at : at + 1])
    assert lines.unfinished() == ["█é"]


def test_nested_bars_stay_below_each_other() -> None:
    """tqdm draws the bar at position 1 after a newline, and then moves up again."""
    chunks = ["begin\n", "\router 0/2"]
    for outer in range(2):
        for inner in range(3):
            chunks += [f"\n\rinner {inner}/3{UP}"]
        chunks += [f"\n\r         \r{UP}", f"\router {outer + 1}/2"]
    assert shown(chunks[:4]) == (["begin"], ["outer 0/2", "inner 1/3"])
    assert shown(chunks) == (["begin"], ["outer 2/2"])
    # each write arrives alone: the first newline finishes the outer bar once
    alone = [piece for chunk in chunks for piece in chunk.replace(UP, "|" + UP).split("|")]
    finished, unfinished = shown([*alone, "\nend\n"])
    assert (finished, unfinished) == (["begin", "outer 0/2", "outer 2/2"], ["end"])


def test_no_control_character_reaches_the_terminal() -> None:
    title, screen, reset = "\x1b]0;title\x07", "\x1b[2J\x1b[10;10H\x1b[?25l", "\x9b\x1bc\x07"
    assert shown([f"a{title}b{screen}c{reset}\n", "d\x1b[?25l"]) == (["abc"], ["d"])
    assert shown(["x\x1b["])[1] == ["x"]


def test_moves_far_beyond_the_screen_add_few_lines() -> None:
    finished, unfinished = shown(["\x1b[99999999Aup\x1b[99999999Bdown\x1b[5Fend"])
    assert not finished
    assert len(unfinished) < 20


@given(st.lists(st.text(alphabet="ab\n")))
def test_plain_output_stays_as_it_is(chunks: list[str]) -> None:
    finished, unfinished = shown(chunks)
    assert "\n".join([*finished, *unfinished]).rstrip("\n") == "".join(chunks).rstrip("\n")


@given(st.lists(st.text(alphabet="ab\n\r\x08\x1b[1ABKm;█")))
def test_any_output_is_followed(chunks: list[str]) -> None:
    finished, unfinished = shown(chunks)
    assert all("\n" not in line and "\r" not in line for line in [*finished, *unfinished])


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_bar_is_shown_before_its_line_ends(monkeypatch: pytest.MonkeyPatch, nodes: int) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    job = make_job("x", "running", task=TaskSpec(name="x", run="true", nodes=nodes))
    master, slave = os.openpty()
    with os.fdopen(slave, "w") as out:
        tty.setraw(slave)
        monkeypatch.setattr(sys, "stdout", out)
        with open_screen(job) as screen:
            for rank in range(nodes):
                screen.log(rank, b"first\n\r 10%|#" + b" " * 50 + b"|")
            screen.live.refresh()  # type: ignore[attr-defined]  # as its thread does
            live = [
                "".join(part.text for part in line)
                for line in screen.live.console.render_lines(screen.live.renderable)  # type: ignore[attr-defined]
            ]
            for rank in range(nodes):
                screen.log(rank, b"\r100%|##|\n")
        out.flush()
        written = read_screen(master)
    os.close(master)
    before = [f"[{rank}] " if nodes > 1 else "" for rank in range(nodes)]
    assert [line.rstrip() for line in live[:-1]] == [f"{each} 10%|#" for each in before]
    assert "x" in live[-1]
    for each in before:
        assert f"{each} 10%|#" in written
        assert f"{each}100%|##|" in written
