"""Runs an MPI launcher on the nodes of a gang without SSH between the nodes: `$CAVVY_MPI mpirun
...`.

Every rank runs the same command. Rank 0 waits for the other ranks, then runs the launcher. The
launcher uses this program as its remote shell (`--rsh HOST COMMAND`). The other ranks connect to
rank 0, run rank 0's commands, and exit with rank 0's exit code. Both ends of a connection prove
that they know the gang's key, and each message contains an authentication code.

The agent copies this file to the node's folder. On the node, the file runs without the rest of
Cavvy, on Python 3.8 or later.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import queue
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, BinaryIO

GATHER_S = 600  # all ranks must connect within this many seconds
PORT_AFTER_MASTER = 1
SHELL = "cavvy-rsh"


class RankLink:
    """A connection between two ranks. Each message is a line of JSON with an authentication code,
    which also covers the message's number."""

    def __init__(self, connection: socket.socket, key: bytes) -> None:
        self._file = connection.makefile("rwb")
        self._key = key
        self._sent = self._read = 0
        self._writing = threading.Lock()

    def greet(self, caller: bool) -> None:
        """Derive this connection's key from the gang's key and a random value from each peer. Only
        a peer that knows the gang's key can send a valid first message.
        """
        mine = os.urandom(16).hex()
        self._file.write(mine.encode() + b"\n")
        self._file.flush()
        theirs = self._file.readline(100).strip().decode()
        both = (mine + theirs if caller else theirs + mine).encode()
        self._key = hmac.new(self._key, both, hashlib.sha256).digest()
        self._names = (b">", b"<") if caller else (b"<", b">")

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps(message).encode()
        with self._writing:
            code = self._code(self._names[0], self._sent, body)
            self._sent += 1
            self._file.write(code + b" " + body + b"\n")
            self._file.flush()

    def read(self) -> dict[str, Any] | None:
        """Return the next message, or None at the end of the connection. Raises ValueError if the
        message is not from the gang.
        """
        line = self._file.readline()
        if not line.endswith(b"\n"):
            return None
        code, _, body = line[:-1].partition(b" ")
        if not hmac.compare_digest(code, self._code(self._names[1], self._read, body)):
            raise ValueError("received a message that is not from this gang")
        self._read += 1
        found = json.loads(body)
        return found if isinstance(found, dict) else None

    def _code(self, name: bytes, number: int, body: bytes) -> bytes:
        text = name + str(number).encode() + b" " + body
        return hmac.new(self._key, text, hashlib.sha256).hexdigest().encode()


class LaunchHub:
    """Rank 0's connections to the other ranks, and the commands that the launcher runs on these
    ranks.
    """

    def __init__(self, hosts: list[str]) -> None:
        self._hosts = hosts
        self._lines: dict[int, RankLink] = {}
        self._answers: dict[int, queue.Queue[dict[str, Any] | None]] = {}
        self._lock = threading.Lock()
        self._next = 0

    def gather(self, server: socket.socket, key: bytes) -> None:
        """Wait until every other rank has connected. Raises TimeoutError."""
        end = time.monotonic() + GATHER_S
        while len(self._lines) < len(self._hosts) - 1:
            server.settimeout(max(0.1, end - time.monotonic()))
            try:
                connection, _ = server.accept()
            # timeout errors; the name of their class differs between Python versions
            except OSError:
                raise TimeoutError(
                    f"only {len(self._lines) + 1} of {len(self._hosts)} ranks connected"
                ) from None
            try:
                connection.settimeout(10)
                line = RankLink(connection, key)
                line.greet(False)
                hello = line.read() or {}
                rank = int(hello["rank"])
                connection.settimeout(None)
            except (OSError, ValueError, KeyError):  # not a rank of this gang
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
                connection.close()
                continue
            self._lines[rank] = line
            threading.Thread(target=self._listen, args=(rank, line), daemon=True).start()

    def serve_shells(self, server: socket.socket) -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve_shell, args=(connection,), daemon=True).start()

    def finish(self, code: int) -> None:
        for line in self._lines.values():
            with suppress(OSError):
                line.send({"end": code})

    def _serve_shell(self, connection: socket.socket) -> None:
        """Serve one remote shell of the launcher: pass the shell's command to the named rank, and
        return the result."""
        with connection, connection.makefile("rwb") as file:
            asked = json.loads(file.readline() or b"{}")
            names = (self._hosts, list_plain_hosts(self._hosts))
            ranks = [
                rank
                for rank in sorted(self._lines)
                if asked.get("host") in (f"cavvy-rank-{rank}", *(hosts[rank] for hosts in names))
            ]
            if not ranks:
                file.write(
                    json.dumps({"code": 255, "why": "no such host in this gang"}).encode() + b"\n"
                )
                return
            answers: queue.Queue[dict[str, Any] | None] = queue.Queue()
            with self._lock:
                self._next += 1
                number = self._next
                self._answers[number] = answers
            self._lines[ranks[0]].send({"run": number, "command": asked["command"]})
            while True:
                answer = answers.get()
                file.write(
                    json.dumps(answer or {"code": 255, "why": "the rank has disconnected"}).encode()
                    + b"\n"
                )
                file.flush()
                if answer is None or "code" in answer:
                    return

    def _listen(self, rank: int, line: RankLink) -> None:
        with suppress(OSError, ValueError, KeyError):
            while True:
                message = line.read()
                if message is None:
                    break
                self._answers[int(message["run"])].put(message)
        for answers in list(self._answers.values()):
            answers.put(None)


