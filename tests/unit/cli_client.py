"""A client that answers from memory, for tests of commands: one project with three jobs, and
what was asked of it.
"""

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest
from msgspec import Raw
from msgspec.json import encode
from msgspec.structs import asdict, replace

import cavvy.client
from cavvy.client import ApiError, ExecChunk, LogChunk, Patience, wire
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.units import HourlyRate

T0 = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
# what a listed job has before its first attempt
UNSTARTED: dict[str, Any] = {
    **{"priority": 0, "attempt": 0, "submitted_at": T0, "since": T0},
    **{"ended_at": None, "exit_code": None, "placement": None},
}
OFFER = Offer(
    provider="local", region="box", instance_type="cpu", rate=HourlyRate(3_600_000), shared=True
)


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def at_s(seconds: float) -> float:
    return at(seconds).timestamp()


def make_node(**changes: Any) -> wire.NodeView:
    facts: dict[str, Any] = {
        "rank": 0,
        "phase": "running",
        "address": "127.0.0.1",
        "exit_code": None,
        "exit_outcome": None,
        "exit_reason": "",
        "claimed_at": at(1),
        "running_at": at(2),
        "exited_at": None,
        "heard_at": at(3),
        "telemetry": {"cpu": 0.5},
        "progress": {"done": 3, "total": 12, "unit": "epochs", "loss": 0.25, "left_s": 8.6},
    }
    return wire.NodeView(**{**facts, **changes})


def make_quota(**changes: Any) -> wire.QuotaRow:
    facts: dict[str, Any] = {
        "provider": "azure",
        "region": "eastus",
        "family": "Standard NDSH100v5 Family vCPUs",
        "name": "standardNDSH100v5Family",
        "unit": "vCPUs",
        "purchase": "on-demand",
        "limit": 192,
        "used": 96,
        "left": 96,
        "request": "az quota update --limit-object value=NEW_LIMIT",
    }
    return wire.QuotaRow(**{**facts, **changes})


def make_machine(name: str = "dev", **changes: Any) -> wire.MachineView:
    facts: dict[str, Any] = {
        "name": name,
        "project": "default",
        "user": "ada",
        "state": "idle",
        "job": "good",
        "waiting": 0,
        "placement": OFFER.key,
        "has": "4 CPUs",
        "nodes": 1,
        "since": at(0),
        "kept_until": at(60),
        "keep_s": 1800.0,
        "rate_micros_per_hour": 3_600_000,
        "spent_micros": 10_000,
    }
    return wire.MachineView(**{**facts, **changes})


def make_attempt(number: int = 1, **changes: Any) -> wire.AttemptView:
    facts: dict[str, Any] = {
        "id": f"x-{number}",
        "number": number,
        "gang": f"rm-0-x-{number}",
        "placement": OFFER.key,
        "offer": Raw(encode(OFFER)),
        "rate_micros_per_hour": 3_600_000,
        "phase": "running",
        "reason": "every rank reported that its work is running",
        "outcome": None,
        "exit_code": None,
        "first_failed_rank": None,
        "created_at": at(0),
        "since": at(2),
        "launched_at": at(0),
        "running_at": at(2),
        "finished_at": None,
        "ended_at": None,
        "checkpoint_at": None,
        "drill_until": None,
        "nodes": [make_node()],
    }
    return wire.AttemptView(**{**facts, **changes})


def make_job(
    name: str, phase: str, *, task: TaskSpec | None = None, **changes: Any
) -> wire.JobDetail:
    ended = phase in ("done", "failed", "stopped")
    facts: dict[str, Any] = {
        "id": f"id-of-{name}",
        "project": "default",
        "name": name,
        "user": "ada",
        "phase": phase,
        "reason": {"failed": "exit code 3", "queued": "waits for CPUs"}.get(
            phase, "as it should be"
        ),
        "priority": 0,
        "submitted_at": T0,
        "since": at(10),
        "ended_at": at(10) if ended else None,
        "attempt": 0 if phase == "queued" else 1,
        "exit_code": {"done": 0, "failed": 3}.get(phase),
        "placement": None if phase == "queued" else OFFER.key,
        "spent_micros": 0 if phase == "queued" else 10_000,
        "task": Raw(encode(task or TaskSpec(name=name, run="true"))),
        "origin": Raw(encode(RunOrigin(task_text="name: x\nrun: 'true'\n"))),
        "not_before": None,
        "stop_reason": None,
        "consented": True,
        "ceiling_micros": None,
        "queue_position": 2 if phase == "queued" else None,
        "attempts": []
        if phase == "queued"
        else [make_attempt(**({"phase": "ended", "ended_at": at(10)} if ended else {}))],
    }
    return wire.JobDetail(**{**facts, **changes})


def make_event(number: int, kind: str, text: str, **changes: Any) -> wire.EventView:
    facts: dict[str, Any] = {
        "id": number,
        "at": at(number),
        "attempt": 1,
        "rank": None,
        "kind": kind,
        "text": text,
    }
    return wire.EventView(**{**facts, **changes})


