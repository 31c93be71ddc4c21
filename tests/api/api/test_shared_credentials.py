"""A credential that is set on one of several servers is used by all of them at once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.api.api_state import configure, database, until

from cavvy.api import project_credentials
from cavvy.api.app_state import AppState
from cavvy.api.project_credentials import CredentialContent
from cavvy.providers.base import Provider
from cavvy.server.database import join_servers
from cavvy.server.open_state import open_state
from cavvy.server.state_dir import StateDir

ACCOUNT = "fake@p"


@asynccontextmanager
async def open_server(url: str, folder: Path, files: StateDir) -> AsyncIterator[AppState]:
    folder.mkdir()
    root, configured = configure(folder)
    home, address = StateDir(str(root)), f"unix:{root}/none"
    async with (
        join_servers(url, home, files, configured, address) as leases,
        open_state(
            home, configured, address, lambda: None, database=leases, files=files
        ) as app_state,
    ):
        yield app_state


async def test_a_credential_reaches_the_other_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(project_credentials, "_RETRY_S", 3600.0)  # only the signal is in time
    url = database("postgres")
    assert url is not None
    files = StateDir(str(tmp_path / "files"))
    files.prepare()
    async with (
        open_server(url, tmp_path / "one", files) as one,
        open_server(url, tmp_path / "two", files) as two,
    ):
        pool = two.control_plane.pool

        async def find() -> Provider | None:
            return pool.providers.get(ACCOUNT)

        async def is_replaced() -> bool:
            return pool.providers.get(ACCOUNT) not in (None, first)

        async def is_gone() -> bool:
            return ACCOUNT not in pool.providers

        await one.credentials.put("p", "fake", CredentialContent(keys={"key_file": "k1"}))
        first = await until(find)
        await one.credentials.put("p", "fake", CredentialContent(keys={"key_file": "k2"}))
        await until(is_replaced)
        await one.credentials.remove("p", "fake")
        await until(is_gone)
