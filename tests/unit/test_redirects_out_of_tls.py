"""A web server with TLS sends the caller to a program without TLS on the caller's own machine."""

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.certificates import Authority

from cavvy.store.objects.base import ObjectDenied
from cavvy.store.objects.http import CheckedRedirects, make_opener


@contextmanager
def serve(leads_to: str = "", tls: ssl.SSLContext | None = None) -> Iterator[tuple[int, list[str]]]:
    """A server that redirects to this address; its port and the paths of its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(302 if leads_to and self.path == "/" else 200)
            self.send_header("Location", leads_to)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def test_a_redirect_must_not_leave_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*authority.issue())
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    opener = make_opener(CheckedRedirects)
    with serve() as (port, asked), serve(f"http://127.0.0.1:{port}/inside", tls) as (outer, _):
        with pytest.raises(ObjectDenied, match="redirects to an address without https://"):
            opener.open(f"https://127.0.0.1:{outer}/", timeout=5)
        assert asked == []
    with serve("/beside", tls) as (outer, asked):
        assert opener.open(f"https://127.0.0.1:{outer}/", timeout=5).status == 200
        assert asked == ["/", "/beside"]
    with serve() as (port, asked), serve(f"http://127.0.0.1:{port}/inside") as (outer, _):
        assert opener.open(f"http://127.0.0.1:{outer}/", timeout=5).status == 200
        assert asked == ["/inside"]
