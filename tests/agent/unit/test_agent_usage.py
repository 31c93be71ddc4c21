"""Which processes the agent measures."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from cavvy.agent.work import meters
from cavvy.agent.work.meters import list_below
from cavvy.agent.work.reaper import descendants

_TREE = """
import subprocess, sys, threading
threading.Thread(target=sys.stdin.read, daemon=True).start()
child = subprocess.Popen(["sh", "-c", "read line; true"], stdin=sys.stdin)
made = []
thread = threading.Thread(target=lambda: made.append(subprocess.Popen(["cat"], stdin=sys.stdin)))
thread.start()
thread.join()
print(child.pid, made[0].pid, flush=True)
child.wait()
made[0].wait()
"""


@pytest.fixture
def tree() -> Iterator[tuple[int, set[int]]]:
    """A process, and its children, one of which a thread has started."""
    with subprocess.Popen(
        [sys.executable, "-c", _TREE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process.pid, {int(pid) for pid in process.stdout.readline().split()}
        process.kill()


def test_all_processes_below_are_found(tree: tuple[int, set[int]]) -> None:
    process, children = tree
    assert set(list_below(process)) == set(descendants(process)) == children
    assert {process, *children} <= set(list_below(os.getpid())), "children of children too"
    assert set(list_below(process, process)) == children


def test_work_with_many_threads_is_found_among_all_processes(
    tree: tuple[int, set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    process, children = tree
    monkeypatch.setattr(meters, "THREADS", 0)
    asked: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        meters, "descendants", lambda *roots: asked.append(roots) or descendants(*roots)
    )
    assert set(list_below(process)) == children
    assert asked == [(process,)]


def test_a_process_that_has_ended_has_nothing_below() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert list_below(ended.pid) == []
