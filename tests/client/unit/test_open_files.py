"""The server warns before it has no file descriptors left."""

import os
import resource
from collections.abc import Iterator

import pytest

from cavvy.client.file_limit import OpenFilesCheck


@pytest.fixture
def opened() -> Iterator[list[int]]:
    """The files that a test opens, until it has 200 more than what other tests of this process have
    left open. A limit is one of the descriptors' numbers.
    """
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    limit = max(200, 11 * highest)
    assert limit <= before[1], "too many files are open"
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    descriptors: list[int] = []
    try:
        yield descriptors
    finally:
        for each in descriptors:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("left", [0, 5])
def test_it_warns_once_until_files_are_closed(
    opened: list[int], left: int, caplog: pytest.LogCaptureFixture
) -> None:
    check = OpenFilesCheck()
    check.look()
    assert not caplog.records
    try:
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        for _ in range(left):
            os.close(opened.pop())
    check.look()
    check.look()
    assert len(caplog.records) == 1
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert f"of at most {limit} open files" in caplog.text
    while opened:
        os.close(opened.pop())
    check.look()
    assert len(caplog.records) == 1
