"""The connection of the client, over a real socket."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from cavvy.client.transport import ClientConnection


@pytest.fixture
def server() -> Iterator[tuple[str, threading.Event]]:
    """The address of a server that answers with the path. It answers /slow when the event is set."""
    go = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            if self.path == "/slow":
                go.wait(30)
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.path)))
            self.end_headers()
            self.wfile.write(self.path.encode())

        def log_message(self, *_: object) -> None:
            return

    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=found.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{found.server_address[1]}", go
    go.set()
    found.shutdown()
    found.server_close()


def test_the_answer_of_an_interrupted_request_is_not_the_next_one(
    server: tuple[str, threading.Event],
) -> None:
    address, go = server
    connection = ClientConnection(address)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        connection.request("GET", "/slow", {}, quiet=(0.05, interrupt))
    go.set()
    assert connection.request("GET", "/next", {}).body == b"/next"
    connection.close()
