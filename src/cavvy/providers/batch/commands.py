"""Runs the commands of a batch system on the login node, and interprets their error messages.

Describes a batch job and its state in the same way for all batch systems.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from enum import StrEnum

from cavvy.domain.values import Struct, field
from cavvy.providers.base import NoCapacity, ProviderError, Refused, TryAgain
from cavvy.providers.batch.login_session import CommandResult, LoginSession


class BatchDialect(Struct, frozen=True, kw_only=True):
    """The commands of one batch system, and patterns for its error messages. Patterns ignore
    case.
    """

    title: str  # shown to users
    submit: Sequence[str]
    cancel: str
    job_id: str  # matches the job's id at the start of the output of `submit`
    prefix: str = ""  # prefix of the system's error messages, which Cavvy's messages omit
    later: str  # matches errors that may be temporary, so that Cavvy tries again
    not_sent: str  # matches those errors in `later` after which `submit` certainly created no job
    # matches errors that concern only this offer, after which Cavvy tries another one
    elsewhere: str
    gone: str  # matches the error of `cancel` if the job has already ended
    # environment variables for read-only commands, such as a time format
    environ: Mapping[str, str] = field(default_factory=dict)


class BatchCommands:
    """Runs the commands of a batch system on one login node. Every method may raise TryAgain or
    Refused.
    """

    def __init__(self, login_session: LoginSession, dialect: BatchDialect) -> None:
        self.login_session = login_session
        self._dialect = dialect

    async def submit(self, options: Sequence[str], script: str) -> str:
        """Submit a job and return its id. The method may also raise SubmissionUnsure and
        NoCapacity.
        """
        argv = [*self._dialect.submit, *options]
        done = await self.login_session.run(argv, script.encode(), timeout_s=45)
        if done.code == 0 and (found := re.match(self._dialect.job_id, done.out.strip())):
            return found[0]
        raise sort_complaint(done, self._dialect)

    async def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs. Jobs that have already ended are ignored."""
        command = self._dialect.cancel
        for job in jobs:
            done = await self.login_session.run([command, job])
            if done.code != 0 and not _says(self._dialect.gone, done.said):
                raise TryAgain(f"{command}: {done.said}")

    async def run(self, argv: Sequence[str]) -> CommandResult:
        """Run a read-only command and return its result, even if the exit code is not 0."""
        return await self.login_session.run(argv, env=self._dialect.environ)

    async def ask(self, argv: Sequence[str]) -> str:
        """Run a read-only command and return its output."""
        done = await self.run(argv)
        if done.code != 0:
            raise self.explain(argv[0], done)
        return done.out

    def explain(self, command: str, done: CommandResult) -> ProviderError:
        """Return the provider error for a failed read-only command."""
        if done.code is None or _says(self._dialect.later, done.said):
            return TryAgain(f"{self._dialect.title} does not answer: {done.said}")
        return Refused(f"{command}: {done.said}")


def sort_complaint(done: CommandResult, dialect: BatchDialect) -> ProviderError:
    """Return the provider error for a submission that was refused, or whose reply was lost."""
    said = done.said.replace(dialect.prefix, "")
    text = f"{dialect.submit[0]}: {said}"
    later = _says(dialect.later, said)
    if done.code is None or (later and not _says(dialect.not_sent, said)):
        return SubmissionUnsure(text)
    if later:
        return TryAgain(text)
    if _says(dialect.elsewhere, said):
        return NoCapacity(f"{dialect.title} cannot place this job: {said}")
    return Refused(text)


def _says(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.IGNORECASE) is not None


class BatchPhase(StrEnum):
    """The state of a job."""

    WAITS = "waits"
    BEGINS = "begins"
    WORKS = "works"
    OVER = "over"


class BatchJobRow(Struct, frozen=True, kw_only=True):
    """One job. If `start` or `end` is in the future, the time is an estimate.

    `reason` tells users why the job waits, what it is doing, or how it ended. `taken` means that
    the job ended because the batch system reclaimed the job's nodes. `cancelled` means that a
    person or Cavvy cancelled the job. `broke` means that the job's own program failed, and that the
    job's log may contain the cause.
    """

    id: str
    name: str
    phase: BatchPhase
    reason: str = ""
    hosts: tuple[str, ...] = ()
    start: datetime | None = None
    end: datetime | None = None
    taken: bool = False
    cancelled: bool = False
    broke: bool = False


class SubmissionUnsure(TryAgain):
    """Raised if the submission failed but the batch system may have accepted the job."""
