"""A secret is in the environment of the task that names it, and nowhere else in plain."""

import os
import subprocess
import threading
from base64 import b64encode
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest
from tests.system.trust import User, user_at, wait_until
from tests.waits import PATIENCE_S

pytestmark = pytest.mark.system
VALUE = "Xq7-plain-nowhere-93f1"
LATER = "Yr8-second-value-51c2"
TASK = """
name: teller
secrets: [TOKEN]
checkpoint: {path: ckpt}
setup: echo "setup $TOKEN"
run: |
  echo "printed $TOKEN"; echo "to stderr $TOKEN" >&2
  printf "half "; printf %.5s "$TOKEN"; sleep 0.2; printf "${TOKEN#?????} joined\\n"
  echo "CAVVY_PROGRESS {\\"note\\": \\"$TOKEN\\", \\"step\\": 1}"
  test "$(printf %s "$TOKEN" | sha256sum)" = "SHA256  -" && touch "$CAVVY_CHECKPOINT_DIR/right"
  while [ ! -e ROOT/go ]; do sleep 0.05; done
  exit 3
"""


@pytest.fixture
def user(tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.popen = subprocess.Popen  # these tests read command lines and environments in /proc
        yield user


def holders(root: Path) -> list[str]:
    """Files below a folder that hold the value in plain, in hexadecimal or in base64."""
    plain = VALUE.encode()
    codes = [plain, plain.hex().encode(), b64encode(plain).rstrip(b"=")]
    files = [path for path in root.rglob("*") if path.is_file() and not path.is_symlink()]
    return [str(path) for path in files if any(code in path.read_bytes() for code in codes)]


def test_nobody_but_the_task_sees_it(user: User) -> None:
    seen_in_arguments: list[str] = []
    stop = threading.Event()
    watcher = threading.Thread(target=_watch_arguments, args=(seen_in_arguments, stop))
    watcher.start()
    try:
        told = user.cli("secret", "set", "TOKEN", stdin=VALUE + "\n")
        told += user.cli("secret", "list")
        name = user.submit(
            TASK.replace("ROOT", str(user.root)).replace(
                "SHA256", sha256(VALUE.encode()).hexdigest()
            )
        )
        wait_until(lambda: "joined" in user.said(name))
        _check_while_it_runs(user)
        told += user.cli("exec", name, "--", "sh", "-c", "echo from beside: $TOKEN")
        told += (
            user.cli("status", name)
            + user.cli("status", name, "-o", "json")
            + user.cli("nodes", "-o", "json")
        )
        (user.root / "go").touch()
        job = user.ended(name)
        log = user.log(name)
        rerun = user.start("rerun", name)
        told += rerun.communicate(timeout=PATIENCE_S)[0]
    finally:
        stop.set()
        watcher.join()
    for text in (
        told,
        log,
        user.cli("status", name, "-o", "json"),
        user.cli("events", name, "-o", "json"),
        user.cli("cost", name, "-o", "json"),
        user.cli("diff", name, "teller-2", "-o", "json"),
        msgspec.json.encode(job).decode(),
    ):
        assert VALUE not in text
    assert log.splitlines()[:4] == ["setup ***", "printed ***", "to stderr ***", "half *** joined"]
    assert job.attempts[0].nodes[0].progress["note"] == "***"
    assert "from beside: ***" in told
    assert (user.home / "storage/default" / job.id / "checkpoint/right").exists()
    assert not seen_in_arguments
    # The sealed value opens with the key that lies beside it, so both are the user's alone.
    assert holders(user.root) == []
    assert (user.home / "key").stat().st_mode & 0o777 == 0o600


def _check_while_it_runs(user: User) -> None:
    """In the environment of the work, and in no other file or process of ours."""
    workers = user.worked()
    assert workers
    environs = [environ for pid in workers if (environ := _environ(pid))]
    assert environs
    assert all(VALUE.encode() in environ for environ in environs)
    server = user.server()
    for pid in [*user.agents(), *([server] if server else [])]:
        assert VALUE.encode() not in _environ(pid)
    assert holders(user.root) == []


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # a `sleep` that is over
        return b""


def _watch_arguments(found: list[str], stop: threading.Event) -> None:
    while not stop.wait(0.02):
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
            except OSError:
                continue
            if VALUE.encode() in command:
                found.append(command.decode(errors="replace"))


def test_a_new_value_is_for_the_next_attempt_and_a_deleted_one_is_missed(user: User) -> None:
    user.cli("secret", "set", "TOKEN", stdin=VALUE)
    assert user.cli(
        "run", user.task("{name: a, secrets: [TOKEN], run: 'test $TOKEN = Xq7-plain-nowhere-93f1'}")
    )
    user.cli("secret", "set", "TOKEN", stdin=LATER)
    user.cli("server", "restart")
    assert user.cli(
        "run", user.task("{name: b, secrets: [TOKEN], run: 'test $TOKEN = Yr8-second-value-51c2'}")
    )
    user.cli("secret", "delete", "TOKEN")
    told = user.cli("run", user.task("{name: c, secrets: [TOKEN], run: 'true'}"), code=1)
    assert "TOKEN" in told
    assert "cavvy secret set" in told


def test_a_value_as_an_argument_is_refused(user: User) -> None:
    told = user.cli("secret", "set", "TOKEN", VALUE, code=2)
    assert "unexpected extra argument" in told
