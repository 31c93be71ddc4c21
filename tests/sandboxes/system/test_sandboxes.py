"""Sandboxes with a host of their own: programs, files, limits and ends."""

import asyncio
import json
import os
import signal
import socketserver
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.sandboxes.direct_host import DirectHost, start_host
from tests.waits import wait_until

from cavvy.capabilities.functions.frames import CallFrames, pack
from cavvy.capabilities.sandboxes.errors import (
    SandboxEnded,
    SandboxFileError,
    SandboxLost,
    SandboxNotFound,
)
from cavvy.capabilities.sandboxes.hosts import BRIDGE, ROOT
from cavvy.capabilities.sandboxes.on_node.state_gate import PATH
from cavvy.capabilities.sandboxes.options import SandboxOptions
from cavvy.capabilities.sandboxes.sandbox import Sandbox
from cavvy.sdk.errors import CavvyError

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def host() -> Iterator[DirectHost]:
    with start_host() as made:
        yield made


@pytest.fixture
def sandbox(host: DirectHost) -> Iterator[Sandbox]:
    with host.create() as made:
        yield made


def test_programs_have_input_outputs_and_an_end(sandbox: Sandbox) -> None:
    echo = sandbox.exec("cat")
    echo.stdin.write("one\ntwo\n")
    echo.stdin.write_eof()
    assert list(echo.stdout) == ["one\n", "two\n"]
    assert echo.wait() == 0

    both = sandbox.exec("sh", "-c", "echo out; echo $WORD >&2; pwd; exit 3", env={"WORD": "error"})
    assert both.stdout.read() == "out\n/home/sandbox\n"
    assert (both.stderr.read(), both.wait()) == ("error\n", 3)

    missing = sandbox.exec("no-such-program")
    assert missing.wait() == 127
    assert missing.stderr.read() == "no-such-program: not found\n"

    killed = sandbox.exec("sleep", "60")
    killed.kill(signal.SIGTERM)
    assert killed.wait() == -signal.SIGTERM
    late = sandbox.exec("sleep", "60", timeout=0.05)
    assert (late.wait(), late.why) == (-signal.SIGKILL, "timeout")
    with pytest.raises(BrokenPipeError):
        late.stdin.write("x")


