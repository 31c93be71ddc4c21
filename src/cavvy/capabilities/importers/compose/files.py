"""Makes tasks of a Compose file: each service becomes a job, and the services that run at the same
time a group of jobs, which start together and find each other by their names.
"""

import json
import re
from collections.abc import Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from shlex import quote

from cavvy.capabilities.importers.compose.services import list_ports, read_seconds, read_service
from cavvy.capabilities.importers.compose.values import ComposeReader, read_dot_env
from cavvy.capabilities.importers.own_rules import check_task
from cavvy.domain.tasks import JobDependency, JobGroup, TaskSpec, VolumeKind
from cavvy.domain.values import Struct, replace
from cavvy.spec.kept_keys import TranslationNotes
from cavvy.spec.problems import ProblemNotes, SourceMark, slug
from cavvy.spec.translation import KeptKey
from cavvy.spec.tree import ListNode, MapNode, Node, ScalarNode
from cavvy.spec.writing import make_keys

_PROFILES = "COMPOSE_PROFILES"
_TOP = {
    "version": "",
    "networks": "the services reach each other by their names; Cavvy makes no other networks",
    "configs": "",
    "secrets": "",
    "name": "",
    "services": "",
    "volumes": "",
}
_CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")
_STARTED, _HEALTHY, _COMPLETED = _CONDITIONS
_URL = re.compile(
    r"https?://(?:localhost|127\.0\.0\.1|0\.0\.0\.0|\[::1\])(?::(\d{1,5}))?(/[^\s'\"|;&]*)?"
)
# programs that checks of health call, and the port of their server
_PORTS = {
    **{"pg_isready": 5432, "psql": 5432, "redis-cli": 6379, "valkey-cli": 6379},
    **{"mysqladmin": 3306, "healthcheck.sh": 3306, "mongosh": 27017, "rabbitmq-diagnostics": 5672},
    **{"cqlsh": 9042, "etcdctl": 2379},
}
_LEAST_WAIT_S = 600  # other nodes may still pull their images
_WAIT = """\
_cavvy_wait() { # NAME HOST PORT PATH SECONDS
  _left=$5
  until
    if [ -n "$4" ]; then
      _url="http://$2:$3$4"
      if command -v curl >/dev/null 2>&1; then curl -fsS -m 5 -o /dev/null "$_url" 2>/dev/null
      elif command -v wget >/dev/null 2>&1; then wget -q -T 5 -O /dev/null "$_url" 2>/dev/null
      else python3 -c 'import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)' \\
        "$_url" 2>/dev/null; fi
    elif command -v python3 >/dev/null 2>&1; then
      python3 -c 'import socket, sys; socket.create_connection((sys.argv[1], sys.argv[2]), 5)' \\
        "$2" "$3" 2>/dev/null
    elif command -v nc >/dev/null 2>&1; then nc -z -w 5 "$2" "$3" >/dev/null 2>&1
    else bash -c 'exec 3<>"/dev/tcp/$0/$1"' "$2" "$3" 2>/dev/null; fi
  do
    _left=$((_left - 2))
    if [ $_left -le 0 ]; then echo "$1 did not become healthy in $5 s" >&2; exit 1; fi
    sleep 2
  done
}
"""


class ComposeTasks(Struct, frozen=True, kw_only=True):
    """The tasks of a Compose file, as the texts of task files, and what was left out."""

    texts: tuple[str, ...]
    kept: tuple[KeptKey, ...]
    notes: tuple[str, ...] = ()


class _Dependency(Struct, frozen=True, kw_only=True):
    name: str
    condition: str
    mark: SourceMark


class _Service(Struct, frozen=True, kw_only=True):
    name: str
    table: MapNode
    mark: SourceMark
    task: TaskSpec
    ports: Sequence[tuple[int, str]]
    needs: Sequence[_Dependency]


