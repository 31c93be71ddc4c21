"""dstack's configurations as our tasks and what is kept of them."""

import re
import shlex
from datetime import timedelta

from cavvy.domain.tasks import Limits, Retry, Task, Volume, VolumeKind, Workdir
from cavvy.importers.common_fields import read_commit, read_folder, read_name, read_tags
from cavvy.importers.dstack.resources import read_resources
from cavvy.importers.dstack.rules import is_set, split_pair
from cavvy.importers.dstack.scalars import read_duration
from cavvy.importers.dstack.tables import TABLES, VOLUME_BACKENDS
from cavvy.importers.kept_keys import Translation, TranslationNotes
from cavvy.importers.readers import (
    as_text,
    child,
    entries,
    flag_at,
    int_at,
    items,
    mark_of,
    text_at,
)
from cavvy.importers.translation_header import enter_folder, use_python
from cavvy.importers.yaml11 import to_value
from cavvy.spec.fields.kinds import WrongValue
from cavvy.spec.fields.paths import check_path
from cavvy.spec.problems import ProblemNotes, SourceMark, listed, nearest, shown
from cavvy.spec.tree import MapNode, Node, ScalarNode

KIND = "dstack"
TYPES = ("task", "service", "dev-environment", "fleet", "volume", "gateway", "preset")
_WHY_NOT = {
    "service": "services are not served yet",
    "dev-environment": "environments to log in to and work in do not exist yet; a task that runs "
    "can be logged in to",
    "fleet": "fleets do not exist here: nodes are found for each job, and given back",
    "volume": "volumes are not made yet",
    "gateway": "services are not served yet, and have no gateways",
    "preset": "no settings are searched for a model's service yet",
}
_LATER = {
    "groups": "nodes of several kinds in one job do not exist yet",
    "user": "another user within a container cannot be chosen yet",
    "registry_auth": "credentials of a registry are not passed on yet",
    "nvcc": "name an image that has nvcc",
    "docker": "a container's own Docker cannot be started yet",
    "privileged": "containers are never privileged here",
    "dstack": "there is no dstack server to reach",
    "availability_zones": "zones are chosen by price and capacity; name regions",
    "reservation": "reservations cannot be used yet",
    "utilization_policy": "`limits: {idle: …}` of a Cavvy file is the nearest there is",
    "schedule": "a job is started once; let cron or a systemd timer call `cavvy run -d FILE`",
    "fleets": "fleets do not exist here",
    "instances": "nodes cannot be named; the place is chosen by price and capacity",
    "backend_options": "there are no such options here",
}
_NOTED = {
    "ports": "they are not brought here by themselves; `cavvy forward NAME PORT` brings one",
    "home_dir": "dstack does not read it any more",
    "setup": "dstack does not carry it out any more",
    "single_branch": "the working folder is frozen, not cloned",
    "idle_duration": "nodes are given back when the job ends, always",
}
_DEFAULT_GRACE_S = 300
_MOST_GRACE_S = 3600


def translate(root: Node, notes: ProblemNotes) -> Translation:
    """What a configuration means. Everything wrong is noted; the result then counts for nothing."""
    kind = text_at(root, "type") or ""
    if kind == "volume":
        backend, name = child(root, "backend"), text_at(root, "backend") or ""
        if name in VOLUME_BACKENDS:
            TABLES[f"volume_{name}"].check(root, "", notes)
        else:
            message = "the volume names no backend that has volumes"
            notes.add((backend or root).mark, message, expected=listed(VOLUME_BACKENDS))
    elif kind in TYPES:
        TABLES[kind].check(root, "", notes)
    else:
        close = nearest(kind, TYPES)
        hint = f"did you mean `{close}`?" if close else ""
        notes.add(
            mark_of(root, "type"),
            f"dstack has no type {shown(kind)}",
            expected=listed(TYPES),
            suggestion=hint,
        )
    if len(notes):
        return Translation(kind=KIND, what=kind)
    kept_keys = TranslationNotes()
    if kind in _WHY_NOT:
        kept_keys.refuse_at(root, "type", _WHY_NOT[kind])
    if kind not in ("task", "service", "dev-environment"):
        return Translation(kind=KIND, what=kind, kept=kept_keys.list_kept())
    task = _translate_run(root, kept_keys)
    before = _read_before(root)
    return Translation(
        kind=KIND, what=kind, tasks=(task,), kept=kept_keys.list_kept(), before=before
    )


