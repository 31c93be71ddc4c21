"""The main program of a joined machine. The program joins once, and then relays the lines of the
machine's supervisor to the control plane until the machine leaves.

Calls to the control plane use HTTPS, with the server's certificate pinned by hash. An OSError means
that the caller should try again later; MachineDismissed means that the machine must leave
permanently.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    _T = TypeVar("_T")
    Fields = dict[str, Any]

POLL_S = 20.0
FIRST_PAUSE_S, LAST_PAUSE_S = 0.2, 3.0
GRACE_S = 20.0  # seconds that jobs have to save their state when this machine leaves
LAST_WORDS_S = 15.0  # additional seconds for the agents' last reports


def say(text: str) -> None:
    sys.stderr.write(f"cavvy: {text}\n")
    sys.stderr.flush()


def retry(work: Callable[[], _T], over: threading.Event, *, loud: bool = False) -> _T | None:
    """Call `work` until it raises no OSError, and return its result. Return None if
    `over` is set before `work` succeeds.
    """
    pause = FIRST_PAUSE_S
    while not over.is_set():
        try:
            return work()
        except OSError as error:
            if loud:
                say(f"{error}; trying again")
            over.wait(pause)
            pause = min(LAST_PAUSE_S, pause * 2)
    return None


class MachineClient:
    """This machine as a member of one installation."""

    def __init__(self, address: str, pin: str, place: str, folder: str, python: str) -> None:
        self._where = (pin, place)
        self.folder, self.start = folder, [*python.split(), "-I", "-S"]
        self._card_path = f"{folder}/member-{pin[:16]}-{place}.json"
        self._card: Fields = read_json(self._card_path) or {"nonce": os.urandom(16).hex()}
        self._addresses = ServerAddresses(address, self._card.get("servers", []))
        self._calls = self.make_calls()
        self.root = ""
        # set when this machine must leave
        self._leaving = threading.Event()

    def leave(self, *signalled: object) -> None:
        """Make this machine leave. The method can be used as a signal handler, so it accepts a
        handler's arguments and ignores them.
        """
        self._leaving.set()

    def run(self, token: str) -> int:
        """Run until this machine has left. Return the exit code."""
        if "token" not in self._card and not self._enter(token):
            return 1
        self.root = f"{self.folder}/{self._card['folder']}"
        os.makedirs(self.root, mode=0o700, exist_ok=True)
        lock = os.open(self.root + "/joiner.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"this machine has already joined as {self._card['name']} and is connected")
            return 0
        while not self._leaving.is_set():
            session = None
            try:
                session = retry(lambda: SupervisorSession(self), self._leaving, loud=True)
                if session is None:
                    break
                say(f"joined as {self._card['name']}; press Ctrl-C to leave")
                session.relay(self._leaving)
                if session.wanted_to_leave or self._leaving.is_set():
                    session.leave()
                    if session.wanted_to_leave:
                        os.unlink(self._card_path)
                    say("left")
                    break
            except MachineDismissed as error:
                if session is not None:
                    session.close()
                return self._end_for_good(str(error))
            finally:
                if session is not None:
                    session.close()
            self._leaving.wait(FIRST_PAUSE_S)
        return 0

    def _enter(self, token: str) -> bool:
        self._calls.token = token
        # stored before the request, so that a later attempt uses the same nonce
        write_json(self._card_path, self._card)
        wish = {"nonce": self._card["nonce"], "hostname": os.uname().nodename}
        try:
            entered = retry(lambda: self._calls.ask("enter", wish), self._leaving, loud=True)
        except MachineDismissed as error:
            os.unlink(self._card_path)
            say(str(error))
            return False
        if entered is None:
            return False
        self._card.update(entered)
        write_json(self._card_path, self._card)
        self._calls.token = entered["token"]
        return True

    def make_calls(self) -> ServerCalls:
        return ServerCalls(self._addresses, *self._where, self._card.get("token", ""))

    def learn_addresses(self, servers: list[str]) -> None:
        """Remember the addresses of all servers, also for a later run of this program."""
        if servers and self._addresses.learn(servers):
            self._card["servers"] = servers
            write_json(self._card_path, self._card)

    def _end_for_good(self, reason: str) -> int:
        """End all work of the installation, because the control plane refused this machine's
        token."""
        say(reason)
        if os.path.exists(self._card_path):
            os.unlink(self._card_path)
        paths = glob.glob(f"{glob.escape(self.folder)}/*.supervisor.pyz")
        if self.root and paths:
            end_all(self.start, max(paths, key=os.path.getmtime), self.root)
        return 1


class SupervisorSession:
    """One session, with its own supervisor process. The constructor may raise OSError or
    MachineDismissed.
    """

    def __init__(self, machine: MachineClient) -> None:
        self._id = os.urandom(8).hex()
        self._machine, self.root = machine, machine.root
        self._calls, self._tell = machine.make_calls(), machine.make_calls()
        command = [*machine.start, self._fetch()]
        environ = dict(os.environ, CAVVY_NODE_ADDRESS=self._calls.own_address)
        environ.pop("CAVVY_JOIN_TOKEN", None)
        facts = subprocess.run(
            [*command, "facts", self.root],
            stdout=subprocess.PIPE,
            env=environ,
            timeout=60,
            check=True,
        ).stdout
        self._supervisor = subprocess.Popen(
            [*command, "serve", self.root],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ,
            start_new_session=True,  # so that Ctrl-C interrupts only this program
        )
        self._over = threading.Event()
        self.wanted_to_leave = False
        self._failure: MachineDismissed | None = None
        self._lines: list[str] = []  # lines from the supervisor that were not sent yet
        self._first = 1  # the number of the first line in `_lines`
        self._written = threading.Lock()
        self._news = threading.Condition()
        self._greet(json.loads(facts))

    def _fetch(self) -> str:
        """Fetch the supervisor and the agent. Return the supervisor's path."""
        wanted, folder = self._calls.ask("bundles", {}), self._machine.folder
        supervisor = f"{folder}/{wanted['supervisor']}.supervisor.pyz"
        self._calls.fetch(wanted["supervisor"], supervisor)
        self._calls.fetch(wanted["agent"], f"{folder}/{wanted['agent']}.pyz")
        return supervisor

    def _greet(self, facts: Fields) -> None:
        self._calls.ask(
            "hello",
            {
                "session": self._id,
                "root": self.root,
                "cache": self._machine.folder + "/cache",
                "start": self._machine.start,
                "folder": self._machine.folder,
                "facts": facts,
            },
        )

    def relay(self, leaving: threading.Event) -> None:
        """Relay lines until the session ends or the machine must leave. Raises MachineDismissed."""
        for work in (self._listen, self._read, self._say):
            threading.Thread(target=work, daemon=True).start()
        while not self._over.is_set() and not leaving.is_set() and not self.wanted_to_leave:
            self._over.wait(0.1)
        if self._failure is not None:
            raise self._failure

    def leave(self) -> None:
        """Let jobs save their state and end, as in a preemption, and report the machine's departure
        to the control plane."""
        say(f"leaving: jobs have {GRACE_S:g} s to save their state")
        calls = self._machine.make_calls()
        self._notify(calls, "leave")
        self._write(json.dumps({"id": -1, "do": "leave", "grace_s": GRACE_S}))
        until = time.monotonic() + GRACE_S + LAST_WORDS_S
        while (
            time.monotonic() < until
            and (self._lines or alive(self.root))
            and self._supervisor.poll() is None
        ):
            time.sleep(0.1)
        time.sleep(0.5)
        self._notify(calls, "gone")

    def _notify(self, calls: ServerCalls, call: str) -> None:
        try:
            calls.ask(call, {"session": self._id})
        except (OSError, MachineDismissed) as error:
            say(f"the control plane was not informed: {error}")

    def close(self) -> None:
        self._over.set()
        self._supervisor.kill()
        self._supervisor.wait()
        with self._news:
            self._news.notify_all()

    def _ask(
        self, calls: ServerCalls, call: str, fields: Fields, wait_s: float = 0
    ) -> Fields | None:
        """Send a request of this session, and repeat the request if necessary. Return the answer,
        or None if the session has ended.
        """
        answer = None
        try:
            asked = dict(fields, session=self._id)
            answer = retry(lambda: calls.ask(call, asked, wait_s), self._over)
        except MachineDismissed as error:
            self._failure = error
        if answer is None or answer.get("again"):
            self._over.set()
            return None
        return answer

    def _listen(self) -> None:
        """Pass the control plane's lines to the supervisor."""
        after = 0
        while not self._over.is_set():
            asked = {"after": after, "wait_s": POLL_S}
            heard = self._ask(self._calls, "listen", asked, POLL_S)
            if heard is None:
                return
            for number, line in heard.get("lines", ()):
                if number > after:
                    after = number
                    self._write(line)
            self._machine.learn_addresses(heard.get("servers", []))
            if heard.get("leave") and not self.wanted_to_leave:
                self.wanted_to_leave = True
            elif heard.get("leave"):
                self._over.wait(FIRST_PAUSE_S)

    def _write(self, line: str) -> None:
        assert self._supervisor.stdin is not None
        try:
            with self._written:
                self._supervisor.stdin.write(line.encode() + b"\n")
                self._supervisor.stdin.flush()
        except OSError:
            self._over.set()

    def _read(self) -> None:
        """Collect the supervisor's lines."""
        assert self._supervisor.stdout is not None
        for line in self._supervisor.stdout:
            with self._news:
                self._lines.append(line.decode("utf-8", "replace").rstrip("\n"))
                self._news.notify_all()
        self._over.set()

    def _say(self) -> None:
        """Send the supervisor's lines to the control plane."""
        while not self._over.is_set():
            with self._news:
                while not self._lines and not self._over.is_set():
                    self._news.wait(1.0)
                lines, first = self._lines[:1000], self._first
            if not lines:
                continue
            said = self._ask(self._tell, "say", {"first": first, "lines": lines})
            if said is None:
                return
            with self._news:
                taken = int(said["next"]) - self._first
                del self._lines[:taken]
                self._first += taken


