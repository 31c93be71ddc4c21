"""The first process of a pod: starts the agent, carries its requests out, and ends the pod when
nobody is left to ask.

It stays until the agent has left. Requests go through the line that `tunnel.py` makes: a frame is a
kind, the number of a connection of the agent, a length, and as many bytes. It needs nothing of ours
and any Python from 3.8 on, and is read by older ones, which step aside for one that is brought.

Many images leave out the compiled forms of Python's own modules, and `json`, `signal` and `socket`
are then a tenth of a second of work. Only the agent, a fork of this process, loads them; this
process takes the bare modules below them, so that the line is up while the agent is still loading.
"""

import _signal  # type: ignore[import-not-found]  # typeshed leaves it out; signal.py imports it
import _socket
import _struct
import os
import select
import sys
import time
import zipimport

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

RUN = "/cavvy/run"
AGENT = "/cavvy/agent"
HOME = RUN + "/home"
HANDLED = (_signal.SIGCHLD, _signal.SIGTERM, _signal.SIGINT)
SECRET = "/cavvy/gang/config.json"
PATIENCE = "/cavvy/gang/patience_s"
FRAME = _struct.Struct("!cII")
OPEN, DATA, CLOSE, REMOVED = b"O", b"D", b"C", b"R"
CHUNK = 65536
LINE_S = 20.0  # a line that takes nothing for so long is a dead one
DELIVERY_S = 45.0  # an agent that only delivers tries for 20 s
SLACK_S = 60.0  # beyond lease and grace: the agent is no longer able to leave by itself


def main() -> int:
    if tuple(sys.version_info) < (3, 8):  # images bring their own Python
        os.execv("/bin/sh", ["sh", AGENT + "/boot.sh", "bring"])
    os.makedirs(RUN, mode=0o700, exist_ok=True)
    doors = [listen(RUN + "/agent.sock"), listen(RUN + "/line.sock")]
    with open(RUN + "/python.new", "w") as file:
        file.write(" ".join(started_as()))
    os.rename(RUN + "/python.new", RUN + "/python")
    agent = start_agent(doors)
    with open(PATIENCE) as file:
        hold = PodInit(doors[0], doors[1], agent, float(file.read()) + SLACK_S)
    code = hold.run()
    if code > 128 and os.path.exists(HOME + "/started"):
        hold.follow(start_agent(doors, "--deliver"))
        hold.run()
    tell_end()
    return code


def start_agent(doors: "list[_socket.socket]", *options: str) -> int:
    """A fork of this process, which need not start a Python again."""
    agent = os.fork()
    if agent == 0:
        for door in doors:
            door.close()
        _signal.set_wakeup_fd(-1)
        for number in HANDLED:
            _signal.signal(number, _signal.SIG_DFL)
        archive = AGENT + "/agent.pyz"
        sys.argv = [archive, *options, RUN + "/config.json"]
        try:
            write_config()
            code = zipimport.zipimporter(archive).get_code("__main__")
            exec(code, {"__name__": "__main__", "__file__": archive + "/__main__.py"})
        except SystemExit as leaving:
            sys.stderr.flush()
            os._exit(leaving.code if isinstance(leaving.code, int) else 1)
        os._exit(0)
    return agent


def tell_end() -> None:
    """What the agent noted of its work's end outlives the pod as its termination message."""
    try:
        with open(HOME + "/exit.json", "rb") as file:
            said = file.read(4096)
        with open("/dev/termination-log", "wb") as file:
            file.write(said)
    except OSError:
        return


def started_as() -> "list[str]":
    """The words that start this Python: one that was brought has a loader of its own."""
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
    return words[: next(at for at, word in enumerate(words) if word.endswith("init.py"))]


