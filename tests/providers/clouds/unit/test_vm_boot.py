"""What a machine of a cloud without metadata service does at boot: the boot program of its user
data runs as a process, with a stand-in for the agent.
"""

import asyncio
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.providers.clouds.contract.test_provider_vm import BARE
from tests.providers.clouds.unit.test_vm_layer import OURS, make_gang

from cavvy.providers.contract.memory_cloud import MemoryPlace
from cavvy.providers.hosts.boot import learn

AGENT = """
import pathlib, sys
config = pathlib.Path(sys.argv[1])
config.with_name("seen.json").write_bytes(config.read_bytes())
"""


def part(script: str, end: str) -> str:
    """The file that the script writes between the lines with this word."""
    return script.split(f"<<'{end}'\n")[1].split(f"\n{end}\n")[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_agent_starts_with_the_nodes_own_rank_token_and_address(
    rank: int, tmp_path: Path
) -> None:
    place = MemoryPlace(BARE, tmp_path)
    asyncio.run(place.provider(OURS).launch(make_gang(place, nodes=2)))
    (script,) = place.cloud.requests[rank].user_data
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    boot = json.loads(part(script, "END_OF_BOOT"))
    boot["config"]["address"] = "https://127.0.0.1:7443"  # the test's machine may have no network
    (tmp_path / "boot.json").write_text(json.dumps(boot))
    (tmp_path / "boot.py").write_text(part(script, "END_OF_PYTHON"))
    (tmp_path / "agent.pyz").write_text(AGENT)
    command = [sys.executable, "-I", "-S", str(tmp_path / "boot.py"), sys.executable]
    subprocess.run(command, check=True, timeout=60)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["rank"], seen["token"]) == (rank, f"claim-rm-1-job-1-{rank}")
    assert (seen["gang"], seen["node_address"]) == ("rm-1-job-1", "127.0.0.1")
    assert not (tmp_path / "boot.json").exists()


class WorkerNumber(http.server.BaseHTTPRequestHandler):
    """A metadata service that reports the number of a worker."""

    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Metadata-Flavor"] == "Google" else 403)
        self.end_headers()
        self.wfile.write(b"3\n")

    def log_message(self, *_: object) -> None:
        return


def test_a_rank_is_the_number_of_the_worker_after_the_first_rank_of_its_slice() -> None:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), WorkerNumber)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    metadata = {
        "rank": f"http://127.0.0.1:{server.server_address[1]}/agent-worker-number",
        "address": "",
        "headers": {"Metadata-Flavor": "Google"},
    }
    try:
        assert learn({**metadata, "first_rank": 4}, "https://127.0.0.1:1") == (7, "127.0.0.1")
        assert learn(metadata, "https://127.0.0.1:1") == (3, "127.0.0.1")
    finally:
        server.shutdown()
        server.server_close()
