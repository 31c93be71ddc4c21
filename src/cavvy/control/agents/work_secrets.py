"""Opens the secrets of jobs for the agents that start the jobs."""

from collections.abc import Awaitable, Callable, Mapping, Sequence

from cavvy.control.agents.work import list_mount_keys
from cavvy.control.clock import ControlClock
from cavvy.control.decide.rows import make_attempt_event
from cavvy.domain.jobs import Attempt, JobRecord
from cavvy.store.base import AtomicWrite, KeyUnusable
from cavvy.store.sql import Store

OpenSecrets = Callable[
    [str, Sequence[str]], Awaitable[dict[str, str]]
]  # (project, names) -> secret values


class WorkSecrets:
    """Opens secrets with `open_secrets`. While a key of a job's secrets cannot be used, the job's
    nodes wait and cost money, so an event of the job says why.
    """

    def __init__(self, store: Store, clock: ControlClock, open_secrets: OpenSecrets) -> None:
        self._store, self._clock, self._open = store, clock, open_secrets
        self._waiting: set[str] = set()  # attempts with such an event; their agents ask repeatedly

    async def open(self, job: JobRecord, attempt: Attempt) -> Mapping[str, str]:
        """Return the values of the secrets that the job uses. Raises KeyUnusable if a secret cannot
        be decrypted now.
        """
        names = [*job.task.secrets, *([job.task.image_login] if job.task.image_login else [])]
        names += {name for each in job.task.inputs for name in list_mount_keys(each)}
        try:
            opened = await self._open(job.project, names) if names else {}
        except KeyUnusable as error:
            await self._explain(attempt, str(error))
            raise
        self._waiting.discard(attempt.id)
        return opened

    async def _explain(self, attempt: Attempt, why: str) -> None:
        if attempt.id in self._waiting:
            return
        self._waiting.add(attempt.id)
        text = f"the work waits, because {why}"
        event = make_attempt_event(attempt, self._clock.now(), "secrets", text)
        await self._store.commit(AtomicWrite(events=[event]))
