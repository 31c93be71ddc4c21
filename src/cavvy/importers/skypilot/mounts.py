"""SkyPilot's `file_mounts` and `volumes` as inputs, outputs and volumes."""

import posixpath
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TypeVar

from cavvy.domain.tasks import Transfer, Volume, VolumeKind, Workdir
from cavvy.importers.kept_keys import TranslationNotes
from cavvy.importers.readers import as_text, child, entries, flag_at, items, mark_of, text_at
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.paths import check_path
from cavvy.spec.fields.urls import read_source
from cavvy.spec.problems import SourceMark
from cavvy.spec.tree import ListNode, Node, ScalarNode

T = TypeVar("T")
_URL = re.compile(r"([a-z0-9+.-]+)://", re.IGNORECASE)
_SENT_EVERY = timedelta(seconds=30)
_NOT_MOUNTED = (
    "IT IS NOT MOUNTED but copied in before the work, and what the work changes there is sent back "
    "every 30 s and at "
    "its end, however that comes; what others write meanwhile is not seen, and nothing is deleted "
    "in the bucket"
)
_STORES = {"s3": "s3", "gcs": "gs"}  # stores by name -> our scheme for their buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class TranslatedMounts:
    """What a file has put beside the working folder."""

    inputs: tuple[Transfer, ...] = ()
    outputs: tuple[Transfer, ...] = ()
    volumes: tuple[Volume, ...] = ()
    workdir: Workdir | None = None


def read_mounts(
    table: Node, workdir: Workdir | None, kept_keys: TranslationNotes
) -> TranslatedMounts:
    """Translate what can be; the rest is kept and refused. Local files travel with the working
    folder.
    """
    local: list[tuple[str, str, SourceMark]] = []
    inputs: list[Transfer] = []
    outputs: list[Transfer] = []
    for key, value in entries(child(table, "file_mounts")):
        where = f"file_mounts.{key.text}"
        refuse = partial(kept_keys.refuse, key.mark, where)
        target = _try(_read_target, key.text, refuse)
        if isinstance(value, ScalarNode) and not _URL.match(as_text(value)):
            if target is not None:
                local.append((as_text(value), target, key.mark))
            continue
        source = _try(_read_source, value, refuse)
        if source is None or target is None:
            continue
        inputs.append(Transfer(source=source, target=target))
        if isinstance(value, ScalarNode):
            continue
        for note in _list_notes(value):
            kept_keys.note(key.mark, where, note)
        if _is_written(value):
            outputs.append(Transfer(source=target, target=source, every=_SENT_EVERY))
    folders, workdir = _read_local(local, workdir, kept_keys)
    volumes = (*folders, *_read_volumes(table, kept_keys))
    return TranslatedMounts(
        inputs=tuple(inputs), outputs=tuple(outputs), volumes=volumes, workdir=workdir
    )


def _list_notes(value: Node) -> Iterator[str]:
    """What differs from a mount of SkyPilot."""
    if not text_at(value, "source"):
        yield "the bucket must exist; none is made"
    if _is_written(value):
        yield _NOT_MOUNTED
    elif _mode(value) != "COPY":
        yield "it is copied before the work, not mounted"


def _try(read: Callable[[T], str], value: T, refuse: Callable[[str], None]) -> str | None:
    """What `read` makes of a value; None after it was refused."""
    try:
        return read(value)
    except WrongValue as error:
        refuse(str(error))
        return None


def _read_local(
    local: list[tuple[str, str, SourceMark]], workdir: Workdir | None, kept_keys: TranslationNotes
) -> tuple[tuple[Volume, ...], Workdir | None]:
    """Local paths as parts of the working folder; without one the file's own folder is it."""
    found: list[Volume] = []
    base = posixpath.normpath(workdir.path) if workdir is not None and workdir.path else "."
    for source, target, mark in local:
        path = posixpath.relpath(posixpath.normpath(source), base)
        outside = source.startswith(("/", "~")) or path.startswith("..") or "$" in source
        if outside or (workdir is not None and workdir.path is None) or base.startswith(("/", "~")):
            reason = (
                f"a local path ({source}) outside the working folder is not put at {target}; "
                "put it below `workdir`"
            )
            kept_keys.refuse(mark, f"file_mounts.{target}", reason)
            continue
        if workdir is None:
            workdir = Workdir(path=".")
            kept_keys.note(
                mark, f"file_mounts.{target}", "the file's folder is frozen and sent along for it"
            )
        found.append(Volume(kind=VolumeKind.FOLDER, source=path, path=target))
    return tuple(found), workdir


