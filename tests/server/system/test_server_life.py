"""The embedded server's life: started by whoever needs it, one per home, gone when idle, back
after kill -9.
"""

import json
import os
import signal
import socket
import sqlite3
import stat
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from click.testing import CliRunner
from tests.system.server_state import home_at, kill_server, run_python, wait_until
from tests.waits import PATIENCE_S

from cavvy.cli.main import cli
from cavvy.client import (
    ApiClient,
    ApiError,
    IncompatibleVersions,
    StartFailed,
    Unreachable,
    connect,
    launch,
)
from cavvy.client.client import REVISION
from cavvy.client.connection import ensure_server, stop_server
from cavvy.client.state import ServerFile, read_server, read_token, server_holds_lock, write_server

pytestmark = pytest.mark.system
ASK_PID = "from cavvy.client import connect; print(connect().server().pid)"


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_at(tmp_path / "home") as folder:
        yield folder


def change(home: Path, **facts: object) -> None:
    """Make server.json say something else."""
    server = read_server(str(home))
    assert server is not None
    write_server(str(home), msgspec.structs.replace(server, **facts))


def pid_of(home: Path) -> int:
    with connect() as client:
        return client.server().pid


def test_many_commands_at_once_start_one_server(home: Path) -> None:
    commands = [run_python(ASK_PID) for _ in range(6)]
    told = [(*command.communicate(timeout=PATIENCE_S), command.returncode) for command in commands]
    assert [(err, code) for _, err, code in told] == [("", 0)] * 6
    assert len({out for out, _, _ in told}) == 1


def test_the_server_outlives_the_command_and_its_session(home: Path) -> None:
    out, _ = run_python(ASK_PID).communicate(timeout=PATIENCE_S)
    server = int(out)
    assert os.getsid(server) == server
    assert pid_of(home) == server


def test_only_its_user_can_reach_it(home: Path) -> None:
    server = ensure_server()
    path = server.address.removeprefix("unix:")
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700
    for name in ("token", "server.json", "server.log", "server.lock", "cavvy.db"):
        assert stat.S_IMODE(os.stat(home / name).st_mode) == 0o600, name
    with ApiClient(server.address, "wrong") as client, pytest.raises(ApiError) as caught:
        client.server()
    assert (caught.value.status, caught.value.code) == (401, "unauthorised")


def test_kill_9_leaves_nothing_in_the_way(home: Path) -> None:
    first = pid_of(home)
    assert kill_server(home) == first
    assert (home / "server.json").exists()
    assert (home / "server.sock").exists()
    assert pid_of(home) != first


def test_a_client_survives_the_end_of_its_server(home: Path) -> None:
    with connect() as client:
        first = client.server().pid
        kill_server(home)
        assert client.server().pid != first


def test_a_paused_server_is_not_called_stopped(home: Path) -> None:
    pid = pid_of(home)
    (home / "server.json").rename(home / "aside")
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(Unreachable, match="is running, but does not answer") as caught:
            connect(start=False)
    finally:
        os.kill(pid, signal.SIGCONT)
        (home / "aside").rename(home / "server.json")
    assert caught.value.code == "server-unreachable"


def test_an_older_server_is_named_by_its_status(home: Path) -> None:
    pid_of(home)
    server = read_server(str(home))
    assert server is not None
    write_server(str(home), msgspec.structs.replace(server, revision=0))
    status = CliRunner().invoke(cli, ["server", "status"])
    assert status.exit_code == 1
    assert "is older than this command" in status.output
    assert "cavvy server restart" in status.output


def test_nothing_is_started_where_that_is_not_wanted(home: Path) -> None:
    with pytest.raises(Unreachable) as caught:
        connect(start=False)
    assert caught.value.code == "server-not-running"
    pid_of(home)
    kill_server(home)
    with pytest.raises(Unreachable), connect(start=False) as client:
        client.server()
    assert not server_holds_lock(str(home))


