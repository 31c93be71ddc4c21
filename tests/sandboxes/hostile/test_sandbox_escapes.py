"""Hostile programs in sandboxes try to leave them, and to harm who reads what they send."""

import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sandboxes.direct_host import PROGRAM as DIRECT
from tests.sandboxes.direct_host import DirectHost, start_host

from cavvy.capabilities.functions.frames import pack
from cavvy.capabilities.sandboxes import trees
from cavvy.capabilities.sandboxes.errors import SandboxError, SandboxFileError, SandboxLost
from cavvy.capabilities.sandboxes.link import SandboxLink
from cavvy.capabilities.sandboxes.on_node.file_calls import ENTRY
from cavvy.capabilities.sandboxes.on_node.walls import Walls

pytestmark = pytest.mark.system
PROGRAM = Path(__file__).parents[2].joinpath("hostile", "sandbox_escapes.py")
MARK = f"hunted-{os.getpid()}"
# a fork that shares its pages counts whole, so as many as there may be need this much memory
LIMITS = {"memory_mib": 512, "disk_mib": 16, "processes": 48}
OUTSIDE = (
    *("secret", "host-process", "loopback-port", "abstract-socket", "path-socket"),
    *("inherited-variable", "sys", "processes-seen", "packet-socket", "shm-file"),
    *("crash-program", "terminals-of-machine", "requests-of-machine", "watchers-of-user"),
)


@pytest.fixture(scope="module")
def host() -> Iterator[DirectHost]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HUNTED", MARK)
        with start_host() as made:
            yield made


@pytest.fixture(scope="module")
def host_of_user() -> Iterator[DirectHost]:
    """A host whose user is not root: all its sandboxes have this user's ID outside."""
    if os.geteuid():
        pytest.skip("only root starts a host as another user")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HUNTED", MARK)
        with start_host(user=4242) as made:
            yield made


@pytest.fixture
def hunt(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """What is outside, for which the programs look."""
    with ExitStack() as stack:
        secret, shm = tmp_path / "secret", Path(f"/dev/shm/{MARK}")
        for each in (secret, shm):
            each.write_text("secret")
            each.chmod(0o644)
        stack.callback(shm.unlink)
        listener = stack.enter_context(socket.create_server(("", 0)))
        abstract, path = stack.enter_context(_listen(f"\0{MARK}")), str(tmp_path / "s")
        stack.enter_context(_listen(path))
        assert abstract
        waiting = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", "input()", MARK], stdin=subprocess.PIPE)
        )
        stack.callback(waiting.kill)
        yield {
            "secret": str(secret),
            "shm_file": str(shm),
            "port": listener.getsockname()[1],
            "address": _find_address(),
            "abstract": MARK,
            "socket": path,
            "pid": waiting.pid,
            "mark": MARK,
            "shm_key": 0x5B5B,
            **LIMITS,
        }


@pytest.mark.parametrize("kind", ["host", "host_of_user"])
def test_no_attempt_to_escape_succeeds(
    kind: str, request: pytest.FixtureRequest, hunt: dict[str, Any]
) -> None:
    host: DirectHost = request.getfixturevalue(kind)
    options = {"memory": "512MB", "disk": "16MB", "processes": LIMITS["processes"]}
    with host.create(env={"PYTHONDONTWRITEBYTECODE": "1"}, cpu=1, **options) as sandbox:
        sandbox.put(PROGRAM, "escapes.py")
        done = sandbox.exec("python3", "escapes.py", json.dumps(hunt))
        told = done.stdout.read()
        assert told, (done.wait(), done.why, done.stderr.read())
        found = json.loads(told)
        assert {name: said for name, said in found.items() if said} == {}
        assert len(found) >= 100
        assert sandbox.exec("echo", "alive").stdout.read() == "alive\n"


def test_the_same_attempts_succeed_without_a_sandbox(hunt: dict[str, Any]) -> None:
    """What proves nothing succeeds nowhere. Only attempts that do no harm are made."""
    command = [sys.executable, str(PROGRAM), json.dumps(hunt), *OUTSIDE]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "HUNTED": MARK}
    )
    found = json.loads(done.stdout)
    root = {"packet-socket"} if os.geteuid() else set()
    assert {name for name, said in found.items() if not said} == root


