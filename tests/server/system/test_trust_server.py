"""The embedded server under awkward commands, homes, disks and databases, always with real jobs
at work.
"""

import os
import signal
import sqlite3
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest
from tests.system.trust import User, check_clean, user_at, wait_until
from tests.waits import PATIENCE_S

from cavvy.client.state import read_server, server_holds_lock, write_server
from cavvy.store import migrate
from cavvy.store.drivers import make_driver

pytestmark = pytest.mark.system


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        yield user


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder for sockets, whose paths end at 107 characters: those below tmp_path may be longer."""
    with TemporaryDirectory(prefix="cavvy-run-") as folder:
        yield Path(folder)


def gate(user: User) -> str:
    """Shell that waits until the test lets it go on."""
    return f"while [ ! -e {user.root}/go ]; do sleep 0.05; done"


def working(user: User) -> str:
    """A job that began and waits; it counts its starts and tells both ends of its work."""
    run = f"echo $CAVVY_ATTEMPT >> {user.root}/starts; echo begin; {gate(user)}; echo end"
    name = user.submit(f"{{name: on, run: '{run}'}}")
    wait_until(lambda: user.said(name) == "begin\n")
    return name


def check_went_through(user: User, name: str) -> None:
    """Let the job go on to its end: it ran once, and its log is whole."""
    (user.root / "go").touch()
    job = user.ended(name)
    assert (job.phase, job.attempt) == ("done", 1)
    assert (user.root / "starts").read_text() == "1\n"
    assert user.log(name) == "begin\nend\n"
    check_clean(user)


def change(user: User, **facts: object) -> None:
    """Make server.json tell something else."""
    server = read_server(str(user.home))
    assert server is not None
    write_server(str(user.home), msgspec.structs.replace(server, **facts))


# Commands


def test_ten_commands_at_once_start_one_server(user: User) -> None:
    files = [user.task(f"{{name: n{i}, run: 'echo {i}'}}", f"{i}.yaml") for i in range(3)]
    commands = [user.start("run", file) for file in files] + [user.start("ps") for _ in range(7)]
    told = [(*command.communicate(timeout=PATIENCE_S), command.returncode) for command in commands]
    assert [code for _, _, code in told] == [0] * 10, told
    assert [out for out, _, _ in told[:3]] == ["0\n", "1\n", "2\n"]
    assert (user.home / "server.log").read_text().count('"serving"') == 1
    assert [len(user.job(f"n{i}").attempts) for i in range(3)] == [1, 1, 1]
    check_clean(user)


def test_it_stops_when_idle_and_the_next_command_finds_everything(user: User) -> None:
    user.variables["CAVVY_SERVER_IDLE_STOP_S"] = "1"
    user.cli("run", user.task("{name: before, run: echo kept}"))
    user.forget()
    wait_until(lambda: not server_holds_lock(str(user.home)))
    assert not user.left()
    assert user.log("before") == "kept\n"
    assert user.json("ps")[0]["phase"] == "done"


def test_a_newer_command_replaces_the_server_under_a_job(user: User) -> None:
    name = working(user)
    first = user.server()
    change(user, version="0.0.1", revision=0)
    user.forget()
    wait_until(lambda: user.cli("ps").count("running") == 1)
    assert user.server() not in (None, first)
    check_went_through(user, name)


def test_who_follows_does_not_notice_a_restart(user: User) -> None:
    command = user.start(
        "run", user.task(f"{{name: on, run: 'echo begin; {gate(user)}; echo end; exit 4'}}")
    )
    wait_until(lambda: user.has("on") and user.said("on") == "begin\n")
    user.forget()
    for _ in range(2):
        user.cli("server", "restart")
    (user.root / "go").touch()
    out, err = command.communicate(timeout=PATIENCE_S)
    assert (out, command.returncode) == ("begin\nend\n", 4), err
    assert "Traceback" not in err
    assert user.job("on").attempt == 1
    check_clean(user)


def test_an_older_command_is_told_and_harms_nothing(user: User) -> None:
    name = working(user)
    true = read_server(str(user.home))
    assert true is not None
    change(user, version="99.0.0", api=99)
    told = user.cli("stop", name, code=1)
    assert "newer" in told
    assert "update this command: " in told
    write_server(str(user.home), true)
    check_went_through(user, name)


def test_leftovers_of_a_killed_server_are_in_nobodys_way(user: User) -> None:
    """A socket nobody listens at, a lock nobody holds, and a server.json whose number is another
    process's now.
    """
    name = working(user)
    user.kill_server()
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        change(user, pid=bystander.pid)
        (user.home / "server.lock").write_text(f"{bystander.pid}\n")
        (user.home / f"server.json.{bystander.pid}.tmp").write_text("{half")
        wait_until(lambda: user.cli("ps").count("running") == 1)
        assert user.server() not in (None, bystander.pid)
        user.cli("server", "stop")
        assert bystander.poll() is None
        (user.home / "server.json").write_text('{"pid": ')  # as a full disk once left it
        check_went_through(user, name)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


# Homes


def test_a_home_on_nfs_runs_jobs_and_survives_its_server(short_folder: Path, user: User) -> None:
    mounts = user.root / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\nfiler:/home {user.root} nfs4 rw 0 0\n")
    user.variables |= {"CAVVY_MOUNTS_FILE": str(mounts), "XDG_RUNTIME_DIR": str(short_folder)}
    name = working(user)
    server = read_server(str(user.home))
    assert server is not None
    assert server.address.startswith(f"unix:{short_folder}/")
    assert not (user.home / "cavvy.db-wal").exists()  # which needs memory that hosts cannot share
    user.kill_server()
    check_went_through(user, name)


def test_a_home_whose_path_no_socket_can_have_runs_jobs(tmp_path: Path) -> None:
    with user_at(tmp_path / ("d" * 60) / ("e" * 60) / "user") as user:
        name = working(user)
        server = read_server(str(user.home))
        assert server is not None
        assert len(server.address.removeprefix("unix:")) < 108
        user.kill_server()
        check_went_through(user, name)


# Disks


@contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting a small disk needs root: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_disk_that_fills_up_under_a_job_loses_nothing_that_was_taken(tmp_path: Path) -> None:
    """Database, logs and the agent's spool are on it; the job goes on, and once there is room so
    does the rest.
    """
    with small_disk(tmp_path / "disk", 24) as disk, user_at(disk / "user") as user:
        outside = tmp_path / "node_endpoint"
        outside.mkdir()
        run = (
            f"echo $CAVVY_ATTEMPT >> {outside}/starts; echo begin; while [ ! -e {outside}/full ]; "
            "do sleep 0.05; done;"
            f" seq 1 2000; touch {outside}/written; while [ ! -e {outside}/go ]; do sleep 0.05; "
            "done; echo end; exit 3"
        )
        name = user.submit(f"{{name: on, run: '{run}'}}")
        wait_until(lambda: user.said(name) == "begin\n")
        stuffing = [disk / "much", disk / "rest"]
        _fill(stuffing[0], 65536)
        _fill(stuffing[1], 1)
        (outside / "full").touch()
        wait_until(lambda: (outside / "written").exists())  # a full disk holds no task up
        during = user.start("run", "-d", str(_outside_task(outside)))
        told = during.communicate(timeout=PATIENCE_S)[1]
        assert "disk" in told or "room" in told or told == "", told
        assert user.job(name).phase == "running"
        (outside / "go").touch()
        time.sleep(1)
        user.kill_server()
        for path in stuffing:
            path.unlink()
        job = user.ended(name)
        assert (job.phase, job.exit_code, job.attempt) == ("failed", 3, 1), user.cli("events", name)
        assert (outside / "starts").read_text() == "1\n"
        assert user.log(name).split() == ["begin", *map(str, range(1, 2001)), "end"]
        user.cli("run", user.task("{name: after, run: echo again}"))
        check_clean(user)


def _fill(path: Path, block: int) -> None:
    """Write until the disk takes no more."""
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(b"x" * block) == block:
            pass


def _outside_task(folder: Path) -> Path:
    path = folder / "during.yaml"
    path.write_text("{name: during, run: 'true'}")
    return path


# Databases


FIRST = min(migrate.MIGRATIONS)


def age(database: Path) -> None:
    """Make the database one of the first revision, with everything in it that the first revision
    could hold.
    """
    old = database.with_name("old.db")
    with closing(make_driver(f"sqlite:///{old}", journal="delete").connect()) as session:
        session.begin()
        migrate.run_script(session, migrate.MIGRATIONS[FIRST].sql)
        session.run(f"INSERT INTO {migrate.VERSION_TABLE} (version_num) VALUES (?)", (FIRST,))
        session.commit()
    with closing(sqlite3.connect(old)) as rows:
        rows.execute("ATTACH ? AS new", (str(database),))
        tables = [
            row[0]
            for row in rows.execute("SELECT name FROM main.sqlite_master WHERE type = 'table'")
        ]
        for table in set(tables) - {migrate.VERSION_TABLE}:
            names = ", ".join(row[1] for row in rows.execute(f"PRAGMA main.table_info({table})"))
            rows.execute(f"DELETE FROM main.{table}")
            rows.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM new.{table}")
        rows.commit()
    for name in ("cavvy.db-wal", "cavvy.db-shm"):
        database.with_name(name).unlink(missing_ok=True)
    os.replace(old, database)


def test_a_database_is_migrated_under_a_running_job(user: User) -> None:
    name = working(user)
    user.kill_server(signal.SIGTERM)
    age(user.home / "cavvy.db")
    user.cli("ps")
    with closing(sqlite3.connect(user.home / "cavvy.db")) as database:
        assert database.execute(f"SELECT version_num FROM {migrate.VERSION_TABLE}").fetchone() == (
            migrate.HEAD,
        )
    assert list(user.home.glob(f"cavvy.db.backup-{FIRST}"))
    check_went_through(user, name)
