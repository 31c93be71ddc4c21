"""The devices, the link and the load of `make demo-edge`: `demo_edge.py FOLDER COMMAND ...`."""

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
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from sklearn.datasets import load_digits

from cavvy.client import connect
from cavvy.client.edge_wire import list_devices, list_rollouts

LIMIT_S = 180.0
# The images that devices see: those of the training, of which the first model is sure; then new
# ones, and at the end others, on which no model was trained.
KNOWN, NEW, UNSEEN = range(60), range(60, 730), range(730, 1400)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
    for number in range(1, count + 1):
        device = folder / "devices" / f"d{number}"
        device.mkdir(parents=True)
        options = {
            "listen": f"127.0.0.1:{free_port()}",
            "share": f"127.0.0.1:{free_port()}",
            "probation_s": 2,
            "every_s": 1,
            "look_s": 0.2,
        }
        (device / "edge.json").write_text(json.dumps(options))
        environ = {**os.environ, "CAVVY_EDGE_FOLDER": str(device)}
        environ["CAVVY_EDGE_PYTHON"] = sys.executable
        with (device / "log").open("ab") as log:
            process = subprocess.Popen(
                ["sh", "-c", command], env=environ, stdout=log, stderr=log, start_new_session=True
            )
        (device / "pid").write_text(str(process.pid))
    with connect() as client:
        await_it(lambda: len(list_devices(client, None)) == count, f"{count} devices enrol")
        names = sorted(each.name for each in list_devices(client, None))
    print(f"enrolled: {', '.join(names)}")


def stop(folder: Path) -> None:
    for path in folder.glob("devices/*/pid"):
        with suppress(ProcessLookupError):
            os.killpg(int(path.read_text()), signal.SIGKILL)


def await_version(number: int, count: int) -> None:
    def served() -> bool:
        with connect() as client:
            found = [model.serving for each in list_devices(client, None) for model in each.models]
            rollouts = list_rollouts(client, None)
        return found.count(number) == count and rollouts[0].phase != "running"

    await_it(served, f"{count} devices serve digits@{number}")
    print(f"{count} devices serve digits@{number}")


def load(folder: Path, count: int, option: str = "") -> None:
    """Send images to all devices, and say how many were answered and how many rightly."""
    digits = load_digits()
    ports = [
        json.loads(path.read_text())["listen"].rpartition(":")[2]
        for path in sorted(folder.glob("devices/*/edge.json"))
    ]
    chosen = random.Random(1)
    answered = right = sent = 0

    def ask(index: int) -> int | None:
        body = json.dumps({"instances": [(digits.data[index] / 16).tolist()]}).encode()
        url = f"http://127.0.0.1:{chosen.choice(ports)}/v1/models/digits:predict"
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
            for index, found in zip(images, pool.map(ask, images), strict=True):
                sent += 1
                answered += found is not None
                right += found == digits.target[index]
            if option != "--until-halted" or is_halted():
                break
            if time.monotonic() > until:
                sys.exit("the rollout did not halt")
    print(f"{answered} of {sent} requests answered, {right / max(1, answered):.1%} of them rightly")


def main() -> None:
    folder, command, *rest = sys.argv[1:]
    state = Path(folder)
    match command:
        case "ports":
            print(free_port(), free_port())
        case "link":
            link(int(rest[0]), int(rest[1]))
        case "start":
            start(state, int(rest[0]), rest[1])
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
