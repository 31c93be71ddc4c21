"""The local provider with the real agent, against a small stand-in for the control plane."""

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import reduce
from operator import and_
from pathlib import Path

import pytest
from tests.records import make_gang_spec
from tests.waits import patience

from cavvy.agent.bundle import make_command
from cavvy.domain.values import replace
from cavvy.providers import registry
from cavvy.providers.base import (
    AgentEndpoint,
    GangSeen,
    GangSpec,
    GangState,
    ProviderContext,
)
from cavvy.providers.local import processes
from cavvy.providers.local.provider import LocalProvider

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's process descriptors"),
]


@dataclass
class Control:
    """Grants every claim once per nonce, keeps what agents say, and can be deaf for a while."""

    run: str
    claims: dict[tuple[str, int], str] = field(default_factory=dict)
    said: list[dict[str, object]] = field(default_factory=list)
    log: bytes = b""
    deaf: bool = False
    opened: int = 0  # connections; an agent keeps one for each of messages, the log and orders
    heard: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.opened += 1
        with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split(" ", 2)
                headers = dict(
                    line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line
                )
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if self.deaf:
                    break
                answer = json.dumps(await self.answer(method, target, body)).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: "
                )
                writer.write(b"%d\r\n\r\n" % len(answer) + answer)
        writer.close()

    async def answer(self, method: str, target: str, body: bytes) -> dict[str, object]:
        if target.startswith("/agent/v1/claim"):
            asked = json.loads(body)
            nonce = self.claims.setdefault((asked["gang"], asked["rank"]), asked["nonce"])
            assert nonce == asked["nonce"], "a second agent claimed the same rank"
            return {"state": "go", "work": self.work(), "lease_s": 3600}
        if target.startswith("/agent/v1/messages"):
            messages = json.loads(body)["messages"]
            known = {message["seq"] for message in self.said}
            self.said += [message for message in messages if message["seq"] not in known]
            self.heard.set()
            return {
                "ack": max((message["seq"] for message in self.said), default=0),
                "lease_s": 3600,
            }  # type: ignore[type-var]
        if target.startswith("/agent/v1/log"):
            offset = int(target.partition("offset=")[2].partition("&")[0])
            self.log = self.log[:offset] + body
            return {"offset": len(self.log), "lease_s": 3600}
        await asyncio.sleep(30)
        return {"order": None, "execs": [], "lease_s": 3600}

    def work(self) -> dict[str, object]:
        who = {"job": "j", "job_id": "j1", "project": "default", "attempt": 1, "nodes": 1}
        return {**who, "addresses": ["127.0.0.1"], "run": self.run, "grace_s": 1}

    async def hears(self, kind: str) -> dict[str, object]:
        async with patience():
            while True:
                self.heard.clear()
                for message in self.said:
                    if message["kind"] == kind:
                        return message
                await self.heard.wait()


@pytest.fixture(params=[False, True], ids=["spawned", "forked"])
def forked(request: pytest.FixtureRequest) -> bool:
    """Whether agents are forks of a fork server; normally, those after the first are."""
    return bool(request.param)


@asynccontextmanager
async def stage(
    home: Path, run: str, *, forked: bool = False
) -> AsyncIterator[tuple[Control, LocalProvider, GangSpec]]:
    control = Control(run)
    server = await asyncio.start_unix_server(control.serve, home / "s")
    context = ProviderContext(
        installation="ours", home=home / "providers", agent_command=make_command()
    )
    loaded = registry.load({}, context)
    provider = loaded["local"]
    assert isinstance(provider, LocalProvider)
    provider._gangs._gang_store._has_started = forked
    spec = make_gang_spec(
        (await provider.offers())[0],
        name="rm-ours-1",
        installation="ours",
        agent_endpoint=AgentEndpoint(address=f"unix:{home}/s", token="t"),
        grace=timedelta(seconds=1),
    )
    try:
        yield control, provider, spec
    finally:
        await provider.remove(spec.name)
        for process in processes.list_marked(spec.name, 0):
            processes.send(process, signal.SIGKILL)
        await provider.close()
        server.close()


async def ended(provider: LocalProvider, name: str) -> GangSeen:
    """The gang at its end; until then no node of it counts as lost."""
    async with patience():
        while True:
            (seen,) = await provider.gangs(name)
            if seen.state is GangState.ENDED:
                return seen
            assert all(node.ended_at is None for node in seen.nodes)
            await provider.changed()


def test_a_job_from_launch_to_its_end(tmp_path: Path, forked: bool) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, "echo hello; exit 3", forked=forked) as (
            control,
            provider,
            spec,
        ):
            await provider.launch(spec)
            exited = await control.hears("exited")
            assert (exited["outcome"], exited["exit_code"]) == ("exit", 3)
            assert control.log == b"hello\n"
            seen = await ended(provider, spec.name)
            assert seen.exit_code == 3
            assert processes.list_marked(spec.name, 0) == []

    asyncio.run(scenario())


def test_removal_ends_the_work_and_the_agent(tmp_path: Path, forked: bool) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, "sleep 600", forked=forked) as (control, provider, spec):
            await provider.launch(spec)
            await control.hears("running")
            await provider.remove(spec.name)
            seen = await ended(provider, spec.name)
            assert seen.reason == "removed"
            assert processes.list_marked(spec.name, 0) == []

    asyncio.run(scenario())


