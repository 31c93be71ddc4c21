"""The fixtures that tests of several rooms share. Each imports what it is made of when a test asks
for it, so that a test of one room does not load the others.
"""

from collections.abc import AsyncIterator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.api.api_state import Api
    from tests.system.replica_site import ReplicaSite
    from tests.system.trust import User

    from cavvy.providers.contract.rest_stand_in import RestServer
    from cavvy.store.sql import Store


@pytest.fixture(autouse=True, scope="module")
def state_folder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Where a command of a unit test keeps what it has to, unless the test names a folder: below
    pytest's folder, not that of who runs it.
    """
    if request.path.parent.name != "unit":
        yield
        return
    folder = tmp_path_factory.getbasetemp() / "state" / request.module.__name__
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAVVY_HOME", str(folder))
        yield


@pytest.fixture(params=("sqlite", "postgres"))
async def api(request: pytest.FixtureRequest, tmp_path: Path) -> "AsyncIterator[Api]":
    """An open application state, for each kind of store that servers have. The store in memory is
    SQLite too; its own tests are those of the stores and of the simulator.
    """
    from tests.api.api_state import open_api

    async with open_api(request.param, tmp_path) as opened:
        yield opened


@pytest.fixture(params=("memory", "sqlite-wal", "sqlite-delete", "postgres"))
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> "AsyncIterator[Store]":
    """An open store of each kind."""
    from tests.contract.store_suite import make_store

    opened = make_store(request.param, tmp_path)
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture(scope="session")
def rest_server() -> "Iterator[RestServer]":
    """The server of the stand-ins of REST APIs."""
    from cavvy.providers.contract.rest_stand_in import RestServer

    server = RestServer()
    yield server
    server.close()


@pytest.fixture(scope="class")
def keys_read_once() -> Iterator[None]:
    """The same private key is checked once, not by each provider that a test makes: an RSA key is
    checked for primes, which takes longer than the rest of such a test.
    """
    from cryptography.hazmat.primitives import serialization

    read = cache(serialization.load_pem_private_key)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serialization, "load_pem_private_key", read)
        yield


@pytest.fixture(scope="module")
def warm() -> Iterator[None]:
    """Scripts that are measured have PyTorch imported."""
    from tests.tuning.warm_probe import warm_probes

    with warm_probes():
        yield


@pytest.fixture
def user(tmp_path: Path) -> "Iterator[User]":
    """A user with a server of their own."""
    from tests.system.trust import user_at

    with user_at(tmp_path / "user") as user:
        yield user


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose server has run jobs."""
    from tests.system.server_state import home_with_jobs

    with home_with_jobs(tmp_path / "home") as folder:
        yield folder


@pytest.fixture
def url() -> str:
    """A new database of PostgreSQL."""
    from tests.system.postgres import PostgresMissing, new_database

    try:
        return new_database()
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


@pytest.fixture
def site(tmp_path: Path) -> "Iterator[ReplicaSite]":
    """Servers that share a database."""
    from tests.system.postgres import PostgresMissing
    from tests.system.replica_site import replica_site

    try:
        with replica_site(tmp_path) as made:
            yield made
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")
