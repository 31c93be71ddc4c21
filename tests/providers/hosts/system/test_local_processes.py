"""Faults of real processes under the local provider: kills at any moment, leftovers, restarts,
full books.
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from tests.contract.stand_in import STAND_IN
from tests.records import make_gang_spec
from tests.waits import patience

from cavvy.agent.documents import AgentConfigFile
from cavvy.domain.allocations import Allocation
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers import base
from cavvy.providers.hosts.devices import MachineSources
from cavvy.providers.hosts.machine import this_machine
from cavvy.providers.hosts.records import write
from cavvy.providers.local import MANIFEST, processes
from cavvy.providers.local.processes import LocalProcess
from cavvy.providers.local.provider import LocalProvider
from cavvy.providers.local.records import LocalIntent

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs Linux's process descriptors"),
]


class Machine:
    """One home folder and the providers over it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.command: Sequence[str] = (sys.executable, "-I", "-S", str(STAND_IN))
        self.later = timedelta(0)
        self.engine: str | None = None
        self.sources: MachineSources = this_machine(home)
        self.made: list[LocalProvider] = []

    def start(self) -> LocalProvider:
        context = base.ProviderContext(
            installation="ours",
            home=self.home,
            settings={},
            agent_command=self.command,
            now=lambda: datetime.now(UTC) + self.later,
        )
        self.made.append(LocalProvider(MANIFEST, context, self.sources, lambda: self.engine))
        return self.made[-1]

    async def spec(self, provider: LocalProvider, name: str, nodes: int = 1) -> base.GangSpec:
        return make_gang_spec(
            (await provider.offers())[0],
            name=name,
            installation="ours",
            nodes=nodes,
            agent_endpoint=base.AgentEndpoint(address="unix:/nonexistent", token="secret-token"),
            grace=timedelta(seconds=1),
        )

    def rank(self, gang: str, number: int = 0) -> Path:
        return self.home / "agents" / gang / str(number)

    def work(self, script: str) -> None:
        """What every agent runs beside itself from now on."""
        (self.home / "work.sh").write_text(script)


@asynccontextmanager
async def machine_at(home: Path) -> AsyncIterator[Machine]:
    machine = Machine(home)
    try:
        yield machine
    finally:
        provider = machine.start()
        for gang in await provider.gangs():
            await provider.remove(gang.name)
            for rank in range(len(gang.nodes)):
                for process in processes.list_marked(gang.name, rank):
                    processes.send(process, signal.SIGKILL)
        for each in machine.made:
            await each.close()


async def until(
    provider: LocalProvider, name: str, good: Callable[[base.GangSeen], bool]
) -> base.GangSeen:
    async with patience():
        while True:
            seen = await provider.gangs(name)
            if seen and good(seen[0]):
                return seen[0]
            await asyncio.sleep(0.01)


async def appears(path: Path) -> str:
    async with patience():
        while not path.exists() or not path.read_text().endswith("\n"):
            await asyncio.sleep(0.01)
    return path.read_text()


def ended(seen: base.GangSeen) -> bool:
    return seen.state is base.GangState.ENDED


async def agent_of(machine: Machine, provider: LocalProvider, gang: str) -> LocalProcess:
    await appears(machine.rank(gang) / "starts")
    (seen,) = await provider.gangs(gang)
    process = processes.find(int(seen.nodes[0].engine_id))
    assert process is not None
    return process


