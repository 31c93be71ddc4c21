"""What all tests share, and what is different in CI.

There, property tests draw the same cases every time, so that a run can be repeated; and a test of real servers that
fails is tried a second time, because the machine is noisy. Every second try is listed in the run's summary: one that
needs it again and again is a defect.
"""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# A shell starts what it puts into the background with these ignored, and every program that a test starts would
# inherit that.
for number in (signal.SIGINT, signal.SIGQUIT):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number is signal.SIGINT else signal.SIG_DFL)

REAL_SERVERS = ("tests/system/", "tests/contract/test_provider_", "tests/api/")

settings.register_profile("ci", derandomize=True, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    root = Path(__file__).resolve().parent.parent
    for item in items if os.environ.get("CI") else ():
        if item.path.relative_to(root).as_posix().startswith(REAL_SERVERS):
            item.add_marker(pytest.mark.flaky(reruns=1, reruns_delay=1))