def _translate_run(root: Node, kept_keys: TranslationNotes) -> Task:
    keys = (key for key, _ in entries(root) if key.text in _NOTED or is_set(root, key.text))
    kept_keys.keep_listed(keys, _LATER, _NOTED)
    _keep_order(root, kept_keys)
    _keep_files(root, kept_keys)
    env, secrets = _read_env(child(root, "env"), kept_keys)
    return Task(
        name=read_name(root, kept_keys) or "",
        run=_read_run(root, kept_keys),
        tags=read_tags(root, "tags"),
        priority=int_at(root, "priority") or 0,
        resources=read_resources(root, kept_keys),
        nodes=int_at(root, "nodes") or 1,
        image=text_at(root, "image"),
        workdir=_read_workdir(root, kept_keys),
        env=env,
        secrets=secrets,
        volumes=_read_volumes(root, kept_keys),
        limits=Limits(duration=_read_length(root, "max_duration")),
        retry=_read_retry(root, kept_keys),
        grace=_read_grace(root, kept_keys),
    )


# commands


def _read_run(root: Node, kept_keys: TranslationNotes) -> str:
    commands = [
        as_text(each) for each in items(child(root, "commands")) if isinstance(each, ScalarNode)
    ]
    entrypoint = text_at(root, "entrypoint")
    shell = text_at(root, "shell")
    if shell not in (None, "sh", "bash", "/bin/sh", "/bin/bash"):
        kept_keys.refuse_at(
            root,
            "shell",
            "commands are read by bash, or by sh where there is none",
        )
    if entrypoint is not None:
        try:
            return shlex.join([*shlex.split(entrypoint), *commands])
        except ValueError:
            kept_keys.refuse_at(root, "entrypoint", "its quotes do not fit together")
            return ""
    if (
        not any(command.strip() for command in commands)
        and text_at(root, "type") != "dev-environment"
    ):
        groups = child(root, "groups") is not None or items(child(root, "replicas"))
        mark = mark_of(root, "image" if child(root, "image") is not None else "commands")
        if not groups:
            kept_keys.refuse(
                mark, "commands", "an image's own command cannot be started yet; write it out"
            )
    return join_commands(commands)


def join_commands(commands: list[str]) -> str:
    """One script of several commands, each of which runs only after the one before it has
    succeeded.
    """
    found = []
    for command in commands:
        text = command.strip()
        if "\n" in text:
            text = "{\n" + text + "\n}"
        elif text.endswith("&"):
            text = "{ " + text + " }"
        found.append(text)
    return " &&\n".join(found)


def _read_before(root: Node) -> str:
    folder, python = text_at(root, "working_dir"), text_at(root, "python")
    lines = enter_folder(folder) if folder and folder not in (".", "./") else ""
    return lines + (use_python("3.10" if python == "3.1" else python) if python else "")


# environment


def _read_env(
    node: Node | None, kept_keys: TranslationNotes
) -> tuple[dict[str, str], tuple[str, ...]]:
    env: dict[str, str] = {}
    secrets: dict[str, None] = {}
    for name, value, mark in _list_variables(node):
        inner = re.fullmatch(
            r"\s*\$\{\{\s*secrets\.([A-Za-z_][A-Za-z0-9_]*)\s*\}\}\s*", value or ""
        )
        if value is None or (inner and inner[1] == name):
            kept_keys.note(mark, f"env.{name}", f"its value comes from `cavvy secret set {name}`")
            secrets[name] = None
            continue
        if "${{" in value:
            reason = (
                f"{value.strip()} cannot be put in; `secrets` of a Cavvy file are variables "
                "of their own names"
            )
            kept_keys.refuse(mark, f"env.{name}", reason)
        env[name] = value
    return env, tuple(secrets)


def _list_variables(node: Node | None) -> list[tuple[str, str | None, SourceMark]]:
    found: list[tuple[str, str | None, SourceMark]] = []
    for each in items(node):
        name, equals, value = (
            as_text(each).partition("=") if isinstance(each, ScalarNode) else ("", "", "")
        )
        found.append((name, value if equals else None, each.mark))
    for key, each in node.entries if isinstance(node, MapNode) else ():
        found.append((key.text, as_text(each) if isinstance(each, ScalarNode) else None, key.mark))
    return found


# files


def _keep_files(root: Node, kept_keys: TranslationNotes) -> None:
    for each in items(child(root, "files")):
        kept_keys.refuse(
            each.mark,
            "files",
            "single files are not copied; put them below `repos`, which is sent along",
        )


