"""A control plane for agents under test: real HTTP on a Unix socket, strict about the protocol,
wilful when asked.
"""

import json
import os
import re
import shutil
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.waits import PATIENCE_S, wait_until

from cavvy.agent.bundle import make_command
from cavvy.agent.documents import PROTOCOL

# of this process: control groups and containers have its name
GANG = f"rm-0badcafe-test{os.getpid()}-1"
TOKEN = "the-token-of-this-gang"


class Stub:
    """What the server knows and how it behaves; `faults` collects every breach of the protocol."""

    def __init__(self, path: Path, work: dict[str, object]) -> None:
        self.path = str(path)
        self.work = {
            "job": "digits",
            "job_id": "01j",
            "project": "default",
            "attempt": 1,
            "run": "true",
            **work,
        }
        self.lease_s = 3600.0
        self.every_s: float | None = None  # how often the work shall save
        self.nonces: dict[int, str] = {}
        self.claims_before_go = 0
        self.refuse: int | None = None  # status of every answer
        self.log_delay_s = 0.0
        self.messages: list[dict[str, object]] = []
        self.log = bytearray()  # what came, without what was lost
        self.log_size = 0
        self.lost: list[tuple[int, int]] = []
        self.keep_log = True
        self.order: dict[str, object] | None = None
        self.execs: list[dict[str, object]] = []
        self.exec_output: dict[str, bytearray] = {}
        self.exec_codes: dict[str, int] = {}
        self.execs_left: set[str] = set()  # commands whose user has disconnected
        self.blobs: dict[str, bytes] = {}
        self.held: dict[str, bytes] = {}  # files of checkpoints
        self.commits: list[dict[str, object]] = []
        self.packs = True  # False: a server from before them
        self.pack_blobs = 3  # in one answer
        self.tamper: Callable[[bytes], bytes] = lambda pack: pack
        self.put_delay_s = 0.0
        self.on_put: Callable[[], object] = lambda: None
        self.put_status = 200
        self.parts: dict[str, bytearray] = {}
        self.requests: list[str] = []
        self.answered: list[str] = []
        self.uploads: list[dict[str, object]] = []  # signed, for results
        self.faults: list[str] = []
        self.lock = threading.Condition()
        self._server: _Server | None = None

    def start(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)
        self._server = _Server(self)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Be gone, as a killed server is: the socket's file stays, all connections break."""
        if self._server is not None:
            server, self._server = self._server, None
            server.shutdown()
            server.server_close()
            server.break_all()

    def kinds(self) -> list[str]:
        with self.lock:
            # a setup also tells where its output begins, and now and then how much it has written
            return [
                str(message["kind"])
                for message in self.messages
                if message["kind"] != "preparing" and "setup_" not in str(message.get("values"))
            ]

    def last(self, kind: str) -> dict[str, object]:
        with self.lock:
            return next(message for message in reversed(self.messages) if message["kind"] == kind)

    def give(self, kind: str, seconds: float, reason: str = "because") -> None:
        with self.lock:
            seq = int(str(self.order["seq"])) + 1 if self.order else 1
            self.order = {"seq": seq, "kind": kind, "seconds": seconds, "reason": reason}
            self.lock.notify_all()

    def run_beside(self, exec_id: str, command: Sequence[str]) -> None:
        with self.lock:
            ask = {"id": exec_id, "command": list(command), "tty": False, "attached": True}
            self.execs.append(ask)
            self.lock.notify_all()

    def add_blob(self, data: bytes) -> str:
        digest = sha256(data).hexdigest()
        self.blobs[digest] = data
        return digest

    def add_folder(
        self, files: dict[str, bytes], links: dict[str, str] | None = None, mode: int = 0o644
    ) -> str:
        entries: list[dict[str, object]] = [
            {"path": path, "sha256": self.add_blob(data), "mode": mode, "size": len(data)}
            for path, data in files.items()
        ]
        entries += [{"path": path, "link": target} for path, target in (links or {}).items()]
        return self.add_blob(json.dumps({"files": entries}).encode())

    # The routes. Each returns a status and a body.

    def claim(self, ask: dict[str, object]) -> tuple[int, object]:
        rank, nonce = int(str(ask["rank"])), str(ask["nonce"])
        if self.nonces.setdefault(rank, nonce) != nonce:
            return 409, {"code": "claimed"}
        if set(ask) != {"gang", "rank", "nonce", "address", "host", "wait_s"}:
            self.faults.append(f"claim with {sorted(ask)}")
        if self.claims_before_go > 0:
            self.claims_before_go -= 1
            return 200, {"state": "wait", "after_s": 0.05}
        return 200, {"state": "go", "work": self.work, "lease_s": self.lease_s}

    def receive(self, ask: dict[str, object]) -> tuple[int, object]:
        if self.nonces.get(int(str(ask["rank"]))) != ask["nonce"]:
            return 409, {"code": "claimed"}
        messages = ask["messages"]
        assert isinstance(messages, list)
        for message in messages:
            done = len(self.messages)
            if message["seq"] > done + 1:
                self.faults.append(f"message {message['seq']} after {done}")
            elif message["seq"] == done + 1:
                if self.messages and self.messages[-1]["kind"] == "exited":
                    self.faults.append(f"{message['kind']} after exited")
                if message["kind"] == "exited" and message["log_bytes"] != self.log_size:
                    self.faults.append(
                        f"exited with {message['log_bytes']} bytes of log, {self.log_size} came"
                    )
                self.messages.append(message)
        return 200, {"ack": len(self.messages), "lease_s": self.lease_s}

    def append(self, query: dict[str, str], data: bytes) -> tuple[int, object]:
        offset, lost = int(query["offset"]), int(query.get("lost", 0))
        if offset > self.log_size and offset - lost > self.log_size:
            return 200, {"offset": self.log_size}
        if offset > self.log_size:
            self.lost.append((self.log_size, offset - self.log_size))
            self.log_size = offset
        fresh = data[self.log_size - offset :]
        if self.keep_log:
            self.log += fresh
        self.log_size += len(fresh)
        return 200, {"offset": self.log_size}

    def orders(self, query: dict[str, str]) -> tuple[int, object]:
        def news() -> bool:
            return bool(self.order and int(str(self.order["seq"])) > int(query["after"])) or any(
                each["id"] not in self.exec_output for each in self.execs
            )

        with self.lock:
            self.lock.wait_for(lambda: news() or self._server is None, float(query["wait_s"]))
            order = (
                self.order
                if self.order and int(str(self.order["seq"])) > int(query["after"])
                else None
            )
            waiting = [each for each in self.execs if each["id"] not in self.exec_output]
            save_interval = {} if self.every_s is None else {"every_s": self.every_s}
            return 200, {"order": order, "execs": waiting, "lease_s": self.lease_s, **save_interval}

    def pack(self, ask: dict[str, object]) -> tuple[int, object]:
        if not self.packs:
            return 405, {"code": "wrong-method"}
        names = ask["blobs"]
        assert isinstance(names, list)
        found = [(name, self.blobs[name]) for name in names if name in self.blobs][
            : self.pack_blobs
        ]
        return 200, self.tamper(
            b"".join(f"{name}{len(data)}\n".encode() + data for name, data in found)
        )

    def missing(self, ask: dict[str, object]) -> tuple[int, object]:
        names = ask["blobs"]
        assert isinstance(names, list)
        return 200, {"missing": [name for name in names if name not in self.held]}

    def hold(self, name: str, query: dict[str, str], data: bytes) -> tuple[int, object]:
        self.on_put()
        if self.put_status != 200:
            return self.put_status, {"code": "no"}
        if "size" in query:
            part = self.parts.setdefault(name, bytearray())
            if int(query["offset"]) == len(part):
                part += data
            if len(part) < int(query["size"]):
                return 200, {"offset": len(part)}
            data = bytes(self.parts.pop(name))
        if sha256(data).hexdigest() != name:
            return 422, {"code": "blob-mismatch"}
        self.held[name] = data
        return 200, {"offset": len(data)}

    def commit(self, ask: dict[str, object]) -> tuple[int, object]:
        files = ask["files"]
        assert isinstance(files, list)
        if self.nonces.get(int(str(ask["rank"]))) != ask["nonce"]:
            return 409, {"code": "claimed"}
        lost = [
            each["sha256"]
            for each in files
            if "link" not in each and each["sha256"] not in self.held
        ]
        if lost:
            return 200, {"number": None, "missing": lost}
        self.commits.append(ask)
        return 200, {"number": len(self.commits), "missing": []}

    def latest(self) -> tuple[int, object]:
        if not self.commits:
            return 200, {"checkpoint": None}
        files = self.commits[-1]["files"]
        assert isinstance(files, list)
        size = sum(each.get("size", 0) for each in files)
        number = len(self.commits)
        return 200, {
            "checkpoint": {
                "number": number,
                "attempt": 1,
                "made_at": "",
                "bytes": size,
                "files": files,
            }
        }

    def folder(self, number: int = -1) -> dict[str, bytes]:
        """What a committed checkpoint holds, links as their targets."""
        files = self.commits[number]["files"]
        assert isinstance(files, list)
        return {
            each["path"]: each["link"].encode() if "link" in each else self.held[each["sha256"]]
            for each in files
        }

    def serve_exec(
        self, exec_id: str, query: dict[str, str], data: bytes | None
    ) -> tuple[int, object]:
        """Take a command's output, or answer a request for input if `data` is None."""
        if data is None:
            return 200, {"data": "", "end": exec_id in self.execs_left}
        output = self.exec_output.setdefault(exec_id, bytearray())
        offset = int(query["offset"])
        if offset > len(output):
            self.faults.append(f"output of {exec_id} at {offset}, {len(output)} came")
        output += data[len(output) - offset :]
        if "exit_code" in query:
            self.exec_codes[exec_id] = int(query["exit_code"])
        return 200, {}


