"""The application over application state of a test's own: a store of either kind, the made-up cloud,
nothing on the network.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.contract.store_suite import put_database
from tests.system.postgres import PostgresMissing, opened_database
from tests.waits import PATIENCE_S

from cavvy import settings
from cavvy.api.app import make_app
from cavvy.api.app_state import AppState
from cavvy.api.audit import AuditMiddleware
from cavvy.api.auth import AuthMiddleware
from cavvy.client.paths import make_key
from cavvy.domain.jobs import Attempt
from cavvy.domain.messages import PROTOCOL
from cavvy.server.open_state import open_state
from cavvy.server.state_dir import StateDir
from cavvy.settings import Settings

TOKEN = "the-users-token"
KINDS = ("sqlite", "postgres")  # which servers have; some tests use "memory"

# Nodes that never boot: a test is their agents. The free machine can be had twice.
SCRIPT = """
[[offers]]
instance_type = "free"
price_usd_hr = 0.0
cpus = 4
memory_gib = 8
capacity = 2

[[offers]]
instance_type = "paid"
price_usd_hr = 2.5
cpus = 64
memory_gib = 256

[[offers]]
instance_type = "dear"
price_usd_hr = 9.0
cpus = 128
memory_gib = 256
""" + "".join("[[launches]]\nlatency_s = 0.0\nboots = false\n" for _ in range(50))
SCRIPT += "[[removals]]\nlatency_s = 0.0\ntakes_s = 0.0\n" * 50


@dataclass(kw_only=True)
class Api:
    """Open application state and a user's connection to it."""

    app_state: AppState
    http: httpx.AsyncClient
    app: AuditMiddleware

    async def submit(
        self, text: str = "{name: t, run: 'true'}", *, key: str | None = None, **ask: Any
    ) -> Any:
        """Submit and return the answer's body; the status must be good."""
        answer = await self.post_job(text, key=key, **ask)
        assert answer.status_code in (200, 201), answer.text
        return answer.json()

    async def post_job(
        self, text: str, *, key: str | None = None, project: str = "default", **ask: Any
    ) -> Any:
        headers = {"Idempotency-Key": key or make_key()}
        return await self.http.post(
            f"/v1/projects/{project}/jobs", json={"text": text, **ask}, headers=headers
        )

    async def attempt(self, job_id: str) -> Attempt:
        """The job's open attempt, once control has launched it."""
        return await until(lambda: self._open(job_id))

    async def _open(self, job_id: str) -> Attempt | None:
        attempts = await self.app_state.store.attempts(job_id)
        return attempts[-1] if attempts and attempts[-1].phase == "booting" else None

    def agent(self, gang: str, protocol: int = PROTOCOL) -> dict[str, str]:
        """The headers of a gang's agent."""
        return {
            "Authorization": f"Bearer {self.app_state.tokens.of(gang)}",
            "Cavvy-Agent-Protocol": str(protocol),
        }


async def until(look: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """What `look` gives as soon as it is something."""
    async with asyncio.timeout(seconds):
        while not (found := await look()):
            await asyncio.sleep(0.005)
    return found


def database(kind: str) -> str | None:
    """The URL of a database with nothing in its tables; None is the embedded server's own. Skips
    the test where there is none.
    """
    if kind != "postgres":
        return "memory:" if kind == "memory" else None
    try:
        return opened_database()
    except PostgresMissing as missing:
        pytest.skip(f"no PostgreSQL: {missing}")


def configure(
    folder: Path, script: str = SCRIPT, values: Mapping[str, str] | None = None
) -> tuple[Path, Settings]:
    """A new state folder, and settings that name it and the made-up cloud."""
    root = folder / "home"
    root.mkdir(mode=0o700)
    (folder / "script.toml").write_text(script)
    (folder / "settings.toml").write_text(
        f"[providers.local]\nenabled = false\n[providers.fake]\nscript = '{folder}/script.toml'\n"
    )
    environment = {
        "HOME": str(folder),
        "CAVVY_HOME": str(root),
        "CAVVY_CONFIG": str(folder / "settings.toml"),
        **(values or {}),
    }
    return root, settings.load(environment)


@asynccontextmanager
async def open_api(
    kind: str, folder: Path, *, script: str = SCRIPT, values: Mapping[str, str] | None = None
) -> AsyncIterator[Api]:
    """An API over a store of this kind; `values` are settings, as variables."""
    url = database(kind)
    root, configured = configure(folder, script, values)
    if kind == "sqlite":
        put_database(root / "cavvy.db")
    async with open_state(
        StateDir(str(root)), configured, "unix:/nowhere", lambda: None, database=url
    ) as app_state:
        auth = AuthMiddleware(make_app(app_state), TOKEN, app_state)
        app = AuditMiddleware(auth, app_state)
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)  # type: ignore[arg-type]  # it is one
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://cavvy", headers=headers
        ) as http:
            yield Api(app_state=app_state, http=http, app=app)
            app_state.close_polls()
