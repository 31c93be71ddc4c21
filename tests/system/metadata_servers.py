"""Stand-ins for the metadata services of clouds, strict about what the real ones are strict about.

As documented: AWS "Instance metadata service" and "Spot Instance interruption notices", Google
Cloud "About VM metadata" and "Spot VMs", Azure "Scheduled Events".
"""

import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit


class Metadata:
    """What a node would be told; `faults` collects requests that the real service would not have
    understood.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.faults: list[str] = []
        self.requests: list[str] = []
        self.tokens: set[str] = set()
        self.action: dict[str, str] | None = None  # AWS
        self.rebalance: dict[str, str] | None = None
        self.told: dict[str, str] = {}  # further facts, by their names
        self.preempted = "FALSE"  # Google Cloud
        self.maintenance = "NONE"
        self.holding = 0
        self.name = "vm_7"  # Azure
        self.events: list[dict[str, object]] = []
        self.started: list[str] = []
        self.skew_s = 0.0  # of this service's clock
        self.stopped = False
        self.port = 0

    def set(self, **values: object) -> None:
        with self.changed:
            for name, value in values.items():
                setattr(self, name, value)
            self.changed.notify_all()

    def http_date(self, later_s: float) -> str:
        return formatdate(time.time() + self.skew_s + later_s, usegmt=True)

    def iso_date(self, later_s: float) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + self.skew_s + later_s))

    def answer(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> tuple[int, str, str]:
        """Status, text, ETag."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.requests.append(f"{method} {url.path}")
        if url.path.startswith("/latest/"):
            return self._aws(method, url.path, headers)
        if url.path.startswith("/computeMetadata/"):
            return self._google(url.path, query, headers)
        if url.path.startswith("/metadata/"):
            return self._azure(method, url.path, query, headers, body)
        self.faults.append(f"{method} {target}")
        return 404, "", ""

    def _aws(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str, str]:
        if path == "/latest/api/token":
            if (
                method != "PUT"
                or not headers.get("x-aws-ec2-metadata-token-ttl-seconds", "").isdigit()
            ):
                self.faults.append("a token asked for wrongly")
                return 400, "", ""
            token = f"token{len(self.tokens)}=="
            self.tokens.add(token)
            return 200, token, ""
        if headers.get("x-aws-ec2-metadata-token") not in self.tokens:
            return 401, "", ""
        known = {
            "/latest/meta-data/spot/instance-action": self.action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }
        fact = self.told.get(path.removeprefix("/latest/meta-data/"))
        if fact is not None:
            return 200, fact, ""
        found = known.get(path)
        return (200, json.dumps(found), "") if found else (404, "<html>Not Found</html>", "")

    def _google(
        self, path: str, query: dict[str, str], headers: dict[str, str]
    ) -> tuple[int, str, str]:
        name = path.removeprefix("/computeMetadata/v1/instance/")
        known = name in ("preempted", "maintenance-event")
        if headers.get("metadata-flavor") != "Google" or not known:
            self.faults.append(f"{path} {headers}")
            return 403, "", ""
        with self.changed:
            if query.get("wait_for_change") == "true":
                self.holding += 1
                wait_s = float(query.get("timeout_sec", 60))
                self.changed.wait_for(
                    lambda: self.stopped or f"tag-of-{self._tell(name)}" != query.get("last_etag"),
                    wait_s,
                )
                self.holding -= 1
            return 200, self._tell(name), f"tag-of-{self._tell(name)}"

    def _tell(self, name: str) -> str:
        return self.preempted if name == "preempted" else self.maintenance

    def _azure(
        self, method: str, path: str, query: dict[str, str], headers: dict[str, str], body: bytes
    ) -> tuple[int, str, str]:
        if headers.get("metadata", "").lower() != "true" or "api-version" not in query:
            self.faults.append(f"{path} {query} {headers}")
            return 400, "", ""
        if path == "/metadata/instance/compute/name":
            return 200, self.name, ""
        if path != "/metadata/scheduledevents":
            self.faults.append(path)
            return 404, "", ""
        if method == "POST":
            for each in json.loads(body)["StartRequests"]:
                self.started.append(each["EventId"])
            return 200, "", ""
        return 200, json.dumps({"DocumentIncarnation": len(self.events), "Events": self.events}), ""


def make_handler(metadata: Metadata) -> type[BaseHTTPRequestHandler]:
    """The handler of an HTTP server for this node."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            status, text, tag = metadata.answer(self.command, self.path, headers, body)
            data = text.encode()
            self.send_response_only(status)
            self.send_header("Date", metadata.http_date(0))
            self.send_header("Content-Length", str(len(data)))
            if tag:
                self.send_header("ETag", tag)
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = _serve

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler


class MetadataServer(ThreadingHTTPServer):
    """An HTTP server that keeps quiet about nodes that left before they were answered."""

    daemon_threads, block_on_close = True, False

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def serve_metadata() -> Iterator[Metadata]:
    metadata = Metadata()
    server = MetadataServer(("127.0.0.1", 0), make_handler(metadata))
    metadata.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield metadata
    finally:
        metadata.set(stopped=True)
        server.shutdown()
        server.server_close()
        thread.join()
