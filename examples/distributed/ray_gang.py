"""Start a Ray of its own on every node of a gang, run a program on the first, and end it when the
program has ended.

    python ray_gang.py PROGRAM.py [ARGUMENT ...]

Every rank runs this same line; Cavvy's rank environment says who is first. The program finds the
cluster by `ray.init()`. Nothing outlives the gang, and no other Ray on the machine is touched, as
`ray stop` would.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

RAY = os.path.join(os.path.dirname(sys.executable), "ray")
HOST, PORT = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
RANK, NODES = int(os.environ["NODE_RANK"]), int(os.environ["NNODES"])
PATIENCE_S = 120
GONE_AFTER = 3  # looks, a second apart
TRIES = 4


class Node:
    """This node's part of Ray, in a folder of its own."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="ray-gang-")  # short, for the sockets in it
        # Ports that nobody else on this machine can have; the first node's alone is known.
        options = [
            "--block",
            "--disable-usage-stats",
            "--include-log-monitor=false",
            f"--temp-dir={self.folder}",
        ]
        options += ["--min-worker-port=0", "--max-worker-port=0", "--dashboard-agent-listen-port=0"]
        if RANK == 0:
            options += ["--head", f"--port={PORT}", "--include-dashboard=false"]
            options += [f"--ray-client-server-port={free_port()}"]
        else:
            options += [f"--address={HOST}:{PORT}"]
        self.process = subprocess.Popen([RAY, "start", *options], stdout=subprocess.DEVNULL)

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def main() -> int:
    signal.signal(
        signal.SIGTERM, lambda number, frame: sys.exit(128 + number)
    )  # a notice, or a stop
    return lead() if RANK == 0 else follow()


def lead() -> int:
    """Run the program when all nodes are there."""
    node = Node()
    try:
        import ray

        wait_for_head()
        os.environ["RAY_ADDRESS"] = f"{HOST}:{PORT}"
        until = time.monotonic() + PATIENCE_S
        ray.init(log_to_driver=False)
        while sum(each["Alive"] for each in ray.nodes()) < NODES:
            if not node.runs or time.monotonic() > until:
                sys.exit(f"of {NODES} nodes only {len(ray.nodes())} joined Ray")
            time.sleep(0.2)
        ray.shutdown()
        return subprocess.call([sys.executable, *sys.argv[1:]])
    finally:
        node.end()


def follow() -> int:
    """Stay for as long as the first node does. A Ray that ends here before that is started
    again, a few times.
    """
    wait_for_head()
    node, tries, missed = Node(), 1, 0
    try:
        while missed < GONE_AFTER:
            missed = 0 if answers() else missed + 1
            if not node.runs and not missed:
                if tries == TRIES:
                    return 1
                node.end()
                node, tries = Node(), tries + 1
            time.sleep(1)
        return 0
    finally:
        node.end()


def wait_for_head() -> None:
    until = time.monotonic() + PATIENCE_S
    while not answers():
        if time.monotonic() > until:
            sys.exit(f"Ray's head at {HOST}:{PORT} does not answer")
        time.sleep(0.2)


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("", 0))
        return int(door.getsockname()[1])


def answers() -> bool:
    try:
        with socket.create_connection((HOST, PORT), timeout=5):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