def translate(
    root: Node,
    folder: Path,
    environ: Mapping[str, str],
    named: Mapping[str, str],
    notes: ProblemNotes,
) -> ComposeTasks:
    """Translate a Compose file in this folder. `environ` has the variables of this machine, and
    `named` those that the command line names. Mistakes, and what cannot be kept, are added to
    `notes`. Raises SpecError.
    """
    kept = TranslationNotes()
    variables = {**read_dot_env(folder, notes), **named}
    reader = ComposeReader(folder, variables, environ, notes, kept, root)
    profiles = environ.get(_PROFILES) or variables.get(_PROFILES) or ""
    services = _read_services(root, {each.strip() for each in profiles.split(",")}, reader)
    notes.check()
    project = reader.text(root.get("name")) if isinstance(root, MapNode) else ""
    project = slug(project or folder.resolve().name) or "compose"
    _name_volumes(services, root, project, reader)
    _check_networks(root, reader)
    tasks, said = _join(services, project, reader)
    for service, task in zip(services.values(), tasks, strict=True):
        check_task(task, {}, service.mark, notes)
    notes.check()
    texts = []
    for task in tasks:
        texts.append(json.dumps(make_keys(task), indent=2))
    return ComposeTasks(texts=tuple(texts), kept=kept.list_kept(), notes=tuple(said))


def _read_services(root: Node, active: set[str], reader: ComposeReader) -> dict[str, _Service]:
    """Return the services whose profiles are active, in the order of the file."""
    notes = reader.notes
    entries = root.entries if isinstance(root, MapNode) else ()
    for key, _ in entries:
        if key.text == "include":
            message, hint = "`include` is not supported", "write its services into this file"
            notes.add(key.mark, message, suggestion=hint)
        elif _TOP.get(key.text):
            reader.kept.note(key.mark, key.text, _TOP[key.text])
        elif key.text not in _TOP and not key.text.startswith("x-"):
            expected = ", ".join(sorted(_TOP))
            notes.add(key.mark, f"a Compose file has no key {key.text!r}", expected=expected)
    table = root.get("services") if isinstance(root, MapNode) else None
    if not isinstance(table, MapNode) or not table.entries:
        notes.add(root.mark, "the file has no services", expected="a table `services`")
        return {}
    found: dict[str, _Service] = {}
    for key, value in table.entries:
        if not isinstance(value, MapNode):
            notes.add(
                value.mark, f"the service {key.text} is no table", expected="`image` and others"
            )
            continue
        profiles = set(reader.texts(value.get("profiles")))
        if profiles and not profiles & active and "*" not in active:
            names = ",".join(sorted(profiles))
            reason = f"its profile is not active; {_PROFILES}={names} before `cavvy` adds it"
            reader.kept.note(key.mark, f"services.{key.text}", reason)
            continue
        found[key.text] = _Service(
            name=key.text,
            table=value,
            mark=key.mark,
            task=read_service(key.text, value, key.mark, reader),
            ports=list_ports(value, reader),
            needs=_read_needs(value.get("depends_on"), reader),
        )
    if not found:
        hint = f"set {_PROFILES}"
        notes.add(table.mark, "no service is without a profile", suggestion=hint)
    _check_needs(found, reader)
    return found


def _read_needs(node: Node | None, reader: ComposeReader) -> list[_Dependency]:
    if isinstance(node, ListNode):
        return [
            _Dependency(name=reader.text(each), condition=_STARTED, mark=each.mark)
            for each in node.items
        ]
    needs: list[_Dependency] = []
    for key, value in node.entries if isinstance(node, MapNode) else ():
        table = value if isinstance(value, MapNode) else None
        for inner, _ in table.entries if table else ():
            if inner.text not in ("condition",):
                reason = "a service that ends is not started again with others"
                if inner.text == "required":
                    reason = "services that are needed must be in the file"
                reader.kept.note(inner.mark, f"depends_on.{key.text}.{inner.text}", reason)
        condition = reader.text(table.get("condition")) if table else ""
        if condition and condition not in _CONDITIONS:
            message = f"the condition {condition!r} is unknown"
            reader.notes.add(value.mark, message, expected=", ".join(_CONDITIONS))
        needs.append(_Dependency(name=key.text, condition=condition or _STARTED, mark=key.mark))
    return needs


def _check_needs(services: Mapping[str, _Service], reader: ComposeReader) -> None:
    sorter = TopologicalSorter[str]()
    for service in services.values():
        sorter.add(service.name, *(each.name for each in service.needs))
        for each in service.needs:
            if each.name not in services:
                message = f"{service.name} depends on {each.name}, which is no service that starts"
                hint = f"correct the name, or activate its profile with {_PROFILES}"
                reader.notes.add(each.mark, message, suggestion=hint)
    try:
        sorter.prepare()
    except CycleError as error:
        first, *rest = reversed(error.args[1])
        more = f" and so on, {len(rest)} in all" if len(rest) > 5 else ""
        path = ", which depends on ".join(rest[:5]) + more
        message = f"the services wait for each other: {first} depends on {path}"
        mark = services[first].mark if first in services else SourceMark(line=1, column=1)
        reader.notes.add(mark, message, suggestion="delete one of these lines")


