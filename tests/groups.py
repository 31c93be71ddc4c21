"""Each process of a run collects a group of tests (`tests/spread.py`) when it is about to run it.

pytest-xdist would have every process collect every test, a fifth of a core's time of a whole run.
For it, a process has collected two items of each group: one that collects and runs the group's
tests, and one that waits for the next group.
"""

import gc
import sys
from collections.abc import Iterator

import pytest
from _pytest.runner import collect_one_node
from tests.shared import end_group
from tests.spread import end_of, group_of, in_order


class GroupItem(pytest.Item):
    """Stands for the tests of a group, or, without any, for the time until the next group."""

    parts: tuple[pytest.Item | pytest.Collector, ...]

    def runtest(self) -> None:
        raise AssertionError("ByGroup runs it")


def make_item(
    session: pytest.Session, nodeid: str, parts: tuple[pytest.Item | pytest.Collector, ...]
) -> GroupItem:
    item: GroupItem = GroupItem.from_parent(session, name=nodeid, nodeid=nodeid)
    item.parts = parts
    item.add_marker(pytest.mark.timeout(0))  # each test has its own
    return item


class ByGroup:
    """The part of pytest, in one of several processes, that collects and runs groups."""

    def __init__(self) -> None:
        self._found = False

    def pytest_collection(self, session: pytest.Session) -> bool:
        session.perform_collect(genitems=False)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item | pytest.Collector]
    ) -> None:
        if self._found:
            return
        self._found = True
        groups: dict[str, list[pytest.Item | pytest.Collector]] = {}
        for part in leaves(session, items):
            groups.setdefault(group_of(part.nodeid), []).append(part)
        items.clear()
        for group in in_order({name: [part.path for part in groups[name]] for name in groups}):
            session.items.append(make_item(session, group, tuple(groups[group])))
            session.items.append(make_item(session, end_of(group), ()))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> bool | None:
        if not isinstance(item, GroupItem):
            return None
        session = item.session
        if not item.parts:
            if nextitem is None:
                session._setupstate.teardown_exact(None)
                end_group()
            return True
        place = session.items.index(item)
        tests = collect(session, item.parts)
        for number, test in enumerate(tests):
            session.items[place] = test  # pytest-xdist looks for what it sends a report of
            following = tests[number + 1] if number + 1 < len(tests) else nextitem
            session.config.hook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.shouldfail or session.shouldstop:
                break
        session.items[place] = item
        return True


def leaves(
    session: pytest.Session, nodes: list[pytest.Item | pytest.Collector]
) -> Iterator[pytest.Item | pytest.Collector]:
    """The files below what was asked for, and what was asked for of single files. None is read."""
    for node in nodes:
        if not isinstance(node, pytest.Directory):
            yield node
            continue
        report = collect_one_node(node)
        session.ihook.pytest_collectreport(report=report)
        yield from leaves(session, report.result or [])


def collect(
    session: pytest.Session, parts: tuple[pytest.Item | pytest.Collector, ...]
) -> list[pytest.Item]:
    """The tests of these parts that the run selects.

    What collection makes lives until the end: see `gc.disable` in tests/conftest.py.
    """
    obeyed, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        items = [item for part in parts for item in session.genitems(part)]
        session.config.hook.pytest_collection_modifyitems(
            session=session, config=session.config, items=items
        )
    finally:
        gc.freeze()
        gc.enable()
        sys.dont_write_bytecode = obeyed
    return items
