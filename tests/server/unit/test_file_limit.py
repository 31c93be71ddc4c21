"""Cavvy raises its limit on open files, and says so if the limit is too low."""

import os
import resource
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cavvy.client.errors import Unreachable
from cavvy.client.file_limit import CODE, LEAST
from cavvy.client.transport import ClientConnection
from cavvy.server.state_dir import home_error
from cavvy.store.drivers import make_driver, translate

CODE_TO_RAISE = """
import resource
from cavvy.client.file_limit import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
raise_file_limit(65536)
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(("hard", "soft"), [(300, 300), (5000, 5000), (70_000, 65_536)])
def test_the_limit_is_raised_as_far_as_permitted(hard: int, soft: int) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[1] < hard:
        pytest.skip(f"the hard limit of this process is below {hard}: run `ulimit -Hn {hard}`")
    command = [sys.executable, "-c", CODE_TO_RAISE.format(hard=hard)]
    told = subprocess.run(command, capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(soft), str(hard)]


def run_limited(limit: str, command: list[str], home: Path) -> "subprocess.CompletedProcess[str]":
    """Run a command after `ulimit LIMIT`."""
    script = f'ulimit {limit}; exec "$@"'
    return subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "CAVVY_HOME": str(home)},
    )


@pytest.mark.parametrize("limit", [8, 16, 24, LEAST - 1])
def test_commands_name_a_limit_that_is_too_low(limit: int, tmp_path: Path) -> None:
    told = run_limited(f"-n {limit}", ["-m", "cavvy", "ps"], tmp_path)
    assert told.returncode == 1
    assert f"a process may have only {limit} files open" in told.stderr
    assert f"at least {LEAST}" in told.stderr
    assert "hint: raise the limit: `ulimit -n 4096`" in told.stderr
    assert not list(tmp_path.iterdir())


def test_the_server_names_a_limit_that_is_too_low(tmp_path: Path) -> None:
    told = run_limited("-n 24", ["-m", "cavvy.server.embedded"], tmp_path)
    assert told.returncode == 1
    assert f"{CODE}: a process may have only 24 files open" in told.stderr
    assert not list(tmp_path.iterdir())


def test_commands_raise_a_low_soft_limit(tmp_path: Path) -> None:
    told = run_limited("-S -n 16", ["-m", "cavvy", "server", "logs"], tmp_path)
    assert "files open" not in told.stderr


@pytest.fixture
def no_files() -> Iterator[None]:
    """Leave this process no file descriptor."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    opened: list[int] = []
    try:
        with suppress(OSError):
            while True:
                opened.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        for each in opened:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("no_files")
def test_a_client_without_files_does_not_blame_the_server() -> None:
    with pytest.raises(Unreachable) as raised:
        ClientConnection("http://127.0.0.1:9").request("GET", "/", {})
    assert raised.value.code == CODE
    assert "all 200 files that this process may have open" in raised.value.message


def test_a_database_that_cannot_be_opened_for_lack_of_files(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    driver = make_driver(f"sqlite:///{tmp_path / 'cavvy.db'}", journal="wal")
    request.getfixturevalue("no_files")
    with pytest.raises(sqlite3.OperationalError) as raised:
        driver.connect()
    told = str(translate(raised.value, driver))
    assert "this process has too many files open; raise its limit" in told
    assert "owner" not in told


@pytest.mark.usefixtures("no_files")
def test_a_state_folder_that_cannot_be_opened_for_lack_of_files() -> None:
    with pytest.raises(OSError, match="Too many") as raised:
        os.open("/dev/null", os.O_RDONLY)
    assert home_error("/state", raised.value).code == CODE
