"""The first process of a pod: starts the agent, relays its requests, and ends the pod if the
control plane stays silent.

The process runs until the agent has exited. Requests pass as frames through the tunnel that
`tunnel.py` opens. A frame consists of a kind, the number of an agent's connection, a length in
bytes, and data of this length. This program needs only the standard library of Python 3.8 or newer.
On an older Python, the program runs `boot.sh bring` to wait for a newer Python. The agent is a fork
of this process, so that the tunnel can open while the agent still loads.
"""

import os
import select
import signal
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

RUN = "/cavvy/run"
AGENT = "/cavvy/agent"
HOME = RUN + "/home"
HANDLED = (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT)
SECRET = "/cavvy/gang/config.json"
PATIENCE = "/cavvy/gang/patience_s"
FRAME = struct.Struct("!cII")
OPEN, DATA, CLOSE, REMOVED = b"O", b"D", b"C", b"R"
CHUNK = 65536
TUNNEL_S = 20.0  # a tunnel counts as broken if it accepts no data for this long
DELIVERY_S = 45.0  # time limit for an agent with --deliver, which itself stops after 20 s
SLACK_S = 60.0  # an agent that still runs this long after lease and grace is killed


def main() -> int:
    if tuple(sys.version_info) < (3, 8):  # the image has a Python of its own that is too old
        os.execv("/bin/sh", ["sh", AGENT + "/boot.sh", "bring"])
    os.makedirs(RUN, mode=0o700, exist_ok=True)
    listeners = [listen(RUN + "/agent.sock"), listen(RUN + "/tunnel.sock")]
    with open(RUN + "/python.new", "w") as file:
        file.write(" ".join(started_as()))
    os.rename(RUN + "/python.new", RUN + "/python")
    agent = start_agent(listeners)
    with open(PATIENCE) as file:
        init = PodInit(listeners[0], listeners[1], agent, float(file.read()) + SLACK_S)
    code = init.run()
    if code > 128 and os.path.exists(HOME + "/started"):
        init.follow(start_agent(listeners, "--deliver"))
        init.run()
    write_termination_message()
    return code


def start_agent(listeners: "list[socket.socket]", *options: str) -> int:
    """Start the agent as a fork of this process, which is faster than starting a second Python."""
    agent = os.fork()
    if agent == 0:
        for listener in listeners:
            listener.close()
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        sys.argv = [AGENT + "/agent.pyz", *options, RUN + "/config.json"]
        try:
            import runpy

            write_config()
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as leaving:
            sys.stderr.flush()
            os._exit(leaving.code if isinstance(leaving.code, int) else 1)
        os._exit(0)
    return agent


def write_termination_message() -> None:
    """Copy the agent's exit record to the termination message, which Kubernetes keeps after the pod
    has ended.
    """
    try:
        with open(HOME + "/exit.json", "rb") as file:
            note = file.read(4096)
        with open("/dev/termination-log", "wb") as file:
            file.write(note)
    except OSError:
        return


def started_as() -> "list[str]":
    """Return the command that started this Python. A runtime that was copied from the server must
    be started through its own loader."""
    with open("/proc/self/cmdline", "rb") as file:
        words = file.read().decode().split("\0")
    return words[: next(at for at, word in enumerate(words) if word.endswith("init.py"))]


def write_config() -> None:
    """Write the agent's configuration: the gang's configuration, with the values for this pod
    added."""
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


def listen(path: str) -> socket.socket:
    if os.path.exists(path):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


