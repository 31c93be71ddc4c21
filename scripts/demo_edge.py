"""The devices, the links and the load of `make demo-edge`: `demo_edge.py FOLDER COMMAND ...`."""

import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Network, ip_network
from itertools import cycle
from pathlib import Path
from urllib.parse import urlsplit

LIMIT_S = 180.0
# The images that devices see: those of the training, of which the first model is sure (the others
# would be kept, and the graph would go on too early); then new ones, and at the end others, on
# which no model was trained.
UNSURE = (3, 5, 9, 38, 39, 53)
KNOWN = [each for each in range(60) if each not in UNSURE]
NEW, UNSEEN = range(60, 730), range(730, 1400)


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def ip(*words: str, lines: Sequence[str] = ()) -> str:
    """Run one `ip` for a command or, after options, for several lines of commands."""
    command = ["ip", *words, *(("-batch", "-") if lines else ())]
    try:
        done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    except FileNotFoundError:
        raise OSError("there is no command ip: install iproute2") from None
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout


def find_unused_network() -> IPv4Network:
    """Return 32 private addresses to which this machine has no route, but that by which it reaches
    everything. Raises OSError."""
    listed = json.loads(ip("-j", "-4", "route", "show", "table", "all"))
    routes = [ip_network(each["dst"]) for each in listed if each["dst"] != "default"]
    used = [each for each in routes if each.prefixlen >= 8]  # VPNs have a default route in halves
    for private in map(IPv4Network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")):
        for _ in range(100):
            start = random.randrange(int(private[0]), int(private[-1]), 32)
            network = IPv4Network((start, 27))
            if not any(network.overlaps(each) for each in used):
                return network
    raise OSError("this machine has routes to all private addresses")


class Spaces:
    """A network namespace for each device, and a bridge, on which the server listens. The bridge's
    name holds the network's first address, so that two demos never have the same names; device N
    has the name of the bridge with -N, and so has the bridge's end of its link."""

    def __init__(self, bridge: str) -> None:
        self.bridge = bridge
        self._first = int(bridge.removeprefix("cve"), 16)

    def address(self, number: int) -> str:
        """The address of a device; 0 is the server."""
        return str(IPv4Network((self._first, 27))[number + 1])

    def name(self, number: int) -> str:
        return f"{self.bridge}-{number}"

    def make(self, count: int) -> None:
        """Raises OSError, also if devices cannot reach the server or each other."""
        names = [self.name(number) for number in range(1, count + 1)]
        ip(lines=[
            f"link add {self.bridge} type bridge",
            f"addr add {self.address(0)}/27 dev {self.bridge}",
            f"link set {self.bridge} up",
            *(f"netns add {name}" for name in names),
            *(f"link add {name} type veth peer name eth0 netns {name}" for name in names),
            *(f"link set {name} master {self.bridge} up" for name in names),
        ])  # fmt: skip
        for number, name in enumerate(names, 1):
            inner = f"addr add {self.address(number)}/27 dev eth0"
            ip("-n", name, lines=[inner, "link set eth0 up", "link set lo up"])
        ip("netns", "exec", names[0], "true")
        self._check(0, range(1, count + 1))
        self._check(1, range(2, count + 1))

    def _check(self, server: int, devices: range) -> None:
        host = self.address(server)
        with ThreadPoolExecutor(1) as pool:  # its thread stays in the server's namespace
            if server:
                pool.submit(self.enter, server).result()
            listener = pool.submit(socket.create_server, (host, 0)).result()
        with listener:
            where = listener.getsockname()[:2]
            lines = [(partial(self.enter, each), where) for each in devices]
            if count_reached(lines) < len(lines):
                raise OSError(f"devices cannot reach {host}: a firewall of this machine?")

    def enter(self, number: int) -> None:
        """Move this thread into the namespace of a device."""
        with open(f"/run/netns/{self.name(number)}") as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), 0x40000000) != 0:  # CLONE_NEWNET
                raise OSError(ctypes.get_errno(), "setns")

    def switch(self, state: str, count: int) -> None:
        """Let all links be `up` or `down`."""
        print(f"$ ip link set {self.name(1)} {state}, and so for each of {count} devices")
        ip(lines=[f"link set {self.name(number)} {state}" for number in range(1, count + 1)])

    def remove(self) -> None:
        """End the processes in the namespaces, and remove all that `make` made, also in part."""
        folder = Path("/run/netns")
        names = [each.name for each in folder.glob(f"{self.bridge}-*")]
        spaces = [(folder / name).stat() for name in names]
        for _ in range(50):  # a process may start others meanwhile
            found = 0
            for process in filter(str.isdigit, os.listdir("/proc")):
                with suppress(OSError):
                    space = os.stat(f"/proc/{process}/ns/net")
                    if any(os.path.samestat(space, each) for each in spaces):
                        os.kill(int(process), signal.SIGKILL)
                        found += 1
            if not found:
                break
            time.sleep(0.1)
        lines = [f"link del {name}" for name in [*names, self.bridge]]
        with suppress(OSError):  # some that it had not made yet
            ip("-force", lines=[*lines, *(f"netns del {name}" for name in names)])


