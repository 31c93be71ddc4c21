"""Services whose gateway cannot listen: users are told why."""

import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.api.api_state import Api, open_api, until

from cavvy.capabilities.serving.addresses import find_listener

SERVICE = "/v1/projects/default/services/chat"
TEXT = "{name: chat, run: serve, resources: {cpu: 0.1}, service: {port: 80}}"


@pytest.fixture
async def taken() -> AsyncIterator[socket.socket]:
    """A port of another process."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


@pytest.fixture
async def api(tmp_path: Path, taken: socket.socket) -> AsyncIterator[Api]:
    values = {
        "CAVVY_PROVIDERS_LOCAL_ENABLED": "true",
        "CAVVY_SERVICES_LISTEN": f"127.0.0.1:{taken.getsockname()[1]}",
    }
    async with open_api("memory", tmp_path, values=values) as api:
        yield api


async def read_problem(api: Api) -> str:
    problem: str = (await api.http.get("/v1/server")).json()["problem"]
    return problem


async def test_a_port_that_is_taken_is_named_until_it_is_free(
    api: Api, taken: socket.socket
) -> None:
    port = taken.getsockname()[1]
    what = find_listener(port)
    assert f"process {os.getpid()} (" in what
    reason = f"address 127.0.0.1:{port} is in use by {what}; end it, or change services.listen"
    assert await read_problem(api) == f"services cannot be reached: {reason}"
    put = await api.http.put(SERVICE, json={"text": TEXT, "user": "ada"})
    assert (put.json()["state"], put.json()["url"]) == ("failing", "")
    found = (await api.http.get(SERVICE)).json()
    assert (found["state"], found["url"], found["unreachable"]) == ("failing", "", reason)
    assert await read_problem(api) == f"services cannot be reached: {reason}"
    taken.close()

    async def find_url() -> str:
        url: str = (await api.http.get(SERVICE)).json()["url"]
        return url

    assert await until(find_url) == f"http://127.0.0.1:{port}/default/chat"
    assert (await api.http.get(SERVICE)).json()["unreachable"] == ""
    assert await read_problem(api) == ""
