"""The server's process of the gateway."""

import asyncio
import signal
from pathlib import Path

import pytest

from cavvy.api.serving.gateway_child import GatewayChild
from cavvy.api.serving.listener import ServiceListener

pytestmark = pytest.mark.anyio


async def test_a_gateway_that_still_starts_is_told_to_end(tmp_path: Path) -> None:
    """It has no control socket yet. A gateway that is not told would be killed after its time."""
    child = GatewayChild(tmp_path, str(tmp_path / "socket"), ServiceListener())
    starting = asyncio.create_task(child.reach())
    while not child.started:
        await asyncio.sleep(0)
    process = child._process
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await child.end(2.0)
    assert process is not None
    assert process.returncode in (0, -signal.SIGTERM)
