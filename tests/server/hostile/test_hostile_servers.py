"""A server that is not the one which a join command was made for."""

import ssl
import subprocess
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from cavvy.providers.base import NodeEndpoint
from cavvy.providers.join.members import make_invitation
from cavvy.server.node_tls import load_certificate


class _Script(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"touch joined\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("kind", ["shell", "python"])
@pytest.mark.parametrize("same", [True, False])
def test_a_join_command_runs_nothing_of_a_server_with_another_certificate(
    tmp_path: Path, same: bool, kind: str
) -> None:
    """Also where PYTHONOPTIMIZE removes assertions."""
    here, there = tmp_path / "here.pem", tmp_path / "there.pem"
    serving, expected = load_certificate(str(here)), load_certificate(str(there))
    expected = serving if same else expected
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(here)
    server = HTTPServer(("127.0.0.1", 0), _Script)
    server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        endpoint = NodeEndpoint(
            address=f"https://127.0.0.1:{server.server_port}",
            pin=expected.pin,
            key_pin=expected.key_pin,
            agent=lambda: "",
            pythons=dict,
            publish=lambda path: "",
            claim_token=lambda gang, rank: "",
        )
        made = make_invitation(endpoint, "join", "token", datetime.now(UTC))
        command = made.shell if kind == "shell" else made.python
        ran = subprocess.run(
            ["sh", "-c", command],
            cwd=tmp_path,
            env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONOPTIMIZE": "1"},
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (tmp_path / "joined").exists() == same, ran
    if kind == "python":
        assert ran.returncode == (0 if same else 1)
        assert ("does not match" in ran.stderr) == (not same)
