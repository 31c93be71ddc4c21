"""Reports that a process of a run can send to the main process.

pytest-xdist sends text as UTF-8. A test that fails or logs with half of a surrogate pair, as paths
and other systems' bytes have, would otherwise end the whole run with an internal error.
"""

from collections.abc import Generator
from typing import Any

import pytest


@pytest.hookimpl(wrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, Any]:
    return make_sendable((yield))


def make_sendable(value: Any) -> Any:
    """Return the value with `\\udcff` written out wherever its texts have such half a pair."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {make_sendable(key): make_sendable(each) for key, each in value.items()}
        case list():
            return [make_sendable(each) for each in value]
        case tuple():
            return tuple(make_sendable(each) for each in value)
    return value