def test_a_killed_agents_work_dies_and_its_exit_is_delivered(tmp_path: Path, forked: bool) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, "echo before; sleep 600", forked=forked) as (
            control,
            provider,
            spec,
        ):
            await provider.launch(spec)
            await control.hears("running")
            async with patience():
                while control.log != b"before\n":
                    await asyncio.sleep(0.01)
            (seen,) = await provider.gangs(spec.name)
            os.kill(int(seen.nodes[0].engine_id), signal.SIGKILL)
            seen = await ended(provider, spec.name)
            exited = await control.hears("exited")
            assert exited["outcome"] == "exit"  # without own processes, the work may have done it
            assert "killed" in seen.reason
            assert processes.list_marked(spec.name, 0) == []

    asyncio.run(scenario())


def test_work_that_ended_before_its_agent_was_killed_keeps_its_exit_code(
    tmp_path: Path, forked: bool
) -> None:
    async def scenario() -> None:
        async with stage(
            tmp_path, "until [ -e ../go ]; do sleep 0.02; done; echo done; exit 7", forked=forked
        ) as stood:
            control, provider, spec = stood
            await provider.launch(spec)
            await control.hears("running")
            control.deaf = True
            local = tmp_path / "providers" / "local"
            (local / "gangs" / spec.name / "0" / "go").touch()
            async with patience():
                while not (local / "agents" / spec.name / "0" / "exit.json").exists():
                    await asyncio.sleep(0.01)
            (seen,) = await provider.gangs(spec.name)
            os.kill(int(seen.nodes[0].engine_id), signal.SIGKILL)
            control.deaf = False
            seen = await ended(provider, spec.name)
            exited = await control.hears("exited")
            assert (exited["outcome"], exited["exit_code"]) == ("exit", 7)
            assert control.log == b"done\n"
            assert seen.exit_code == 7

    asyncio.run(scenario())


def list_kept(proc: Path) -> Counter[str]:
    """The files that a process has open all the time: an agent reads files of /proc and sends
    requests between two looks."""
    looks = []
    while len(looks) < 10:
        looks.append(Counter[str]())
        for each in (proc / "fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed since
                looks[-1][os.readlink(each).split(":")[0]] += 1
        time.sleep(0.05)
    return reduce(and_, looks)


def describe(pid: int, gang: str) -> dict[str, object]:
    """What other programs see of an agent, without what differs between two gangs."""
    proc = Path(f"/proc/{pid}")
    masks = ("SigBlk", "SigIgn", "SigCgt", "Umask", "NoNewPrivs", "Groups")
    status = [line.split(":") for line in (proc / "status").read_text().splitlines()]
    texts = [(proc / name).read_text().rstrip("\0") for name in ("cmdline", "environ")]
    return {
        **{name: value for name, value in status if name in masks},
        "arguments and environment": [text.replace(gang, "GANG").split("\0") for text in texts],
        "folder": os.readlink(proc / "cwd"),
        "files": sorted(list_kept(proc).elements()),
        "is in a session of its own": os.getsid(pid) == pid,
    }


def test_a_forked_agent_is_like_one_that_was_started_by_itself(tmp_path: Path) -> None:
    """The first agent is a program of its own, the second a fork. The first work leaves behind what
    it can, and its agent is killed."""
    change = "umask 0; export LEFT=1; cd /; exec 9</dev/null; sleep 600 & "
    look = "echo $LEFT; umask; ls /proc/self/fd | wc -l; ls; (cd ..; pwd)"
    found = []

    async def scenario() -> None:
        async with stage(tmp_path, f"{look}; {change} wait") as (control, provider, spec):
            local = tmp_path / "providers" / "local"
            for number in (1, 2):
                gang = replace(spec, name=f"rm-ours-{number}")
                await provider.launch(gang)
                await control.hears("running")
                async with patience():
                    while not control.log.endswith(b"/0\n") or control.opened < 3:
                        await asyncio.sleep(0.01)
                (seen,) = await provider.gangs(gang.name)
                pid = int(seen.nodes[0].engine_id)
                view = describe(pid, gang.name)
                view["files"] = [
                    each.replace(str(local / "agents" / gang.name), "PRIVATE")
                    for each in view["files"]  # type: ignore[attr-defined]
                ]
                found.append((view, control.log.decode().replace(gang.name, "GANG")))
                os.kill(pid, signal.SIGKILL)
                await ended(provider, gang.name)
                assert processes.list_marked(gang.name, 0) == []
                control.said, control.log, control.opened = [], b"", 0

    asyncio.run(scenario())
    assert found[0] == found[1]
    assert found[0][1].startswith("\n0022\n")


def test_agents_outlive_their_fork_server_and_others_start_without_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with stage(tmp_path, "sleep 600", forked=True) as (control, provider, spec):
            await provider.launch(spec)
            await control.hears("running")
            server = provider._gangs._gang_store._fork_server
            assert server is not None
            assert server._process is not None
            (seen,) = await provider.gangs(spec.name)
            processes.send(server._process, signal.SIGKILL)
            next_one = replace(spec, name="rm-ours-2")
            await provider.launch(next_one)
            (later,) = await provider.gangs(next_one.name)
            assert later.state is GangState.RUNNING
            (again,) = await provider.gangs(spec.name)
            assert again == seen
            for name in (spec.name, next_one.name):
                await provider.remove(name)
                assert (await ended(provider, name)).reason == "removed"

    asyncio.run(scenario())
