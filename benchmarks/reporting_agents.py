"""Many agents in one process, without work: they claim their ranks, report telemetry, and wait for
orders. `active_jobs.py` starts these processes and reads their results.

They use the agent's own client, so requests, connections, TLS and retries are those of real agents.
Each agent has an address of its own (127.a.b.c), because the server limits the connections of one
address.
"""

import contextlib
import json
import random
import signal
import socket
import sys
import time
from pathlib import Path

from cavvy.agent.config import AgentConfig, ConfigFields
from cavvy.agent.control_client import ControlPlaneClient
from cavvy.agent.log import LogSpool
from cavvy.agent.loop import EventLoop
from cavvy.agent.outbox import MessageOutbox

TELEMETRY = {"cpu_percent": 93.5, "memory_mib": 2048, "gpu_percent": 97.0, "gpu_memory_mib": 70000}
CLAIM_SPREAD_S = 20.0  # agents start at random moments of this time, like nodes that boot


class NodeTarget(tuple[str, int]):
    """The server's address, as seen by the node with the address `source`."""

    source = ""


class NodeSocket(socket.socket):
    """A socket that connects from the address of a node."""

    def connect_ex(self, target: object) -> int:  # type: ignore[override]  # as `socket` has it
        if isinstance(target, NodeTarget):
            self.bind((target.source, 0))
        return super().connect_ex(target)  # type: ignore[arg-type]  # as above


class ReportingAgent:
    """One agent, whose work never ends."""

    def __init__(self, loop: EventLoop, fields: dict[str, object], every_s: float) -> None:
        self._loop, self._every_s = loop, every_s
        home = Path(str(fields["home"]))
        home.mkdir(parents=True)
        config = AgentConfig(ConfigFields(fields, "configuration"))
        self._outbox = MessageOutbox(config.outbox_file)
        log = LogSpool(config.log_folder, 1)
        self._link = ControlPlaneClient(loop, config, config.gang, self._outbox, log, self)
        target = NodeTarget((self._link.address.name, self._link.address.port))
        target.source = str(fields["from"])
        self._link.address.targets = [(socket.AF_INET, target)]
        self._told_at: float | None = None
        self.running = self.over = False
        self.waits_s: list[float] = []  # how long each report waited until it was acknowledged
        loop.after(random.uniform(0, CLAIM_SPREAD_S), lambda: self._link.claim(self._begin))

    @property
    def waits_since(self) -> float | None:
        """When the report was sent that is not acknowledged yet."""
        return self._told_at

    def _begin(self, work: ConfigFields) -> None:
        self.running = True
        self._outbox.put("running")
        self._send()
        self._link.listen_soon()
        self._loop.after(random.uniform(0, self._every_s), self._report)

    def _report(self) -> None:
        self._outbox.put("telemetry", values=dict(TELEMETRY, gpu_percent=random.uniform(80, 100)))
        self._send()
        self._loop.after(self._every_s, self._report)

    def _send(self) -> None:
        if not self._outbox.holds:  # figures may wait for others, as the server has said
            self._told_at = self._told_at or time.monotonic()
        self._link.pump()

    # what the client tells its agent

    def delivered(self) -> None:
        if self._outbox.told and self._told_at is not None:
            self.waits_s.append(time.monotonic() - self._told_at)
            self._told_at = None
        elif self._outbox.holds:  # the rest is newer than the report, and waits for the next one
            self._told_at = None

    def dismissed(self, reason: str) -> None:
        self.over, self._told_at = True, None

    def ordered(self, kind: str, seconds: float, reason: str) -> None:
        self._link.close()
        self.over, self._told_at = True, None

    def asked(self, asked: object) -> None:
        """Users ask for nothing here."""

    def paced(self, every_s: float) -> None:
        """There are no checkpoints."""

    def kept(self, seconds: float) -> None:
        """Nodes are not kept."""


class AgentProcess:
    """The agents of this process. SIGUSR1 begins to count, and SIGUSR2 writes the counts."""

    def __init__(self, loop: EventLoop, plan: dict[str, object]) -> None:
        self._loop, self._result = loop, Path(str(plan["result"]))
        every_s, configs = float(str(plan["every_s"])), plan["agents"]
        assert isinstance(configs, list)
        self._agents = [ReportingAgent(loop, fields, every_s) for fields in configs]
        loop.on_signal(signal.SIGUSR1, self._count_from_now)
        loop.on_signal(signal.SIGUSR2, self._write)
        self._look()

    def _look(self) -> None:
        """Say when all work has begun."""
        if all(agent.running for agent in self._agents):
            self._result.with_suffix(".ready").touch()
        else:
            self._loop.after(0.5, self._look)

    def _count_from_now(self) -> None:
        for agent in self._agents:
            agent.waits_s.clear()

    def _write(self) -> None:
        now = time.monotonic()
        waits = [wait for agent in self._agents for wait in agent.waits_s]
        unhandled = [now - at for agent in self._agents if (at := agent.waits_since) is not None]
        over = sum(agent.over for agent in self._agents)
        with contextlib.suppress(FileNotFoundError):
            part = self._result.with_suffix(".part")
            part.write_text(json.dumps({"waits": waits, "unhandled": unhandled, "over": over}))
            part.rename(self._result)


def main() -> None:
    plan = json.loads(Path(sys.argv[1]).read_text())
    socket.socket = NodeSocket  # type: ignore[misc]  # for the agent's client
    loop = EventLoop()
    AgentProcess(loop, plan)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    loop.run()


if __name__ == "__main__":
    main()