def test_callers_on_other_machines_reach_the_host(host: DirectHost, sandbox: Sandbox) -> None:
    """Through a program that their tunnel starts in the folder of the job."""
    asked = pack({"op": "terminate", "id": 1, "sandbox": sandbox.id.rpartition("-")[2]})
    program = [sys.executable, host.folder / BRIDGE.removeprefix(f"{ROOT}/")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(program, cwd=host.folder, **pipes) as bridge:
        assert bridge.stdin is not None
        assert bridge.stdout is not None
        bridge.stdin.write(asked)
        bridge.stdin.flush()
        ((answer, _),) = CallFrames().feed(os.read(bridge.stdout.fileno(), 1 << 16))
        bridge.kill()
    assert (answer["op"], answer["state"], answer["why"]) == ("reply", "ended", "terminated")


USES = """
import cavvy, os, socket
notes = cavvy.Dict("notes", trust=False)
notes["a"] = [1]
print(notes["a"])
for use in (lambda: cavvy.Dict("other")["a"], lambda: cavvy.Queue("notes").len()):
    try:
        print("reached", use())
    except cavvy.CavvyError as error:
        print(error.message)
print(sorted(name for name in os.environ if name.startswith("CAVVY")))
"""


def test_programs_reach_the_dicts_that_are_named_and_nothing_else(tmp_path: Path) -> None:
    told: list[dict[str, Any]] = []
    agent = StateAgent(tmp_path / "agent", told)
    variables = {"CAVVY_NOTICE": agent.path, "CAVVY_JOB": "j1"}
    try:
        with start_host(**variables) as host:
            with host.create(dicts=["notes"]) as sandbox:
                used = sandbox.exec("python3", "-c", USES)
                assert used.stdout.read().splitlines() == [
                    "[1]",
                    "this sandbox may not use the dict other",
                    "this sandbox may not use the queue notes",
                    "['CAVVY_JOB', 'CAVVY_NOTICE']",
                ], used.stderr.read()
                assert sandbox.exec("ls", PATH).stdout.read() == f"{PATH}\n"
            with host.create() as sandbox:
                shown = sandbox.exec("sh", "-c", f"env | grep CAVVY; ls {PATH}")
                assert shown.stdout.read() == "", "by default, nothing is reached"
    finally:
        agent.close()
    assert {(each["to"], each["body"]["name"]) for each in told} == {("state/dict", "notes")}


class StateAgent(socketserver.ThreadingUnixStreamServer):
    """The agent of a node, as far as a host asks it, with one dict."""

    daemon_threads = True

    def __init__(self, path: Path, told: list[dict[str, Any]]) -> None:
        super().__init__(str(path), AgentConnection)
        self.path, self.told, self.value = str(path), told, ""
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()


class AgentConnection(socketserver.StreamRequestHandler):
    """A connection to it."""

    def handle(self) -> None:
        agent = self.server
        assert isinstance(agent, StateAgent)
        for line in self.rfile:
            ask = json.loads(line)["ask"]
            body = json.loads(ask["body"])
            found: dict[str, Any] = {}
            if ask["to"] != "sandboxes/report":
                agent.told.append({"to": ask["to"], "body": body})
                agent.value = body.get("data", [agent.value])[0]
                found = {"entries": [{"key": '"a"', "value": agent.value}], "count": 1}
            answer = {"id": ask["id"], "status": 200, "body": found}
            self.wfile.write(json.dumps({"answer": answer}).encode() + b"\n")


def test_a_daemon_does_not_keep_the_outputs_open(sandbox: Sandbox) -> None:
    done = sandbox.exec("sh", "-c", "sleep 60 & echo started")
    assert done.stdout.read() == "started\n"


def test_an_output_that_nobody_reads_is_bounded(sandbox: Sandbox) -> None:
    loud = sandbox.exec("sh", "-c", "head -c 3000000 /dev/zero; echo end >&2")
    assert loud.stdout._stream.take(1)
    assert loud.poll() is None  # its pipe is full
    assert loud.wait() == 0  # whoever waits takes what comes
    assert loud.stderr.read() == "end\n"


def test_async(host: DirectHost) -> None:
    async def use() -> list[str]:
        async with host.create() as made:
            process = await made.exec.aio("sh", "-c", "echo a; echo b")
            lines = [line async for line in process.stdout]
            await process.wait.aio()
            return lines

    assert asyncio.run(use()) == ["a\n", "b\n"]


def test_files(sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox.write_file("notes/a.txt", "hello")
    sandbox.write_file("/tmp/b", b"\0\xff")
    assert sandbox.read_file("notes/a.txt") == b"hello"
    assert sandbox.read_file("/tmp/b") == b"\0\xff"
    assert [(each.name, each.kind, each.size) for each in sandbox.ls("notes")] == [
        ("a.txt", "file", 5)
    ]
    with pytest.raises(SandboxFileError, match="No such file"):
        sandbox.read_file("missing")
    with pytest.raises(SandboxFileError, match="folder"):
        sandbox.read_file("notes")
    with pytest.raises(SandboxFileError, match=r"Permission denied|Read-only"):
        sandbox.write_file("/usr/x", "x")

    source = tmp_path / "source"
    (source / "deep" / "empty").mkdir(parents=True)
    (source / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (source / "deep" / "run.sh").chmod(0o755)
    (source / "link").symlink_to("/etc/passwd")
    sandbox.put(source, "work")
    assert sandbox.exec("work/deep/run.sh").stdout.read() == "ran\n"
    assert [each.name for each in sandbox.ls("work")] == ["deep"]
    assert sandbox.get("work", tmp_path / "back") == 0
    assert (tmp_path / "back/deep/run.sh").stat().st_mode & 0o111
    assert (tmp_path / "back/deep/empty").is_dir()
    sandbox.get("notes/a.txt", tmp_path / "a.txt")
    assert (tmp_path / "a.txt").read_text() == "hello"
    sandbox.rm("work")
    sandbox.rm("notes/a.txt")
    assert [each.name for each in sandbox.ls()] == ["notes"]


def test_snapshots(
    host: DirectHost, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path))
    sandbox.write_file("a/b", "kept")
    sandbox.exec("sh", "-c", "ln -s b a/link; mkfifo a/pipe; chmod 700 a/b").wait()
    kept = sandbox.snapshot()
    with host.create() as other:
        other._unpack(kept)
        assert other.read_file("a/link") == b"kept"
        assert "rwx------" in other.exec("ls", "-l", "a/b").stdout.read()
        assert [each.name for each in other.ls("a")] == ["b", "link"]


def test_ports(sandbox: Sandbox) -> None:
    sandbox.write_file("www/index.html", "hello")
    sandbox.exec("python3", "-m", "http.server", "8000", "-d", "www")
    address = f"http://127.0.0.1:{sandbox.forward(8000)}/index.html"

    answers: list[bytes] = []

    def read() -> bool:
        with suppress(OSError), urllib.request.urlopen(address) as answer:
            answers.append(answer.read())
        return bool(answers)

    wait_until(read)
    assert answers == [b"hello"]


def test_a_sandbox_ends_when_its_time_is_over(host: DirectHost) -> None:
    made = host.create(timeout=0.2)
    sleeping = made.exec("sleep", "60")
    assert sleeping.wait() == -signal.SIGKILL
    assert made.wait() == "timeout"
    with pytest.raises(SandboxEnded):
        made.exec("true")
    assert made.info().state == "ended"
    assert made.info().seconds >= 0.2


def test_a_sandbox_ends_when_its_caller_says_so(host: DirectHost) -> None:
    made = host.create()
    pids = find_inside(host)
    assert pids
    made.terminate()
    made.terminate()
    assert made.info().why == "terminated"
    assert not set(pids) & set(find_inside(host))
    with pytest.raises(SandboxNotFound):
        Sandbox(host.link, made._place, "0" * 16).info()


@pytest.mark.parametrize("killed", ["host", "zygote"])
def test_sandboxes_end_with_what_made_them(killed: str) -> None:
    with start_host() as host:
        for _ in range(3):
            host.create().exec("sh", "-c", "trap '' TERM HUP; sleep 1000 & sleep 1000")
        (zygote,) = list_children(host.process.pid)
        wait_until(lambda: len(list_below(zygote)) >= 12)
        inside = list_below(zygote)
        os.kill(host.process.pid if killed == "host" else zygote, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(each) for each in [*inside, zygote]))
        assert not Path(f"{host.folder}/root/usr").exists()  # what was mounted is gone with them


def test_of_a_thousand_sandboxes_none_is_left() -> None:
    """Each round ends some by their time and some by their callers, and then the host, its zygote
    or both are killed while the others run programs."""
    kills = ("host",), ("zygote",), ("host", "zygote")
    for number in range(10):
        make_and_kill(kills[number % 3])


def make_and_kill(killed: Sequence[str]) -> None:
    with start_host() as host:
        host.create()  # which skips the test where sandboxes are not possible
        (zygote,) = list_children(host.process.pid)
        for number in range(99):
            options = SandboxOptions(timeout=0.05 if number % 2 else 60, memory="32MB").to_wire()
            try:
                made = host.link.ask("create", options=options)["name"]
            except SandboxLost as error:
                if "timeout" not in str(error):
                    raise
                continue  # its time was over before it had started
            if number % 10 == 0:
                host.link.open("start", sandbox=made, argv=["sleep", "1000"])
            elif number % 10 == 2:
                host.link.ask("terminate", sandbox=made)
        inside = [*list_below(zygote), zygote]
        assert len(inside) >= 40
        for name in killed:
            os.kill(host.process.pid if name == "host" else zygote, signal.SIGKILL)
        wait_until(lambda: not any(is_alive(each) for each in inside))
        assert not Path(f"{host.folder}/root/usr").exists()


def test_memory_processes_and_disk_are_limited(host: DirectHost) -> None:
    with host.create(memory="64MB", disk="8MB", processes=16) as made:
        hungry = made.exec("python3", "-c", "x = bytearray(1 << 30)")
        assert hungry.wait() == 1
        assert "MemoryError" in hungry.stderr.read()
        many = "import os, time\nfor _ in range(8): os.fork() or [bytearray(30 << 20), time.sleep(60)]\ntime.sleep(60)"
        together = made.exec("python3", "-c", many)
        assert (together.wait(), together.why) == (-signal.SIGKILL, "memory")
        bomb = made.exec("python3", "-c", "import os\nfor _ in range(99): os.fork() or os.pause()")
        assert bomb.wait() == 1
        assert "BlockingIOError" in bomb.stderr.read()
        made.exec("pkill", "-9", "python3").wait()
        full = made.exec("dd", "if=/dev/zero", "of=big", "bs=1M", "count=99")
        assert full.wait() != 0
        assert sum(each.size for each in made.ls()) <= 8 << 20


PIECES = """
import ctypes, mmap
libc = ctypes.CDLL(None)
libc.mmap.restype, libc.munmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]
for _ in range(32):
    at = libc.mmap(None, 4 << 20, 3, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS, -1, 0)
    if at == ctypes.c_void_p(-1).value:
        raise MemoryError
    ctypes.memset(at, 1, 4 << 20)
    libc.munmap(at + 4096, (4 << 20) - 4096)
"""
SEMAPHORES = """
import ctypes
for _ in range(48):
    assert ctypes.CDLL(None).semget(0, 32000, 0o600) >= 0
"""
THREADS = """
import ctypes, os, threading, time
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=lambda: [b"x" * (30 << 20), time.sleep(60)]).start()
        ctypes.CDLL(None).syscall(93 if os.uname().machine == "aarch64" else 60, 0)
"""


@pytest.mark.parametrize("program", [PIECES, SEMAPHORES, THREADS])
def test_memory_that_is_in_no_process_is_counted(host: DirectHost, program: str) -> None:
    with host.create(memory="64MB", processes=16) as made:
        held = made.exec("python3", "-c", f"{program}\nimport time; time.sleep(60)")
        held.wait()
        assert held.why == "memory" or "MemoryError" in held.stderr.read()


def test_memory_is_counted_when_the_programs_have_ended(host: DirectHost) -> None:
    fork = "import os\nfor _ in range(3): os.fork() or [b'x' * (30 << 20), input()]"
    with host.create(memory="64MB") as made:
        (first,) = find_inside(host)
        daemons = ["sh", "-c", f'mkfifo never; python3 -c "{fork}" <>never >&2 & exit 0']
        assert made.exec(*daemons).wait() == 0
        wait_until(lambda: not list_children(first))


def test_programs_share_memory(host: DirectHost) -> None:
    program = (
        "import mmap, os\n"
        "for _ in range(3):\n"
        "    shared = mmap.mmap(-1, 20 << 20)\n"
        "    if os.fork() == 0:\n"
        "        shared[:5] = b'child'\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "    print(shared[:5].decode(), flush=True)\n"
    )
    with host.create(memory="128MB") as made:
        for _ in range(3):  # what ended programs had asked for is free again
            done = made.exec("python3", "-c", program)
            assert done.stdout.read() == "child\n" * 3, done.stderr.read()
            assert done.wait() == 0


def test_more_than_the_machine_has_is_refused(host: DirectHost) -> None:
    for large in ({"cpu": 1024}, {"memory": "900TB"}):
        with pytest.raises(CavvyError, match="this machine has"):
            host.create(**large)


def test_a_create_that_cannot_be_done_stops_no_other(host: DirectHost) -> None:
    usual = SandboxOptions().to_wire()
    for wrong in (
        {**usual, "env": {"X": "\u4e2d" * 40_000}},
        {**usual, "network": ["x" * 250] * 1000},
        {**usual, "cpu": "x"},
        {"isolation": "best"},
    ):
        with pytest.raises(CavvyError):
            host.link.ask("create", 20, options=wrong)
    with host.create() as made:
        assert made.exec("echo", "there").stdout.read() == "there\n"
        assert made.wait(timeout=0.01) == ""
    assert [each for each in host.link.ask("list")["sandboxes"] if each["state"] != "ended"] == []


def find_inside(host: DirectHost) -> list[int]:
    (zygote,) = list_children(host.process.pid)
    return list_children(zygote)


def list_children(pid: int) -> list[int]:
    try:
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except FileNotFoundError:
        return []
    return [int(each) for each in found.split()]


def list_below(pid: int) -> list[int]:
    children = list_children(pid)
    return children + [each for child in children for each in list_below(child)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
