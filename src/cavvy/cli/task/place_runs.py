"""Measures running jobs by their reports of progress, and runs one script as a job at several
places. `cavvy bench` and `compare` use this module."""

import re
import shlex
import time
from collections.abc import Sequence
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.cli.view.formatting import ENDED
from cavvy.domain.facts import Fact
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.wire import JobDetail
    from cavvy.sdk.client import Client
    from cavvy.spec.keys import Resources

_POLL_S = 0.5
# seconds that a node may take to start and set up; the measured time begins after that
START_S = 1800
_REASON = "measured by cavvy compare"


class PlaceRun(Struct, frozen=True, kw_only=True):
    """One run of the script.

    `start_s` is the time from the submission, or from the end of the job before it, until the
    program ran, `samples_per_s` the rate
    between the reports of progress. `finish_s` and `finish_usd` are the time and the cost of all
    samples at this rate, with the start; or of the run itself, if it ended before it was measured.
    Values are None if they could not be measured.
    """

    place: str
    machine: str
    job: str
    at: datetime
    outcome: str
    start_s: float | None
    samples_per_s: float | None
    usd_hr: float | None
    finish_s: float | None
    finish_usd: float | None

    @property
    def usd_per_1000(self) -> float | None:
        """The price of 1,000 samples in dollars."""
        if not self.samples_per_s or self.usd_hr is None:
            return None
        return self.usd_hr / 3.6 / self.samples_per_s


def run_places(
    script: Path,
    gpus: Sequence[str],
    providers: Sequence[str],
    *,
    seconds: float,
    samples: float | None,
    consent: bool,
) -> list[PlaceRun]:
    """Run the script on each GPU at each provider, one after another.

    All jobs are submitted first, each after the one before: a place that cannot run the script is
    known before any time is measured. A place that fails later is a run whose outcome says why.
    Raises CommandFailure if a job is refused, after stopping the others.
    """
    from cavvy.cli.reach.session import session
    from cavvy.client import ApiError
    from cavvy.sdk.client import Client

    found = []
    places = list(product(gpus or (None,), providers or (None,)))
    with session() as client, Client() as submitter:
        jobs = _submit_all(client, submitter, places, _PlaceScript(script, seconds, consent))
        try:
            for number, (place, job) in enumerate(jobs):
                click.echo(f"{job.name} ({place}): waiting for its first report", err=True)
                try:
                    seen, last = watch_reports(client, job.project, job.id, seconds)
                    earlier = jobs[number - 1][1].id if number else None
                    begin = client.job(job.project, earlier).ended_at if earlier else None
                    run = _measure(place, seen, last, begin, seconds, samples)
                except ApiError as error:
                    click.echo(f"{job.name} ({place}): {error.message}", err=True)
                    run = _give_up(place, job, error.message)
                stop_measured(client, job.project, job.id, _REASON)
                found.append(run)
        finally:
            for _, job in reversed(jobs[len(found) :]):  # the end of a job starts the next one
                stop_measured(client, job.project, job.id, _REASON)
    return found


class _PlaceScript(NamedTuple):
    path: Path
    seconds: float
    consent: bool


class _PlaceJob(NamedTuple):
    project: str
    name: str
    id: str
    at: datetime


def _submit_all(
    client: "ApiClient",
    submitter: "Client",
    places: Sequence[tuple[str | None, str | None]],
    script: _PlaceScript,
) -> list[tuple[str, _PlaceJob]]:
    from cavvy.sdk.errors import CavvyError
    from cavvy.sdk.task import Task

    jobs: list[tuple[str, _PlaceJob]] = []
    made: list[tuple[str, str]] = []
    try:
        for gpu, provider in places:
            resources: Resources = {"gpu": gpu} if gpu else {}
            if provider:
                resources["providers"] = [provider]
            place = " ".join(filter(None, (provider, gpu))) or "any"
            try:
                task = Task(
                    f"python3 {shlex.quote(script.path.name)}",
                    name=name_job(script.path),
                    workdir=str(script.path.absolute().parent),
                    resources=resources,
                    limits={"duration": f"{round(script.seconds + START_S)}s"},
                )
                earlier = f"{made[-1][1]}:any" if made else None
                job = submitter.submit(task, after=earlier, consent=script.consent)
            except CavvyError as error:
                raise CommandFailure(f"{place}: {error.message}", error.hint) from error
            made.append((job.project, job.id))
            detail = client.job(job.project, job.id)
            jobs.append((place, _PlaceJob(job.project, job.name, job.id, detail.submitted_at)))
    except BaseException as error:  # also Ctrl+C: what was submitted would run and cost money
        refused = isinstance(error, CommandFailure)
        why = "another place cannot run the script" if refused else "the comparison was interrupted"
        for project, name in reversed(made):
            stop_measured(client, project, name, why)
        raise
    return jobs


def _give_up(place: str, job: _PlaceJob, why: str) -> PlaceRun:
    """Return the run of a place that could not be measured."""
    return PlaceRun(
        place=place,
        machine="-",
        job=f"{job.project}/{job.name}",
        at=job.at,
        outcome=f"not measured: {why}",
        start_s=None,
        samples_per_s=None,
        usd_hr=None,
        finish_s=None,
        finish_usd=None,
    )


