"""The interface of a batch system. Implementations contain the system's commands, output formats
and resource options.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar, TaskSpec, TopologyNeed
from cavvy.domain.values import Struct, field
from cavvy.providers.base import GangSpec, Refused
from cavvy.providers.batch.cluster import BatchCluster, ClusterQueue
from cavvy.providers.batch.commands import BatchCommands, BatchJobRow
from cavvy.providers.batch.login_session import HelperHello, read_words

# Shell lines that wait for the background process {process} to end, even if signals arrive
# meanwhile. Then `code` is its exit code.
WAIT = """while :; do
    wait {process}
    code=$?
    kill -0 {process} 2>/dev/null || break # else it was a signal that ended the waiting
done"""


class JobOptions(Struct, frozen=True, kw_only=True):
    """The settings that apply to every job."""

    account: str = ""
    options: Sequence[str] = ()  # the user's additional arguments for the submit command
    python: str = "python3"
    warning_s: int = 60  # seconds between the warning and the time limit
    # what the system calls the labels in a task's `topology`, by these labels
    topology: Mapping[str, str] = field(default_factory=dict)


class JobFiles(Struct, frozen=True, kw_only=True):
    """The paths of the files for a gang's job, and the mark by which Cavvy finds the job."""

    mark: str
    folder: str  # the gang's folder
    agent: str  # the folder of the programs that nodes run


class BatchSystem(Protocol):
    """One batch system on one login node. Every asynchronous method may raise TryAgain and
    Refused.
    """

    title: str  # shown to users
    queues: str  # the system's term for queues, which is also the name of the setting
    commands: BatchCommands
    job_options: JobOptions

    def object_to_topology(self, need: TopologyNeed) -> str:
        """Return why the system cannot place nodes as required, or "". `need.same` is a key of
        `job_options.topology`."""

    async def read_cluster(self) -> BatchCluster:
        """Return all queues to which this user may submit jobs, and all nodes."""

    async def jobs(self, uid: int, mark: str) -> Sequence[BatchJobRow]:
        """Return the jobs with this installation's mark, including jobs that ended recently."""

    async def accounted(self, job: str) -> BatchJobRow | None:
        """Return the accounting record of a job that `jobs` no longer lists, or None if no record
        exists."""

    async def explain_accounts(self, user: str, hello: HelperHello) -> Sequence[tuple[str, str]]:
        """Describe the user's accounts and limits, for `cavvy check`."""

    def make_job(
        self, gang: GangSpec, queue: ClusterQueue, files: JobFiles
    ) -> tuple[Sequence[str], str]:
        """Return the options and the script for the submit command."""

    def export(self, task: TaskSpec, offer: Offer | None, nodes: int) -> str:
        """See `ExportsTasks.export`."""


def read_job_options(settings: Mapping[str, Scalar], options: str) -> JobOptions:
    """Read the settings for jobs. `options` is the name of the setting with additional arguments.
    Raises Refused.
    """
    return JobOptions(
        account=str(settings.get("account", "")),
        options=read_words(settings, options),
        python=str(settings.get("python", "")) or "python3",
        warning_s=int(settings.get("warning_s", 60)),
        topology=_read_topology(str(settings.get("topology", ""))),
    )


def _read_topology(text: str) -> Mapping[str, str]:
    words = text.replace(",", " ").split()
    for word in words:
        if not all(word.partition("=")):
            raise Refused(f"topology: {word!r} does not have the form name=value")
    return dict(word.partition("=")[::2] for word in words)
