"""The server on PostgreSQL: what it remembers, and which set-ups it refuses."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.server_state import (
    follow_to_end,
    home_at,
    home_beside_another,
    kill_server,
    run_python,
)
from tests.waits import PATIENCE_S, wait_until

from cavvy.client import StartFailed, connect
from cavvy.client.connection import ensure_server, stop_server
from cavvy.client.state import read_server, server_holds_lock

pytestmark = pytest.mark.system
DATABASE, FILES = "CAVVY_SERVER_DATABASE", "CAVVY_SERVER_FILES"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_beside_another(tmp_path) as folder:
        yield folder


def refusal() -> StartFailed:
    with pytest.raises(StartFailed) as caught:
        ensure_server()
    return caught.value


def start_with(url: str) -> str:
    code = f"from cavvy.cli.main import cli; cli(['server', 'start', '--database', {url!r}])"
    out, err = run_python(code).communicate(timeout=PATIENCE_S)
    return out + err


def test_the_database_is_remembered_and_jobs_outlive_their_server(home: Path, url: str) -> None:
    assert "the server is running" in start_with(url)
    assert "a server is running" in start_with(url)  # refused: it would have no effect
    with connect() as client:
        assert client.server().database == "postgresql"
        client.submit(
            f"{{name: long, run: 'until [ -e {home.parent}/go ]; do sleep 0.05; done; exit 3'}}"
        )
        wait_until(lambda: client.job("default", "long").phase == "running")
        kill_server(home, signal.SIGKILL)
        (home.parent / "go").touch()
        follow_to_end(client, "long")  # the client starts a new server, which needs no option
        assert client.job("default", "long").exit_code == 3
        assert len(client.job("default", "long").attempts) == 1
    assert not (home / "cavvy.db").exists()
    assert (home / "database").stat().st_mode & 0o077 == 0


def test_a_server_with_other_files_is_refused(home: Path, url: str, tmp_path: Path) -> None:
    twin = tmp_path / "two" / "home"
    with home_at(home, **{DATABASE: url}):
        first = ensure_server()
        twin.mkdir(mode=0o700)
        for name in ("files.id", "key", "agents.key"):  # a copy of the folder is not the folder
            if (home / name).exists():
                (twin / name).write_bytes((home / name).read_bytes())
        with home_at(twin, **{DATABASE: url}):
            refused = refusal()
        assert refused.code == "settings-invalid"
        assert f"process {first.pid} on {first.host}" in refused.message
        assert read_server(str(home)) == first
        with home_at(tmp_path / "two" / "other", **{DATABASE: url, FILES: str(home)}):
            refused = refusal()  # jobs on this machine could read its folder
        assert "could read the state folder" in refused.message
        stop_server()
        with home_at(tmp_path / "two" / "third", **{DATABASE: url}):
            refused = refusal()  # its folder lacks the keys, logs and files
        assert refused.code == "settings-invalid"
        assert f"in {home} on" in refused.message
        ensure_server()


@pytest.mark.parametrize("alone", [False, True], ids=["beside it", "after it has ended"])
def test_a_server_that_hangs_is_replaced_and_shares_the_work_when_it_wakes_up(
    home: Path, url: str, alone: bool
) -> None:
    with home_at(home, **{DATABASE: url}):
        first = ensure_server()
        with home_at(home / "twin", **{DATABASE: url, FILES: str(home)}):
            ensure_server()
            os.kill(first.pid, signal.SIGSTOP)
            try:
                with connect() as client:
                    client.submit("{name: taken, run: 'true'}")
                    follow_to_end(client, "taken")
                if alone:
                    stop_server()
            finally:
                os.kill(first.pid, signal.SIGCONT)
            stop_server()
        with connect() as client:
            assert [each.phase for each in client.jobs().jobs] == ["done"]
            client.submit("{name: more, run: 'true'}")
            follow_to_end(client, "more")
            assert read_server(str(home)) == first


def test_a_folder_with_jobs_in_sqlite_is_not_hidden_behind_another_database(
    home: Path, url: str
) -> None:
    ensure_server()
    stop_server()
    with home_at(home, **{DATABASE: url}):
        refused = refusal()
        assert refused.code == "settings-invalid"
        assert "cavvy.db" in refused.message
    with home_at(home, **{DATABASE: "mysql://somewhere"}):
        assert "expected postgresql://" in refusal().message
    ensure_server()


def test_a_newer_database_is_refused_before_anything_is_changed(home: Path, url: str) -> None:
    import psycopg

    with home_at(home, **{DATABASE: url}):
        ensure_server()
        stop_server()
        with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
            connection.execute("UPDATE cavvy_revision SET version_num = '0999'")
        refused = refusal()
        assert refused.code == "database-unusable"
        assert "revision 0999" in refused.message
        wait_until(lambda: not server_holds_lock(str(home)))