def name_job(script: Path) -> str:
    """Return the name of the job that runs a script: letters, digits and hyphens only."""
    plain = re.sub(r"[^a-z0-9]+", "-", script.stem.lower()).strip("-")
    return f"compare-{plain or 'script'}"[:50].rstrip("-")


def watch_reports(
    client: "ApiClient", project: str, name: str, seconds: float
) -> "tuple[list[tuple[float, float]], JobDetail]":
    """Watch the job until `seconds` after its first report of progress, or until its end. Return
    the time of each report with the number of samples finished by then, and the job's last known
    state.
    """
    seen: list[tuple[float, float]] = []
    ends = time.monotonic() + START_S
    job = client.job(project, name)
    while time.monotonic() < ends:
        done = read_done(job)
        now = time.monotonic()
        if done is not None and (not seen or done > seen[-1][1]):
            ends = ends if seen else now + seconds
            seen.append((now, done))
        if job.phase in ENDED:
            break
        time.sleep(_POLL_S)
        job = client.job(project, name)
    return seen, job


def read_rate(seen: list[tuple[float, float]], seconds: float) -> float | None:
    """Return the samples per second between the reports. The first sixth of the time is ignored,
    because it contains warm-up and compilation.
    """
    steady = [each for each in seen if each[0] >= seen[0][0] + seconds / 6] or seen
    steady = steady if len(steady) > 1 else seen
    if len(steady) < 2:
        return None
    return (steady[-1][1] - steady[0][1]) / (steady[-1][0] - steady[0][0])


def read_done(job: "JobDetail") -> float | None:
    """Return the number of samples that the first rank has reported."""
    if not job.attempts or not job.attempts[-1].nodes:
        return None
    done = job.attempts[-1].nodes[0].progress.get("done")
    return float(done) if isinstance(done, int | float) else None


def read_machine(job: "JobDetail") -> tuple[str, float | None]:
    """Return the machine of the job's last attempt, and the price of one node in dollars per hour.
    The machine is "PROVIDER/INSTANCE-TYPE:COUNT", or "-" without an attempt. COUNT is the number of
    accelerators, or of vCPUs if the job uses no accelerators.
    """
    from msgspec.json import decode

    from cavvy.domain.offers import Offer
    from cavvy.domain.tasks import TaskSpec

    if not job.attempts:
        return "-", None
    offer = decode(job.attempts[-1].offer, type=Offer)
    resources = decode(job.task, type=TaskSpec).resources
    is_used = offer.accelerator is not None and resources.uses_accelerators(offer.shared)
    count = offer.accelerator_count if is_used else f"{offer.vcpus:g}"
    return f"{offer.provider}/{offer.instance_type}:{count}", float(offer.rate.usd)


def stop_measured(client: "ApiClient", project: str, name: str, reason: str) -> None:
    """Stop a job that was measured, if it still runs."""
    from cavvy.client import ApiError

    try:
        if client.job(project, name).phase not in ENDED:
            client.stop(project, name, reason=reason)
    except ApiError as error:
        note_out(f"{name} could not be stopped: {error.message}")


def _measure(
    place: str,
    seen: list[tuple[float, float]],
    job: "JobDetail",
    begin: datetime | None,
    seconds: float,
    samples: float | None,
) -> PlaceRun:
    """Return the figures of a run. `begin` is the end of the job before it, or None for the first,
    which begins with its submission."""
    machine, usd_hr = read_machine(job)
    rate = read_rate(seen, seconds) if seen else None
    began = job.attempts[-1].running_at if job.attempts else None
    ready = max(begin or job.submitted_at, job.submitted_at)
    start_s = (began - ready).total_seconds() if began else None
    finish_s = finish_usd = None
    if samples is not None and rate and start_s is not None:
        finish_s = start_s + samples / rate
        finish_usd = None if usd_hr is None else usd_hr * finish_s / 3600
    elif samples is None and job.phase == "done" and job.ended_at is not None:
        finish_s = (job.ended_at - ready).total_seconds()
        finish_usd = job.spent_micros / 1e6
    return PlaceRun(
        place=place,
        machine=machine,
        job=f"{job.project}/{job.name}",
        at=job.submitted_at,
        outcome=job.phase if job.phase in ENDED else "measured",
        start_s=start_s,
        samples_per_s=rate,
        usd_hr=usd_hr,
        finish_s=finish_s,
        finish_usd=finish_usd,
    )


def list_run_facts(runs: Sequence[PlaceRun]) -> list[Fact]:
    """Return the measured figures of all runs; the source of each is its job."""
    units = {"start_s": "s", "samples_per_s": "samples/s", "usd_hr": "USD per node and hour"}
    units |= {"finish_s": "s", "finish_usd": "USD"}
    return [
        Fact(
            name=f"{run.place}: {name}",
            value=value,
            unit=unit,
            source=f"job {run.job} on {run.machine}",
            as_of=run.at.date(),
        )
        for run in runs
        for name, unit in units.items()
        if (value := getattr(run, name)) is not None
    ]
