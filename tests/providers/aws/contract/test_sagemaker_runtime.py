"""Requests to endpoints of SageMaker that take long, by the real SDK: probes do not wait for them."""

import asyncio
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tests.waits import PATIENCE_S

from cavvy.providers.abilities import ReplicaRequest
from cavvy.providers.managed import endpoint_provider
from cavvy.providers.sagemaker_endpoints import SageMakerRuntime


class SlowEndpoint(BaseHTTPRequestHandler):
    asked, ends = threading.Event(), threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b'{"EndpointStatus": "InService"}'
        if self.path.endswith("/invocations"):
            self.asked.set()
            self.ends.wait(10)
            body = b"answer"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing."""


def test_probes_do_not_wait_for_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_provider, "AT_ONCE", 1)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    server = ThreadingHTTPServer(("127.0.0.1", 0), SlowEndpoint)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    calls = SageMakerRuntime({"endpoint": f"http://127.0.0.1:{server.server_port}"})

    async def scenario() -> None:
        request = ReplicaRequest(body=b"{}", headers={})
        asked = asyncio.create_task(calls.invoke("eu-west-1/e", request))
        try:
            while not SlowEndpoint.asked.is_set():
                await asyncio.sleep(0.01)
            assert await asyncio.wait_for(calls.answers("eu-west-1/e"), PATIENCE_S)
            assert not asked.done()
        finally:
            SlowEndpoint.ends.set()
        assert (await asked).body == b"answer"

    try:
        asyncio.run(scenario())
    finally:
        calls.close()
        server.shutdown()
        server.server_close()