class _Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, stub: Stub) -> None:
        self.stub = stub
        self.open: set[socket.socket] = set()
        super().__init__(stub.path, _Handler)

    def get_request(self) -> tuple[socket.socket, str]:
        connection, _ = self.socket.accept()
        self.open.add(connection)
        return connection, "agent"

    def break_all(self) -> None:
        with self.stub.lock:
            self.stub.lock.notify_all()
        for connection in list(self.open):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            self.stub.faults.append(f"{type(error).__name__}: {error}")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        self._serve()

    def do_GET(self) -> None:
        self._serve()

    def do_PUT(self) -> None:
        time.sleep(self.server.stub.put_delay_s)
        self._serve()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _serve(self) -> None:
        stub = self.server.stub
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        url = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        stub.requests.append(url.path)
        if self.headers["Authorization"] != f"Bearer {TOKEN}" or self.headers[
            "Cavvy-Agent-Protocol"
        ] != str(PROTOCOL):
            stub.faults.append(f"headers of {self.path}")
        if stub.refuse is not None:
            self._answer(stub.refuse, {"code": "no"})
            return
        if url.path == "/agent/v1/log":
            time.sleep(stub.log_delay_s)
        if url.path == "/agent/v1/orders":
            self._answer(*stub.orders(query))
            return
        with stub.lock:
            status, answer = self._route(stub, url.path, query, data)
        self._answer(status, answer)
        stub.answered.append(url.path)

    def _route(
        self, stub: Stub, path: str, query: dict[str, str], data: bytes
    ) -> tuple[int, object]:
        match path.removeprefix("/agent/v1/").split("/"):
            case ["claim"]:
                return stub.claim(json.loads(data))
            case ["messages"]:
                return stub.receive(json.loads(data))
            case ["log"]:
                return stub.append(query, data)
            case ["data", "deposit"]:
                return 200, {
                    "uploads": stub.uploads,
                    "most_bytes": 1 << 29,
                    "valid_s": 3600.0,
                    "again_s": 3600.0,
                }
            case ["execs", exec_id, *rest]:
                return stub.serve_exec(exec_id, query, None if rest else data)
            case ["blobs", "missing"]:
                return stub.missing(json.loads(data))
            case ["blobs", "pack"]:
                return stub.pack(json.loads(data))
            case ["blobs", digest] if self.command == "PUT":
                return stub.hold(digest, query, data)
            case ["blobs", digest] if digest in stub.blobs or digest in stub.held:
                return 200, stub.blobs[digest] if digest in stub.blobs else stub.held[digest]
            case ["checkpoints", "latest"]:
                return stub.latest()
            case ["checkpoints"]:
                return stub.commit(json.loads(data))
            case _:
                return 404, {"code": "not-found"}

    def _answer(self, status: int, answer: object) -> None:
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class Rig:
    """One agent, its home, and the server that it talks to."""

    def __init__(self, folder: Path, **work: object) -> None:
        self.folder = folder
        self.stub = Stub(folder / "s", work)
        self.home = folder / "home"
        self.config: dict[str, object] = {
            "protocol": 1,
            "gang": GANG,
            "rank": 0,
            "address": f"unix:{folder}/s",
            "token": TOKEN,
            "home": str(self.home),
            "cache": str(folder / "cache"),
            "lease_s": 3600,
            "grace_s": 2,
            "devices": [],
        }
        self.environ = {
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "SERVER_SECRET": "not-for-tasks",
        }
        self.command = make_command()
        self.agents: list[subprocess.Popen[bytes]] = []

    def launch(self, *arguments: str) -> subprocess.Popen[bytes]:
        path = self.folder / f"config-{self.config['rank']}-{len(self.agents)}.json"
        path.write_text(json.dumps(self.config))
        with open(self.folder / "agent.log", "ab") as log:
            agent = subprocess.Popen(
                [*self.command, *arguments, str(path)],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.agents.append(agent)
        return agent

    def finish(self, *arguments: str) -> int:
        """Run an agent to its end."""
        return self.launch(*arguments).wait(PATIENCE_S * 2)

    def said(self) -> str:
        return (self.folder / "agent.log").read_text()

    def until(self, condition: Callable[[], object]) -> None:
        wait_until(
            condition,
            lambda: f"messages: {self.stub.messages}; agent: {self.said()}",
            pause_s=0.01,
        )

    def output(self) -> str:
        return bytes(self.stub.log).decode()

    def exited(self) -> dict[str, object]:
        return self.stub.last("exited")

    def survivors(self) -> list[int]:
        """Processes of the work that live, found by what the work's environment promises."""
        mark = f"CAVVY_JOB_ID={self.stub.work['job_id']}".encode()
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit():
                with suppress(OSError):
                    zombie = (
                        Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[0]
                        == b"Z"
                    )
                    if not zombie and mark in Path(f"/proc/{entry}/environ").read_bytes().split(
                        b"\0"
                    ):
                        found.append(int(entry))
        return found


@contextmanager
def make_rig(**work: object) -> Iterator[Rig]:
    """A rig with its server up; nothing of it is left afterwards, and the protocol was kept."""
    folder = Path(
        tempfile.mkdtemp(prefix="rm-agent-", dir="/tmp")
    )  # a Unix socket's path must be short
    work.setdefault("job_id", re.sub(r"\W", "", folder.name))
    rig = Rig(folder, **work)
    rig.stub.start()
    try:
        yield rig
        assert rig.stub.faults == []
    finally:
        for agent in rig.agents:
            if agent.poll() is None:
                agent.send_signal(signal.SIGKILL)
            agent.wait()
        rig.stub.stop()
        rig.until(lambda: not rig.survivors())
        shutil.rmtree(folder, ignore_errors=True)
