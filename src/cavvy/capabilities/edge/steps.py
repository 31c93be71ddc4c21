"""Carries out the jobs that have no program: the server publishes a model, brings it to devices, or
collects their samples (`EdgeStep`), as the steps of a graph of jobs.

A step is repeated until it ends. Each look reads what earlier ones have written, so that a crash
between two looks publishes or deploys nothing twice. The files that a step gives to the jobs behind
it are written together with its end.
"""

import asyncio
import hashlib
import json
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta

from cavvy.capabilities.edge.nouns import EdgeSample, Rollout, RolloutPhase
from cavvy.capabilities.edge.rows import SqlEdge
from cavvy.capabilities.edge.service import EdgeService
from cavvy.capabilities.models.nouns import ModelVersion
from cavvy.capabilities.models.registry import ModelRefused, choose_main
from cavvy.control.agents.checkpoints import Checkpoints
from cavvy.control.agents.model_folder import make_model_folder, read_entries
from cavvy.control.clock import ControlClock
from cavvy.control.decide.job import deadline_of
from cavvy.control.decide.rows import make_event
from cavvy.control.decide.task_places import is_within
from cavvy.control.decide.transitions import turn_job
from cavvy.control.job_service import JobServiceError
from cavvy.control.parts import FileKeeper
from cavvy.domain.audit import AuditEntry, AuditOutcome
from cavvy.domain.jobs import JobPhase, JobRecord
from cavvy.domain.tasks import WAVES, EdgeStep
from cavvy.domain.values import Struct, replace
from cavvy.spec.workdir import FolderEntry, encode_manifest
from cavvy.store.base import AtomicWrite, KeyUnusable, RowNotFound
from cavvy.store.blobs import BlobStore, NotManifest
from cavvy.store.documents import to_micros
from cavvy.store.sql import Store

_EVERY = timedelta(seconds=5)  # interval between two looks at a step
_LEAST = timedelta(seconds=1)  # interval if the waves of a rollout are that short
_PAGE = 500  # samples that are read at once
_MOST_BYTES = 64 << 20  # of the samples of a data set; older ones are left out
_MOST_JOBS = 200  # of a graph, in which the step that published a model is looked for
_PUBLISH, _DEPLOY = "edge step publish", "edge step deploy"  # in the audit log
_MODEL = "model"  # the folder into which a job's checkpoint is copied


class _StepFailed(Exception):
    """Raised if a step cannot succeed."""


class _Look(Struct, frozen=True, kw_only=True):
    """What a step has reached. `files` come to the jobs behind it, which must keep to
    `residency`."""

    reason: str
    done: bool = False
    files: Sequence[FolderEntry] = ()
    residency: str = ""


