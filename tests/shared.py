"""Servers that the tests of a group share: the first test that needs one starts it, and it ends
after the last test of the group. What only a test has can be given back when this test ends.

A server that stayed up until its process ends would slow down all tests that follow: an idle
Kubernetes takes a tenth of a core, and an idle Ray cluster more.
"""

import atexit
from collections.abc import Callable, Generator
from functools import wraps
from typing import TypeVar

import pytest
from tests.spread import group_of

T = TypeVar("T")
_ends: list[Callable[[], object]] = []
_test_ends: list[Callable[[], object]] = []


def when_test_ends(end: Callable[[], object]) -> None:
    """Call a function when the present test and its own fixtures are over."""
    _test_ends.append(end)


def when_group_ends(end: Callable[[], object]) -> None:
    """Call a function when the last test of the present group is over, or when the process ends,
    where that comes first.
    """
    if not _ends:
        atexit.register(end_group)
    _ends.append(end)


def end_group() -> None:
    """Call the functions, the latest first, each once."""
    atexit.unregister(end_group)
    while _ends:
        _ends.pop()()


def once_in_group(start: Callable[[], T]) -> Callable[[], T]:
    """Start it at the first call; later calls of the group get the same, or are skipped for the
    same reason without waiting. A group that comes later, or a further try of the last test, starts
    it again.
    """
    made: list[T | pytest.skip.Exception] = []

    @wraps(start)
    def call() -> T:
        if not made:
            when_group_ends(made.clear)
            try:
                made.append(start())
            except pytest.skip.Exception as error:
                made.append(error)
        if isinstance(made[0], pytest.skip.Exception):
            raise made[0]
        return made[0]

    return call


class GroupEnds:
    """The part of pytest that sees the end of a test and the last test of a group; the fixtures
    of that test end before.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, None, None]:
        try:
            yield
        finally:
            while _test_ends:
                _test_ends.pop()()
            if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
                end_group()
