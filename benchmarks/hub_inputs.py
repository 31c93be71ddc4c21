"""Measures how fast a node downloads a model, beside one stream of curl, on the loopback.

    python benchmarks/hub_inputs.py [--mib N] [--stream-mbs N]

With --stream-mbs, the server limits each connection to N MB/s, as hosts of files do. The second
job on the node takes the file from the cache.
"""

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cavvy.agent.allowed_folders import AllowedFolders
from cavvy.agent.data.fetch import fetch_files
from cavvy.agent.data.transfer import TransferProgress

PIECE = 1 << 20


def serve(path: str, stream_mbs: float) -> None:
    """Serve a file, also in ranges; print the port."""

    class Files(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None: ...

        def do_GET(self) -> None:
            size = os.path.getsize(path)
            begin, _, end = (
                self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")
            )
            at, stop = int(begin), min(int(end or size) + 1, size)
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Length", str(stop - at))
            self.end_headers()
            began, first = time.monotonic(), at
            with open(path, "rb") as file:
                while at < stop:
                    at += os.sendfile(
                        self.connection.fileno(), file.fileno(), at, min(PIECE, stop - at)
                    )
                    if stream_mbs:
                        due = began + (at - first) / 1e6 / stream_mbs
                        time.sleep(max(0.0, due - time.monotonic()))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Files)
    print(server.server_address[1], flush=True)
    server.serve_forever()


class ControlPlane:
    """Lists the file to the node."""

    def __init__(self, url: str, size: int, digest: str) -> None:
        signed = {"method": "GET", "url": url, "headers": {}}
        self.file = {
            "path": "m",
            "size": size,
            "tag": "",
            "md5": "",
            "sha256": digest,
            "signed": signed,
        }

    def read(self, *_: object, **__: object) -> Any:
        return {"files": [self.file], "next": ""}


def measure(name: str, mb: float, run: Any) -> None:
    def cpu_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(each.ru_utime + each.ru_stime for each in used)

    before, began = cpu_s(), time.monotonic()
    run()
    took = time.monotonic() - began
    used = cpu_s() - before
    print(f"{name:32} {mb / took:8.0f} MB/s {took:7.2f} s {1e3 * used / mb * 1e3:8.0f} ms CPU/GB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mib", type=int, default=2048)
    parser.add_argument("--stream-mbs", type=float, default=0.0)
    parser.add_argument("--serve", default="")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.stream_mbs)
        return
    with tempfile.TemporaryDirectory() as folder:
        path, found, block = f"{folder}/weights", hashlib.sha256(), os.urandom(PIECE)
        with open(path, "wb") as file:
            for _ in range(given.mib):
                file.write(block)
                found.update(block)
        command = [sys.executable, __file__, "--serve", path, "--stream-mbs", str(given.stream_mbs)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}/m"
        mb = given.mib * PIECE / 1e6

        def bring(job: str) -> None:
            Path(folder, job).mkdir()
            plane: Any = ControlPlane(url, given.mib * PIECE, found.hexdigest())
            fetch_files(
                AllowedFolders([f"{folder}/{job}"]),
                f"{folder}/cache",
                f"{folder}/{job}/in",
                lambda: plane,
                TransferProgress("input", lambda text: None),
            )

        try:
            curl = ["curl", "-sS", "-o", f"{folder}/by-curl", url]
            measure("curl, one stream", mb, lambda: subprocess.run(curl, check=True))
            hashing = ["sha256sum", f"{folder}/by-curl"]
            measure("sha256sum of it", mb, lambda: subprocess.run(hashing, check=True, stdout=-3))
            os.unlink(f"{folder}/by-curl")
            measure("a node: parts, checked", mb, lambda: bring("first"))
            measure("the next job: cache, checked", mb, lambda: bring("second"))
        finally:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