def _read_target(text: str) -> str:
    if text.startswith("~/") and ".." not in text.split("/"):
        return text.rstrip("/")
    try:
        if not text.startswith("/"):
            raise WrongValue("it is no full path")
        return check_path(text)
    except WrongValue as error:
        raise WrongValue(f"nothing can be put at {text}: {error}") from error


def _read_source(value: Node) -> str:
    if isinstance(value, ScalarNode):
        return _read_url(as_text(value))
    source, name = child(value, "source"), text_at(value, "name")
    if isinstance(source, ListNode):
        raise WrongValue("several sources cannot be put at one place; give each a place of its own")
    text = as_text(source) if isinstance(source, ScalarNode) else ""
    if text and name:
        raise WrongValue(
            f"{text} is not uploaded to a bucket {name}; upload it, and name that as the source"
        )
    if text:
        return _read_url(text.rstrip("/") + "/" if _URL.match(text) else text)
    scheme = _STORES.get((text_at(value, "store") or "").lower())
    if scheme is None or not name:
        raise WrongValue(
            f"the bucket {name or ''} has no store that is known here; name it by a URL as `source`"
        )
    path = text_at(value, "_bucket_sub_path") or ""
    return f"{scheme}://{name}/" + (f"{path.strip('/')}/" if path else "")


def _read_url(text: str) -> str:
    if not _URL.match(text):
        raise WrongValue(
            f"a local path ({text}) as a bucket's content is not uploaded; upload it yourself"
        )
    if ".blob.core.windows.net" in text:
        raise WrongValue(
            f"{text} is a container of Azure; write az://CONTAINER/PATH in a Cavvy file"
        )
    try:
        return read_source(text)
    except WrongValue as error:
        raise WrongValue(f"it cannot be fetched: {error}") from error


def _mode(value: Node) -> str:
    return (text_at(value, "mode") or "MOUNT").upper()


def _is_written(value: Node) -> bool:
    """Whether what the work writes there would reach the bucket."""
    config = child(value, "config")
    read_only = any(flag_at(child(config, each), "read_only") for each in ("mount", "mount_cached"))
    return (
        _mode(value) != "COPY"
        and not read_only
        and not (text_at(value, "type") or "").upper().endswith("_RO")
    )


def _read_volumes(table: Node, kept_keys: TranslationNotes) -> tuple[Volume, ...]:
    found: list[Volume] = []
    for key, value in entries(child(table, "volumes")):
        name = as_text(value) if isinstance(value, ScalarNode) else text_at(value, "name")
        _add_volume(found, name, key.text, f"volumes.{key.text}", key.mark, kept_keys)
    for each in items(child(table, "volume_mounts")):
        mark = mark_of(each, "path")
        _add_volume(
            found,
            text_at(each, "volume_name"),
            text_at(each, "path") or "",
            "volume_mounts",
            mark,
            kept_keys,
        )
    return tuple(found)


def _add_volume(
    found: list[Volume],
    name: str | None,
    path: str,
    where: str,
    mark: SourceMark,
    kept_keys: TranslationNotes,
) -> None:
    """One volume by its name; the place must have it."""
    try:
        if not name:
            raise WrongValue("it has no name, and no volume is made for one job alone")
        if not path.startswith("/"):
            raise WrongValue(f"{path} is no full path")
        found.append(Volume(kind=VolumeKind.NAMED, source=name, path=check_path(path)))
    except WrongValue as error:
        kept_keys.refuse(mark, where, f"the volume cannot be attached: {error}")