@dataclass
class FakeClient:
    """What the commands use of `cavvy.client.ApiClient`; `asked` holds what was asked for that
    changes something.
    """

    address: ClassVar[str] = "unix:///run/cavvy.sock"
    all_jobs: dict[str, wire.JobDetail] = field(default_factory=dict)
    story: list[wire.EventView] = field(default_factory=list)
    found: list[wire.CleanupItem] = field(default_factory=list)
    named: list[wire.MachineView] = field(default_factory=list)
    stubborn: list[wire.CleanupItem] = field(
        default_factory=list
    )  # what `down` does not get rid of
    rows: list[wire.NodeListing] = field(default_factory=list)
    series: list[wire.SeriesView] = field(default_factory=list)
    served: list[Any] = field(default_factory=list)  # the services
    removes_old_from: datetime | None = None
    log_bytes: bytes = b""
    log_asked: dict[str, object] = field(default_factory=dict)
    removed: wire.JobRemoved = field(default_factory=lambda: wire.JobRemoved(freed_bytes=0))
    asked: list[tuple[object, ...]] = field(default_factory=list)
    patience: Patience = field(default_factory=Patience)
    sessions: dict[str, str] = field(default_factory=dict)  # unfinished sessions by machine
    looked: list[str] = field(default_factory=list)  # names and IDs of jobs that were asked for
    next_session: dict[str, str] = field(
        default_factory=dict
    )  # names that lead to another job from their second use on

    def server(self) -> SimpleNamespace:
        return SimpleNamespace(removes_old_from=self.removes_old_from)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @contextmanager
    def sibling(self) -> Iterator["FakeClient"]:
        yield self

    def job(self, project: str, name: str, *, session: bool = False) -> wire.JobDetail:
        self.looked.append(name)
        name = self.sessions.get(name, name) if session else name
        if name in self.next_session:
            self.all_jobs[f"former {name}"] = self.all_jobs[name]
            self.all_jobs[name] = self.all_jobs[self.next_session.pop(name)]
            return self.all_jobs[f"former {name}"]
        name = self._key(name)
        if name not in self.all_jobs:
            raise ApiError(
                "job-not-found",
                f"project {project} has no job {name}",
                "`cavvy ps` lists the jobs",
                404,
            )
        return self.all_jobs[name]

    def _key(self, name: str) -> str:
        return next((key for key, job in self.all_jobs.items() if job.id == name), name)

    def figures(self, project: str, name: str, **asked: Any) -> wire.JobFigures:
        return wire.JobFigures(start=T0, step_s=60, series=self.series)

    def forecast(self, project: str, name: str) -> wire.ForecastView:
        return wire.ForecastView(
            runs=60,
            mean_micros=1_500_000,
            p10_micros=900_000,
            p90_micros=4_000_000,
            in_time=0.98,
            hours_p50=6.5,
        )

    def jobs(
        self,
        project: str | None = None,
        *,
        phases: Collection[str] = (),
        cursor: str | None = None,
        limit: int = 50,
        arrays: bool = False,
    ) -> wire.JobPage:
        wanted = [job for job in self.all_jobs.values() if not phases or job.phase in phases]
        first = int(cursor or 0)
        rows = [
            wire.JobListing(
                **{name: getattr(job, name) for name in wire.JobListing.__struct_fields__}
            )
            for job in wanted[first : first + limit]
        ]
        return wire.JobPage(
            jobs=rows, cursor=str(first + limit) if first + limit < len(wanted) else None
        )

    def search_jobs(
        self, *, user: str, phase: Collection[str], offset: int, limit: int, **rest: object
    ) -> wire.JobMatches:
        every = [job for job in self.jobs(phases=phase, limit=1000).jobs if job.user == user]
        return wire.JobMatches(jobs=every[offset : offset + limit], total=len(every))

    def events(
        self, project: str, name: str, *, after: int = 0, wait_s: float = 0
    ) -> wire.EventPage:
        events = [event for event in self.story if event.id > after][:2]
        return wire.EventPage(events=events, last=events[-1].id if events else after, over=True)

    def follow(self, project: str, name: str, *, after: int = 0) -> Iterator[wire.EventView]:
        yield from (event for event in self.story if event.id > after)

    def logs(
        self,
        project: str,
        name: str,
        *,
        tail_bytes: int | None = None,
        follow: bool = False,
        **which: object,
    ) -> Iterator[bytes]:
        self.job(project, name)
        yield (
            self.log_bytes
            if tail_bytes is None
            else self.log_bytes[-tail_bytes:]
            if tail_bytes
            else b""
        )

    def log_chunks(
        self,
        project: str,
        name: str,
        *,
        rank: int = 0,
        tail_bytes: int | None = None,
        times: bool = False,
        **which: object,
    ) -> Iterator[LogChunk]:
        self.job(project, name)
        self.log_asked = which
        size = len(self.log_bytes)
        data = self.log_bytes[size - min(size, size if tail_bytes is None else tail_bytes) :]
        at = [(0, T0.timestamp()), (4, at_s(60))] if times else []
        yield LogChunk(data=data, attempt=1, offset=size, over=True, times=at)

    def stop(self, project: str, name: str) -> wire.JobDetail:
        job = self.job(project, name)
        name = self._key(name)
        self.asked.append(("stop", job.name))
        if job.phase not in ("done", "failed", "stopped"):
            self.all_jobs[name] = replace(job, phase="stopped", reason="stopped by the user")
        return job

    def remove(self, project: str, name: str) -> wire.JobRemoved:
        self.asked.append(("remove", name))
        del self.all_jobs[name]
        return self.removed

    def retry(self, project: str, name: str, **how: object) -> wire.JobDetail:
        self.asked.append(("retry", name))
        return replace(self.job(project, name), phase="queued")

    def drill_preempt(
        self, project: str, name: str, *, notice_s: float, rank: int | None = None
    ) -> wire.JobDetail:
        self.asked.append(("drill", name, notice_s))
        return self.job(project, name)

    def exec(
        self, project: str, name: str, command: list[str], *, rank: int = 0
    ) -> Generator[ExecChunk]:
        self.asked.append(("exec", name, command, rank))
        yield ExecChunk(data=b"some", exit_code=None)
        yield ExecChunk(data=b" output\n", exit_code=7)

    def project_cost(self, project: str) -> wire.ProjectCost:
        total = sum(job.spent_micros for job in self.all_jobs.values())
        return wire.ProjectCost(project=project, since=None, total_micros=total)

    def cost(self, project: str, name: str) -> wire.CostView:
        job = self.job(project, name)
        charge = wire.ChargeView(
            attempt=1,
            rank=0,
            kind="node",
            since=T0,
            until=at(10),
            rate_micros_per_hour=3_600_000,
            amount_micros=job.spent_micros,
        )
        return wire.CostView(
            job=job.id,
            charges=[charge] if job.spent_micros else [],
            total_micros=job.spent_micros,
            queued_s=1,
            starting_s=2,
            running_s=6.5,
            lost_s=0.5,
            ending_s=0,
            timeline=[],
        )

    def nodes(self, project: str | None = None) -> list[wire.NodeListing]:
        return self.rows

    def markets(self) -> list[wire.MarketListing]:
        return []

    def joined(self) -> list[wire.MachineRow]:
        return []

    def machines(self, project: str | None = None) -> list[wire.MachineView]:
        return [each for each in self.named if project in (None, each.project)]

    def machine(self, project: str, name: str) -> wire.MachineView:
        return next(each for each in self.named if (each.project, each.name) == (project, name))

    def stop_machine(self, project: str, name: str) -> wire.MachineView:
        self.asked.append(("stop machine", project, name))
        self.named = [
            replace(each, state="stopped", waiting=0, rate_micros_per_hour=None)
            for each in self.named
        ]
        return self.machine(project, name)

    def delete_machine(self, project: str, name: str) -> None:
        self.named = [each for each in self.named if each.name != name]

    def keep_machine(self, project: str, name: str, *, keep_s: float) -> wire.MachineView:
        self.asked.append(("keep machine", name, keep_s))
        return self.machine(project, name)

    def down(self, *, project: str | None = None, dry_run: bool = False) -> list[wire.CleanupItem]:
        self.asked.append(("down", project, dry_run))
        found = [wire.CleanupItem(**{**asdict(each), "done": not dry_run}) for each in self.found]
        if not dry_run:
            self.found = self.stubborn
            self.rows = []
        return found

    def gc(self, *, dry_run: bool = True) -> list[wire.CleanupItem]:
        self.asked.append(("gc", dry_run))
        return [wire.CleanupItem(**{**asdict(each), "done": not dry_run}) for each in self.found]

    def ask(self, target: str, kind: Any, body: Any = None, *, method: str = "") -> Any:
        if "/arrays/" in target:
            raise ApiError("job-not-found", "project default has no array", "", 404)
        if "/services/" in target:
            raise ApiError("service-not-found", "project default has no service", "", 404)
        if target.startswith("/v1/ledger"):
            return []
        assert target.startswith("/v1/services"), target
        return self.served

    def check_submission(self, text: str, **how: Any) -> wire.SubmissionCheck:
        self.asked.append(("check", text, how))
        return wire.SubmissionCheck(name=how["name"] or "a")

    def submit(self, text: str, **how: Any) -> wire.Submitted:
        self.asked.append(("submit", text, how))
        name = f"{how['name']}-2"
        self.all_jobs[name] = make_job(name, "done")
        return wire.Submitted(id="new", project=how["project"], name=name, phase="queued")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The client that commands get, whichever server they would talk to."""
    jobs = [
        make_job("good", "done"),
        make_job("bad", "failed"),
        make_job("next", "queued"),
        make_job("now", "running"),
    ]
    fake = FakeClient(all_jobs={job.name: job for job in jobs})
    monkeypatch.setattr(cavvy.client, "connect", lambda **how: fake)
    monkeypatch.delenv("CAVVY_PROJECT", raising=False)
    return fake