class PodInit:
    """The main loop: one thread that waits for signals, the agent's connections and the tunnel."""

    def __init__(
        self, agents: socket.socket, tunnels: socket.socket, agent: int, patience_s: float
    ) -> None:
        self.agents, self.tunnels, self.agent = agents, tunnels, agent
        self.patience_s = patience_s
        self.heard = time.monotonic()
        self.tunnel: socket.socket | None = None
        self.unread = b""  # bytes from the tunnel that do not form a complete frame yet
        self.connections: dict[int, socket.socket] = {}  # the agent's connections, by number
        # data received while there was no tunnel, by connection number
        self.early: dict[int, bytes] = {}
        self.count = 0
        self.code: int | None = None
        self.poll = select.poll()
        # the function that handles the data of a file descriptor, by descriptor
        self.ready: dict[int, Callable[[], None]] = {}
        self.wake, out = os.pipe()
        for end in (self.wake, out):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(out, warn_on_full_buffer=False)
        for number in HANDLED:
            signal.signal(number, lambda number, frame: None)
        self.watch(self.wake, lambda: self.signalled(set(os.read(self.wake, 512))))
        self.watch(agents.fileno(), self.accept)
        self.watch(tunnels.fileno(), lambda: self.take_tunnel(tunnels.accept()[0]))

    def watch(self, descriptor: int, handle: "Callable[[], None]") -> None:
        self.ready[descriptor] = handle
        self.poll.register(descriptor, select.POLLIN)

    def close(self, connection: socket.socket) -> None:
        del self.ready[connection.fileno()]
        self.poll.unregister(connection)
        connection.close()

    def follow(self, agent: int) -> None:
        """Relay requests for a second agent, which only delivers the results of the first agent."""
        self.agent, self.code = agent, None
        self.heard = time.monotonic()
        self.patience_s = DELIVERY_S

    def run(self) -> int:
        """Relay requests until the agent has exited. Return the agent's exit code, or 128 + N if
        signal N killed the agent.
        """
        while self.code is None:
            left = self.heard + self.patience_s - time.monotonic()
            if left <= 0:
                # The agent does not exit by itself, and nothing else would end this pod.
                os.kill(self.agent, signal.SIGKILL)
                self.heard = time.monotonic()
                continue
            for descriptor, _ in self.poll.poll(min(left, 3600.0) * 1000 + 1):
                if descriptor in self.ready:  # an earlier handler may have closed the descriptor
                    self.ready[descriptor]()
        return self.code

    def signalled(self, numbers: "set[int]") -> None:
        for number in numbers & {signal.SIGTERM, signal.SIGINT}:
            os.kill(self.agent, number)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.agent:
                code = os.WEXITSTATUS(status) if os.WIFEXITED(status) else None
                self.code = 128 + os.WTERMSIG(status) if code is None else code

    def accept(self) -> None:
        connection = self.agents.accept()[0]
        self.count += 1
        number = self.count
        self.connections[number] = connection
        self.watch(connection.fileno(), lambda: self.read_agent(number, connection))
        self.send(OPEN, number)

    def read_agent(self, number: int, connection: socket.socket) -> None:
        data = receive(connection)
        if not data:
            self.drop(number)
            self.send(CLOSE, number)
        elif self.tunnel is None:
            self.early[number] = self.early.get(number, b"") + data
        else:
            self.send(DATA, number, data)

    def take_tunnel(self, tunnel: socket.socket) -> None:
        """Replace the last tunnel with a new tunnel. The agent repeats the requests that were in
        flight.
        """
        self.lose_tunnel()
        tunnel.settimeout(TUNNEL_S)
        self.tunnel = tunnel
        self.watch(tunnel.fileno(), self.read_tunnel)
        self.heard = time.monotonic()
        for number in sorted(self.connections):
            self.send(OPEN, number)
            if number in self.early:
                self.send(DATA, number, self.early[number])
            if self.tunnel is not tunnel:
                return  # the new tunnel broke at once; keep the early data for the next tunnel
            self.early.pop(number, None)

    def lose_tunnel(self) -> None:
        if self.tunnel is None:
            return
        self.close(self.tunnel)
        self.tunnel, self.unread = None, b""
        for number in list(self.connections):
            if number not in self.early:
                self.drop(number)

    def read_tunnel(self) -> None:
        data = receive(self.tunnel) if self.tunnel is not None else b""
        if not data:
            self.lose_tunnel()
            return
        self.heard = time.monotonic()
        self.unread += data
        while len(self.unread) >= FRAME.size:
            kind, number, length = FRAME.unpack_from(self.unread)
            end = FRAME.size + length
            if len(self.unread) < end:
                return
            body, self.unread = self.unread[FRAME.size : end], self.unread[end:]
            self.handle(kind, number, body)

    def handle(self, kind: bytes, number: int, body: bytes) -> None:
        """Handle a frame from the control plane."""
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
        self.early.pop(number, None)
        self.close(self.connections.pop(number))

    def send(self, kind: bytes, number: int, body: bytes = b"") -> None:
        if self.tunnel is None:
            return
        try:
            self.tunnel.sendall(FRAME.pack(kind, number, len(body)) + body)
        except OSError:
            self.lose_tunnel()


def receive(connection: socket.socket) -> bytes:
    """Return received data, or b"" if the connection was closed or broke."""
    try:
        return connection.recv(CHUNK)
    except OSError:
        return b""


if __name__ == "__main__":
    sys.exit(main())
