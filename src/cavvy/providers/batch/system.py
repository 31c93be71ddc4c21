"""The differences between batch systems: command lines, the meaning of their output, resource
flags."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar, Task
from cavvy.providers.base import GangSpec
from cavvy.providers.batch.cluster import BatchCluster, ClusterQueue
from cavvy.providers.batch.commands import BatchCommands
from cavvy.providers.batch.login_session import HelperHello, read_words
from cavvy.providers.batch.rows import BatchJobRow


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The settings that apply to every job."""

    account: str = ""
    options: Sequence[str] = ()  # more arguments of the submit command
    python: str = "python3"
    warning_s: int = 60  # time between the warning and the time limit


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFiles:
    """The path of a gang's job files, and the mark by which the job is found again."""

    mark: str
    folder: str  # name of the gang
    agent: str  # folder of the nodes' programs


class BatchSystem(Protocol):
    """One batch system on one login node. Every asynchronous method raises TryAgain and
    Refused.
    """

    title: str  # for people
    queues: str  # its word for queues, which is also the name of the setting
    commands: BatchCommands
    job_options: JobOptions

    async def read_cluster(self) -> BatchCluster:
        """All queues that this user may submit to, and all nodes."""

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        """The jobs with this installation's mark, including those that ended recently."""

    async def accounted(self, job: str) -> BatchJobRow | None:
        """The accounting's record of a job that `jobs` no longer lists, if any."""

    async def explain_accounts(self, user: str, hello: HelperHello) -> Sequence[tuple[str, str]]:
        """Accounts and limits for `cavvy check`."""

    def make_job(
        self, gang: GangSpec, queue: ClusterQueue, files: JobFiles
    ) -> tuple[Sequence[str], str]:
        """The options and the script to submit."""

    def export(self, task: Task, offer: Offer | None, nodes: int) -> str:
        """As ExportsTasks.export."""


def read_job_options(settings: Mapping[str, Scalar], options: str) -> JobOptions:
    """Read the settings; `options` names the one with more words. Raises Refused."""
    return JobOptions(
        account=str(settings.get("account", "")),
        options=read_words(settings, options),
        python=str(settings.get("python", "")) or "python3",
        warning_s=int(settings.get("warning_s", 60)),
    )
