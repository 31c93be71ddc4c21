"""Commands wait for a server that migrates its database, however long that takes."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.waits import wait_until

from cavvy.client import launch
from cavvy.client.errors import StartFailed
from cavvy.client.state import end_migration, is_migrating, note_migration
from cavvy.client.transport import Patience
from cavvy.server import embedded
from cavvy.server.state_dir import StateDir
from cavvy.store import migrate

# a server that needs longer than the limit of a start of 1 s, and says why
MIGRATES = """
import os, sys, time
from cavvy.client.state import ServerFile, note_migration, write_server
from datetime import UTC, datetime
home, fd = os.environ["CAVVY_HOME"], int(sys.argv[1])
for _ in range(6):
    {told}
    time.sleep(0.3)
now = datetime.now(UTC)
write_server(home, ServerFile(pid=1, process="", host="", address="unix:x", version="1", api=1,
    revision=1, started_at=now))
os.write(fd, b'{{"state": "ready"}}\\n')
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "config.toml").write_text("[server]\nstart_timeout_s = 1\n")
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "config.toml"))
    return tmp_path / "home"


def start_with(monkeypatch: pytest.MonkeyPatch, told: str, migrates: Path | None = None) -> None:
    def start(words: list[str], **options: Any) -> "subprocess.Popen[bytes]":
        if migrates is not None:  # a busy machine may need the whole second to load the script
            note_migration(str(migrates))
        script = MIGRATES.format(told=told)
        return subprocess.Popen([sys.executable, "-c", script, words[-1]], **options)

    monkeypatch.setattr(launch, "start_process", start)


def test_a_command_waits_for_a_migration_and_says_so(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "QUIET_S", 0.1)
    said: list[str] = []
    start_with(monkeypatch, "note_migration(home)", home)
    assert launch.launch(str(home), Patience(report=said.append)).address == "unix:x"
    assert [each for each in said if "migrating its database" in each] == said[-1:]


def test_a_start_that_is_slow_for_another_reason_is_given_up(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(monkeypatch, "pass")
    with pytest.raises(StartFailed, match="within 1 s"):
        launch.launch(str(home), Patience())


def test_the_server_tells_of_its_migration_until_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "_TELL_S", 0.01)
    home, ended = StateDir(str(tmp_path)), threading.Event()
    thread = threading.Thread(target=embedded._tell_of_migration, args=(home, ended))
    thread.start()
    assert not is_migrating(home.path)
    migrate.running.set()
    try:
        wait_until(lambda: is_migrating(home.path))
    finally:
        migrate.running.clear()
        ended.set()
        thread.join()
    assert not is_migrating(home.path)


def test_a_word_of_a_migration_is_forgotten(tmp_path: Path) -> None:
    assert not is_migrating(str(tmp_path))
    note_migration(str(tmp_path))
    assert is_migrating(str(tmp_path))
    end_migration(str(tmp_path))
    end_migration(str(tmp_path))
    assert not is_migrating(str(tmp_path))