class EdgeSteps:
    """Carries out steps, one look at a time."""

    def __init__(
        self,
        store: Store,
        clock: ControlClock,
        edge: EdgeService,
        checkpoints: Checkpoints,
        keeper: FileKeeper | None,
    ) -> None:
        self._store, self._clock, self._edge = store, clock, edge
        self._rows = SqlEdge(*store.database)
        self._checkpoints, self._keeper = checkpoints, keeper

    async def step(self, job: JobRecord, step: EdgeStep) -> timedelta:
        """Look at a step. Return the time until the next look. Raises StaleVersion."""
        now, given = self._clock.now(), list[JobRecord]()
        deadline = deadline_of(job)
        try:
            if deadline is not None and now >= deadline:
                raise _StepFailed(f"its deadline has passed: {job.reason}")
            look = await self._look(job, step, now)
            if look.done and look.files:
                given = await self._give(job, look)
            phase, reason = JobPhase.DONE if look.done else JobPhase.QUEUED, look.reason
        except (_StepFailed, JobServiceError, RowNotFound, NotManifest, KeyUnusable) as error:
            phase, reason, given = JobPhase.FAILED, str(error), []
        if phase is JobPhase.QUEUED:
            if reason != job.reason:
                await self._store.commit(AtomicWrite(jobs=[replace(job, reason=reason)]))
            return min(_EVERY, max(_LEAST, step.soak))
        ended = turn_job(job, phase, reason, now)
        event = make_event(job, now, phase, reason)
        await self._store.commit(AtomicWrite(jobs=[ended, *given], events=[event]))
        return timedelta(0)

    async def _look(self, job: JobRecord, step: EdgeStep, now: datetime) -> _Look:
        if self._keeper is None:
            raise _StepFailed("this server keeps no models")
        if step.publish:
            return await self._publish(job, step, self._keeper, now)
        if step.deploy:
            return await self._deploy(job, step, now)
        return await self._collect(job, step, self._keeper.blobs(job.project))

    async def _publish(
        self, job: JobRecord, step: EdgeStep, keeper: FileKeeper, now: datetime
    ) -> _Look:
        blobs = keeper.blobs(job.project)
        made = await self._find_made(job, job.since)
        if made is None:
            source = await self._find_before(job, step.publish)
            found = await make_model_folder(self._checkpoints, source, blobs, [], _MODEL)
            files = await self._edge.registry.list_files(blobs, found.snapshot, _MODEL)
            model = ModelVersion(
                project=job.project,
                name=f"{step.model}@0",
                snapshot=found.snapshot,
                files=files,
                main=step.main or choose_main(files),
                job=source.name,
                step=job.id,
                residency=step.residency,
                made_by=job.user,
                created_at=now,
            )
            made = await self._edge.registry.publish(model, keeper.sealer, blobs)
            told = {"model": made.name, "snapshot": made.snapshot}
            await self._record(job, _PUBLISH, made.model, told)
        else:
            await self._edge.registry.complete(made, keeper.sealer)
        entries = [
            FolderEntry(path=f"{step.into}/{each.path}", size=each.size, sha256=each.sha256)
            for each in (made.files if step.into else ())
        ]
        return _Look(
            reason=f"published {made.name}", done=True, files=entries, residency=made.residency
        )

    async def _deploy(self, job: JobRecord, step: EdgeStep, now: datetime) -> _Look:
        known = [
            each
            for each in await self._edge.rollouts(job.project)
            if each.job == job.id and each.created_at >= job.since
        ]
        if known:
            rollout = max(known, key=lambda each: each.number)
        else:
            version = await self._find_version(job, step.deploy)
            rollout = Rollout(
                project=job.project,
                name=f"{version.model}-0",
                model=version.model,
                to=version.number,
                site=step.site,
                labels=step.labels,
                waves=step.waves or WAVES,
                wave_at=now,
                soak_s=step.soak.total_seconds(),
                collect_below=step.below,
                made_by=job.user,
                job=job.id,
                created_at=now,
            )
            try:
                rollout, left_out = await self._edge.deploy(rollout)
            except ModelRefused as error:
                meant = {"to": version.number, "reason": str(error)}
                await self._record(job, _DEPLOY, version.model, meant, code="model-refused")
                raise
            began = {"rollout": rollout.name, "to": rollout.to, "site": rollout.site}
            began["refused_by_residency"] = list(left_out)
            await self._record(job, _DEPLOY, version.model, began)
        told = f"rollout {rollout.name} of {rollout.model}@{rollout.to}"
        if rollout.phase is RolloutPhase.RUNNING:
            return _Look(reason=f"{told}: wave {rollout.wave + 1} of {len(rollout.waves)}")
        if rollout.phase is not RolloutPhase.DONE:
            raise _StepFailed(f"{told} was {rollout.phase}: {rollout.reason}")
        return _Look(reason=f"{told} is done", done=True)

    async def _record(
        self, job: JobRecord, action: str, model: str, after: Mapping[str, object], code: str = ""
    ) -> None:
        """Add what a step did, with the account that submitted or retried its job, to the audit
        log."""
        await self._store.record(
            AuditEntry(
                at=self._clock.now(),
                signed_in=True,
                account=job.account,
                action=action,
                target={"job": job.name, "model": model},
                project=job.project,
                outcome=AuditOutcome.REFUSED if code else AuditOutcome.DONE,
                code=code,
                after=after,
            )
        )

    async def _collect(self, job: JobRecord, step: EdgeStep, blobs: BlobStore) -> _Look:
        since, new = to_micros(await self._find_start(job)), 0
        async for _ in self._read(job, step, since):
            new += 1
            if new == step.samples:
                break
        told = f"{new:,} of {step.samples:,} samples of {step.collect}"
        if new < step.samples:
            return _Look(reason=told)
        lines, size = deque[bytes](), 0
        async for each in self._read(job, step, 0):
            # the server knows the name of the device, which may have written another
            line = json.dumps({**json.loads(each.body), "device": each.device}).encode()
            lines.append(line)
            size += len(line) + 1
            while size > _MOST_BYTES:
                size -= len(lines.popleft()) + 1
        content = b"".join(line + b"\n" for line in lines)
        name = hashlib.sha256(content).hexdigest()
        await asyncio.to_thread(blobs.put, name, [content])
        entry = FolderEntry(path=step.into, size=len(content), sha256=name)
        told = f"{len(lines):,} samples of {step.collect}"
        return _Look(reason=told, done=True, files=[entry], residency=step.residency)

    async def _read(
        self, job: JobRecord, step: EdgeStep, since: int
    ) -> AsyncGenerator[EdgeSample, None]:
        """Yield samples that came after `since`, in microseconds, oldest first."""
        place = (since, "", 0)
        while True:
            page, _, last = await self._edge.list_samples(
                job.project, step.collect, step.residency, place, _PAGE
            )
            for each in page:
                yield each
            if last is None:
                break
            place = last.received, last.device, last.number

    async def _give(self, job: JobRecord, look: _Look) -> list[JobRecord]:
        """Return the jobs that wait for this one, with the files in their working folders."""
        assert self._keeper is not None
        blobs, given = self._keeper.blobs(job.project), list[JobRecord]()
        for each in await self._store.find_jobs(await self._store.dependencies.waiting(job)):
            if each.phase is not JobPhase.QUEUED or each.task.edge is not None:
                continue
            if look.residency and not is_within(each.task, look.residency):
                raise _StepFailed(
                    f"its files must not leave {look.residency}, but {each.name} could run "
                    f"elsewhere: set its `resources.regions` to {look.residency}"
                )
            snapshot = await asyncio.to_thread(_merge, blobs, each.origin.snapshot, look.files)
            given.append(replace(each, origin=replace(each.origin, snapshot=snapshot)))
        return given

    async def _find_before(self, job: JobRecord, name: str) -> JobRecord:
        """Return the job that the task names in `after`, which may have got another name."""
        ids = [each.id for each in job.task.after if each.job == name and each.id]
        return await self._store.find_job(job.project, ids[0] if ids else name)

    async def _find_start(self, job: JobRecord) -> datetime:
        """Return when the last of the jobs before this one ended."""
        ends = [job.submitted_at]
        for each in job.task.after:
            with suppress(RowNotFound):
                before = await self._find_before(job, each.job)
                ends.append(before.ended_at or job.submitted_at)
        return max(ends)

    async def _find_version(self, job: JobRecord, text: str) -> ModelVersion:
        model, _, which = text.partition("@")
        if which.isdecimal():
            return await self._rows.models.get(job.project, f"{model}@{int(which)}")
        if which:
            return await self._edge.registry.find_labelled(job.project, model, which)
        async for each in self._list_before(job):
            step = each.task.edge
            if step is not None and step.model == model and step.publish:
                made = await self._find_made(each, each.submitted_at)
                if made is not None:
                    return made
        known = [
            each for each in await self._edge.registry.models(job.project) if each.model == model
        ]
        if not known:
            raise _StepFailed(f"project {job.project} has published no model {model}")
        return max(known, key=lambda each: each.number)

    async def _find_made(self, job: JobRecord, since: datetime) -> ModelVersion | None:
        """Return the newest version that a step has published."""
        made = [
            each
            for each in await self._edge.registry.models(job.project)
            if each.step == job.id and each.created_at >= since
        ]
        return max(made, key=lambda each: each.number, default=None)

    async def _list_before(self, job: JobRecord) -> AsyncIterator[JobRecord]:
        """Yield the jobs before this one, the nearest first."""
        todo, seen = deque([job]), {job.id}
        while todo and len(seen) <= _MOST_JOBS:
            each = todo.popleft()
            for one in each.task.after:
                with suppress(RowNotFound):
                    before = await self._find_before(each, one.job)
                    if before.id not in seen:
                        seen.add(before.id)
                        todo.append(before)
                        yield before


def _merge(blobs: BlobStore, snapshot: str | None, files: Iterable[FolderEntry]) -> str:
    """Store the snapshot with these files in it, and return its hash."""
    known = read_entries(blobs, snapshot) if snapshot else []
    entries = {each.path: each for each in [*known, *files]}
    manifest = encode_manifest([entries[path] for path in sorted(entries)])
    name = hashlib.sha256(manifest).hexdigest()
    blobs.put(name, [manifest])
    return name
