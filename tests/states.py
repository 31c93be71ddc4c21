"""A test that fails shows the state of its servers, which end before anybody can look at them."""

from collections.abc import Generator, Iterator
from subprocess import SubprocessError
from typing import Any, Protocol, runtime_checkable

import pytest

_TITLE = "state of "
_MOST = 4000  # characters of one state


@runtime_checkable
class TellsState(Protocol):
    """A fixture's value that can tell what its servers do."""

    def tell_state(self) -> str: ...


class StateReport:
    """The part of pytest that asks the fixtures of a test that failed."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "call" and call.excinfo is not None and not report.skipped:
            report.sections.extend(_ask(getattr(item, "funcargs", {})))
        return report


def states_of(report: pytest.TestReport) -> list[str]:
    """What `StateReport` has added to a report."""
    return [text for title, text in report.sections if title.startswith(_TITLE)]


def _ask(fixtures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in fixtures.items():
        if isinstance(value, TellsState):
            try:
                text = value.tell_state()
            except (AssertionError, OSError, ValueError, SubprocessError) as error:
                text = f"it cannot be told: {error!r}"
            yield f"{_TITLE}{name}", text[-_MOST:]
