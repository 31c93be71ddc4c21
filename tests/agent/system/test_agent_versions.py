"""Agents of other versions than the server's: `frozen/agent-protocol-1.pyz` is the first whole
agent that there was.

It is that agent's own files, packed as `agent/bundle.py` packs them, and is never made anew: what
it sends and what it understands of the answers is what the server has to live with for as long as
it serves protocol 1.
"""

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import uvicorn
from tests.api.api_state import Api, open_api, until

from cavvy.agent import config as todays
from cavvy.agent.documents import WorkConfig
from cavvy.domain.messages import APART, NEWEST, OLDEST, PROTOCOL, list_unknown

pytestmark = pytest.mark.system
FROZEN = Path(__file__).parents[2].joinpath("system", "frozen") / "agent-protocol-1.pyz"
JOB = "/v1/projects/default/jobs/old"


class Range:
    """A server on a Unix socket, whose nodes are this test's to start."""

    def __init__(self, api: Api, folder: Path) -> None:
        self.api, self.folder = api, folder
        self.agents: list[asyncio.subprocess.Process] = []

    async def freeze(self, files: dict[str, bytes]) -> str:
        """A frozen working folder, as a command would send it."""
        entries = [
            await self._put(data) | {"path": path, "mode": 0o644} for path, data in files.items()
        ]
        return str((await self._put(json.dumps({"files": entries}).encode()))["sha256"])

    async def _put(self, data: bytes) -> dict[str, object]:
        name = hashlib.sha256(data).hexdigest()
        assert (
            await self.api.http.put(f"/v1/projects/default/blobs/{name}", content=data)
        ).status_code == 204
        return {"sha256": name, "size": len(data)}

    async def submit(self, text: str, **ask: Any) -> str:
        """A job that waits for its agent; its gang."""
        made = await self.api.submit(text, **ask)
        return (await self.api.attempt(made["id"])).gang

    async def start(self, gang: str) -> asyncio.subprocess.Process:
        """The oldest agent, on this machine."""
        told = {
            "protocol": 1,
            "gang": gang,
            "rank": 0,
            "address": f"unix:{self.folder}/s",
            "token": self.api.app_state.tokens.of(gang),
            "home": f"{self.folder}/node",
            "cache": f"{self.folder}/cache",
            "devices": [],
        }
        path = self.folder / "config.json"
        path.write_text(json.dumps(told))
        with open(self.folder / "agent.log", "wb") as log:
            agent = await asyncio.create_subprocess_exec(
                sys.executable, "-I", "-S", FROZEN, path, stderr=log
            )
        self.agents.append(agent)
        return agent

    async def phase(self, wanted: str) -> Any:
        """The job, once it is that far; None before."""
        found = (await self.api.http.get(JOB)).json()
        return found if found["phase"] == wanted else None


@asynccontextmanager
async def range_at(tmp_path: Path) -> AsyncIterator[Range]:
    with TemporaryDirectory(prefix="rm-old-", dir="/tmp") as short:  # a Unix socket's path must be
        async with open_api("sqlite", tmp_path) as api:
            server = uvicorn.Server(
                uvicorn.Config(api.app, uds=f"{short}/s", lifespan="off", log_level="error")
            )
            serving, here = asyncio.create_task(server.serve()), Range(api, Path(short))
            try:
                await until(lambda: asyncio.sleep(0, server.started))
                yield here
            finally:
                for agent in here.agents:
                    if agent.returncode is None:  # its reaper ends the work
                        agent.kill()
                        await agent.wait()
                api.app_state.close_polls()
                server.should_exit = True
                await serving


def test_the_agent_and_the_server_of_today_speak_the_same_version() -> None:
    assert todays.PROTOCOL == PROTOCOL
    assert (OLDEST, NEWEST) == (PROTOCOL - APART, PROTOCOL + APART)