def test_work_of_a_killed_agent_is_killed_wherever_it_hides(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            # One child in a session of its own, one that cleared its environment under a marked
            # parent.
            machine.work(
                f"setsid sleep 600 & env -i sleep 601 & echo $$ > {tmp_path}/work.pid; wait\n"
            )
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-1"))
            agent = await agent_of(machine, provider, "rm-a-1")
            await appears(tmp_path / "work.pid")
            async with patience():
                while len(processes.list_marked("rm-a-1", 0)) < 4:
                    await asyncio.sleep(0.01)
            everything = processes.list_marked("rm-a-1", 0)
            os.kill(agent.pid, signal.SIGKILL)
            await until(provider, "rm-a-1", lambda seen: "dead agent" in seen.reason)
            machine.later = timedelta(seconds=5)  # the stand-in has no reaper to wait for
            seen = await until(provider, "rm-a-1", ended)
            assert "killed" in seen.reason
            assert not any(processes.lives(process) for process in everything)
            assert not machine.rank("rm-a-1").exists()

    asyncio.run(scenario())


def test_a_death_is_told_at_once_also_after_a_restart(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            first = machine.start()
            await first.launch(await machine.spec(first, "rm-a-2"))
            agent = await agent_of(machine, first, "rm-a-2")
            second = machine.start()
            await second.gangs()
            os.kill(agent.pid, signal.SIGKILL)
            async with patience():
                assert await second.changed() == "rm-a-2"
                assert await first.changed() == "rm-a-2"
            await until(second, "rm-a-2", ended)

    asyncio.run(scenario())


def test_last_words_of_a_killed_agent_are_delivered(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-3"))
            agent = await agent_of(machine, provider, "rm-a-3")
            starts, keep = machine.rank("rm-a-3") / "starts", tmp_path / "kept"
            os.link(starts, keep)
            (machine.rank("rm-a-3") / "started").touch()  # the agent had begun its work
            os.kill(agent.pid, signal.SIGKILL)
            await until(provider, "rm-a-3", ended)
            assert keep.read_text().split() == ["work", "deliver"]

    asyncio.run(scenario())


def test_the_container_of_a_killed_agent_is_removed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            engine = tmp_path / "podman"
            engine.write_text(f'#!/bin/sh\nsleep 0.1\necho "$@" >> {tmp_path}/engine.log\n')
            engine.chmod(0o755)
            machine.engine = str(engine)
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-13"))
            agent = await agent_of(machine, provider, "rm-a-13")
            # as the agent writes it for a container
            (tmp_path / "gangs/rm-a-13/0/entry.sh").touch()
            os.kill(agent.pid, signal.SIGKILL)
            await until(provider, "rm-a-13", ended)
            assert (tmp_path / "engine.log").read_text() == "rm -f rm-a-13-0\n"

    asyncio.run(scenario())


def test_a_launch_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-4", nodes=3))
            agent = await agent_of(machine, provider, "rm-a-4")
            # As if the server had been killed: after the first agent, before its record; and before
            # the second agent.
            second = processes.find(int((await provider.gangs("rm-a-4"))[0].nodes[1].engine_id))
            assert second is not None
            os.kill(second.pid, signal.SIGKILL)
            os.waitpid(second.pid, 0)
            (machine.rank("rm-a-4", 0) / "started.json").unlink()
            for name in ("started.json", "lock", "starts"):
                (machine.rank("rm-a-4", 1) / name).unlink(missing_ok=True)
            seen = await until(
                machine.start(), "rm-a-4", lambda seen: seen.state is base.GangState.RUNNING
            )
            ids = [node.engine_id for node in seen.nodes]
            assert ids[0] == str(agent.pid)
            assert ids[1] not in ("", str(second.pid))
            assert len(set(ids)) == 3

    asyncio.run(scenario())


def test_who_ignores_sigterm_is_killed_when_patience_ends(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            machine.command = (
                "/bin/sh",
                "-c",
                "trap '' TERM; echo up > $(dirname $0)/starts; sleep 600 & wait; wait",
            )
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-5"))
            agent = await agent_of(machine, provider, "rm-a-5")
            await provider.remove("rm-a-5")
            (seen,) = await provider.gangs("rm-a-5")
            assert seen.state is base.GangState.RUNNING
            assert seen.reason
            machine.later = timedelta(minutes=1)
            await until(provider, "rm-a-5", ended)
            assert not processes.lives(agent)

    asyncio.run(scenario())


def test_a_number_used_again_is_never_signalled() -> None:
    process = processes.start(["sleep", "600"], {"PATH": os.environ["PATH"]}, Path(os.devnull))
    try:
        processes.send(LocalProcess(process.pid, "another boot/1"), signal.SIGKILL)
        assert processes.lives(process)
        assert not processes.lives(LocalProcess(process.pid, "another boot/1"))
    finally:
        processes.send(process, signal.SIGKILL)
        os.waitpid(process.pid, 0)


def test_an_agent_that_cannot_be_started_leaves_nothing(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            machine.command = ("/no/such/python",)
            provider = machine.start()
            with pytest.raises(base.Refused, match="cannot be started"):
                await provider.launch(await machine.spec(provider, "rm-a-6", nodes=2))
            assert await provider.gangs() == []
            assert [*(tmp_path / "agents").iterdir(), *(tmp_path / "gangs").iterdir()] == []

    asyncio.run(scenario())


def test_one_device_is_never_given_twice(tmp_path: Path) -> None:
    class OneGpu:
        def count(self) -> int:
            return 1

        def uuid(self, index: int) -> str:
            return "GPU-0"

        def name(self, index: int) -> str:
            return "NVIDIA H100 80GB HBM3"

        def memory_mib(self, index: int) -> int:
            return 81559

        def partitioned(self, index: int) -> bool:
            return False

        def instances(self, index: int) -> Sequence[tuple[str, str]]:
            return []

        def problem(self, index: int) -> str:
            return ""

        def close(self) -> None: ...

    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            machine.sources = replace(
                machine.sources, nvml=OneGpu, environ={**os.environ, "SECRET": "s"}
            )
            provider = machine.start()
            offer = (await provider.offers())[1]
            (host,) = await provider.hosts()
            hold = Allocation(
                host=host.name,
                gang="",
                rank=0,
                project="p",
                cpus=1,
                memory_mib=100,
                devices=("GPU-0",),
            )
            spec = replace(await machine.spec(provider, "rm-a-7"), offer=offer, allocations=[hold])
            await provider.launch(spec)
            agent = await agent_of(machine, provider, "rm-a-7")
            assert b"SECRET" not in Path(f"/proc/{agent.pid}/environ").read_bytes()
            with pytest.raises(base.NoCapacity, match="rm-a-7"):
                await provider.launch(replace(spec, name="rm-a-8"))
            with pytest.raises(base.NoCapacity, match="GPU-9"):
                await provider.launch(
                    replace(spec, name="rm-a-9", allocations=[replace(hold, devices=("GPU-9",))])
                )
            await provider.remove("rm-a-7")
            await until(provider, "rm-a-7", ended)
            await provider.launch(replace(spec, name="rm-a-8"))
            (seen,) = await provider.gangs("rm-a-8")
            assert seen.state is base.GangState.RUNNING
            assert offer.rate == HourlyRate(0)

    asyncio.run(scenario())


def test_the_token_is_for_its_user_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-10"))
            await agent_of(machine, provider, "rm-a-10")
            config = machine.rank("rm-a-10") / "config.json"
            assert config.stat().st_mode & 0o777 == 0o600
            assert "secret-token" in config.read_text()
            command = Path(
                f"/proc/{(await agent_of(machine, provider, 'rm-a-10')).pid}/cmdline"
            ).read_bytes()
            assert b"secret-token" not in command

    asyncio.run(scenario())


def test_a_disk_without_room_is_a_passing_fault_that_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            provider = machine.start()
            spec = await machine.spec(provider, "rm-a-11")
            real = os.replace
            with monkeypatch.context() as patch:
                patch.setattr("os.replace", _no_room)
                with pytest.raises(base.TryAgain, match="No space left"):
                    await provider.launch(spec)
            assert os.replace is real
            assert [*(tmp_path / "agents").iterdir(), *(tmp_path / "gangs").iterdir()] == []
            await provider.launch(spec)
            await until(provider, "rm-a-11", lambda seen: seen.state is base.GangState.RUNNING)

    asyncio.run(scenario())


def _no_room(*arguments: object) -> None:
    raise OSError(28, "No space left on device")


def test_long_ended_gangs_are_forgotten_and_their_folders_go(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            provider = machine.start()
            await provider.launch(await machine.spec(provider, "rm-a-12"))
            await agent_of(machine, provider, "rm-a-12")
            await provider.remove("rm-a-12")
            await until(provider, "rm-a-12", ended)
            machine.later = timedelta(minutes=61)
            assert [seen.name for seen in await provider.gangs()] == ["rm-a-12"]
            machine.later = timedelta(hours=3)
            assert await provider.gangs() == []
            await provider.close()
            for name in ("agents", "gangs", "ended", "trash"):
                assert list((tmp_path / name).iterdir()) == []

    asyncio.run(scenario())


def test_gangs_of_an_earlier_version_are_taken_over_and_never_started_again(
    tmp_path: Path,
) -> None:
    """The earlier version kept all records in the work's folder, where the work could change them:
    here it has changed the one of the second gang, and removed the marks of its start.
    """

    async def scenario() -> None:
        async with machine_at(tmp_path) as machine:
            agents = []
            for name in ("rm-a-20", "rm-a-21"):
                agents.append(start_as_earlier(machine, name))
                await appears(tmp_path / "gangs" / name / "0" / "starts")
            kept, ended_one = agents
            forged = tmp_path / "gangs/rm-a-21/0"
            intent = {"name": "rm-a-21", "installation": "ours", "nodes": 5, "grace_s": 1e200}
            intent |= {"launched_at": "2999-01-01T00:00:00"}
            (forged.parent / "gang.json").write_text(json.dumps(intent))
            for mark in ("started.json", "lock", "starts"):
                (forged / mark).unlink()
            processes.send(ended_one, signal.SIGKILL)
            processes.reap(ended_one)
            provider = machine.start()
            seen = await until(provider, "rm-a-21", ended)
            assert [node.rank for node in seen.nodes] == [0]
            assert not (forged / "starts").exists()
            (seen,) = await provider.gangs("rm-a-20")
            assert seen.state is base.GangState.RUNNING
            assert seen.nodes[0].engine_id == str(kept.pid)
            (tmp_path / "gangs/rm-a-20/0/finish").touch()
            await until(machine.start(), "rm-a-20", ended)
            assert [*(tmp_path / "agents").iterdir(), *(tmp_path / "gangs").iterdir()] == []

    asyncio.run(scenario())


def start_as_earlier(machine: Machine, name: str) -> LocalProcess:
    """Start a gang as the version before the folder `agents` did."""
    rank = machine.home / "gangs" / name / "0"
    rank.mkdir(parents=True)
    intent = LocalIntent(
        name=name, installation="ours", nodes=1, launched_at=datetime.now(UTC), grace_s=1.0
    )
    config = AgentConfigFile(
        gang=name, rank=0, address="unix:/nonexistent", token="t", home=str(rank), cache="/c",
        lease_s=3600.0, grace_s=1.0, devices=[],
    )  # fmt: skip
    write(rank.parent / "gang.json", intent)
    write(rank / "config.json", config)
    environ = {**os.environ, "CAVVY_GANG": name, "CAVVY_RANK": "0"}
    command = [*machine.command, str(rank / "config.json")]
    process = processes.start(command, environ, rank / "agent.log")
    write(rank / "started.json", process)
    return process