def find_spaces(folder: Path) -> Spaces | None:
    path = folder / "spaces"
    return Spaces(path.read_text()) if path.exists() else None


def make_network(folder: Path, count: int) -> None:
    """Print where the server listens: the host, the port that devices call, and its own. They are
    the same if devices have namespaces."""
    try:
        if os.geteuid() != 0:
            raise OSError("they need root")
        spaces = Spaces(f"cve{int(find_unused_network()[0]):08x}")
        (folder / "spaces").write_text(spaces.bridge)
        spaces.make(count)
    except OSError as error:
        remove_network(folder)
        why = f"Devices are processes behind one link, not in network namespaces: {error}"
        print(why, file=sys.stderr)
        print("127.0.0.1", free_port(), free_port())
        return
    host = spaces.address(0)
    why = f"Each device has a network namespace, and a link to the bridge {spaces.bridge}, {host}"
    print(why, file=sys.stderr)
    port = free_port(host)
    print(host, port, port)


def remove_network(folder: Path) -> None:
    if spaces := find_spaces(folder):
        spaces.remove()
        (folder / "spaces").unlink()


def count_reached(lines: list[tuple[Callable[[], None], tuple[str, int]]]) -> int:
    """Count the addresses that answer, each asked after a call that enters a namespace."""

    def answers(line: tuple[Callable[[], None], tuple[str, int]]) -> bool:
        enter, where = line
        enter()
        with suppress(OSError), socket.create_connection(where, timeout=3):
            return True
        return False

    with ThreadPoolExecutor(max(1, len(lines))) as pool:
        return sum(pool.map(answers, lines))


def await_it(true: "object", what: str) -> None:
    until = time.monotonic() + LIMIT_S
    while not true():  # type: ignore[operator]
        if time.monotonic() > until:
            sys.exit(f"not within {LIMIT_S:g} s: {what}")
        time.sleep(0.3)


def link(outer: int, inner: int) -> None:
    """Pass connections on until this process ends."""
    listener = socket.create_server(("127.0.0.1", outer), reuse_port=True)
    while True:
        caller, _ = listener.accept()
        server = socket.create_connection(("127.0.0.1", inner))
        for source, sink in ((caller, server), (server, caller)):
            threading.Thread(target=copy, args=(source, sink), daemon=True).start()


def copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_RDWR)


def start(folder: Path, count: int, command: str) -> None:
    """Start devices, each with the line that a user would type; no argument holds its token."""
    from cavvy.capabilities.edge.wire import list_devices
    from cavvy.client import connect  # slow, and few commands need it

    spaces = find_spaces(folder)
    for number in range(1, count + 1):
        device = folder / "devices" / f"d{number}"
        device.mkdir(parents=True)
        options = {
            "listen": f"127.0.0.1:{8080 if spaces else free_port()}",
            "share": f"{spaces.address(number)}:8090" if spaces else f"127.0.0.1:{free_port()}",
            "probation_s": 2,
            "every_s": 1,
            "look_s": 0.2,
        }
        (device / "edge.json").write_text(json.dumps(options))
        environ = {**os.environ, "CAVVY_EDGE_FOLDER": str(device)}
        environ["CAVVY_EDGE_PYTHON"] = sys.executable
        with (device / "log").open("ab") as log:
            process = subprocess.Popen(
                [*(("ip", "netns", "exec", spaces.name(number)) if spaces else ()), "sh"],
                stdin=subprocess.PIPE,
                env=environ,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (device / "pid").write_text(str(process.pid))
        assert process.stdin is not None
        process.stdin.write(command.encode())
        process.stdin.close()
    with connect() as client:
        await_it(lambda: len(list_devices(client, None)) == count, f"{count} devices enrol")
        names = sorted(each.name for each in list_devices(client, None))
    print(f"enrolled: {', '.join(names)}")


def stop(folder: Path) -> None:
    for path in folder.glob("devices/*/pid"):
        with suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)
    remove_network(folder)


