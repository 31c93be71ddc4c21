"""Real jobs on this machine under a server that is stopped, killed, replaced and left without
disk.
"""

import os
import signal
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.server_state import (
    follow_to_end,
    home_at,
    kill_server,
    wait_until,
)

from cavvy.client import ApiClient, ApiError, connect
from cavvy.client.connection import ensure_server, stop_server
from cavvy.client.state import server_holds_lock

pytestmark = pytest.mark.system


def run_to_end(client: ApiClient, name: str) -> str:
    follow_to_end(client, name)
    return client.job("default", name).phase


def log_of(client: ApiClient, name: str, *, follow: bool = False) -> bytes:
    return b"".join(client.logs("default", name, follow=follow))


def test_a_job_runs_from_end_to_end(home: Path) -> None:
    with connect() as client:
        made = client.submit("{name: hello, run: 'echo hi; exit 3'}")
        assert log_of(client, made.name, follow=True) == b"hi\n"
        job = client.job("default", made.name)
        assert (job.phase, job.exit_code) == ("failed", 3)
        assert job.attempts[0].nodes[0].exit_outcome == "exit"
        assert client.cost("default", made.name).running_s > 0


def test_a_job_has_the_python_and_the_files_of_the_shell_that_submits_it(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server starts in another shell, without the environment and in another folder."""
    with connect():
        pass
    venv.create(tmp_path / "mine", symlinks=True, with_pip=False)
    packages = next((tmp_path / "mine").glob("lib/*/site-packages"))
    (packages / "only_here.py").write_text("")
    project = tmp_path / "project"
    project.mkdir()
    (project / "train.py").write_text("import only_here, sys; print(sys.prefix)")
    (project / "task.yaml").write_text("run: python train.py\n")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    command = [Path(sys.executable).with_name("cavvy"), "run", project / "task.yaml", "--name"]
    said = subprocess.run([*command, "without"], capture_output=True, text=True, check=False)
    assert said.returncode == 1
    assert "has no module only_here: `pip install PACKAGE` in `setup`" in said.stderr
    path = f"{tmp_path}/mine/bin:{os.environ['PATH']}"
    said = subprocess.run(
        [*command, "within"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": path},
    )
    assert (said.returncode, said.stdout) == (0, f"{tmp_path}/mine\n"), said.stderr


def test_followed_logs_come_while_the_job_runs(home: Path) -> None:
    with connect() as client:
        client.submit(
            f"{{name: slow, run: 'echo one; while [ ! -e {home.parent}/go ]; do sleep 0.05; done; echo "
            f"two'}}"
        )
        chunks = client.logs("default", "slow", follow=True)
        assert next(chunks) == b"one\n"
        (home.parent / "go").touch()
        assert b"".join(chunks) == b"two\n"


def test_work_goes_on_while_the_server_is_dead(home: Path) -> None:
    with connect() as client:
        client.submit(
            f"{{name: on, run: 'echo a; while [ ! -e {home.parent}/go ]; do sleep 0.05; done; echo b; "
            f"exit 7'}}"
        )
        wait_until(lambda: log_of(client, "on") == b"a\n")
    kill_server(home)
    (home.parent / "go").touch()
    with connect() as client:
        assert run_to_end(client, "on") == "failed"
        assert client.job("default", "on").exit_code == 7
        assert client.job("default", "on").attempt == 1
        assert log_of(client, "on") == b"a\nb\n"


def test_a_graceful_stop_is_quick_and_ends_no_job(home: Path) -> None:
    with connect() as client:
        client.submit(f"{{name: on, run: 'while [ ! -e {home.parent}/go ]; do sleep 0.05; done'}}")
        wait_until(lambda: client.job("default", "on").phase == "running")
    began = time.monotonic()
    kill_server(home, signal.SIGTERM)
    took = time.monotonic() - began
    assert '"stopped"' in (home / "server.log").read_text()
    assert took < 30  # it must not wait for the agents' long polls, which last as long
    (home.parent / "go").touch()
    with connect() as client:
        assert run_to_end(client, "on") == "done"
        assert client.job("default", "on").attempt == 1


def test_an_answered_submission_survives_kill_9(home: Path) -> None:
    with connect() as client:
        made = [client.submit("{name: j, run: echo x}").id for _ in range(20)]
        kill_server(home)
    with connect() as client:
        assert {row.id for row in client.jobs("default").jobs} == set(made)
        wait_until(lambda: all(row.phase == "done" for row in client.jobs("default").jobs))
        assert all(log_of(client, job_id) == b"x\n" for job_id in made)
        assert all(client.job("default", job_id).attempt == 1 for job_id in made)


def test_it_does_not_stop_for_idleness_while_a_job_lives(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_SERVER_IDLE_STOP_S", "1")
    with connect() as client:
        client.submit(f"{{name: on, run: 'while [ ! -e {home.parent}/go ]; do sleep 0.05; done'}}")
    time.sleep(3)
    assert server_holds_lock(str(home))
    (home.parent / "go").touch()
    wait_until(lambda: not server_holds_lock(str(home)))
    with connect() as client:
        assert client.job("default", "on").phase == "done"


def test_a_command_beside_the_work_streams_and_returns_its_code(home: Path) -> None:
    with connect() as client:
        client.submit("{name: on, run: 'sleep 300', env: {GREETING: hello}}")
        wait_until(lambda: client.job("default", "on").phase == "running")
        chunks = list(client.exec("default", "on", ["sh", "-c", "echo $GREETING; exit 5"]))
        assert b"".join(chunk.data for chunk in chunks) == b"hello\n"
        assert chunks[-1].exit_code == 5


def test_a_working_folder_is_uploaded_and_run(home: Path, tmp_path: Path) -> None:
    from cavvy.client.blobs import upload
    from cavvy.domain.jobs import RunOrigin
    from cavvy.spec.workdir import freeze

    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "hello.txt").write_text("from the folder\n")
    frozen = freeze(folder)
    seen: list[tuple[int, int]] = []
    with connect() as client:
        sent = upload(client, "default", frozen.blobs(), lambda done, of: seen.append((done, of)))
        assert sent == seen[-1][0] == seen[-1][1] > 0
        assert upload(client, "default", frozen.blobs()) == 0
        client.submit(
            "{name: w, run: cat hello.txt, workdir: .}", origin=RunOrigin(snapshot=frozen.hash)
        )
        assert log_of(client, "w", follow=True) == b"from the folder\n"


@contextmanager
def home_on_disk(disk: Path, size: str) -> Iterator[None]:
    """A home on a disk of its own, of this size."""
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs needs root: {mounted.stderr.decode().strip()}")
    try:
        with home_at(disk / "home"):
            yield
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_full_disk_loses_nothing_and_recovers(tmp_path: Path) -> None:
    with home_on_disk(tmp_path / "disk", "12m"):
        _fill_and_free(tmp_path / "disk")


def _fill_and_free(disk: Path) -> None:
    stuffing = disk / "stuffing"
    with connect() as client:
        pid = client.server().pid
        before = client.submit("{name: before, run: 'true'}")
        assert run_to_end(client, before.name) == "done"
        wait_until(lambda: not client.nodes())
        with pytest.raises(OSError, match="No space left"):
            _stuff(stuffing)
        with pytest.raises(ApiError) as caught:
            _submit_until_full(client)
        assert (caught.value.status, caught.value.code) == (507, "disk-full")
        assert client.job("default", "before").phase == "done"
        stuffing.unlink()
        after = client.submit("{name: after, run: echo again}")
        assert run_to_end(client, after.name) == "done"
        assert log_of(client, "after") == b"again\n"
        assert client.server().pid == pid
    stop_server()
    ensure_server()
    with connect() as client:
        assert client.job("default", "after").phase == "done"


def _stuff(path: Path) -> None:
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(b"x" * 65536)


def _submit_until_full(client: ApiClient) -> None:
    """What the database file has room for is taken first."""
    for number in range(2000):
        client.submit(
            f"{{name: full-{number}, run: 'true', tags: {{x: {'y' * 60}}}, schedule: {{at: "
            f"2199-01-01T00:00:00Z}}}}"
        )


def test_a_full_disk_at_the_start_is_told(tmp_path: Path) -> None:
    with home_on_disk(tmp_path / "disk", "64k"):
        with pytest.raises(ApiError) as caught:
            connect()
        assert caught.value.code == "disk-full"


def test_the_log_of_the_server_is_kept_short(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_SERVER_LOG_MIB", "1")
    monkeypatch.setenv("CAVVY_SERVER_IDLE_STOP_S", "2")
    home.mkdir(mode=0o700)
    (home / "server.log").write_bytes(b"old\n" * 300_000)
    os.chmod(home / "server.log", 0o600)
    with connect() as client:
        client.server()
    names = ("server.log.1", "server.log")  # for a moment, only the first one exists
    wait_until(lambda: all((home / each).exists() for each in names))
    assert (home / "server.log").stat().st_size < 1 << 20


def test_a_machine_is_reused_with_its_setup_and_entered_by_its_name(home: Path) -> None:
    task = "{{name: {0}, machine: dev, setup: 'true', run: '{1}'}}"
    with connect() as client:
        client.submit(task.format("first", "echo one"))
        assert run_to_end(client, "first") == "done"
        wait_until(lambda: client.machine("default", "dev").state == "idle")
        client.submit(task.format("second", "sleep 60"))
        wait_until(lambda: client.job("default", "second").phase == "running")
        events = client.events("default", "second").events
        assert any("starts on machine dev" in each.text for each in events)
        said = b"".join(piece.data for piece in client.exec("default", "dev", ["echo", "inside"]))
        assert said == b"inside\n"
        client.stop_machine("default", "dev")
        wait_until(lambda: client.machine("default", "dev").state == "stopped")
        assert client.job("default", "second").phase == "stopped"


def test_a_small_job_starts_beside_a_larger_one_that_waits(home: Path) -> None:
    cpus = len(os.sched_getaffinity(0))
    if cpus < 2:
        pytest.skip("needs two CPUs")
    task = "{{name: {0}, resources: {{cpu: {1}}}, run: 'while [ ! -e {2} ]; do sleep 0.05; done'}}"
    with connect() as client:
        client.submit(task.format("most", cpus - 0.5, home.parent / "go"))
        wait_until(lambda: client.job("default", "most").phase == "running")
        client.submit(task.format("waits", 1, home.parent / "go"))
        wait_until(lambda: "waits for free capacity" in client.job("default", "waits").reason)
        client.submit("{name: beside, resources: {cpu: 0.5}, run: 'true'}")
        assert run_to_end(client, "beside") == "done"
        assert client.job("default", "waits").phase == "queued"
        client.submit(f"{{name: delays, resources: {{cpu: {cpus - 0.5}}}, run: 'true'}}")
        wait_until(lambda: "waits" in client.job("default", "delays").reason)
        (home.parent / "go").touch()
        assert [run_to_end(client, name) for name in ("waits", "delays")] == ["done", "done"]