def test_programs_that_outlive_their_starter_end_with_the_sandbox(host: DirectHost) -> None:
    daemon = (
        "import os, signal, time\n"
        "for each in range(1, 32):\n"
        "    if each not in (9, 19, 17): signal.signal(each, signal.SIG_IGN)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        print('there', flush=True)\n"
        "        time.sleep(1000)\n"
    )
    with host.create() as sandbox:
        assert next(iter(sandbox.exec("python3", "-c", daemon, "daemon-" + MARK).stdout))
        assert _find_processes("daemon-" + MARK)
    assert not _find_processes("daemon-" + MARK)


def test_what_a_sandbox_has_for_files_harms_no_reader(host: DirectHost, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    made = """
mkdir -p tree/deep; cd tree; mkfifo pipe; ln -s /etc/passwd link; ln -s ../.. up
ln -s /dev/zero endless; echo fine > deep/file; ln deep/file hard
printf x > "$(printf 'a\\033[2Jb')"; chmod 4755 deep/file; truncate -s 1M sparse
python3 -c "import socket; socket.socket(socket.AF_UNIX).bind('socket')"
python3 -c "import os
for _ in range(40):
    os.mkdir('n' * 200); os.chdir('n' * 200)"
"""
    with host.create() as sandbox:
        assert sandbox.exec("sh", "-c", made).wait() == 0
        for path in ("tree/pipe", "tree/endless", "/dev/zero", "tree/socket"):
            with pytest.raises(SandboxFileError):
                sandbox.read_file(path)
        kinds = {each.name: each.kind for each in sandbox.ls("tree")}
        assert (kinds["pipe"], kinds["link"], kinds["socket"]) == ("pipe", "link", "socket")
        with pytest.raises(SandboxError):  # a path that is too long
            sandbox.get("tree", tmp_path / "got")
        sandbox.exec("sh", "-c", "rm -r tree/n*").wait()
        assert sandbox.get("tree", tmp_path / "whole") == 5
        assert sorted(os.listdir(tmp_path / "whole")) == ["a\x1b[2Jb", "deep", "hard", "sparse"]
        assert os.stat(tmp_path / "whole/deep/file").st_mode & 0o7000 == 0

        # what lies at the target is replaced if the user says so, never written through
        (tmp_path / "to").mkdir()
        (tmp_path / "to/hard").symlink_to(tmp_path / "mine")
        with pytest.raises(SandboxFileError, match="files that Cavvy has not put there"):
            sandbox.get("tree", tmp_path / "to")
        assert os.listdir(tmp_path / "to") == ["hard"]
        sandbox.get("tree", tmp_path / "to", replace=True)
        assert (tmp_path / "mine").read_text() == "mine"
        assert not (tmp_path / "to/hard").is_symlink()
        (tmp_path / "linked").mkdir()
        (tmp_path / "linked/deep").symlink_to(tmp_path)
        with pytest.raises(OSError, match=r"deep|directory|symbolic"):
            sandbox.get("tree", tmp_path / "linked", replace=True)


@pytest.mark.parametrize(
    "name",
    [b"../x", b"/x", b"a/../../x", b"a//b", b"./x", b"", b"a\0b", b"n" * 300, b"..", b"a/."],
)
def test_paths_that_lead_elsewhere_are_refused(tmp_path: Path, name: bytes) -> None:
    entry = ENTRY.pack(len(name) or 5000, 0o100644, 1) + name + b"x"
    with pytest.raises(SandboxFileError):
        trees.take_tree(iter([entry, ENTRY.pack(0, 0, 0)]), tmp_path / "deep" / "to", 1)
    assert not list(tmp_path.rglob("x*"))


def test_sizes_that_are_wrong_are_refused(tmp_path: Path) -> None:
    for size in (5, 1 << 62):
        entry = ENTRY.pack(1, 0o100644, size) + b"a" + b"xy"
        with pytest.raises(SandboxFileError):
            trees.take_tree(iter([entry]), tmp_path / "to", 1)
    with pytest.raises(SandboxFileError):  # a device
        trees.take_tree(iter([ENTRY.pack(1, 0o020644, 0) + b"a"]), tmp_path / "to", 1)


def _send(files: dict[str, bytes]) -> Iterator[bytes]:
    for name, data in files.items():
        raw = os.fsencode(name)
        yield ENTRY.pack(len(raw), 0o100644, len(data)) + raw + data
    yield ENTRY.pack(0, 0, 0)


def test_files_of_the_user_are_not_replaced_unasked(tmp_path: Path) -> None:
    """A sandbox chooses the names: any may be one that a program here obeys."""
    mine = tmp_path / "mine"
    (mine / "deep").mkdir(parents=True)
    (mine / "deep/file").write_text("mine")
    for name in (".envrc", "deep/new", "deep/file"):
        with pytest.raises(SandboxFileError, match="replace=True"):
            trees.take_tree(_send({name: b"theirs"}), mine, 1)
    assert [str(each.relative_to(mine)) for each in mine.rglob("*")] == ["deep", "deep/file"]
    assert (mine / "deep/file").read_text() == "mine"
    trees.take_tree(_send({"deep/file": b"theirs"}), mine, 1, replace=True)
    assert (mine / "deep/file").read_text() == "theirs"

    fresh = tmp_path / "fresh"
    for data in (b"one", b"two"):  # what arrived before is replaced, as long as it is as it arrived
        trees.take_tree(_send({"deep/file": data, "odd-\udcff": data}), fresh, 1)
    assert (fresh / "deep/file").read_text() == "two"
    (fresh / "deep/file").write_text("changed by me")
    with pytest.raises(SandboxFileError, match="may not replace 'deep/file'"):
        trees.take_tree(_send({"deep/file": b"three"}), fresh, 1)
    assert (fresh / "deep/file").read_text() == "changed by me"


def test_a_repository_of_the_user_gets_no_hooks(tmp_path: Path) -> None:
    (tmp_path / "mine/.git/hooks").mkdir(parents=True)
    hook = {".git/hooks/post-checkout": b"#!/bin/sh\n"}
    for local in ("mine", "mine/.git", "mine/.git/hooks", "mine/.git/new"):
        with pytest.raises(SandboxFileError, match="git"):
            trees.take_tree(_send(hook), tmp_path / local, 1, replace=True)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]
    trees.take_tree(_send(hook), tmp_path / "new", 1)


