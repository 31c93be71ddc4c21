"""From a submission to a stored job: everything is checked again here, whatever the client has
checked.
"""

import asyncio
import re
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec

from cavvy.api.errors import Problem
from cavvy.api.house import House
from cavvy.client import wire
from cavvy.client.ids import read_time
from cavvy.domain.jobs import Job, Origin
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Task
from cavvy.domain.units import Money, format_duration, format_rate, format_usd
from cavvy.importers import parse_task
from cavvy.planner.placements import Situation
from cavvy.planner.prospects import Market, Prospects, find_prospects, jobs_of, line_up, unite
from cavvy.spec.uses import explain_unused
from cavvy.store.base import NotFound, Stale

_KEY_AGE_S = 900  # an older key could jump the queue, for ids are in the order of submission
_MARKET_AGE = timedelta(seconds=60)  # a check before the queue's own may be this much behind
_MARKET_WAIT_S = 5.0
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_decode_origin = msgspec.json.Decoder(Origin).decode
_decode_manifest = msgspec.json.Decoder(dict[str, list[dict[str, msgspec.Raw]]]).decode


async def submit_task(
    house: House, project: str, ask: wire.Submission, key: str | None
) -> tuple[Job, bool]:
    """Store the job; False where `key` had made it before. Raises Problem, SpecError."""
    now = house.now()
    text = read_text(ask)
    origin = read_origin(ask, text)
    if key is not None and not _is_of_now(key, now):
        return await _made_before(house, project, key, origin), False
    task = read_task(project, ask, text, now)
    await check_secrets(house, task)
    await check_snapshot(house, origin.snapshot)
    await check_uses(house, task, origin.snapshot)
    await check_places(house, task, ask, now)
    try:
        job = await house.plant.jobs.submit(
            task,
            origin,
            project,
            user=ask.user,
            consented=ask.consent,
            ceiling=None if ask.ceiling_micros is None else Money(ask.ceiling_micros),
            job_id=key,
        )
    except Stale:
        if key is None:
            raise
        return await _made_before(house, project, key, origin), False
    if origin.snapshot is not None:
        house.snapshots.add(origin.snapshot)  # now it is a job's: no sweep removes it
    return job, True


def _is_of_now(key: str, now: datetime) -> bool:
    made = read_time(key)
    return made is not None and abs(made - now.timestamp()) <= _KEY_AGE_S


async def _made_before(house: House, project: str, key: str, origin: Origin) -> Job:
    try:
        job = await house.store.job(key)
    except NotFound:
        raise Problem(
            "invalid-request",
            f"the idempotency key {key} is not of the last {_KEY_AGE_S // 60} minutes",
        ) from None
    if job.project != project or job.origin.task_text != origin.task_text:
        raise Problem(
            "key-reused",
            f"the idempotency key {key} made the job {job.name} of project {job.project}",
        )
    return job


def read_text(ask: wire.Submission) -> str:
    """The task's text as it was sent, or the object as JSON, which is YAML too. Raises Problem."""
    if ask.text is not None and isinstance(ask.task, msgspec.UnsetType):
        return ask.text
    if ask.text is None and not isinstance(ask.task, msgspec.UnsetType):
        return bytes(ask.task).decode()
    raise Problem(
        "invalid-request", "send either `text`, the file's text, or `task`, the same as an object"
    )


def read_task(project: str, ask: wire.Submission, text: str, now: datetime) -> Task:
    """The task that was sent. Raises SpecError, Problem."""
    task = parse_task(text, file=ask.path, params=ask.params, now=now)
    if ask.name is not None and not _NAME.fullmatch(ask.name):
        raise Problem(
            "invalid-request", f"`name` must be 1 to 63 of a-z, 0-9 and -, not {ask.name!r}"
        )
    return replace(task, project=project, name=ask.name or task.name)


def read_origin(ask: wire.Submission, text: str) -> Origin:
    """What the run was made from; the text is what was sent, where the client does not say.
    Raises Problem.
    """
    if isinstance(ask.origin, msgspec.UnsetType):
        origin = Origin()
    else:
        try:
            origin = _decode_origin(ask.origin)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Problem(
                "invalid-request", f"the body cannot be read: {error} in `origin`"
            ) from error
    return origin if origin.task_text else replace(origin, task_text=text)