def write_config() -> None:
    """The agent's configuration: the gang's, fitted to this pod."""
    import json

    with open(SECRET, encoding="utf-8") as file:
        config: dict[str, Any] = json.load(file)
    config["rank"] = int(os.environ.pop("CAVVY_POD_RANK"))
    config["node_address"] = os.environ.pop("CAVVY_POD_IP", "") or "127.0.0.1"
    config["home"] = HOME
    config.setdefault("address", "unix:" + RUN + "/agent.sock")
    config["taken"]["unless"] = RUN + "/removed"
    descriptor = os.open(RUN + "/config.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        json.dump(config, file)


def listen(path: str) -> _socket.socket:
    if os.path.exists(path):
        os.unlink(path)
    door = _socket.socket(_socket.AF_UNIX)
    door.bind(path)
    os.chmod(path, 0o600)
    door.listen(64)
    return door


def accept(door: _socket.socket) -> _socket.socket:
    """One who has knocked."""
    return _socket.socket(fileno=door._accept()[0])  # type: ignore[attr-defined]  # as socket.py does it


class PodInit:
    """One thread that waits for all of it."""

    def __init__(
        self, agents: _socket.socket, lines: _socket.socket, agent: int, patience_s: float
    ) -> None:
        self.agents, self.lines, self.agent = agents, lines, agent
        self.patience_s = patience_s
        self.heard = time.monotonic()
        self.line: _socket.socket | None = None
        self.unread = b""  # of the line
        self.connections: dict[int, _socket.socket] = {}  # number -> the agent's connection
        self.early: dict[int, bytes] = {}  # number -> what it said while there was no line
        self.count = 0
        self.code: int | None = None
        self.poll = select.poll()
        self.wake, out = os.pipe()
        for end in (self.wake, out):
            os.set_blocking(end, False)
        _signal.set_wakeup_fd(out, warn_on_full_buffer=False)
        for number in HANDLED:
            _signal.signal(number, lambda number, frame: None)
        for each in (self.wake, agents, lines):
            self.poll.register(each, select.POLLIN)

    def follow(self, agent: int) -> None:
        self.agent, self.code = agent, None
        self.heard = time.monotonic()
        self.patience_s = DELIVERY_S

    def run(self) -> int:
        while self.code is None:
            left = self.heard + self.patience_s - time.monotonic()
            if left <= 0:
                os.kill(
                    self.agent, _signal.SIGKILL
                )  # it cannot leave, and nobody else ends this pod
                self.heard = time.monotonic()
                continue
            for descriptor, _ in self.poll.poll(min(left, 3600.0) * 1000 + 1):
                self.ready(descriptor)
        return self.code

    def ready(self, descriptor: int) -> None:
        if descriptor == self.wake:
            self.signalled(set(os.read(self.wake, 512)))
        elif descriptor == self.agents.fileno():
            self.accept()
        elif descriptor == self.lines.fileno():
            self.take_line(accept(self.lines))
        elif self.line is not None and descriptor == self.line.fileno():
            self.read_line()
        else:
            for number, connection in list(self.connections.items()):
                if connection.fileno() == descriptor:
                    self.read_agent(number, connection)

    def signalled(self, numbers: "set[int]") -> None:
        for number in numbers & {_signal.SIGTERM, _signal.SIGINT}:
            os.kill(self.agent, number)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.agent:
                self.code = (
                    os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
                )

    def accept(self) -> None:
        connection = accept(self.agents)
        self.count += 1
        self.connections[self.count] = connection
        self.poll.register(connection, select.POLLIN)
        self.send(OPEN, self.count)

    def read_agent(self, number: int, connection: _socket.socket) -> None:
        try:
            data = connection.recv(CHUNK)
        except OSError:
            data = b""
        if data:
            if self.line is None:
                self.early[number] = self.early.get(number, b"") + data
            else:
                self.send(DATA, number, data)
        else:
            self.drop(number)
            self.send(CLOSE, number)

    def take_line(self, line: _socket.socket) -> None:
        """A new line takes the place of the last; what was under way over that one is lost, and
        asked again.
        """
        self.lose_line()
        line.settimeout(LINE_S)
        self.line = line
        self.poll.register(line, select.POLLIN)
        self.heard = time.monotonic()
        for number in sorted(self.connections):
            self.send(OPEN, number)
            if number in self.early:
                self.send(DATA, number, self.early[number])
            if self.line is not line:
                return  # it broke at once: whoever spoke early is heard over the next
            self.early.pop(number, None)

    def lose_line(self) -> None:
        if self.line is None:
            return
        self.poll.unregister(self.line)
        self.line.close()
        self.line, self.unread = None, b""
        for number in list(self.connections):
            if number not in self.early:
                self.drop(number)

    def read_line(self) -> None:
        try:
            data = self.line.recv(CHUNK) if self.line is not None else b""
        except OSError:
            data = b""
        if not data:
            self.lose_line()
            return
        self.heard = time.monotonic()
        self.unread += data
        while len(self.unread) >= FRAME.size:
            kind, number, length = FRAME.unpack_from(self.unread)
            if len(self.unread) < FRAME.size + length:
                return
            body = self.unread[FRAME.size : FRAME.size + length]
            self.unread = self.unread[FRAME.size + length :]
            self.told(kind, number, body)

    def told(self, kind: bytes, number: int, body: bytes) -> None:
        connection = self.connections.get(number)
        if kind == REMOVED:
            open(RUN + "/removed", "w").close()
            self.send(REMOVED, 0)
        elif connection is not None and kind == DATA:
            try:
                connection.sendall(body)
            except OSError:
                self.drop(number)
                self.send(CLOSE, number)
        elif connection is not None and kind == CLOSE:
            self.drop(number)

    def drop(self, number: int) -> None:
        connection = self.connections.pop(number)
        self.early.pop(number, None)
        self.poll.unregister(connection)
        connection.close()

    def send(self, kind: bytes, number: int, body: bytes = b"") -> None:
        if self.line is None:
            return
        try:
            self.line.sendall(FRAME.pack(kind, number, len(body)) + body)
        except OSError:
            self.lose_line()


if __name__ == "__main__":
    sys.exit(main())
