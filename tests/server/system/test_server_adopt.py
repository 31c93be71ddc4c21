"""An embedded server's jobs move from SQLite to PostgreSQL while one of them runs."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.postgres import PostgresMissing, new_database
from tests.system.server_state import follow_to_end, home_at, home_beside_another, run_python
from tests.waits import PATIENCE_S, wait_until

from cavvy.client import StartFailed, connect
from cavvy.client.account_wire import AccountClient, TokenAsk
from cavvy.client.connection import ensure_server, stop_server
from cavvy.client.state import server_holds_lock

pytestmark = pytest.mark.system


@pytest.fixture
def url() -> str:
    try:
        return new_database().replace("+psycopg", "")
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_beside_another(tmp_path) as folder:
        yield folder


def run_adopt(*options: str) -> str:
    code = f"from cavvy.cli.main import cli; cli(['server', 'adopt', *{options!r}])"
    out, err = run_python(code).communicate(timeout=PATIENCE_S)
    return out + err


def fill(home: Path) -> None:
    """One job that ended, one that runs, a secret, and an account with a token."""
    with connect() as client:
        client.put_secret("default", "S", "planted-value")
        client.submit("{name: first, run: 'echo first-said; exit 3'}")
        follow_to_end(client, "first")
        accounts = AccountClient(client)
        accounts.add_account("ada", "user")
        accounts.create_token(TokenAsk(account="ada", label="x", expires_s=3600))
        client.submit(
            f"{{name: long, secrets: [S], run: 'until [ -e {home.parent}/go ]; do sleep 0.05; "
            "done; echo has-$S; exit 4'}"
        )
        wait_until(lambda: client.job("default", "long").phase == "running")


def check_moved(home: Path) -> None:
    with connect() as client:
        assert client.server().database == "postgresql"
        assert client.job("default", "first").exit_code == 3
        assert [each.name for each in AccountClient(client).accounts()] == ["ada"]
        assert client.job("default", "long").phase == "running"
        (home.parent / "go").touch()
        follow_to_end(client, "long")
        job = client.job("default", "long")
        assert (job.exit_code, len(job.attempts)) == (4, 1)
        client.submit("{name: later, secrets: [S], run: 'test $S = planted-value'}")
        follow_to_end(client, "later")
        assert client.job("default", "later").exit_code == 0


def test_a_running_job_continues_on_postgresql(home: Path, url: str) -> None:
    ensure_server()
    fill(home)
    assert "stop this server first" in run_adopt("--database", url)
    assert "expected postgresql://" in run_adopt("--database", "mysql://x")
    stop_server()
    told = run_adopt("--database", url)
    assert "moved 2 jobs" in told, told
    assert not (home / "cavvy.db").exists()
    # as after a crash before the file was renamed
    (home / "cavvy.db.moved").rename(home / "cavvy.db")
    assert "had moved 2 jobs" in run_adopt("--database", url)
    ensure_server()
    check_moved(home)
    stop_server()
    assert "were already moved (cavvy.db.moved exists)" in run_adopt("--database", url)
    (home / "cavvy.db.moved").rename(home / "cavvy.db")
    # later changes exist only in PostgreSQL
    assert "has rows already" in run_adopt("--database", url)
    assert (home / "cavvy.db").exists()


def test_a_server_moves_to_another_folder_when_no_job_runs(
    home: Path, url: str, tmp_path: Path
) -> None:
    new = tmp_path / "two" / "home"
    ensure_server()
    with connect() as client:
        client.put_secret("default", "S", "planted-value")
        client.submit(f"{{name: long, run: 'until [ -e {tmp_path}/go ]; do sleep 0.05; done'}}")
        wait_until(lambda: client.job("default", "long").phase == "running")
    stop_server()
    options = ("--database", url, "--from", str(home))
    with home_at(new):
        assert "jobs of " in (told := run_adopt(*options)), told
    ensure_server()
    (tmp_path / "go").touch()
    with connect() as client:
        follow_to_end(client, "long")
        # the agent still uses the folder until it has said what it left
        wait_until(lambda: client.job("default", "long").attempts[-1].phase == "ended")
    stop_server()
    with home_at(new):
        assert "moved 1 jobs" in (told := run_adopt(*options)), told
        ensure_server()
        with connect() as client:
            assert client.job("default", "long").exit_code == 0
            client.submit("{name: later, secrets: [S], run: 'test $S = planted-value'}")
            follow_to_end(client, "later")
            assert client.job("default", "later").exit_code == 0
            client.down()
            wait_until(lambda: not client.nodes())
        stop_server()
    with pytest.raises(StartFailed, match=str(new)):
        ensure_server()
    wait_until(lambda: not server_holds_lock(str(home)))
