"""Fixtures of the contract tests: one open store of each kind, and the server of REST APIs."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from tests.contract.store_suite import KINDS, make_store

from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.store.sql import Store


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    opened = make_store(request.param, tmp_path)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def rest_server() -> Iterator[RestServer]:
    server = RestServer()
    yield server
    server.close()
