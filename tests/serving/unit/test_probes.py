"""What probes of replicas accept."""

import asyncio
from datetime import timedelta
from http.server import BaseHTTPRequestHandler

from tests.client.unit.test_http_client import INSIDE, reply, serving

from cavvy.capabilities.serving.server.probes import probe
from cavvy.domain.services import ReadinessProbe


def test_probes_follow_no_redirect_and_end() -> None:
    def drip(request: BaseHTTPRequestHandler) -> None:
        request.connection.sendall(b"HTTP/1.1 20")
        while not server.stopped.wait(0.01):
            request.connection.sendall(b"0")

    how = ReadinessProbe(timeout=timedelta(seconds=0.2))
    with (
        serving(reply, INSIDE) as inside,
        serving(lambda request: reply(request, b"", 302, Location=inside.url)) as server,
    ):
        assert asyncio.run(probe(server.server_port, how)) == ""
        assert inside.asked == []
    for answer in (drip, lambda request: request.connection.sendall(bytes(1 << 20))):
        with serving(answer) as server:
            assert "no answer to /" in asyncio.run(probe(server.server_port, how))
