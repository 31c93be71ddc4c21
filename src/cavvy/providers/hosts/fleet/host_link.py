"""The line to one host's supervisor, whatever it is made of.

Errors, by what the caller does next:

* CannotConnect(TryAgain)  nobody answers now, and nothing was asked of the host; a later call may
* LoginRefused(Refused)        a person must act
* LinkLost(TryAgain)       the line broke after something was asked: perhaps it was done
* TryAgain, NoCapacity, Refused   what the supervisor answered
"""

import asyncio
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol, TypeVar

import msgspec

from cavvy.providers.base import NoCapacity, Refused, TryAgain

_T = TypeVar("_T")
ASK_TIMEOUT_S = 60  # of one answer; a launch writes a few files
Asked = dict[
    int, asyncio.Future[msgspec.Raw]
]  # what was asked of the supervisor and not answered yet, by number


class CannotConnect(TryAgain):
    """Nobody answers now."""


class LoginRefused(Refused):
    """A person must act."""


class LinkLost(TryAgain):
    """The line broke after something was asked: perhaps it was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """A host as it was set up for this connection."""

    root: str  # of this installation on this host
    cache: str
    agent: tuple[str, ...]  # starts the agent; the configuration's path is appended
    supervisor: tuple[str, ...]


class SupervisorAnswer(msgspec.Struct, frozen=True):
    """A line of the supervisor: what it answers, or a gang that `changed`."""

    id: int | None = None
    answer: msgspec.Raw = msgspec.Raw()  # empty: there is an error instead
    kind: str = ""
    error: str = ""
    changed: str | None = None


class HostLink(Protocol):
    """One host. Times are the control plane's."""

    problem: str  # why it is not connected
    let_in: bool  # False: somebody answers and does not let us in
    heard_at: datetime | None
    silent_since: datetime | None
    silent_s: float  # how long it has not been reached, as far as we tried

    @property
    def name(self) -> str: ...

    @property
    def up(self) -> bool: ...

    @property
    def target(self) -> tuple[str, int]:
        """Where it listens, as far as we know."""

    async def connect(self) -> HostSetup:
        """Be connected, where that is ours to do. Raises CannotConnect, LoginRefused."""

    async def ask(self, do: str, kind: type[_T], **fields: object) -> _T:
        """Have the supervisor do something. Raises what this module's head lists."""

    async def reaches(self, address: str, port: int) -> bool:
        """Whether that port answers from here: a second witness of its host's being alive."""


def give_answer(asked: Asked, answer: SupervisorAnswer, host: str) -> None:
    """Hand an answer to whoever asked for it."""
    future = asked.pop(-1 if answer.id is None else answer.id, None)
    if future is None or future.done():
        return
    if len(bytes(answer.answer)):
        future.set_result(answer.answer)
        return
    errors: dict[str, type[Exception]] = {"busy": NoCapacity, "refused": Refused}
    future.set_exception(errors.get(answer.kind, TryAgain)(f"{host}: {answer.error}"))


def give_up(asked: Asked, problem: str) -> None:
    """Tell all who wait for an answer that none comes."""
    for future in asked.values():
        if not future.done():
            future.set_exception(LinkLost(problem))
            future.exception()  # whoever asked may have gone
    asked.clear()