async def test_the_oldest_agent_still_finishes_its_job(tmp_path: Path) -> None:
    async with range_at(tmp_path) as here:
        await here.api.http.put("/v1/projects/default/secrets/TOKEN", json={"value": "hush-hush"})
        snapshot = await here.freeze(
            {
                "main.sh": b'echo "$GREETING $CAVVY_PARAM_LR $(cat made) $TOKEN"; cat sub/x\n',
                "sub/x": b"deep\n",
            }
        )
        run = (
            "sh main.sh; echo 'CAVVY_PROGRESS {\"step\": 3}'; while [ ! -e go ]; do sleep 0.05; "
            "done"
        )
        text = f"name: old\nrun: {json.dumps(run)}\nsetup: echo set up > made\nsecrets: [TOKEN]\n"
        gang = await here.submit(
            text + "env: {GREETING: hello}\nparams: {lr: 0.5}\nworkdir: .\n",
            origin={"snapshot": snapshot},
        )
        agent = await here.start(gang)
        await until(lambda: here.phase("running"))

        line = (await here.api.http.post(JOB + "/exec", json={"session": True})).json()["id"]
        refused = await here.api.http.get(f"{JOB}/exec/{line}", params={"wait_s": 30})
        assert (refused.status_code, refused.json()["code"]) == (426, "agent-protocol")
        assert "too old for sessions" in refused.json()["message"]
        beside = (
            await here.api.http.post(JOB + "/exec", json={"command": ["touch", "go"]})
        ).json()["id"]
        done = await here.api.http.get(f"{JOB}/exec/{beside}", params={"wait_s": 30})
        assert done.headers["cavvy-exit-code"] == "0", done.content

        job = await until(lambda: here.phase("done"))
        assert await asyncio.wait_for(agent.wait(), 30) == 0
        assert [attempt["outcome"] for attempt in job["attempts"]] == ["succeeded"]
        log = (await here.api.http.get(JOB + "/logs")).text
        assert log.splitlines()[:2] == ["hello 0.5 set up ***", "deep"]
        assert (await here.api.app_state.store.nodes(job["attempts"][0]["id"]))[0].progress == {
            "step": 3
        }


async def test_the_oldest_agent_is_stopped(tmp_path: Path) -> None:
    async with range_at(tmp_path) as here:
        agent = await here.start(await here.submit("{name: old, run: exec sleep 1000, grace: 1s}"))
        await until(lambda: here.phase("running"))
        await here.api.http.post(JOB + "/stop", json={})
        job = await until(lambda: here.phase("stopped"))
        assert job["attempts"][0]["outcome"] == "stopped"
        assert await asyncio.wait_for(agent.wait(), 30) == 0


async def test_the_oldest_agent_gets_no_work_that_it_would_do_by_halves(tmp_path: Path) -> None:
    async with range_at(tmp_path) as here:
        inputs = "inputs: [{source: 'https://example.invalid/x', target: x}]"
        agent = await here.start(
            await here.submit(f"name: old\nrun: touch {tmp_path}/ran\n{inputs}\n")
        )
        assert await asyncio.wait_for(agent.wait(), 30) == 0
        assert not (tmp_path / "ran").exists()
        events = (await here.api.http.get(JOB + "/events")).json()["events"]
        told = (
            "older than the server and was refused work: the agent's protocol 1 does not support "
            "inputs or outputs at a URL"
        )
        assert any(event["text"].endswith(told) for event in events)


@pytest.mark.parametrize(
    ("part", "since"),
    [
        ({}, 1),
        (
            {
                "inputs": [{"source": "/a", "target": "b"}],
                "image": "a",
                "setup": "x",
                "keep_s": 9.0,
            },
            1,
        ),
        ({"checkpoint": {"path": "c", "storage": "/s"}}, 1),
        ({"checkpoint": {"path": "c", "sync": True}}, 2),
        ({"outputs": [{"source": "a", "target": "s3://b/c"}]}, 3),
        ({"inputs": [{"source": "/a", "target": "b", "mode": "stream"}]}, 3),
        ({"outputs": [{"source": "a", "target": "/b", "every_s": 1.0}]}, 3),
        ({"volumes": [{"kind": "host", "source": "/data", "path": "data"}]}, 3),
        ({"build": {"path": "."}}, 3),
        ({"image_login": "u:p"}, 3),
        ({"check": {"share": 0.6}}, 3),
    ],
)
def test_what_a_version_lacks_is_named(part: dict[str, Any], since: int) -> None:
    plain = {"job": "j", "job_id": "i", "project": "p", "attempt": 1, "nodes": 1, "run": "x"}
    node = {"addresses": [], "master_port": 1, "accelerators_per_node": 0}
    work = msgspec.convert(plain | node | part, WorkConfig)
    assert [bool(list_unknown(version, work)) for version in (1, 2, 3)] == [
        since > version for version in (1, 2, 3)
    ]
