"""From a submission to a stored job: everything is checked again here, whatever the client has checked."""

import re
from asyncio import to_thread
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import msgspec

from remuda.api.errors import Problem
from remuda.api.house import House
from remuda.client import wire
from remuda.domain.jobs import Job, Origin
from remuda.domain.tasks import Task
from remuda.domain.units import Money
from remuda.spec import parse_task
from remuda.store.base import Conflict, NotFound

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_decode_origin = msgspec.json.Decoder(Origin).decode
_decode_manifest = msgspec.json.Decoder(dict[str, list[dict[str, msgspec.Raw]]]).decode


def read_task(project: str, ask: wire.Submission, now: datetime) -> Task:
    """The task that was sent. Raises SpecError, Problem."""
    if (ask.text is None) == (ask.task is msgspec.UNSET):
        raise Problem("invalid-request", "send either `text`, the file's text, or `task`, the same as an object")
    text = ask.text if ask.text is not None else bytes(ask.task).decode()  # type: ignore[arg-type]  # set, see above
    task = parse_task(text, file=ask.path, params=ask.params, now=now)
    if ask.name is not None and not _NAME.fullmatch(ask.name):
        raise Problem("invalid-request", f"`name` must be 1 to 63 of a-z, 0-9 and -, not {ask.name!r}")
    return replace(task, project=project, name=ask.name or task.name)


def read_origin(ask: wire.Submission) -> Origin:
    """What the run was made from; the server keeps the text that it was sent. Raises Problem."""
    if ask.origin is msgspec.UNSET:
        origin = Origin()
    else:
        try:
            origin = _decode_origin(ask.origin)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise Problem("invalid-request", f"the body cannot be read: {error} in `origin`") from error
    if origin.task_text:
        return origin
    text = ask.text if ask.text is not None else bytes(ask.task).decode()  # type: ignore[arg-type]  # set, as above
    return replace(origin, task_text=text)


async def check_secrets(house: House, task: Task) -> None:
    """Raises Problem where the project lacks a secret that the task names."""
    if not task.secrets:
        return
    known = {secret.name for secret in await house.store.secrets(task.project)}
    missing = [name for name in task.secrets if name not in known]
    if missing:
        hint = " ".join(["set it with:", *(f"remuda secret set {name} -p {task.project};" for name in missing)])
        raise Problem("secret-missing", f"project {task.project} has no secret {', '.join(missing)}", hint.rstrip(";"))


async def check_snapshot(house: House, snapshot: str | None) -> None:
    """Raises Problem where a part of the frozen working folder was not uploaded."""
    if snapshot is None or snapshot in house.snapshots:
        return
    missing = await to_thread(_missing_parts, house, snapshot)
    if missing:
        raise Problem("snapshot-missing", f"{len(missing)} files of the working folder {snapshot[:12]}… are not here")
    house.snapshots.add(snapshot)


def _missing_parts(house: House, snapshot: str) -> Sequence[str]:
    if missing := house.blobs.missing([snapshot]):
        return missing
    try:
        with house.blobs.open(snapshot) as file:
            manifest = _decode_manifest(file.read())
        names = [msgspec.json.decode(each["sha256"], type=str) for each in manifest["files"] if "sha256" in each]
    except (msgspec.MsgspecError, KeyError, NotFound) as error:
        raise Problem("invalid-request", f"the blob {snapshot[:12]}… is no list of a folder's files: {error}") from error
    return house.blobs.missing(names)