def _check_networks(root: Node, reader: ComposeReader) -> None:
    """Object to networks of services that the file does not declare."""
    if not isinstance(root, MapNode):
        return
    table, services = root.get("networks"), root.get("services")
    known = {key.text for key, _ in table.entries} if isinstance(table, MapNode) else set[str]()
    for name, service in services.entries if isinstance(services, MapNode) else ():
        node = service.get("networks") if isinstance(service, MapNode) else None
        named = (
            [key for key, _ in node.entries]
            if isinstance(node, MapNode)
            else [each for each in node.items if isinstance(each, ScalarNode)]
            if isinstance(node, ListNode)
            else []
        )
        for each in named:
            if each.text not in known | {"default"}:
                message = (
                    f"{name.text} uses the network {each.text}, which `networks` does not have"
                )
                hint = f"add `{each.text}:` there"
                reader.notes.add(each.mark, message, suggestion=hint)


def _name_volumes(
    services: dict[str, _Service], root: Node, project: str, reader: ComposeReader
) -> None:
    """Give the volumes their names, which begin with that of the project as in Compose."""
    table = root.get("volumes") if isinstance(root, MapNode) else None
    names: dict[str, str] = {}
    for key, value in table.entries if isinstance(table, MapNode) else ():
        own = reader.text(value.get("name")) if isinstance(value, MapNode) else ""
        external = reader.text(value.get("external")) if isinstance(value, MapNode) else ""
        if isinstance(value, MapNode) and value.get("driver_opts") is not None:
            message = f"`volumes.{key.text}.driver_opts` is not supported"
            hint = "write `volumes` in a Cavvy file, which have `nfs` and `host`"
            reader.notes.add(key.mark, message, suggestion=hint)
        names[key.text] = own or (key.text if external == "true" else f"{project}_{key.text}")
    for name, service in services.items():
        volumes = []
        for each in service.task.volumes:
            if each.kind is VolumeKind.NAMED and each.source not in names:
                message = f"{name} uses the volume {each.source}, which `volumes` does not have"
                reader.notes.add(service.mark, message, suggestion=f"add `{each.source}:` there")
            is_named = each.kind is VolumeKind.NAMED
            source = names.get(each.source, each.source) if is_named else each.source
            volumes.append(replace(each, source=source))
        services[name] = replace(service, task=replace(service.task, volumes=tuple(volumes)))


def _join(
    services: Mapping[str, _Service], project: str, reader: ComposeReader
) -> tuple[list[TaskSpec], list[str]]:
    """Return the tasks of the services, and what the user should know of them."""
    needs = [each for service in services.values() for each in service.needs]
    first = {each.name for each in needs if each.condition == _COMPLETED}
    members = {name: each for name, each in services.items() if name not in first}
    for name in first:
        for each in services[name].needs:
            if each.condition != _COMPLETED:
                message = f"{name} must end before others start, and needs {each.name} meanwhile"
                hint = f"start {name} in the `command` of the services that wait for it"
                reader.notes.add(each.mark, message, suggestion=hint)
    group = f"{project}-group" if project in services else project
    served = {each.name for service in members.values() for each in service.needs}
    tasks, said = [], []
    for name, service in services.items():
        task = service.task
        after = [slug(each.name) or "" for each in service.needs if each.condition == _COMPLETED]
        task = replace(task, after=tuple(JobDependency(each) for each in after))
        if name in members and len(members) > 1:
            task = replace(task, group=JobGroup(name=group, helper=name in served))
            task = replace(task, run=_find_others(service, members, reader) + task.run)
        tasks.append(task)
        said += [
            f"port {inner} of {name} is not public; `cavvy forward {task.name} {outer}:{inner}` "
            f"brings it to port {outer} here"
            for inner, outer in service.ports
            if outer
        ]
    if len(members) > 1:
        said.insert(0, _say_group(group, members))
    waited = {each.name for each in needs if each.condition == _HEALTHY}
    for name, service in services.items():
        _note_unused(name, service, reader, is_waited=name in waited, is_alone=len(members) < 2)
    return tasks, said