def lead(command: list[str], hosts: list[str], key: bytes) -> int:
    """Act as rank 0: wait for the other ranks, run the launcher, and send the launcher's exit code
    to these ranks."""
    home = os.path.dirname(os.path.abspath(__file__))
    shells = os.path.join(home, "mpi.sock")
    hub = LaunchHub(hosts)
    port = int(os.environ["MASTER_PORT"]) + PORT_AFTER_MASTER
    with listen(port) as server, socket.socket(socket.AF_UNIX) as local:
        hub.gather(server, key)
        if os.path.exists(shells):
            os.unlink(shells)
        with from_folder(shells) as name:
            local.bind(name)
        os.chmod(shells, 0o600)
        local.listen(len(hosts))
        threading.Thread(target=hub.serve_shells, args=(local,), daemon=True).start()
        try:
            code = subprocess.call(command, env={**os.environ, **launcher_variables(home, hosts)})
        except OSError as error:
            sys.stderr.write(f"cavvy: {command[0]}: {error.strerror}\n")
            code = 127
        hub.finish(code)
    return code if code >= 0 else 128 - code


@contextmanager
def from_folder(path: str) -> Iterator[str]:
    """Work in the folder of a path, and yield its last part. The path of a Unix socket may have at
    most 107 bytes, and the folder of a node can be deeper."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(os.path.dirname(path))
        yield os.path.basename(path)
    finally:
        os.fchdir(before)
        os.close(before)


def listen(port: int) -> socket.socket:
    """Listen at the port for IPv4 and IPv6, because a node may have only one of them."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def launcher_variables(home: str, hosts: list[str]) -> dict[str, str]:
    """Return variables that make Open MPI 4 and 5, MPICH and Intel MPI start their daemons with
    this remote shell on the gang's hosts.
    """
    slots = int(os.environ.get("NPROC_PER_NODE", "1"))
    counts = {
        host: hosts.count(host) * slots for host in hosts
    }  # a host with several ranks is listed only once
    plain = dict(zip(hosts, list_plain_hosts(hosts), strict=False))
    colons, lines = os.path.join(home, "mpi-hosts"), os.path.join(home, "mpi-slots")
    with open(colons, "w", encoding="utf-8") as file:
        file.write("".join(f"{plain[host]}:{count}\n" for host, count in counts.items()))
    with open(lines, "w", encoding="utf-8") as file:
        file.write("".join(f"{host} slots={count}\n" for host, count in counts.items()))
    return {
        "OMPI_MCA_plm_rsh_agent": SHELL,
        "OMPI_MCA_plm_rsh_no_tree_spawn": "1",
        "OMPI_MCA_orte_default_hostfile": lines,
        "PRTE_MCA_plm_ssh_agent": SHELL,
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",
        "PRTE_MCA_prte_default_hostfile": lines,
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "HYDRA_LAUNCHER": "rsh",
        "HYDRA_LAUNCHER_EXEC": SHELL,
        "HYDRA_HOST_FILE": colons,
        "I_MPI_HYDRA_BOOTSTRAP": "rsh",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC": SHELL,
        "I_MPI_HYDRA_HOST_FILE": colons,
    }


def list_plain_hosts(hosts: list[str]) -> list[str]:
    """Return the hosts' names for Hydra, which takes the first colon of a line for the start of the
    count: an IPv6 address is replaced by a name that only our remote shell knows.
    """
    return [
        host
        if ":" not in host
        else "localhost"
        if host == hosts[0]
        else f"cavvy-rank-{hosts.index(host)}"
        for host in hosts
    ]