def test_a_device_at_the_target_stays(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SandboxFileError, match="not a file or folder"):
        trees.take_tree(_send({".": b"x"}), tmp_path / "pipe", 1)
    assert stat.S_ISFIFO(os.lstat(tmp_path / "pipe").st_mode)


def test_only_the_user_reads_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is whatever a sandbox had, also what the user has put there."""
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    name = trees.keep_snapshot(iter([b"secret"]), 1)
    (found,) = tmp_path.rglob(name)
    assert stat.S_IMODE(found.stat().st_mode) == 0o600


def send_sparse_files() -> Iterator[bytes]:
    """Yield what a sandbox sends that has 1,000 files with a hole of 16 MiB."""
    for number in range(1000):
        name = b"%d" % number
        yield ENTRY.pack(len(name), 0o100644, 16 << 20) + name
        yield from [bytes(1 << 20)] * 16


def test_what_is_sent_fills_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(trees, "_MOST_OVERHEAD", 1 << 20)
    for take in (
        lambda: trees.take_tree(send_sparse_files(), tmp_path / "to", 16),
        lambda: trees.keep_snapshot(send_sparse_files(), 16),
    ):
        with pytest.raises(SandboxFileError, match="sends more than 33 MiB"):
            take()
        assert _count_bytes(tmp_path) <= 33 << 20
    shutil.rmtree(tmp_path / "to")
    left = SimpleNamespace(free=256 << 20)  # which others need
    monkeypatch.setattr(shutil, "disk_usage", lambda _: left)
    for take in (
        lambda: trees.take_tree(send_sparse_files(), tmp_path / "to", 16),
        lambda: trees.keep_snapshot(send_sparse_files(), 16),
    ):
        with pytest.raises(SandboxFileError, match="has 256 MiB free"):
            take()
        assert _count_bytes(tmp_path) <= 2 << 20


def _count_bytes(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


@pytest.mark.parametrize(
    "sent",
    [
        pack({"op": "out", "id": 1, "fd": 99}, b"x"),
        pack({"op": "reply"}),
        pack({"op": "reply", "id": 77}),
        pack({"op": ["x"], "id": {}}),
        struct.pack(">II", 1 << 30, 0),
        struct.pack(">II", 2, 0) + b"[]",
        b"HTTP/1.1 200 OK\r\n\r\n" * 20,
    ],
)
def test_a_host_that_sends_anything_loses_its_connection(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    link = SandboxLink(ours)

    def answer() -> None:
        theirs.recv(4096)
        with suppress(OSError):
            theirs.sendall(sent)
            theirs.shutdown(socket.SHUT_WR)

    thread = threading.Thread(target=answer)
    thread.start()
    with pytest.raises(SandboxLost):
        link.open("start")
    thread.join()
    theirs.close()


def _listen(address: str) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(address)
    made.listen()
    return made


def _find_address() -> str:
    """Return an address of this machine that others can reach, or one that nobody has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        try:
            made.connect(("192.0.2.1", 9))
        except OSError:
            return "192.0.2.1"
        return str(made.getsockname()[0])


