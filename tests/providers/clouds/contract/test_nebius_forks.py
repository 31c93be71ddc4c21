"""Programs that a server starts while it is connected to Nebius by gRPC."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("nebius", reason="needs the extra `nebius`")

FORKS = 300
# A process that calls Nebius, and forks meanwhile; it prints what the forked programs wrote.
CALLER = f"""
import asyncio, subprocess, sys
from cavvy.providers.nebius.api import NebiusApi

def fork():
    for _ in range({FORKS}):
        ran = subprocess.run(["true"], capture_output=True, preexec_fn=int)
        print(ran.stderr.decode(), end="")

async def call():
    api = NebiusApi({{"endpoint": sys.argv[1], "key_file": sys.argv[2]}})
    calls = [
        asyncio.create_task(api.list("compute.InstanceService/List", {{"parentId": "project-1"}}))
        for _ in range(4)
    ]
    await asyncio.to_thread(fork)
    for each in calls:
        each.cancel()
    told = await asyncio.gather(*calls, return_exceptions=True)
    api.close()

asyncio.run(call())
"""


def test_programs_that_are_forked_print_no_errors_of_grpc(tmp_path: Path) -> None:
    from tests.contract.nebius_stand_in import serve_calls

    def answer(*_: object) -> bytes:
        return b""  # an empty list

    token = tmp_path / "token"
    token.write_text("a-token")
    server, port = serve_calls(answer)
    try:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("GRPC_")}
        ran = subprocess.run(
            [sys.executable, "-c", CALLER, f"http://127.0.0.1:{port}", str(token)],
            capture_output=True,
            text=True,
            env=environ,
        )
    finally:
        server.stop(0).wait()
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr[-2000:]