def lay_shell(home: str) -> None:
    """Add the remote shell to PATH. The launcher's daemons on other ranks check that the remote
    shell exists, although they never call it, and fail without it.
    """
    folder = os.path.join(home, "mpi-bin")
    os.makedirs(folder, exist_ok=True)
    script = os.path.join(folder, SHELL)
    with open(script, "w", encoding="utf-8") as file:
        own = [sys.executable, os.path.abspath(__file__), "--rsh", os.path.join(home, "mpi.sock")]
        file.write(f'#!/bin/sh\nexec {" ".join(map(shlex.quote, own))} "$@"\n')
    os.chmod(script, 0o700)
    os.environ["PATH"] = folder + os.pathsep + os.environ.get("PATH", os.defpath)


def follow(rank: int, key: bytes) -> int:
    """Act as a rank other than 0: run rank 0's commands until rank 0 reports that the launcher has
    ended."""
    where = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]) + PORT_AFTER_MASTER)
    end = time.monotonic() + GATHER_S
    while True:
        try:
            connection = socket.create_connection(where, 10)
            break
        except OSError as error:
            if time.monotonic() > end:
                sys.stderr.write(f"cavvy: cannot reach rank 0 at {where[0]}:{where[1]}: {error}\n")
                return 1
            time.sleep(0.2)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    line = RankLink(connection, key)
    line.greet(True)
    line.send({"rank": rank})
    try:
        while True:
            message = line.read()
            if message is None:
                break
            if "end" in message:
                return int(message["end"])
            threading.Thread(
                target=_run, args=(line, message["run"], message["command"]), daemon=True
            ).start()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"cavvy: rank 0: {error}\n")
    sys.stderr.write("cavvy: rank 0 has disconnected\n")
    return 1


def _run(line: RankLink, number: int, command: str) -> None:
    pipe = subprocess.PIPE
    # The pipes are not closed at the end. A daemon that the command left behind may keep them open,
    # and closing would then wait for the threads that still read them.
    process = subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(target=_tell, args=(line, number, name, stream), daemon=True)
        for name, stream in (("out", process.stdout), ("err", process.stderr))
    ]
    for reader in readers:
        reader.start()
    code = process.wait()
    for reader in readers:
        reader.join(1)
    with suppress(OSError):
        line.send({"run": number, "code": code})


def _tell(line: RankLink, number: int, name: str, stream: BinaryIO) -> None:
    with suppress(OSError, ValueError):
        # both streams have `read1`
        for data in iter(lambda: stream.read1(65536), b""):  # type: ignore[attr-defined]
            line.send({"run": number, name: base64.b64encode(data).decode()})


def remote_shell(where: str, words: list[str]) -> int:
    """Act as the launcher's rsh: run a command on a host. Options before the host and a user name
    in front of the host are ignored."""
    while words and words[0].startswith("-"):
        words = words[2:] if words[0] in ("-l", "-p") else words[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        with from_folder(where) as name:
            connection.connect(name)
        with connection.makefile("rwb") as file:
            file.write(
                json.dumps(
                    {"host": words[0].rpartition("@")[2], "command": " ".join(words[1:])}
                ).encode()
                + b"\n"
            )
            file.flush()
            for raw in file:
                answer = json.loads(raw)
                for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
                    if name in answer:
                        stream.buffer.write(base64.b64decode(answer[name]))
                        stream.buffer.flush()
                if "code" in answer:
                    if answer.get("why"):
                        sys.stderr.write(f"cavvy: {words[0]}: {answer['why']}\n")
                    return int(answer["code"])
    return 255


def main(words: list[str]) -> int:
    if words[:1] == ["--rsh"]:
        return remote_shell(words[1], words[2:])
    if not words:
        sys.stderr.write("usage: $CAVVY_MPI mpirun ... (run the same command on every rank)\n")
        return 2
    rank, hosts = int(os.environ["NODE_RANK"]), os.environ["CAVVY_HOSTS"].split(",")
    key = os.environ["CAVVY_MPI_KEY"].encode()
    lay_shell(os.path.dirname(os.path.abspath(__file__)))
    try:
        return lead(words, hosts, key) if rank == 0 else follow(rank, key)
    except TimeoutError as error:
        sys.stderr.write(f"cavvy: {error}\n")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