def _read_volumes(root: Node, kept_keys: TranslationNotes) -> tuple[Volume, ...]:
    found: list[Volume] = []
    for each in items(child(root, "volumes")):
        if isinstance(each, ScalarNode):
            source, _, path = as_text(each).partition(":")
        else:
            source, path = (
                text_at(each, "name") or text_at(each, "instance_path") or "",
                text_at(each, "path") or "",
            )
        kind = VolumeKind.HOST if source.startswith("/") else VolumeKind.NAMED
        if flag_at(each, "optional"):
            kept_keys.note(
                each.mark,
                "volumes",
                "it is optional, and not attached: nobody knows whether a place has it",
            )
            continue
        try:
            if not source or "${{" in source:
                raise WrongValue(f"one name for all nodes is needed, not {source or 'a list'}")
            found.append(Volume(kind=kind, source=source, path=check_path(path)))
        except WrongValue as error:
            kept_keys.refuse(each.mark, "volumes", f"it cannot be attached: {error}")
    return tuple(found)


def _read_workdir(root: Node, kept_keys: TranslationNotes) -> Workdir | None:
    repos = items(child(root, "repos"))
    if not repos:
        return None
    repo, mark = repos[0], repos[0].mark
    if isinstance(repo, ScalarNode):
        source, *rest = split_pair(as_text(repo))
        url = "://" in source or "@" in source.partition("/")[0]
        path, commit = (rest[0] if rest else "."), None
    else:
        url = child(repo, "url") is not None
        source = text_at(repo, "url") or text_at(repo, "local_path") or "."
        path, commit = text_at(repo, "path") or ".", text_at(repo, "hash")
        if child(repo, "branch") is not None and not commit:
            kept_keys.refuse(
                mark,
                "repos.branch",
                "a branch moves, and every attempt must run the same; write `hash`",
            )
    if path.rstrip("/") not in (".", ""):
        kept_keys.refuse(
            mark, "repos", f"the working folder is the repository; it cannot be put at {path}"
        )
    if not url:
        return read_folder(source, "repos", mark, kept_keys)
    reason = "the newest commit moves, and every attempt must run the same; write `hash`"
    return read_commit(source, commit, "repos", mark, reason, kept_keys)


# limits


def _keep_order(root: Node, kept_keys: TranslationNotes) -> None:
    for key, usual, reason in (
        ("startup_order", "any", "the nodes of a job start at the same time"),
        ("stop_criteria", "all-done", "a job ends when all of its nodes have ended"),
        ("creation_policy", "reuse-or-create", "a node is found for each job"),
    ):
        value = text_at(root, key)
        if value is not None and value != usual:
            kept_keys.refuse_at(root, key, reason)


def _read_length(root: Node, key: str) -> timedelta | None:
    node = child(root, key)
    if not isinstance(node, ScalarNode) or isinstance(node.value, bool) or node.value == "off":
        return None
    seconds = read_duration(node)
    return timedelta(seconds=seconds) if seconds else None


def _read_grace(root: Node, kept_keys: TranslationNotes) -> timedelta:
    node, mark = child(root, "stop_duration"), mark_of(root, "stop_duration")
    length = _read_length(root, "stop_duration")
    if node is not None and to_value(node) in (False, "off"):
        length = timedelta(seconds=_MOST_GRACE_S + 1)
    if length is None:
        return timedelta(seconds=_DEFAULT_GRACE_S)
    if length > timedelta(seconds=_MOST_GRACE_S):
        kept_keys.note(
            mark, "stop_duration", "a program gets an hour at most between SIGTERM and SIGKILL"
        )
    return min(length, timedelta(seconds=_MOST_GRACE_S))


def _read_retry(root: Node, kept_keys: TranslationNotes) -> Retry:
    node = child(root, "retry")
    never = Retry(preemption=0, node=0, exit=0)
    if node is None or (isinstance(node, ScalarNode) and not _is_true(node)):
        return never
    events = [each.text for each in items(child(node, "on_events")) if isinstance(each, ScalarNode)]
    events = events or ["no-capacity", "interruption", "error"]
    if "error" in events:
        reason = (
            "restarts after an error are counted here, not timed; write `retry: {exit: N}` in "
            "a Cavvy file"
        )
        kept_keys.refuse_at(root, "retry", reason)
    elif child(node, "duration") is not None:
        kept_keys.note_at(
            node,
            "retry.duration",
            "a job waits for a place as long as its limits allow",
        )
    again = None if "interruption" in events else 0
    return Retry(preemption=again, node=again, exit=0)


def _is_true(node: ScalarNode) -> bool:
    return node.value in (True, 1) or str(node.value).lower() in (
        "true",
        "t",
        "yes",
        "y",
        "on",
        "1",
    )