def alive(root: str) -> bool:
    """Return whether any gang on this machine has a rank that has not ended."""
    ranks = glob.glob(glob.escape(root) + "/agents/*/*/devices")
    return any(not os.path.exists(os.path.dirname(path) + "/dead.json") for path in ranks)


def end_all(start: list[str], supervisor: str, root: str) -> None:
    """End every gang on this machine without contacting the control plane."""
    process = subprocess.Popen(
        [*start, supervisor, "serve", root],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert process.stdin is not None
    try:
        process.stdin.write(
            json.dumps({"id": -1, "do": "leave", "grace_s": GRACE_S}).encode() + b"\n"
        )
        process.stdin.flush()
        until = time.monotonic() + GRACE_S + LAST_WORDS_S
        while time.monotonic() < until and alive(root):
            time.sleep(0.1)
    finally:
        process.kill()
        process.wait()


def read_json(path: str) -> Fields | None:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return None


def write_json(path: str, value: Fields) -> None:
    fresh = f"{path}.{os.getpid()}"
    with open(
        os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
    ) as file:
        json.dump(value, file)
    os.rename(fresh, path)


def main(arguments: list[str]) -> int:
    address, pin, place, folder, python = arguments
    token = os.environ.pop("CAVVY_JOIN_TOKEN", "")
    os.umask(0o077)
    machine = MachineClient(address, pin, place, folder, python)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if (
            number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ):  # if SIGHUP is ignored, as for programs in the background, it stays ignored
            signal.signal(number, machine.leave)
    return machine.run(token)


TIMEOUT_S = 30.0


def _is_intact(path: str, digest: str) -> bool:
    """Return whether the file exists and has this hash. Something else there is removed."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with open(os.open(path, flags), "rb") as file:
            if hashlib.sha256(file.read()).hexdigest() == digest:
                return True
    except OSError:
        pass
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)
    return False


class MachineDismissed(Exception):
    """Raised if the control plane refuses this machine; the message gives the reason."""


class ServerAddresses:
    """The addresses of the control plane's servers, shared by all threads. Each server can answer
    all calls. `first` is the address with which the machine joined.
    """

    def __init__(self, first: str, others: list[str]) -> None:
        self._first, self.others = first, others
        self.current = first

    def learn(self, others: list[str]) -> bool:
        """Replace all addresses except the first. Return whether the addresses have changed."""
        changed, self.others = others != self.others, others
        return changed

    def leave(self, failed: str) -> None:
        """Switch from `failed` to the next address, unless another thread has already switched."""
        if self.current == failed:
            known = [self._first, *(each for each in self.others if each != self._first)]
            at = known.index(failed) + 1 if failed in known else 0
            self.current = known[at % len(known)]


class ServerCalls:
    """A persistent connection to the control plane. Each thread needs its own instance."""

    def __init__(self, addresses: ServerAddresses, pin: str, place: str, token: str) -> None:
        self._addresses, self._pin, self._place = addresses, pin, place
        self.token = token
        self._connection: http.client.HTTPSConnection | None = None
        self.own_address = ""  # this machine's own address on the connection

    def ask(self, call: str, fields: Fields, wait_s: float = 0) -> Fields:
        """Send a request to the control plane and return the answer. Raises OSError,
        MachineDismissed.
        """
        headers = {"Authorization": "Bearer " + self.token, "Content-Type": "application/json"}
        body = json.dumps(fields).encode()
        status, data = self._request(
            "POST", f"/nodes/v1/{self._place}/{call}", body, headers, wait_s
        )
        if status == 200:
            return dict(json.loads(data))
        said = data[:500].decode("utf-8", "replace")
        try:
            said = json.loads(data)["message"]
        except (ValueError, KeyError, TypeError):
            pass
        if status in (401, 403, 410):
            raise MachineDismissed(said)
        raise OSError(f"status {status}: {said}")

    def fetch(self, digest: str, path: str) -> None:
        """Download the file with this hash to `path`, unless the file is there. On some machines,
        an earlier job can have changed the file. Raises OSError."""
        if _is_intact(path, digest):
            return
        status, data = self._request("GET", "/boot/v1/" + digest, b"", {}, 60.0)
        if status != 200 or hashlib.sha256(data).hexdigest() != digest:
            raise OSError(f"the requested file was not received (HTTP status {status})")
        fresh = f"{path}.{os.getpid()}"
        with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(data)
        os.rename(fresh, path)

    def _request(
        self, method: str, path: str, body: bytes, headers: dict[str, str], wait_s: float
    ) -> tuple[int, bytes]:
        address = self._addresses.current
        try:
            connection = self._connect(address)
            connection.sock.settimeout(TIMEOUT_S + wait_s)
            connection.request(method, path, body, headers)
            reply = connection.getresponse()
            data = reply.read()
            if reply.will_close:
                self.drop()
            return reply.status, data
        except (OSError, http.client.HTTPException) as error:
            self.drop()
            self._addresses.leave(address)
            raise OSError(str(error) or type(error).__name__) from error

    def _connect(self, address: str) -> http.client.HTTPSConnection:
        if self._connection is not None:
            return self._connection
        context = ssl.SSLContext(
            ssl.PROTOCOL_TLS_CLIENT
        )  # without CA certificates, because the certificate is checked by its hash
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        host, _, port = address.partition("://")[2].rpartition(":")
        made = http.client.HTTPSConnection(
            host.strip("[]"), int(port), timeout=TIMEOUT_S, context=context
        )
        made.connect()
        made.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        made.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found = hashlib.sha256(made.sock.getpeercert(True) or b"").hexdigest()
        if found != self._pin:
            made.close()
            raise OSError(f"unexpected certificate from the control plane: {found}")
        self.own_address = made.sock.getsockname()[0]
        # no automatic reconnection, because it would skip the check of the certificate
        made.auto_open = 0
        self._connection = made
        return made

    def drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
