"""Defines how the jobs of different projects share a machine, and determines which hosts of a fleet
separate the jobs of different projects: each host tests whether it can separate jobs, and reports
any obstacle.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from cavvy.domain.tasks import Scalar
from cavvy.domain.values import Struct
from cavvy.providers.base import NoCapacity, ProviderError, Refused

if TYPE_CHECKING:
    from cavvy.providers.hosts.fleet.host_link import HostLink
    from cavvy.providers.hosts.fleet.launch_ledger import FleetIntent

# an obstacle that the server itself finds
MIXED = "a job that was started without separation still runs on this machine"
_NOT_ASKED = "the host has not yet reported whether it can separate jobs"
_ASK_AGAIN_S = 60.0
_WAIT_S = 6.0  # how long `refresh` waits for slow hosts


class HostIsolation(StrEnum):
    """A value of the setting `isolation`."""

    ONE_PROJECT = ""  # all jobs that run at the same time belong to one project
    NAMESPACES = "namespaces"
    NONE = "none"


def read_isolation(provider: str, settings: Mapping[str, Scalar]) -> HostIsolation:
    """Read the setting. Raises Refused if the value is unknown."""
    value = str(settings.get("isolation", ""))
    if value not in list(HostIsolation):
        names = " or ".join(f"`{each}`" for each in HostIsolation if each)
        raise Refused(f"[providers.{provider}] isolation: expected {names}, not {value!r}")
    return HostIsolation(value)


def say_isolation(mode: HostIsolation, obstacle: str | None) -> str:
    """Explain to users how the jobs of different projects share a machine. `obstacle` is the reason
    why the machine cannot separate jobs (`say_obstacle`), or None if the machine was not queried
    yet.
    """
    if mode is HostIsolation.NONE:
        return "jobs run side by side on the machine, without separation"
    if mode is HostIsolation.ONE_PROJECT:
        return "the machine runs jobs of one project at a time"
    if obstacle is None:
        return (
            "the machine runs jobs of one project at a time, until it has shown that it can "
            "separate jobs"
        )
    if obstacle:
        return f"the machine runs jobs of one project at a time, because {obstacle}"
    return "side by side, separated by namespaces"


def say_protection(ability: str) -> str:
    """Explain to users whether jobs without an image can change what the machine, its user and
    Cavvy obey. `ability` is the result of `agent.work.hide.find_ability` on the machine.
    """
    what = "settings, programs, units, cron, start files or the kernel's settings"
    if ability:
        from cavvy.agent.work.hide import ALONE, HIDES

        if ability == ALONE:
            return f"jobs cannot change {what}, nor signal other processes"
        if ability == HIDES:
            return f"jobs cannot change {what}, but can signal processes of the same user"
    return (
        f"jobs without an image can change {what} as far as the machine's user can, and can signal "
        "processes: user namespaces are not available or turned off"
    )


def say_obstacle(code: str) -> str:
    """Explain to users why a machine cannot separate jobs. `code` is the result of
    `agent.work.separate.find_obstacle` on the machine; an unknown code counts as an obstacle. The
    result is "" if nothing prevents the separation.
    """
    from cavvy.agent.work.separate import METADATA, METADATA_ADDRESSES, NAMESPACES, NONE, ROOT

    if code == NONE:
        return ""
    kind, _, address = code.partition(" ")
    if kind == METADATA and address in METADATA_ADDRESSES:
        return (
            f"a metadata service answers at {address}, and jobs could request this machine's "
            "credentials there; block this address for the user who runs the jobs, as "
            "docs/guides/isolation.md shows"
        )
    if code == ROOT:
        return (
            "namespaces need a user other than root, but jobs on this machine would run as root; "
            "use another user"
        )
    if code == NAMESPACES:
        return "namespaces need a Linux kernel that lets unprivileged users create them"
    return "the machine did not report whether it can separate jobs"


class ObstacleAnswer(Struct, frozen=True, kw_only=True):
    """A supervisor's answer. `obstacle` is one of the codes that `agent.work.separate` returns."""

    obstacle: str


class AbilityAnswer(Struct, frozen=True, kw_only=True):
    """A supervisor's answer. `ability` is a result of `agent.work.hide.find_ability`, or "?"."""

    ability: str


