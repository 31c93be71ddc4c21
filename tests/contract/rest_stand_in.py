"""An HTTP server that plays a cloud's REST API over a cloud in memory. A fault without a status
closes the connection.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.contract.vm_cloud import MemoryCloud

from cavvy.providers.vm.cloud import CloudFault, CloudMachine


class RestStandIn:
    """Subclasses answer requests and write the bodies of errors."""

    key = "the-secret-key"
    denied = CloudFault(401, "unauthorized", "the key is wrong")

    def __init__(self, cloud: MemoryCloud, root: str) -> None:
        self.cloud, self.root = cloud, root
        self._lock = threading.Lock()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                try:
                    if self.headers["Authorization"] != f"Bearer {stand_in.key}":
                        raise stand_in.denied
                    with stand_in._lock:
                        path = self.path.removeprefix(root)
                        self.reply(*stand_in.answer(self.command, path, body))
                except CloudFault as fault:
                    if fault.status:
                        self.reply(fault.status, stand_in.describe(fault))
                    self.close_connection = True

            do_GET = do_POST = do_DELETE = answer

            def reply(self, status: int, told: object) -> None:
                data = b"" if told is None else json.dumps(told).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                return

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.origin = f"http://127.0.0.1:{self.server.server_address[1]}"
        self.url = self.origin + root

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, method: str, path: str, body: Any) -> tuple[int, object]:
        """The status and the body of a reply. Raises CloudFault."""
        raise NotImplementedError

    def describe(self, fault: CloudFault) -> object:
        """The body of an error."""
        raise NotImplementedError


def must_exist(machine: CloudMachine | None) -> CloudMachine:
    if machine is None:
        raise CloudFault(404, "not-found", "no such machine")
    return machine
