"""Stands in for OpenPBS's commands: strict about options and syntax, runs the scripts, keeps a
queue and its states.

`install(folder)` makes the commands and a cluster of four nodes; the state is one JSON file behind a
lock. It is not PBS: scheduling is first come, first served with what fits.

A test calls dozens of commands, and Python's start would be most of their time. So a command is a
few lines of bash, which ask a server: it forks for each, and the fork works in the caller's folder
and environment. What runs for as long as a job (`run`, `pbsdsh`) is a process of Python, which
imports only what it needs, and this file as a compiled module.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache

TYPE_CHECKING = False  # as in `typing`, which takes long to import
if TYPE_CHECKING:
    import socket
    from pathlib import Path

ASKED = ("qsub", "qstat", "qselect", "qdel", "pbsnodes")  # of the server
KILL_DELAY_S = 2
LOOK_S = 0.05  # between looks at the processes that are to end
SERVER = "meadow"
USAGE = 2
BROKEN = 70
# The fields of a question end with a zero byte. The answer is the name of a file with what the command
# wrote into its two outputs and its exit status: bash reads a file in blocks, a socket byte by byte.
_ASK = """#!/bin/bash
exec 3<>/dev/tcp/127.0.0.1/{port} || exit {broken}
input=
[ "{name}" != qsub ] || IFS= read -r -d '' input
printf '%s\\0' $$ {name} "$input" $# "$@" >&3
IFS= read -r -d '' answer <&3 || exit {broken}
mapfile -d '' -t said <"$answer"
printf %s "${{said[0]}}"
printf %s "${{said[1]}}" >&2
exit "${{said[2]}}"
"""


def install(folder: Path) -> dict[str, str]:
    """The environment in which the commands are found and know their cluster."""
    import shlex
    import zlib

    (folder / "bin").mkdir(parents=True)
    port = _start_server()
    commands = {name: _ASK.format(port=port, name=name, broken=BROKEN) for name in ASKED}
    commands["pbsdsh"] = f'#!/bin/sh\nexec {shlex.join(_command("pbsdsh"))} "$@"\n'
    for name, text in commands.items():
        path = folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    nodes = {
        f"n{i}": {"ncpus": 16, "mem": 65536, "ngpus": 4, "gpu_type": "a100" if i > 2 else "h100"}
        for i in range(1, 5)
    }
    # Jobs are ended by their number, on the whole machine: clusters of tests that run at the same
    # time must not have the same numbers.
    first = 1000 * (zlib.crc32(str(folder).encode()) % 1_000_000) + 1
    save(folder, {"next": first, "jobs": {}, "nodes": nodes, "away": False, "history": True})
    (folder / "pbs.conf").write_text(f"PBS_HOME={folder}\n")
    return {"PATH": f"{folder}/bin:{os.environ['PATH']}", "PBS_CONF_FILE": str(folder / "pbs.conf")}


def _command(name: str) -> list[str]:
    """What runs one of the functions below in a process of its own."""
    folder, file = os.path.split(os.path.abspath(__file__))
    module = file.removesuffix(".py")
    code = f"import sys; sys.path.insert(0, {folder!r}); import {module}; {module}.main()"
    return [sys.executable, "-I", "-S", "-c", code, name]


@cache
def _start_server() -> int:
    """The port of this process's server, which ends when this process closes its input."""
    import subprocess

    process = subprocess.Popen(
        _command("serve"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    atexit.register(process.communicate)  # closes the input, and waits
    return int(process.stdout.readline())


def serve() -> None:
    """Answer questions, each in a fork, until the input ends."""
    import select
    import shlex  # noqa: F401 - for the forks
    import socket
    import subprocess  # noqa: F401 - for the forks

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            ready, _, _ = select.select([listener, sys.stdin], [], [])
            if sys.stdin in ready:
                return
            connection, _ = listener.accept()
            with connection:
                if os.fork() == 0:
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    _answer(connection)
                    os._exit(0)


def _answer(connection: socket.socket) -> None:
    """Run one command as the process that asks would, in its folder and environment."""
    import io
    import traceback

    question = connection.makefile("rb")

    def field() -> str:
        letters = bytearray()
        while (letter := question.read(1)) != b"\0":
            if not letter:
                os._exit(0)  # who asked is gone
            letters += letter
        return os.fsdecode(bytes(letters))

    asker, name, given = field(), field(), field()
    arguments = [field() for _ in range(int(field()))]
    out, err, code = io.StringIO(), io.StringIO(), BROKEN
    with redirect_stdout(out), redirect_stderr(err):
        try:
            os.chdir(os.readlink(f"/proc/{asker}/cwd"))
            with open(f"/proc/{asker}/environ", "rb") as file:
                pairs = (each.partition(b"=") for each in file.read().split(b"\0") if each)
                variables = {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}
            os.environ.clear()
            os.environ.update(variables)
            _run(name, arguments, given)
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        except Exception:  # noqa: BLE001 - a defect of this file, which the caller is to see
            traceback.print_exc()
    path = os.path.join(os.path.dirname(os.environ["PBS_CONF_FILE"]), f"answer-{asker}")
    with open(path, "w") as said:
        said.write(f"{out.getvalue()}\0{err.getvalue()}\0{code}\0")
    with suppress(OSError):
        connection.sendall(os.fsencode(path) + b"\0")
        connection.recv(1)  # until it has been read
    os.unlink(path)


def save(folder: Path, state: dict) -> None:  # type: ignore[type-arg]
    fresh = os.path.join(folder, "state.new")
    with open(fresh, "w") as file:
        file.write(json.dumps(state))
    os.rename(fresh, os.path.join(folder, "state.json"))


@contextmanager
def cluster(folder: Path) -> Iterator[dict]:  # type: ignore[type-arg]
    """The state, for as long as nobody else changes it."""
    with open(os.path.join(folder, "lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with open(os.path.join(folder, "state.json")) as file:
            state = json.load(file)
        yield state
        save(folder, state)


def fail(text: str, code: int = 1) -> None:
    sys.stderr.write(text + "\n")
    sys.exit(code)


def options(
    arguments: list[str], flags: str, valued: str
) -> tuple[dict[str, list[str]], list[str]]:
    """Options as getopt reads them: flags and options with a value, then operands."""
    found: dict[str, list[str]] = {}
    while arguments and arguments[0].startswith("-") and arguments[0] != "-":
        word = arguments.pop(0)
        if word == "--":
            break
        letter = word[1]
        if letter in valued:
            value = word[2:] or (
                arguments.pop(0)
                if arguments
                else fail(f"option requires an argument -- {letter}", USAGE)
            )
            found.setdefault(letter, []).append(str(value))
        elif all(each in flags for each in word[1:]):
            for each in word[1:]:
                found.setdefault(each, []).append("")
        else:
            fail(f"invalid option -- {word}\nusage: see the manual", USAGE)
    return found, arguments


def qsub(folder: Path, arguments: list[str], script: str) -> None:
    import shlex

    directives = [
        word
        for line in script.splitlines()
        if line.startswith("#PBS ")
        for word in shlex.split(line.removeprefix("#PBS "))
    ]
    given, operands = options(directives + arguments, "hIVX", "AaCceijJkKlmMNopPqrRSuvWz")
    if operands:
        fail(f"qsub: script file:: No such file or directory: {operands[0]}")
    name = given.get("N", ["STDIN"])[-1]
    if not re.fullmatch(r"[A-Za-z0-9+][A-Za-z0-9_.+-]{0,229}", name):
        fail("qsub: illegal -N value", USAGE)
    if given.get("r", ["y"])[-1] not in ("y", "n") or given.get("j", ["n"])[-1] not in (
        "oe",
        "eo",
        "n",
    ):
        fail("qsub: illegal -r or -j value", USAGE)
    resources = dict(_resource(text) for text in given.get("l", []))
    if not script.startswith("#!"):
        fail("qsub: the script is empty or no script")
    queue = given.get("q", ["workq"])[-1]
    if queue not in ("workq", "short"):
        fail("qsub: Unknown queue")
    if queue == "short" and _seconds(resources.get("walltime", "1:00:00")) > 3600:
        fail("qsub: Job exceeds queue and/or server resource limits")
    variables = dict(
        text.partition("=")[::2] for text in ",".join(given.get("v", [])).split(",") if text
    )
    with cluster(folder) as state:
        if state["away"]:
            fail("qsub: cannot connect to server meadow (errno=111)", 255)
        number = f"{state['next']}.{SERVER}"
        state["next"] += 1
        chunks = _chunks(resources.get("select", "1:ncpus=1"), state)
        if len(chunks) > 1 and resources.get("place") not in ("scatter", "free", "pack"):
            fail("qsub: illegal -l place value")
        job = {
            "name": name,
            "queue": queue,
            "state": "Q",
            "script": script,
            "chunks": chunks,
            "variables": variables,
            "shell": given.get("S", ["/bin/sh"])[-1],
            "folder": os.getcwd(),
            "output": given.get("o", [f"{name}.o{number.partition('.')[0]}"])[-1],
        }
        job |= {
            "walltime": resources.get("walltime"),
            "rerun": given.get("r", ["y"])[-1],
            "ctime": int(time.time()),
        }
        state["jobs"][number] = job
        schedule(folder, state)
    print(number)


def _resource(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or name not in ("select", "place", "walltime"):
        fail(f"qsub: Unknown resource: {name}")
    if name == "walltime" and not re.fullmatch(r"(\d+:)?[0-5]?\d:[0-5]\d|\d+", value):
        fail("qsub: Illegal attribute or resource value: Resource_List.walltime")
    return name, value


def _chunks(text: str, state: dict) -> list[dict]:  # type: ignore[type-arg]
    chunks = []
    for part in text.split("+"):
        words = part.split(":")
        count = int(words.pop(0)) if words[0].isdigit() else 1
        wanted: dict[str, object] = {"ncpus": 1, "mem": 0, "ngpus": 0}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or name not in ("ncpus", "mem", "ngpus", "gpu_type"):
                fail(f"qsub: Unknown resource: {name}")
            if name == "mem" and not re.fullmatch(r"\d+mb", value):
                fail("qsub: Illegal attribute or resource value: Resource_List.select")
            wanted[name] = value if name == "gpu_type" else int(value.removesuffix("mb"))
        chunks += [wanted] * count
    return chunks


def _seconds(text: str) -> int:
    return sum(int(part) * 60**power for power, part in enumerate(reversed(text.split(":"))))


def schedule(folder: Path, state: dict) -> None:  # type: ignore[type-arg]
    """Start what fits, each chunk on a node of its own."""
    import subprocess

    for number, job in state["jobs"].items():
        if job["state"] != "Q":
            continue
        hosts: list[str] = []
        for chunk in job["chunks"]:
            free = (
                name for name in state["nodes"] if name not in hosts and _fits(state, name, chunk)
            )
            hosts += [host] if (host := next(free, None)) else []
        if len(hosts) < len(job["chunks"]):
            job["comment"] = "Not Running: Insufficient amount of resource: ncpus"
            continue
        job |= {"state": "R", "hosts": hosts, "stime": int(time.time()), "comment": "Job run"}
        quiet = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        subprocess.Popen([*_command("run"), number], start_new_session=True, **quiet)  # type: ignore[call-overload]


def _fits(state: dict, name: str, chunk: dict) -> bool:  # type: ignore[type-arg]
    node, held = state["nodes"][name], _held(state, name)
    kind = chunk.get("gpu_type", node["gpu_type"])
    return kind == node["gpu_type"] and all(held[each] + chunk[each] <= node[each] for each in held)


def _held(state: dict, name: str) -> dict[str, int]:  # type: ignore[type-arg]
    held = {"ncpus": 0, "mem": 0, "ngpus": 0}
    for job in state["jobs"].values():
        for host, chunk in zip(job.get("hosts", []), job["chunks"], strict=False):
            if host == name and job["state"] in ("R", "E"):
                held = {each: held[each] + chunk[each] for each in held}
    return held


def run(folder: Path, arguments: list[str]) -> None:
    """The node's part: run the script of a job to its end, and let the next ones in."""
    import subprocess

    (number,) = arguments
    with cluster(folder) as state:
        job = state["jobs"][number]
    nodefile = os.path.join(folder, f"nodes-{number}")
    with open(nodefile, "w") as file:
        file.write("".join(f"{host}\n" for host in job["hosts"]))
    environ = {
        **os.environ,
        **job["variables"],
        "PBS_JOBID": number,
        "PBS_NODEFILE": nodefile,
        "PBS_NODENUM": "0",
        "PBS_O_WORKDIR": job["folder"],
    }
    output = os.open(
        os.path.join(job["folder"], job["output"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    process = subprocess.Popen(
        [job["shell"]],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environ,
        start_new_session=True,
        cwd="/",
    )
    assert process.stdin is not None
    process.stdin.write(job["script"].encode())
    process.stdin.close()
    with cluster(folder) as state:
        state["jobs"][number]["session"] = process.pid
    code, limit = None, _seconds(job["walltime"]) if job["walltime"] else None
    began = time.monotonic()
    killed = False
    while code is None:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(0.05)
        if code is None and limit is not None and time.monotonic() - began > limit and not killed:
            killed = True
            end_all(number)
    end_all(number, 0)
    with cluster(folder) as state:
        status = -29 if killed else 256 - code if code < 0 else code
        words = "and failed" if status else "and finished"
        state["jobs"][number] |= {
            "state": "F",
            "exit": status,
            "etime": int(time.time()),
            "comment": f"Job run {words}",
        }
        schedule(folder, state)


def end_all(number: str, delay_s: float = KILL_DELAY_S) -> None:
    """SIGTERM to all processes of a job, SIGKILL later."""
    if delay_s:
        signal_all(number, signal.SIGTERM)
    until = time.monotonic() + delay_s
    while processes(number) and time.monotonic() < until:
        time.sleep(LOOK_S)
    signal_all(number, signal.SIGKILL)


def processes(number: str) -> list[int]:
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
            if f"PBS_JOBID={number}".encode() in file.read().split(b"\0"):
                found.append(int(entry))
    return [pid for pid in found if pid != os.getpid()]


def signal_all(number: str, which: int) -> None:
    for pid in processes(number):
        with suppress(ProcessLookupError):
            os.kill(pid, which)


def pbsdsh(folder: Path, arguments: list[str]) -> None:
    import subprocess

    _, command = options(arguments, "osv", "cn")
    with cluster(folder) as state:
        hosts = state["jobs"][os.environ["PBS_JOBID"]]["hosts"]
    bare = {
        name: os.environ[name]
        for name in ("PATH", "HOME", "PBS_JOBID", "PBS_CONF_FILE")
        if name in os.environ
    }
    tasks = [
        subprocess.Popen(command, env={**bare, "PBS_NODENUM": str(rank)})
        for rank in range(len(hosts))
    ]
    for task in tasks:
        task.wait()  # like pbsdsh, this does not report the tasks' exit codes


def qdel(folder: Path, arguments: list[str]) -> None:
    _, numbers = options(arguments, "x", "W")
    for number in numbers:
        with cluster(folder) as state:
            if state["away"]:
                fail("qdel: cannot connect to server meadow (errno=111)", 255)
            job = state["jobs"].get(number)
            if job is None:
                fail(f"qdel: Unknown Job Id {number}", 153)
            if job["state"] == "F":
                fail(f"qdel: Job has finished {number}", 35)
            if job["state"] == "Q":
                deleted = {"comment": "Job deleted", "substate": 91}
                job |= {"state": "F", "etime": int(time.time())} | deleted
                continue
            job |= {"state": "E", "substate": 91}
        if os.fork() == 0:
            end_all(number)
            os._exit(0)


def qselect(folder: Path, arguments: list[str]) -> None:
    given, operands = options(arguments, "xH", "uNqs")
    with cluster(folder) as state:
        if state["away"]:
            fail("qselect: cannot connect to server meadow (errno=111)", 255)
        if operands or "u" not in given:
            fail("usage: qselect [-x] [-u user_list]", USAGE)
        if "x" in given and not state["history"]:
            fail("qselect: PBS is not configured to maintain job history")
        for number, job in state["jobs"].items():
            if job["state"] != "F" or "x" in given:
                print(number)


def qstat(folder: Path, arguments: list[str]) -> None:
    given, operands = options(arguments, "fBQxan", "Fu")
    if given.get("F") != ["json"] or "f" not in given:
        fail("this stand-in shows JSON only: qstat -f -F json", USAGE)
    with cluster(folder) as state:
        if state["away"]:
            fail("cannot connect to server meadow (errno=111)", 255)
        if "B" in given:
            print(
                json.dumps(
                    {"Server": {SERVER: {"server_state": "Active", "pbs_version": "stand-in"}}}
                )
            )
        elif "Q" in given:
            common = {"queue_type": "Execution", "enabled": "True", "started": "True"}
            short = {**common, "resources_max": {"walltime": "01:00:00"}}
            route = {"queue_type": "Route", "enabled": "True", "started": "True"}
            print(json.dumps({"Queue": {"workq": common, "short": short, "route": route}}))
        else:
            missing = [number for number in operands if number not in state["jobs"]]
            jobs = {
                number: _facts(state["jobs"][number])
                for number in operands
                if number not in missing
            }
            print(json.dumps({"timestamp": int(time.time()), "Jobs": jobs}))
            if missing:
                fail(f"qstat: Unknown Job Id {missing[0]}", 153)


def _facts(job: dict) -> dict:  # type: ignore[type-arg]
    facts = {
        "Job_Name": job["name"],
        "job_state": job["state"],
        "queue": job["queue"],
        "Variable_List": job["variables"],
    }
    facts["Rerunable"] = "True" if job["rerun"] == "y" else "False"
    if "hosts" in job:
        facts |= {
            "exec_host": "+".join(f"{host}/0*1" for host in job["hosts"]),
            "stime": _shown(job["stime"]),
        }
    if "etime" in job:
        facts |= {"mtime": _shown(job["etime"]), "history_timestamp": job["etime"]}
    if "substate" in job:
        facts["substate"] = job["substate"]
    if "exit" in job:
        facts["Exit_status"] = job["exit"]
    return {**facts, "comment": job.get("comment", "")}


def _shown(seconds: int) -> str:
    return time.strftime(
        "%a %b %d %H:%M:%S %Y", time.localtime(seconds)
    )  # as ctime, in the client's zone


def pbsnodes(folder: Path, arguments: list[str]) -> None:
    given, _ = options(arguments, "av", "F")
    if given.get("F") != ["json"] or "a" not in given:
        fail("this stand-in shows JSON only: pbsnodes -a -F json", USAGE)
    with cluster(folder) as state:
        shown = {}
        for name, node in state["nodes"].items():
            held = _held(state, name)
            has = {**node, "mem": f"{node['mem'] * 1024}kb", "host": name}
            used = {**held, "mem": f"{held['mem'] * 1024}kb"}
            shown[name] = {"state": "free", "resources_available": has, "resources_assigned": used}
        print(json.dumps({"nodes": shown}))


def main() -> None:
    if sys.argv[1] == "serve":
        serve()
    else:
        _run(sys.argv[1], sys.argv[2:], "")


def _run(name: str, arguments: list[str], given: str) -> None:
    with open(os.environ["PBS_CONF_FILE"]) as file:
        home = file.read().strip().partition("=")[2]
    more = (given,) if name == "qsub" else ()
    globals()[name](home, arguments, *more)
