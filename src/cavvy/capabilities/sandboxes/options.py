"""The options of sandboxes, and how they become keys of a host's task."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from difflib import get_close_matches
from typing import Any

from cavvy.capabilities.functions.image import FunctionImage
from cavvy.capabilities.functions.state.objects import STATE_NAME
from cavvy.capabilities.sandboxes.hosts import HostNeeds
from cavvy.client.client import own_user_name
from cavvy.domain.units import UnitError, parse_duration, parse_memory_mib
from cavvy.sdk.errors import InvalidArgument

ISOLATIONS = ("best", "required")
_MOST_S = 7 * 86400.0
_MOST_TEXT = 200
_MOST_NAMES = 100
_MOST_VARIABLES = 64 << 10
_NO_NAME = re.compile(r"[/@\s]|:\d*$")  # what stands in a URL, and in no name of a host


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxOptions:
    """The options of `Sandbox.create`; see there."""

    image: FunctionImage | None = None
    cpu: float = 1.0
    memory: str | int | float = "2GB"
    disk: str | int | float = "1GB"
    processes: int = 256
    timeout: str | int | float | timedelta = "5m"
    network: bool | Sequence[str] = False
    isolation: str = "best"
    dicts: Sequence[str] = ()
    queues: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    title: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    resources: Mapping[str, Any] = field(default_factory=dict)
    idle: str | int | float | timedelta = "1m"
    consent: bool = False
    free: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Return what the host must know, checked. Raises InvalidArgument."""
        if self.isolation not in ISOLATIONS:
            raise _wrong("isolation", self.isolation, 'use "best" or "required"')
        if not _is_number(self.cpu) or not 0 < self.cpu <= 1024:
            raise _wrong("cpu", self.cpu, "use a number of CPUs, such as 1")
        if not _is_number(self.processes) or not 4 <= self.processes <= 65536:
            raise _wrong("processes", self.processes, "use a number from 4 to 65536")
        timeout_s = _read_length("timeout", self.timeout)
        if not 0 < timeout_s <= _MOST_S:
            raise _wrong("timeout", self.timeout, "use a time up to 7d")
        if not isinstance(self.title, str) or len(self.title) > _MOST_TEXT:
            raise _wrong("title", self.title, f"use a text of at most {_MOST_TEXT} letters")
        return {
            "cpu": float(self.cpu),
            "memory_mib": _read_memory("memory", self.memory, 16),
            "disk_mib": _read_memory("disk", self.disk, 1),
            "processes": int(self.processes),
            "timeout_s": timeout_s,
            "network": _read_network(self.network),
            "isolation": self.isolation,
            "env": check_variables("env", self.env),
            "title": self.title,
            "tags": check_variables("tags", self.tags),
            "user": own_user_name(),
            "dicts": _read_names("dicts", self.dicts),
            "queues": _read_names("queues", self.queues),
        }

    def to_needs(self) -> HostNeeds:
        """Return what the job of the host needs. Raises InvalidArgument."""
        given: object = self.image
        image = FunctionImage() if given is None else given
        if not isinstance(image, FunctionImage):
            hint = "use an image such as cavvy.Image.python().pip_install('numpy')"
            raise _wrong("image", image, hint)
        keys = image.to_keys()
        if self.resources:
            keys["resources"] = dict(self.resources)
        idle_s = _read_length("idle", self.idle)
        return HostNeeds(keys, idle_s, self.consent and not self.free, self.free)


def make_options(keys: Mapping[str, Any]) -> SandboxOptions:
    """Return the options of `Sandbox.create`. Raises InvalidArgument for an unknown one."""
    known = [*SandboxOptions.__dataclass_fields__, "project", "snapshot"]
    for key in keys:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            hint += f"The options are {', '.join(known)}"
            raise InvalidArgument(f"Sandbox.create has no option {key}", hint)
    return SandboxOptions(**keys)


def check_variables(what: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return names with texts, as they can be variables of a process. Raises InvalidArgument."""
    found = dict(values)
    for name, value in found.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise _wrong(what, {name: value}, "names and values are texts")
        if not name or "=" in name or "\0" in name + value:
            raise _wrong(what, {name: value}, "a name has no =, and neither has a zero byte")
    if len(json.dumps(found)) > _MOST_VARIABLES:  # as the host gets it
        hint = "send large values as files, by `write_file` (as JSON, most letters take one byte)"
        raise InvalidArgument(f"{what} has more than {_MOST_VARIABLES >> 10} KiB as JSON", hint)
    return found


def _read_network(value: bool | Sequence[str]) -> bool | list[str]:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) or not all(isinstance(each, str) and each for each in value):
        hint = 'use False, True, or host names such as ["example.org", "*.example.com"]'
        raise _wrong("network", value, hint)
    for each in value:
        if _NO_NAME.search(each):
            bare = re.sub(r"^\w+://", "", each.strip()).rpartition("@")[2]
            host = re.split(r"[/:\s]", bare)[0] or "example.com"
            raise _wrong("network", each, f'a host name has no scheme, port or path: use "{host}"')
    return [each.lower() for each in value]


def _read_names(what: str, names: Sequence[str]) -> list[str]:
    """Return the names of dicts or queues. Raises InvalidArgument."""
    hint = f'use a list of their names, such as {what}=["results"]'
    if isinstance(names, str) or len(names) > _MOST_NAMES:
        raise _wrong(what, names, hint)
    for each in names:
        if not isinstance(each, str) or not STATE_NAME.fullmatch(each):
            raise _wrong(what, each, hint)
    return list(names)


def _read_memory(what: str, value: str | int | float, least: int) -> int:
    try:
        found = parse_memory_mib(value)
    except UnitError as error:
        raise InvalidArgument(f"Sandbox: {what}: {error}") from None
    if found < least:
        raise _wrong(what, value, f"use at least {least}MB")
    return found


def _read_length(what: str, value: str | int | float | timedelta) -> float:
    if isinstance(value, timedelta):
        return value.total_seconds()
    try:
        return parse_duration(value).total_seconds()
    except UnitError as error:
        raise InvalidArgument(f"Sandbox: {what}: {error}") from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(what: str, value: object, hint: str) -> InvalidArgument:
    return InvalidArgument(f"Sandbox: {what}={value!r:.200}", hint)