class FleetIsolation:
    """Decides how projects share the hosts that `links` reach.

    A host is queried when its last answer is a minute old, and before every launch. A host that has
    stopped separating jobs gets no job of a second project, even if the scheduler has assigned such
    a job to the host.
    """

    def __init__(self, mode: HostIsolation, links: "Mapping[str, HostLink]") -> None:
        self._mode, self._links = mode, links
        # host -> why it cannot separate jobs, "" if it can; and when it reported this
        self._obstacles: dict[str, str] = {}
        self._asked_at: dict[str, float] = {}

    @property
    def asks(self) -> bool:
        """Whether the setting requires hosts to separate jobs."""
        return self._mode is HostIsolation.NAMESPACES

    @property
    def hides(self) -> bool:
        """Whether hosts hide Cavvy's folder from jobs, as far as they can."""
        return self._mode is not HostIsolation.NONE

    async def refresh(self) -> None:
        """Query the connected hosts whose last answer is outdated."""
        if not self.asks:
            return
        now = asyncio.get_running_loop().time()
        for name in [name for name in self._obstacles if not self._is_up(name)]:
            del self._obstacles[name], self._asked_at[name]  # the host's agents may have changed
        old = [
            name
            for name in self._links
            if self._is_up(name) and now - self._asked_at.get(name, -_ASK_AGAIN_S) >= _ASK_AGAIN_S
        ]
        await asyncio.gather(*(self._ask(name) for name in old))

    async def admit(
        self, hosts: Collection[str], project: str, intents: "Iterable[FleetIntent]"
    ) -> bool:
        """Query the hosts of a new gang, and return whether these hosts separate the gang's work
        from the work of other projects. `intents` are the gangs that have not ended. Raises
        NoCapacity if work of another project could reach the gang's work.
        """
        if not self.asks:
            return False
        separates = not any(await asyncio.gather(*(self._ask(name) for name in hosts)))
        for intent in intents:
            shared = sorted({*hosts} & {*intent.hosts})
            foreign = project and intent.project and intent.project != project
            if shared and foreign and not (separates and intent.separates):
                obstacle = next(filter(None, map(self._obstacles.get, sorted(hosts))), MIXED)
                raise NoCapacity(
                    f"{shared[0]} runs a job of another project and does not separate jobs: "
                    f"{obstacle}"
                )
        return separates

    def find_obstacle(self, host: str, intents: "Iterable[FleetIntent]") -> str | None:
        """Return why the host does not separate jobs, "" if the host separates jobs, or None if the
        setting does not require separation. `intents` are the gangs that have not ended.
        """
        if not self.asks:
            return "" if self._mode is HostIsolation.NONE else None
        obstacle = self._obstacles.get(host, _NOT_ASKED)
        mixed = any(host in intent.hosts and not intent.separates for intent in intents)
        return obstacle or (MIXED if mixed else "")

    def say(self, host: str) -> str:
        """Explain to users how the jobs of different projects share the host."""
        return say_isolation(self._mode, self._obstacles.get(host))

    async def say_protection(self, name: str) -> str:
        """Explain to users whether jobs can change what the host and its user obey. The host is
        queried. The explanation is "" if the host does not answer."""
        if not self.hides:
            return say_protection("")
        try:
            link = self._links[name]
            async with asyncio.timeout(_WAIT_S):
                setup = await link.connect()
                answer = await link.ask("try_protection", AbilityAnswer, command=setup.agent)
        except (KeyError, TimeoutError, ProviderError):
            return ""
        return say_protection(answer.ability)

    def _is_up(self, name: str) -> bool:
        return name in self._links and self._links[name].up

    async def _ask(self, name: str) -> str:
        """Query one host, and return the obstacle that it reports. Silence is an obstacle."""
        try:
            link = self._links[name]
            async with asyncio.timeout(_WAIT_S):
                setup = await link.connect()
                answer = await link.ask("try_separation", ObstacleAnswer, command=setup.agent)
            obstacle = say_obstacle(answer.obstacle)
        except (KeyError, TimeoutError, ProviderError):
            obstacle = _NOT_ASKED
        self._obstacles[name] = obstacle
        self._asked_at[name] = asyncio.get_running_loop().time()
        return obstacle
