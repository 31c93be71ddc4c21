"""Makes the work documents of claims: collects what `work.make_assignment` needs, such as the
newest checkpoint and the secrets.
"""

import asyncio
from collections.abc import Sequence
from datetime import timedelta

from cavvy.agent.documents import PROTOCOL, CheckpointConfig, WorkConfig
from cavvy.control.agents.dependencies import AgentDependencies
from cavvy.control.agents.work import WorkSecrets, make_assignment
from cavvy.control.clock import ControlClock
from cavvy.domain.jobs import Attempt, JobRecord, Node
from cavvy.domain.messages import list_unknown
from cavvy.store.base import RowNotFound
from cavvy.store.sql import Store

_PATIENCE = timedelta(
    seconds=10
)  # how long a claim waits until the newest checkpoint is copied; agents retry after 30 s


class CheckpointNotReady(Exception):
    """Raised while the job's checkpoint is still being copied to the gang's nodes."""


class WorkDocuments:
    """Makes work documents. It remembers the copies of checkpoints that are in progress."""

    def __init__(self, store: Store, clock: ControlClock, dependencies: AgentDependencies) -> None:
        self._dependencies = dependencies
        self._secrets = WorkSecrets(store, clock, dependencies.open_secrets)
        self._readying: dict[
            str, asyncio.Future[CheckpointConfig | None]
        ] = {}  # running copies of checkpoints, keyed by attempt ID, until the claim is granted

    async def make(self, job: JobRecord, attempt: Attempt, nodes: Sequence[Node]) -> WorkConfig:
        """Return the work of an attempt. Raises CheckpointNotReady, StaleVersion."""
        return make_assignment(
            job,
            attempt,
            nodes,
            accelerators=self._dependencies.accelerators(job, attempt),
            secrets=await self._secrets.open(job, attempt),
            checkpoint=await self._checkpoint(job, attempt)
            if job.task.checkpoint is not None
            else None,
            manifest=await self._manifest(job),
            losses_per_hour=await self._dependencies.losses(attempt),
            deposit_after_s=self._dependencies.deposit_after_s(job),
            traced=self._dependencies.traced,
            repairs=self._dependencies.replaces(attempt),
        )

    async def find_unknown(
        self, job: JobRecord, attempt: Attempt, nodes: Sequence[Node], protocol: int
    ) -> str:
        """Return the fields of the work that an agent with this protocol would ignore, or "".
        Raises CheckpointNotReady, StaleVersion."""
        if protocol >= PROTOCOL:
            return ""
        return ", no ".join(list_unknown(protocol, await self.make(job, attempt, nodes)))

    def forget(self, attempt_id: str) -> None:
        """Cancel the copy of a checkpoint for an attempt that has ended."""
        if (coming := self._readying.pop(attempt_id, None)) is not None:
            coming.cancel()

    async def close(self) -> None:
        """Cancel the copies of checkpoints that are in progress; the server that starts next makes
        these copies again.
        """
        coming, self._readying = list(self._readying.values()), {}
        for each in coming:
            each.cancel()
        await asyncio.gather(*coming, return_exceptions=True)

    async def _checkpoint(self, job: JobRecord, attempt: Attempt) -> CheckpointConfig | None:
        """Return how the nodes access the newest checkpoint. Raises CheckpointNotReady while files
        are still being copied: copying continues in the background, and the node repeats its claim.
        """
        coming = self._readying.get(attempt.id)
        if coming is None:
            coming = self._readying[attempt.id] = asyncio.ensure_future(
                self._dependencies.checkpoint(job, attempt)
            )
        await asyncio.wait((coming,), timeout=_PATIENCE.total_seconds())
        if not coming.done() or coming.cancelled():
            raise CheckpointNotReady
        self._readying.pop(attempt.id, None)
        return coming.result()

    async def _manifest(self, job: JobRecord) -> bytes | None:
        """Return the manifest of the working folder if the setup's key depends on some of the
        folder's files, otherwise None."""
        snapshot, read = job.origin.snapshot, self._dependencies.read_blob
        if job.task.setup_uses is None or snapshot is None or read is None:
            return None
        try:
            return await read(job.project, snapshot)
        except RowNotFound:
            return None  # the agent will notice the missing file, too, and report it
