"""The agents' socket moves to another server: agents that wait for orders are answered, and
requests that take too long get 503 without the report of a bug.
"""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.waits import patience

from cavvy.server.node_listener import MachineSocket
from cavvy.server.state_dir import listen_at

REQUEST = b"GET %s HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"


async def exchange(path: Path, target: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(REQUEST % target)
    answer = await reader.read()
    writer.close()
    return answer


async def listens(path: Path) -> bool:
    try:
        _, writer = await asyncio.open_unix_connection(str(path))
    except OSError:
        return False
    writer.close()
    return True


@pytest.mark.parametrize(
    ("target", "answer"), [(b"/poll", b"HTTP/1.1 200 "), (b"/slow", b"HTTP/1.1 503 ")]
)
async def test_polls_end_when_the_socket_moves(
    tmp_path: Path, target: bytes, answer: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    woken, asked = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        asked.set()
        await (woken if scope["path"] == "/poll" else asyncio.Event()).wait()
        headers = [(b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b""})

    tmp_path.chmod(0o700)
    sockets = MachineSocket(app, str(tmp_path / "agents.sock"), woken.set)
    sockets.update(True)
    async with patience():
        while not await listens(tmp_path / "agents.sock"):
            await asyncio.sleep(0.01)
    held = asyncio.create_task(exchange(tmp_path / "agents.sock", target))
    await asyncio.wait_for(asked.wait(), 30)
    with caplog.at_level(logging.INFO):
        sockets.update(False)
        assert (await asyncio.wait_for(held, 30)).startswith(answer)
        await asyncio.wait_for(sockets.close(), 30)
    assert "Exception in ASGI" not in caplog.text


async def test_a_socket_that_another_server_replaced_is_served_again(tmp_path: Path) -> None:
    """A server that hung may get the machine back from the other server before it noticed."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    tmp_path.chmod(0o700)
    path = tmp_path / "agents.sock"
    sockets = MachineSocket(app, str(path), lambda: None)
    sockets.update(True)
    first = path.stat().st_ino
    sockets.update(True)
    assert path.stat().st_ino == first
    listen_at(str(path)).close()  # the other server, which has ended
    with pytest.raises(ConnectionRefusedError):
        await exchange(path, b"/orders")
    sockets.update(True)
    assert (await asyncio.wait_for(exchange(path, b"/orders"), 30)).startswith(b"HTTP/1.1 200 ")
    await asyncio.wait_for(sockets.close(), 30)
