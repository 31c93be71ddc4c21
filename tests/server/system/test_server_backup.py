"""A server comes back from an archive, and its database from a point in time of PostgreSQL."""

import os
import pwd
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from tests.system.postgres import PostgresMissing, find, new_database
from tests.system.server_state import (
    follow_to_end,
    home_at,
    home_beside_another,
    home_with_jobs,
    kill_server,
    run_python,
)
from tests.system.tied import start_tied
from tests.waits import PATIENCE_S, START_S, wait_until

from cavvy.client import ApiClient, connect
from cavvy.client.connection import ensure_server, stop_server

pytestmark = pytest.mark.system


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    with home_beside_another(tmp_path) as folder:
        yield folder


def run_server(*arguments: str) -> str:
    code = f"from cavvy.cli.main import cli; cli(['server', *{arguments!r}])"
    out, err = run_python(code).communicate(timeout=PATIENCE_S)
    return out + err


def submit_long(client: ApiClient, name: str, folder: Path) -> None:
    client.submit(f"{{name: {name}, run: 'until [ -e {folder}/go ]; do sleep 0.05; done'}}")
    wait_until(lambda: client.job("default", name).phase == "running")


def log_of(client: ApiClient, name: str) -> bytes:
    return b"".join(client.logs("default", name))


def spoil(archive: Path, folder: Path) -> Iterator[Path]:
    """Copies of the archive that are not as it was written."""
    data = archive.read_bytes()
    with tarfile.open(archive) as members:
        at = members.getmember("cavvy.db").offset_data + 5000
    for name, text in (
        ("cut", data[: len(data) // 2]),
        ("flipped", data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]),
    ):
        (folder / name).write_bytes(text)
        yield folder / name


def test_an_archive_of_a_working_server_is_restored_on_postgresql(
    home: Path, tmp_path: Path
) -> None:
    try:
        url = new_database().replace("+psycopg", "")
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
    archive, new = tmp_path / "archive", tmp_path / "two" / "home"
    ensure_server()
    with connect() as client:
        client.put_secret("default", "S", "planted-value")
        client.submit("{name: first, secrets: [S], run: 'echo said; exit 3'}")
        follow_to_end(client, "first")
        log = log_of(client, "first")
        submit_long(client, "long", tmp_path)
        assert "backed up" in (told := run_server("backup", str(archive))), told
        assert archive.stat().st_mode & 0o077 == 0
        told = run_server("restore", "--dry-run", str(archive))  # the server still works
        assert "nothing was changed" in told, told
        assert not list(home.glob("restore.part*"))
        client.down()
        wait_until(lambda: not client.nodes())
    stop_server()
    with home_at(new):
        for spoiled in spoil(archive, tmp_path):
            assert "cannot be restored" in (told := run_server("restore", str(spoiled))), told
        told = run_server("restore", "--dry-run", str(archive))
        assert "long (project default, attempt 1)" in told, told
        assert not (new / "cavvy.db").exists()
        told = run_server("restore", str(archive), "--database", url)
        assert "restored; start the server" in told, told
        ensure_server()
        check_restored(log)
        again = tmp_path / "again"
        assert "backed up" in (told := run_server("backup", str(again))), told
        stop_server()
        assert "a server with jobs" in run_server("restore", str(archive))
    with home_at(tmp_path / "two" / "third"):
        told = run_server("restore", str(again))  # the other way: from PostgreSQL to SQLite
        assert "restored; start the server" in told, told
        ensure_server()
        with connect() as client:
            assert client.server().database == "sqlite"
            assert client.job("default", "later").exit_code == 0
        stop_server()


def check_restored(log: bytes) -> None:
    with connect() as client:
        assert client.server().database == "postgresql"
        assert log_of(client, "first") == log
        # tests/store/sim/test_restored.py: a job whose nodes are gone runs again
        assert client.job("default", "long").phase == "running"
        client.submit("{name: later, secrets: [S], run: 'test $S = planted-value'}")
        follow_to_end(client, "later")
        assert client.job("default", "later").exit_code == 0


def test_jobs_of_this_machine_continue_or_are_ended_but_run_only_once(
    home: Path, tmp_path: Path
) -> None:
    archive, bad = tmp_path / "archive", tmp_path / "bad"
    ensure_server()
    with connect() as client:
        submit_long(client, "long", tmp_path)
        assert "backed up" in (told := run_server("backup", str(archive))), told
        client.submit("{name: since, run: 'true'}")
    kill_server(home)
    with home_at(tmp_path / "two" / "home"):
        told = run_server("restore", "--dry-run", str(archive))
        assert "still runs here" in told, told
        told = run_server("restore", str(archive))
        assert "long (project default, attempt 1)" in told, told
        assert "hint: end them with `kill " in told, told
    bad.mkdir()
    (home / "cavvy.db").rename(bad / "cavvy.db")
    # SQLite would apply this journal to the restored database
    assert (home / "cavvy.db-wal").stat().st_size
    told = run_server("restore", str(archive))
    assert "it contains cavvy.db-wal" in told, told
    for path in home.glob("cavvy.db*"):
        path.rename(bad / path.name)
    told = run_server("restore", str(archive))
    assert "1 gangs are both in the database and at their providers" in told, told
    ensure_server()
    with connect() as client:
        assert [each.name for each in client.jobs().jobs] == ["long"]
        (tmp_path / "go").touch()
        follow_to_end(client, "long")
        assert client.job("default", "long").exit_code == 0
        assert len(client.job("default", "long").attempts) == 1


class ArchivedPostgres:
    """A PostgreSQL that archives its write-ahead log, as docs/guides/backup.md says."""

    def __init__(self, folder: Path) -> None:
        self._programs = find()
        self._user = "postgres" if os.geteuid() == 0 else None
        self._folder = folder
        self._data = folder / "data"
        self._server: subprocess.Popen[bytes] | None = None
        for each in (folder, folder / "wal"):
            each.mkdir()
            if self._user is not None:
                entry = pwd.getpwnam(self._user)
                os.chown(each, entry.pw_uid, entry.pw_gid)
        self._run("initdb", "-D", self._data, "-U", "cavvy", "-A", "trust", "--no-sync")
        with open(self._data / "postgresql.conf", "a") as settings:
            settings.write(
                "archive_mode = on\n"
                f"archive_command = 'test ! -f {folder}/wal/%f && cp %p {folder}/wal/%f'\n"
                f"restore_command = 'cp {folder}/wal/%f %p'\n"
                f"listen_addresses = ''\nunix_socket_directories = '{folder}'\nfsync = off\n"
            )

    @property
    def url(self) -> str:
        return f"postgresql://cavvy@/postgres?host={self._folder}"

    def start(self) -> None:
        with open(self._folder / "log", "ab") as log:
            self._server = start_tied(
                [self._programs / "postgres", "-D", self._data],
                signal.SIGINT,
                user=self._user,
                cwd=self._folder,
                stdout=log,
                stderr=log,
            )
        wait_until(self._accepts, START_S)

    def stop(self) -> None:
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            self._server.wait(START_S)
            self._server = None

    def base_backup(self) -> None:
        login = ("-h", self._folder, "-U", "cavvy")
        self._run("pg_basebackup", *login, "-D", self._folder / "base", "--checkpoint=fast")

    def execute(self, sql: str) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(sql)  # type: ignore[call-overload]  # a literal of this file

    def return_to(self, point: str) -> None:
        """Replace the data with the base backup and the write-ahead log up to a named point."""
        self.stop()
        shutil.rmtree(self._data)
        (self._folder / "base").rename(self._data)
        with open(self._data / "postgresql.conf", "a") as settings:
            settings.write(
                f"recovery_target_name = '{point}'\nrecovery_target_action = 'promote'\n"
            )
        (self._data / "recovery.signal").touch()
        self.start()

    def _run(self, program: str, *arguments: object) -> None:
        command = [str(self._programs / program), *map(str, arguments)]
        subprocess.run(
            command,
            user=self._user,
            cwd=self._folder,
            check=True,
            timeout=START_S,
            stdout=subprocess.DEVNULL,
        )

    def _accepts(self) -> bool:
        try:
            with psycopg.connect(self.url) as connection:
                row = connection.execute("SELECT pg_is_in_recovery()").fetchone()
        except psycopg.OperationalError:
            return False
        return row == (False,)


@pytest.fixture
def postgres() -> Iterator[ArchivedPostgres]:
    folder = Path(f"/tmp/cavvy-wal-{os.getpid()}-{time.monotonic_ns()}")
    try:
        server = ArchivedPostgres(folder)
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
    try:
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def test_a_job_since_the_point_in_time_is_listed_and_kept_until_a_person_decides(
    postgres: ArchivedPostgres, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    with home_with_jobs(tmp_path / "one" / "home"):
        assert "is running" in run_server("start", "--database", postgres.url)
        postgres.base_backup()
        with connect() as client:
            submit_long(client, "before", tmp_path)
            postgres.execute("SELECT pg_create_restore_point('lunch')")
            submit_long(client, "after", tmp_path)
            since = client.job("default", "after").attempts[-1].gang
        stop_server()
        postgres.execute("SELECT pg_switch_wal()")
        postgres.return_to("lunch")
        told = run_server("restore")
        assert since in told, told
        assert "1 gangs are both in the database and at their providers" in told
        ensure_server()
        with connect() as client:
            assert [each.name for each in client.jobs().jobs] == ["before"]
            found = client.gc(dry_run=True)
            assert [each.name for each in found] == [since]
            assert "restored at" in found[0].why
            (tmp_path / "go").touch()
            follow_to_end(client, "before")
            assert len(client.job("default", "before").attempts) == 1