def _find_processes(word: str) -> list[str]:
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if word.encode() in each.read_bytes() and each.parent.name != str(os.getpid()):
                found.append(each.parent.name)
    return found


def test_a_network_leads_to_the_internet_only(host: DirectHost, hunt: dict[str, Any]) -> None:
    """The proxy of a sandbox refuses this machine, and there is no way around it."""
    program = (
        "import json, sys, urllib.error, urllib.request\n"
        "for address in sys.argv[1:]:\n"
        "    try:\n"
        "        print(urllib.request.urlopen(address, timeout=20).status)\n"
        "    except urllib.error.HTTPError as error:\n"
        "        print(error.code)\n"
    )
    port = hunt["port"]
    addresses = [f"http://{hunt['address']}:{port}/", "http://169.254.169.254/latest/meta-data/"]
    with host.create(network=True, cpu=1) as sandbox:
        done = sandbox.exec("python3", "-c", program, *addresses)
        assert done.stdout.read().split() == ["403", "403"], done.stderr.read()
        sandbox.put(PROGRAM, "escapes.py")
        names = (
            "loopback-port",
            "own-address",
            "metadata",
            "names",
            "abstract-socket",
            "raw-socket",
        )
        told = sandbox.exec("python3", "escapes.py", json.dumps(hunt), *names).stdout.read()
        assert json.loads(told) == dict.fromkeys(names, "")


def test_sandboxes_of_one_user_cannot_reach_each_other(host_of_user: DirectHost) -> None:
    """They have the same user ID outside, but neither files nor processes in common."""
    with host_of_user.create() as one, host_of_user.create() as other:
        one.write_file("/tmp/x", "x")
        sleeping = one.exec("sleep", "1000")
        looked = other.exec("sh", "-c", "ls /tmp; cat /proc/[0-9]*/comm; kill -9 -1")
        assert set(looked.stdout.read().split()) <= {"python3", "sh", "cat"}
        assert sleeping.poll() is None


def test_a_machine_that_cannot_isolate_says_what_is_missing(host: DirectHost) -> None:
    """Such as one on which new namespaces are forbidden, as in a sandbox."""
    with host.create() as sandbox:
        sandbox.put(host.folder / "cavvy", "cavvy")
        sandbox.write_file("host.json", '{"idle_s": 60, "env": {}}')
        program = sandbox.exec("timeout", "20", "python3", DIRECT, "host.json", "x:key")
        line = next(iter(program.stderr))
        assert "cannot isolate sandboxes: " in line
        assert "own mount namespaces" in line
        program.kill()
    walls = Walls()
    assert "Landlock" in walls.list_missing()[0]
    walls.landlock = 7
    assert not walls.list_missing()