def test_it_stops_by_itself_when_idle(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_SERVER_IDLE_STOP_S", "1")
    pid_of(home)
    wait_until(lambda: not server_holds_lock(str(home)))
    assert not (home / "server.json").exists()
    assert "the server is idle" in (home / "server.log").read_text()


def test_sigterm_ends_it_cleanly_even_while_somebody_waits(home: Path) -> None:
    pid_of(home)
    assert kill_server(home, signal.SIGTERM) is not None
    assert not (home / "server.json").exists()
    assert not (home / "server.sock").exists()
    assert '"stopped"' in (home / "server.log").read_text()


def test_stop_waits_for_the_end(home: Path) -> None:
    assert stop_server() is False
    ensure_server()
    assert stop_server() is True
    assert not server_holds_lock(str(home))


def test_a_newer_command_replaces_an_older_server(home: Path) -> None:
    first = pid_of(home)
    change(home, version="0.0.1")
    second = pid_of(home)
    assert second != first
    change(home, api=0)
    assert pid_of(home) not in (first, second)


def test_an_older_command_works_with_a_newer_server_of_the_same_language(home: Path) -> None:
    first = pid_of(home)
    change(home, version="99.0.0", revision=REVISION + 1)
    assert pid_of(home) == first
    change(home, api=2, version="99.0.0")
    with pytest.raises(IncompatibleVersions) as caught:
        connect()
    assert caught.value.code == "client-too-old"
    assert "update this command: " in caught.value.hint
    assert "pip install --upgrade" not in caught.value.hint


def test_a_later_process_with_the_same_id_is_never_signalled(home: Path) -> None:
    """server.json names this very process, whose mark is another: asking it to stop must not end
    it.
    """
    ensure_server()
    change(
        home, pid=os.getpid(), process="1@boot", address=f"unix:{home}/nobody.sock", version="0.0.1"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cavvy.client.connection._STOP_WAIT_S", 0.2)
        with pytest.raises(StartFailed) as caught:
            stop_server()
    assert caught.value.code == "server-does-not-stop"
    change(home, **_real(home))


def _real(home: Path) -> dict[str, object]:
    """What the lock's holder is, for the test's own cleaning up."""
    inode = os.stat(home / "server.lock").st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}"):
            from cavvy.client.state import process_mark

            return {"pid": int(fields[4]), "process": process_mark(int(fields[4]))}
    raise AssertionError("nobody holds the lock")


def test_wrong_settings_reach_who_started_it(home: Path) -> None:
    (home.parent / "settings.toml").write_text("[server]\nidle = 3\n")
    with pytest.raises(StartFailed) as caught:
        connect()
    assert caught.value.code == "settings-invalid"
    assert "server.idle" in caught.value.message


def test_a_provider_that_does_not_exist_reaches_who_started_it(home: Path) -> None:
    (home.parent / "settings.toml").write_text("[providers.nonesuch]\nx = 3\n")
    with pytest.raises(StartFailed) as caught:
        connect()
    assert caught.value.code == "settings-invalid"
    assert "nonesuch" in caught.value.message


def test_a_database_from_the_future_is_refused_with_what_to_do(home: Path) -> None:
    ensure_server()
    stop_server()
    with sqlite3.connect(home / "cavvy.db") as database:
        database.execute("UPDATE cavvy_revision SET version_num = '9999'")
    database.close()
    with pytest.raises(StartFailed) as caught:
        connect()
    assert caught.value.code == "database-unusable"
    assert "9999" in caught.value.message


def test_a_damaged_database_is_refused(home: Path) -> None:
    home.mkdir(mode=0o700)
    (home / "cavvy.db").write_bytes(b"this is no database, and long enough to be read as one" * 100)
    with pytest.raises(StartFailed) as caught:
        connect()
    assert caught.value.code == "database-unusable"


def test_a_crash_while_starting_shows_the_end_of_the_log(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cavvy.client.launch._MODULE", "cavvy.no_such_module")
    with pytest.raises(StartFailed) as caught:
        connect()
    assert caught.value.code == "server-start-failed"
    assert "No module named cavvy.no_such_module" in caught.value.message


def test_a_long_home_puts_the_socket_elsewhere(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60) / "home"
    deep.parent.mkdir(parents=True)
    (deep.parent / "run").mkdir()
    with home_at(deep):
        server = ensure_server()
        assert server.address.startswith(f"unix:/tmp/cavvy-{os.getuid()}/")
        assert pid_of(deep) == server.pid
        assert kill_server(deep, signal.SIGTERM) == server.pid
        assert not os.path.exists(server.address.removeprefix("unix:"))


def test_a_home_on_nfs_has_its_socket_on_this_host(tmp_path: Path) -> None:
    folder, mounts = tmp_path / "home", tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nfiler:/x {tmp_path} nfs4 rw 0 0\n")
    # the path of a socket ends at 107 characters, which those below tmp_path may exceed
    with (
        TemporaryDirectory(prefix="cavvy-run-") as run,
        home_at(folder, CAVVY_MOUNTS_FILE=str(mounts), XDG_RUNTIME_DIR=run),
    ):
        server = ensure_server()
        assert server.address.startswith(f"unix:{run}/cavvy/")
        assert sqlite3.connect(folder / "cavvy.db").execute("PRAGMA journal_mode").fetchone() == (
            "delete",
        )
        kill_server(folder)
        write_server(str(folder), msgspec.structs.replace(server, host="other-host"))
        with connect() as client, pytest.raises(StartFailed) as caught:
            client.server()
        assert caught.value.code == "server-elsewhere"
        assert "other-host" in caught.value.message
        os.utime(folder / "server.beat", (1, 1))  # silent for long: that server or its host is gone
        with connect() as client:
            assert client.server().host == socket.gethostname()


def test_another_home_may_not_be_opened_to_others(home: Path) -> None:
    home.mkdir(mode=0o755)
    ensure_server()
    assert stat.S_IMODE(os.stat(home).st_mode) == 0o700


def test_loopback_tcp_takes_the_token_too(home: Path) -> None:
    (home.parent / "settings.toml").write_text("[server]\nlisten = '127.0.0.1:0'\n")
    server = ensure_server()
    assert server.listen is not None
    with ApiClient(server.listen, read_token(str(home))) as client:
        assert (client.server().pid, client.server().listen) == (server.pid, server.listen)
    with (
        ApiClient(server.listen, "") as client,
        pytest.raises(ApiError, match="does not belong to this server"),
    ):
        client.server()


def test_other_machines_are_never_served(home: Path) -> None:
    (home.parent / "settings.toml").write_text("[server]\nlisten = '0.0.0.0:0'\n")
    with pytest.raises(StartFailed, match="other machines can reach"):
        connect()


def test_server_json_is_readable_by_older_and_newer_programs(home: Path) -> None:
    ensure_server()
    facts = json.loads((home / "server.json").read_text())
    (home / "server.json").write_text(json.dumps({**facts, "from_the_future": 1}))
    assert isinstance(read_server(str(home)), ServerFile)


def test_a_refusal_reaches_who_still_sends(home: Path) -> None:
    """The server says that a body is too large as soon as it knows, and does not take the rest."""
    ensure_server()
    with connect() as client, pytest.raises(ApiError) as caught:
        client.submit("x" * (64 << 20))
    assert (caught.value.status, caught.value.code) == (413, "too-large")


def test_slow_clients_are_in_nobodys_way(home: Path) -> None:
    server = ensure_server()
    slow = []
    try:
        for part in (
            b"GET /v1/heal",
            b"POST /v1/gc HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n",
            b"",
        ) * 20:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.connect(server.address.removeprefix("unix:"))
            connection.sendall(part)
            slow.append(connection)
        assert pid_of(home) == server.pid
    finally:
        for connection in slow:
            connection.close()


def test_a_job_lives_on_while_its_server_is_replaced(home: Path) -> None:
    with connect() as client:
        first = client.server().pid
        client.submit(f"{{name: on, run: 'while [ ! -e {home.parent}/go ]; do sleep 0.05; done'}}")
        wait_until(lambda: client.job("default", "on").phase == "running")
    change(home, version="0.0.1")
    with connect() as client:
        assert client.server().pid != first
        (home.parent / "go").touch()
        for _ in client.follow("default", "on"):
            pass
        job = client.job("default", "on")
        assert (job.phase, job.attempt) == ("done", 1)


ANEW = """
import asyncio, os, sys
from cavvy.server import embedded
from cavvy.control.control_plane import ControlPlane
from cavvy.store.sql import Store

def execv(path, words):
    print("anew:", *words[1:])
    sys.exit(0)

os.execv = execv
{patch}
embedded.main([])
print("ended")
"""


def test_a_job_that_comes_while_it_stops_for_idleness_is_not_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_SERVER_IDLE_STOP_S", "1")
    patch = """
real = Store.unfinished
async def unfinished(self):
    return ["a job that just came"] if embedded.stopped else await real(self)
Store.unfinished = unfinished
forget = embedded.StateDir.forget
def forgotten(self, **options):
    embedded.stopped = True
    forget(self, **options)
embedded.stopped = False
embedded.StateDir.forget = forgotten
"""
    out, err = run_python(ANEW.format(patch=patch)).communicate(timeout=PATIENCE_S)
    assert out == "anew: -P -m cavvy.server.embedded\n", err


def test_a_server_without_control_starts_anew_and_says_why(home: Path) -> None:
    patch = """
async def broken(self):
    raise RuntimeError("a bug in control")
ControlPlane._run = broken
"""
    out, err = run_python(ANEW.format(patch=patch)).communicate(timeout=PATIENCE_S)
    assert out == "anew: -P -m cavvy.server.embedded\n", err
    assert "a bug in control" in err


HANGS = """
import sys, threading
if "cavvy.server.embedded" in sys.orig_argv:
    def hang():
        while True:
            threading.Event().wait(60)
    threading.Thread(target=hang, name="of-a-library").start()
"""


def test_a_stop_that_says_stopped_has_stopped_also_if_a_thread_hangs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that the server uses has started a thread that never ends."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setattr(launch, "start_process", subprocess.Popen)  # not one that is prepared
    pid = pid_of(home)
    stopped = CliRunner().invoke(cli, ["server", "stop"], prog_name="cavvy")
    assert stopped.exit_code == 0, stopped.output
    assert "the server has stopped" in stopped.output
    with suppress(FileNotFoundError):  # as a child of this process, it is a zombie
        assert ") Z " in Path(f"/proc/{pid}/stat").read_text()
    log = (home / "server.log").read_text()
    assert "a thread does not end, and is killed with the process: of-a-library" in log
