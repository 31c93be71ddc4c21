"""Whatever the OpenAPI document allows, and much that it does not, is answered without a fault
of ours.
"""

import asyncio
import contextlib
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import requests
import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from tests.api.api_state import KINDS, TOKEN, Api, database, open_api
from tests.waits import PATIENCE_S

from cavvy.store.snapshot import choose

CLAIMED = {"rank": 0, "nonce": "n", "address": "a"}


class Running:
    """An API in a thread of its own, on loopback, with one job that has a gang."""

    def __init__(self, kind: str, folder: Path) -> None:
        self._kind, self._folder = kind, folder
        self._ready = threading.Event()
        self._stop: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self.gang = self.gang_token = self.url = ""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        async with open_api(self._kind, self._folder) as api:
            await self._prepare(api)
            config = uvicorn.Config(
                api.app, host="127.0.0.1", port=0, log_config=None, lifespan="off", ws="none"
            )
            server = uvicorn.Server(config)
            serving = asyncio.create_task(
                server._serve()
            )  # serve() would take the signals of the tests
            while not server.started:
                await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            self.url = f"http://127.0.0.1:{port}"
            self._ready.set()
            await self._stop.wait()
            api.app_state.close_polls()
            server.should_exit = True
            await serving

    async def _prepare(self, api: Api) -> None:
        made = await api.submit("{name: t, run: 'true'}")
        self.gang = (await api.attempt(made["id"])).gang
        self.gang_token = api.app_state.tokens.of(self.gang)
        body = {**CLAIMED, "gang": self.gang}
        assert (
            await api.http.post("/agent/v1/claim", json=body, headers=api.agent(self.gang))
        ).status_code == 200

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


class Servers:
    """One API for each kind of store, each started when it is first wanted."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._running: dict[str, Running] = {}

    def of(self, kind: str) -> Running:
        """Skips the test where there is no such database."""
        if kind not in self._running:
            database(kind)  # skips here, not in the thread, where there is none
            self._running[kind] = Running(kind, self._folders.mktemp("api"))
        return self._running[kind]

    def all(self) -> dict[str, Running]:
        """Those whose database is here."""
        for kind in KINDS:
            with contextlib.suppress(pytest.skip.Exception):
                self.of(kind)
        return self._running

    def stop(self) -> None:
        for each in self._running.values():
            each.stop()


@pytest.fixture(scope="module")
def few_offers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A catalog with a twentieth of its places: a request without a filter reads all offers."""
    few = tmp_path_factory.mktemp("catalog") / "few.db"
    shutil.copyfile(choose.SHIPPED, few)
    with closing(sqlite3.connect(few)) as connection, connection:
        connection.execute("DELETE FROM offer WHERE place % 20 <> 0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "SHIPPED", few)
        yield


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, few_offers: None) -> Iterator[Servers]:
    made = Servers(tmp_path_factory)
    yield made
    made.stop()


def load_schema(running: Running) -> Any:
    url = f"{running.url}/v1/openapi.json"
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return schemathesis.openapi.from_url(url, headers=headers, timeout=PATIENCE_S)


@pytest.mark.timeout(400)  # it walks through all routes, of which there are more and more
def test_no_request_finds_a_fault(servers: Servers) -> None:
    """Each request goes to the servers of all stores: to make it up takes four times as long as to
    answer it.
    """
    running = servers.all()
    api_schema = load_schema(next(iter(running.values())))
    tried, sent = 0, Counter[str]()
    with requests.Session() as session:
        session.trust_env = False  # each request would look for proxies and a .netrc
        for found in api_schema.get_all_operations():
            operation = found.ok()
            tried += 1

            @settings(
                max_examples=15,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy())
            def try_one(case: Any) -> None:
                for kind, each in running.items():
                    headers = aim(case, each)
                    response = case.call(
                        base_url=each.url, headers=headers, session=session, timeout=PATIENCE_S
                    )
                    case.validate_response(response, checks=[not_a_server_error])
                    sent[kind] += 1

            try_one()
    assert tried == sum(len(operations) for operations in api_schema.raw_schema["paths"].values())
    assert set(sent) == set(running)
    assert min(sent.values()) == max(sent.values()) >= tried


def aim(case: Any, running: Running) -> dict[str, str]:
    """Make the case meet something that exists, about every second time; the headers that open
    its door.
    """
    headers = {"Authorization": f"Bearer {TOKEN}"}
    if case.path.startswith("/agent/"):
        headers = {"Authorization": f"Bearer {running.gang_token}", "Cavvy-Agent-Protocol": "1"}
        if isinstance(case.query, dict) and "gang" in case.query:
            case.query["gang"] = running.gang
        if isinstance(case.body, dict) and "gang" in case.body:
            case.body = {**case.body, "gang": running.gang, "nonce": "n"}
    elif case.path_parameters and len(str(case.path_parameters.get("name", ""))) % 2:
        case.path_parameters.update(project="default", name="t")
    if isinstance(case.query, dict) and isinstance(case.query.get("wait_s"), int | float):
        case.query["wait_s"] = min(case.query["wait_s"], 0.01)
    return headers


@pytest.mark.parametrize("kind", KINDS)
def test_the_document_is_complete(kind: str, servers: Servers) -> None:
    """Every route says what it takes and gives; every reference leads somewhere. The servers of all
    stores have the same document, so that requests made up for one suit the others.
    """
    document = load_schema(servers.of(kind)).raw_schema
    assert all(document == load_schema(each).raw_schema for each in servers.all().values())
    known = set(document["components"]["schemas"])
    refs = set(_refs(document))
    assert {ref.rpartition("/")[2] for ref in refs} <= known
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"], (method, path)
            good = [status for status in operation["responses"] if status.startswith("2")]
            assert good, (method, path)
            for status, response in operation["responses"].items():
                empty = status == "204" or (method, status) == ("options", "200")
                assert empty or response["content"], (method, path, status)
                assert response["description"], (method, path, status)


def _refs(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        for child in node.values():
            yield from _refs(child)
    elif isinstance(node, list):
        for child in node:
            yield from _refs(child)