def await_version(number: int, count: int) -> None:
    from cavvy.capabilities.edge.wire import list_devices, list_rollouts
    from cavvy.client import connect

    def served() -> bool:
        with connect() as client:
            found = [model.serving for each in list_devices(client, None) for model in each.models]
            rollouts = list_rollouts(client, None)
        return found.count(number) == count and rollouts[0].phase != "running"

    await_it(served, f"{count} devices serve digits@{number}")
    print(f"{count} devices serve digits@{number}")


def find_devices(folder: Path) -> list[tuple[Callable[[], None], Path]]:
    """The folder of each device, and what brings a thread into the device's network."""
    spaces = find_spaces(folder)
    found = sorted(folder.glob("devices/*"), key=lambda each: int(each.name[1:]))
    enters = [
        partial(spaces.enter, int(each.name[1:])) if spaces else lambda: None for each in found
    ]
    return list(zip(enters, found, strict=True))


def say_reached(folder: Path) -> None:
    devices = find_devices(folder)
    calls = [
        urlsplit(json.loads((each / "card.json").read_text())["address"]) for _, each in devices
    ]
    where = [(call.hostname or "", call.port or 443) for call in calls]
    lines = [(enter, there) for (enter, _), there in zip(devices, where, strict=True)]
    reached = count_reached(lines)
    print(f"{reached} of {len(lines)} devices reach the server")
    if reached:
        sys.exit("demo: a device still reaches the server")


def load(folder: Path, count: int, option: str = "") -> None:
    """Send images to all devices in turn, each from its own network, and say how many were answered
    and how many rightly. Exits with a message if one was not. With `--until-halted`, the file
    `answers` says that the first one was answered."""
    from sklearn.datasets import load_digits  # slow, and only this command needs it

    from cavvy.capabilities.edge.wire import list_rollouts
    from cavvy.client import connect

    digits = load_digits()
    devices = [
        (enter, json.loads((each / "edge.json").read_text())["listen"])
        for enter, each in find_devices(folder)
    ]
    chosen = random.Random(1)
    answered = right = sent = 0

    def ask(index: int, device: tuple[Callable[[], None], str]) -> int | None:
        body = json.dumps({"instances": [(digits.data[index] / 16).tolist()]}).encode()
        enter, listens = device
        enter()
        url = f"http://{listens}/v1/models/digits:predict"
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=30) as reply:
                row = json.load(reply)["predictions"][0]
        except (OSError, urllib.error.HTTPError):
            return None
        return int(max(range(10), key=lambda digit: row[digit]))

    def is_halted() -> bool:
        with connect() as client:
            return list_rollouts(client, None)[0].phase == "halted"

    seen = {"--new": NEW, "--unseen": UNSEEN}.get(option, KNOWN)
    until = time.monotonic() + LIMIT_S
    with ThreadPoolExecutor(4) as pool:
        while True:
            images = chosen.choices(seen, k=count)
            for index, found in zip(images, pool.map(ask, images, cycle(devices)), strict=True):
                sent += 1
                answered += found is not None
                right += found == digits.target[index]
                if found is not None and option == "--until-halted":
                    (folder / "answers").touch()
            if option != "--until-halted" or is_halted():
                break
            if time.monotonic() > until:
                sys.exit("the rollout did not halt")
    print(f"{answered} of {sent} requests answered, {right / max(1, answered):.1%} of them rightly")
    if answered < sent:
        sys.exit(f"demo: {sent - answered} of {sent} requests were not answered")


def main() -> None:
    folder, command, *rest = sys.argv[1:]
    state = Path(folder)
    match command:
        case "network":
            make_network(state, int(rest[0]))
        case "links":
            if spaces := find_spaces(state):
                spaces.switch(rest[0], int(rest[1]))
            if rest[0] == "down":
                say_reached(state)
        case "link":
            link(int(rest[0]), int(rest[1]))
        case "start":
            start(state, int(rest[0]), sys.stdin.read())
        case "remove":
            remove_network(state)
        case "stop":
            stop(state)
        case "await":
            await_version(int(rest[0]), int(rest[1]))
        case "load":
            load(state, int(rest[0]), *rest[1:])
        case _:
            sys.exit(f"there is no command {command}")


if __name__ == "__main__":
    main()