def _note_unused(
    name: str, service: _Service, reader: ComposeReader, *, is_waited: bool, is_alone: bool
) -> None:
    """Name the keys that have a meaning only for other services, if there are none."""
    if (check := service.table.get("healthcheck")) is not None and not is_waited:
        reason = "no service waits for it, and a job that does not end is not restarted"
        reader.kept.note(check.mark, f"services.{name}.healthcheck", reason)
    for key in ("container_name", "hostname") if is_alone else ():
        if (node := service.table.get(key)) is not None:
            reason = f"the job is called {service.task.name}, and no other service looks for it"
            reader.kept.note(node.mark, f"services.{name}.{key}", reason)


def _say_group(group: str, members: Mapping[str, _Service]) -> str:
    inner = [port for each in members.values() for port in {inner for inner, _ in each.ports}]
    twice = sorted({port for port in inner if inner.count(port) > 1})
    text = (
        f"the services {', '.join(members)} start together as the group {group}: on one machine if "
        "it has room, as this one or a shared host, and on a rented machine for each otherwise"
    )
    if twice:
        ports = " and ".join(map(str, twice))
        text += f"; two of them listen on port {ports}, which they cannot on one machine"
    return text


def _find_others(service: _Service, members: Mapping[str, _Service], reader: ComposeReader) -> str:
    """Return shell lines that make the names of the other services known, and wait for those that
    must be healthy.
    """
    lines = ""
    for other in members.values():
        variable = f'"${{CAVVY_HOSTS_{(slug(other.name) or "").upper().replace("-", "_")}%%,*}}"'
        aliases = [reader.text(other.table.get(key)) for key in ("container_name", "hostname")]
        names = " ".join(dict.fromkeys(filter(None, [other.name, *aliases])))
        lines += f"echo {variable} {quote(names)}\n"
    text = f"""\
{{
{lines}}} >> /etc/hosts || echo "the names of the services cannot be written to /etc/hosts" >&2
"""
    waits = [
        _wait_for(each, members[each.name], reader)
        for each in service.needs
        if each.condition == _HEALTHY and each.name in members
    ]
    return text + (_WAIT + "".join(waits) if waits else "")


def _wait_for(need: _Dependency, other: _Service, reader: ComposeReader) -> str:
    """Return a shell line that waits until another service is healthy, as seen from outside."""
    check = other.table.get("healthcheck")
    test = check.get("test") if isinstance(check, MapNode) else None
    if test is None:
        message = f"{other.name} has no `healthcheck`, so Cavvy cannot tell when it is healthy"
        hint = "add one, or write `condition: service_started`"
        reader.notes.add(need.mark, message, suggestion=hint)
        return ""
    words = " ".join(reader.texts(test))
    port, path = 0, ""
    if url := _URL.search(words):
        port, path = int(url[1] or 80), url[2] or "/"
    if not port:
        named = next((_PORTS[each] for each in _PORTS if each in words), 0)
        port = named or next((inner for inner, _ in other.ports), 0)
    if not port:
        message = f"the other services cannot run the `healthcheck` of {other.name}"
        hint = f"name its port in `expose` of {other.name}; they then wait until it answers"
        reader.notes.add(need.mark, message, suggestion=hint)
        return ""
    how = f"http://{other.name}:{port}{path} answers" if path else f"its port {port} answers"
    reader.kept.note(test.mark, f"services.{other.name}.healthcheck", f"others wait until {how}")
    seconds = max(_LEAST_WAIT_S, round(_count_seconds(check, reader)))
    variable = f'"${{CAVVY_HOSTS_{(slug(other.name) or "").upper().replace("-", "_")}%%,*}}"'
    return f"_cavvy_wait {quote(other.name)} {variable} {port} {quote(path)} {seconds}\n"


def _count_seconds(check: Node | None, reader: ComposeReader) -> float:
    """Return after how many seconds a service counts as unhealthy."""
    if not isinstance(check, MapNode):
        return 0
    interval, period = check.get("interval"), check.get("start_period")
    retries = reader.text(check.get("retries"))
    tries = int(retries) if retries.isdecimal() and len(retries) < 6 else 3
    each = 30.0 if interval is None else read_seconds(interval, reader)
    return tries * each + (0 if period is None else read_seconds(period, reader))