async def check_secrets(house: House, task: Task) -> None:
    """Raises Problem where the project lacks a secret that the task names."""
    named = [*task.secrets, *([task.image_login] if task.image_login else [])]
    if not named:
        return
    known = {secret.name for secret in await house.store.secrets(task.project)}
    missing = [name for name in named if name not in known]
    if missing:
        hint = " ".join(
            ["set it with:", *(f"cavvy secret set {name} -p {task.project};" for name in missing)]
        )
        raise Problem(
            "secret-missing",
            f"project {task.project} has no secret {', '.join(missing)}",
            hint.rstrip(";"),
        )


async def check_snapshot(house: House, snapshot: str | None) -> None:
    """Raises Problem where a part of the frozen working folder was not uploaded."""
    if snapshot is None or snapshot in house.snapshots:
        return
    missing = await to_thread(_missing_parts, house, snapshot)
    if missing:
        raise Problem(
            "snapshot-missing",
            f"{len(missing)} files of the working folder {snapshot[:12]}… are not here",
        )


async def check_uses(house: House, task: Task, snapshot: str | None) -> None:
    """Raises Problem where the setup uses files that the frozen folder does not have."""
    if not task.setup_uses or snapshot is None:
        return
    paths = await to_thread(_list_paths, house, snapshot)
    for message, hint in explain_unused(paths, task.setup_uses):
        raise Problem("invalid-task", message, hint)


def _list_paths(house: House, snapshot: str) -> set[str]:
    with house.blobs.open(snapshot) as file:
        return {
            msgspec.json.decode(each["path"], type=str)
            for each in _decode_manifest(file.read())["files"]
        }


def _missing_parts(house: House, snapshot: str) -> Sequence[str]:
    if missing := house.blobs.missing([snapshot]):
        return missing
    try:
        with house.blobs.open(snapshot) as file:
            manifest = _decode_manifest(file.read())
        names = [
            msgspec.json.decode(each["sha256"], type=str)
            for each in manifest["files"]
            if "sha256" in each
        ]
    except (msgspec.MsgspecError, KeyError, NotFound) as error:
        told = f"the blob {snapshot[:12]}… is no list of a folder's files: {error}"
        raise Problem("invalid-request", told) from error
    return house.blobs.missing(names)


async def check_places(house: House, task: Task, ask: wire.Submission, now: datetime) -> None:
    """Raises Problem where no place can ever run the task, or only ones that cost money and
    nobody consented.
    """
    try:
        async with asyncio.timeout(_MARKET_WAIT_S):
            snapshot = await house.plant.places.market(_MARKET_AGE)
    except TimeoutError:
        return  # the queue finds out, and says so in the job's story
    job = Job(
        id="",
        project=task.project,
        name=task.name,
        task=task,
        submitted_at=now,
        since=now,
        consented=ask.consent,
    )
    prospects = _look(house, job, snapshot.market, now)
    if not prospects.hopeless:
        return
    paid = (
        prospects
        if ask.consent
        else _look(house, replace(job, consented=True), snapshot.market, now)
    )
    if not paid.offers:
        raise Problem("no-offer", paid.reason or prospects.reason)
    raise Problem("consent-needed", _price(task, paid.offers[0]))


def _look(house: House, job: Job, market: Market, now: datetime) -> Prospects:
    situation, objections = Situation(submitted_at=now), house.plant.places.objections
    found = [
        (
            each,
            find_prospects(
                each,
                market,
                house.matches.of(market, each),
                objections,
                situation=situation,
                now=now,
            ),
        )
        for each in jobs_of(job)
    ]
    first = tuple(
        offer for _, offers in line_up(found) for offer in offers
    )  # of several wishes, as they are tried
    return replace(unite([each for _, each in found]), offers=first)


def _price(task: Task, offer: Offer) -> str:
    """What the best place costs per hour, and where the spending ends."""
    rate = offer.rate.times(task.nodes)
    nodes = f" for {task.nodes} nodes" if task.nodes > 1 else ""
    if task.limits.budget is not None:
        ceiling = f"at most {format_usd(task.limits.budget)}, by limits.budget"
    elif task.limits.duration is not None:
        most = rate.over(task.limits.duration)
        ceiling = (
            f"about {format_usd(most)} at most, by limits.duration "
            f"({format_duration(task.limits.duration)})"
        )
    else:
        ceiling = "without a ceiling: limits.budget or limits.duration would set one"
    return f"{task.name} costs {format_rate(rate)}{nodes} at {offer.key}, {ceiling}"
