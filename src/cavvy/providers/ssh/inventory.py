"""Reads the hosts from the settings, an inventory file, and the names in the SSH configuration."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from cavvy.domain.allocations import object_to_label
from cavvy.domain.tasks import Scalar
from cavvy.domain.units import parse_rate
from cavvy.domain.values import Struct
from cavvy.providers.base import Refused
from cavvy.providers.hosts.fleet.machines import HostEntry

GROUP = "hosts"  # the group of a host for which no group is set
HOST_KEYS = ("strict", "accept-new")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HOME = Path("~/.config/cavvy")
_SSH_CONFIG = "~/.ssh/config"
_Price = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Size = Annotated[float, msgspec.Meta(gt=0)]
_Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class InventoryHost(HostEntry, frozen=True, kw_only=True):
    """One host of the inventory. Connection fields that are None are taken from the SSH
    configuration.
    """

    address: str | None = None
    user: str | None = None
    port: int | None = None
    identity_file: str | None = None
    jump: str | None = None
    folder: str


class HostInventory(Struct, frozen=True, kw_only=True):
    """All hosts by name, and the settings for connecting to hosts."""

    entries: Mapping[str, InventoryHost]
    ssh_config: Path
    accept_new: bool
    idle: Sequence[str] = ()  # patterns in `hosts` that match no Host in the SSH configuration


class _Host(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A table [hosts.NAME] in the inventory file."""

    group: str | None = None
    price_usd_hr: _Price | None = None
    address: str | None = None
    user: str | None = None
    port: _Port | None = None
    identity_file: str | None = None
    jump: str | None = None
    node_address: str | None = None
    folder: str | None = None
    cpus: _Size | None = None
    memory_gib: _Size | None = None
    accelerators: bool = True
    labels: dict[str, str] = {}


class _Group(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A table [groups.NAME] in the inventory file."""

    hosts: list[str] = []
    price_usd_hr: _Price | None = None
    labels: dict[str, str] = {}


_T = TypeVar("_T", _Host, _Group)


class _InventoryFile(msgspec.Struct, frozen=True, kw_only=True):
    hosts: dict[str, _Host] = {}
    groups: dict[str, _Group] = {}


def read_inventory(settings: Mapping[str, Scalar]) -> HostInventory:
    """Read the inventory. Raises Refused."""
    keys = str(settings.get("host_keys", HOST_KEYS[0]))
    if keys not in HOST_KEYS:
        raise Refused(f"[providers.ssh] host_keys is {keys!r}: write one of {', '.join(HOST_KEYS)}")
    named = str(settings.get("ssh_config", _SSH_CONFIG))
    config = Path(named).expanduser()
    # "" and /dev/null mean that there is no SSH configuration
    if named not in ("", _SSH_CONFIG) and not config.exists():
        raise Refused(f"[providers.ssh] ssh_config: the file {config} does not exist")
    where, file = _read_file(settings.get("inventory"))
    hosts = dict(file.hosts)
    idle: list[str] = []
    for word in _named(str(settings.get("hosts", "")), config, idle):
        name, host = _split(word)
        hosts.setdefault(name, host)
    group_of = _list_groups(where, file)
    for name in group_of:
        hosts.setdefault(name, _Host())
    entries = {}
    for name, host in hosts.items():
        group = host.group or group_of.get(name, GROUP)
        if host.group and group_of.get(name, group) != group:
            raise Refused(
                f"{where}: {name} has the group {group} but is listed in {group_of[name]}"
            )
        entries[name] = _entry(name, host, group, file.groups.get(group, _Group()), settings)
    _check_names(where, entries)
    found = dict(sorted(entries.items()))
    return HostInventory(
        entries=found, ssh_config=config, accept_new=keys == "accept-new", idle=idle
    )


def _list_groups(where: str, file: _InventoryFile) -> dict[str, str]:
    """Return the group of each host that is listed in a group. Raises Refused."""
    found: dict[str, str] = {}
    for group, listed in file.groups.items():
        for name in listed.hosts:
            if name in found:
                raise Refused(
                    f"{where}: {name} is in the groups {found[name]} and {group}; a host can be in "
                    "only one group"
                )
            found[name] = group
    return found


def _check_names(where: str, entries: Mapping[str, InventoryHost]) -> None:
    groups = {entry.group for entry in entries.values()}
    wrong = [name for name in (*entries, *groups) if _NAME.fullmatch(name) is None]
    if wrong:
        raise Refused(
            f"{where}: {wrong[0]!r} is not a valid host or group name: use letters, digits, '.', "
            "'_' and '-'"
        )
    if both := sorted(groups & entries.keys()):
        raise Refused(f"{where}: {both[0]} is both a host and a group; rename one of them")


def _entry(
    name: str, host: _Host, group: str, told: _Group, settings: Mapping[str, Scalar]
) -> InventoryHost:
    usual = told.price_usd_hr if told.price_usd_hr is not None else settings.get("price_usd_hr", 0)
    price = host.price_usd_hr if host.price_usd_hr is not None else usual
    given = msgspec.structs.asdict(host)
    del given["group"], given["price_usd_hr"]
    given["labels"] = {**told.labels, **host.labels}
    given["folder"] = host.folder or str(settings.get("folder", "~/.cavvy-agent"))
    return InventoryHost(
        name=name,
        group=group,
        rate=parse_rate(str(price)),
        in_group=parse_rate(str(price)) == parse_rate(str(usual)),
        **given,
    )


def _read_file(given: Scalar | None) -> tuple[str, _InventoryFile]:
    if not given:
        return "[providers.ssh]", _InventoryFile()
    path = _HOME.expanduser() / Path(str(given)).expanduser()
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        reason = error.strerror or str(error)
        raise Refused(f"[providers.ssh] inventory: {path} cannot be read: {reason}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Refused(f"{path} is not TOML: {error}") from error
    if unknown := sorted(raw.keys() - {"hosts", "groups"}):
        raise Refused(
            f"{path}: {unknown[0]!r} is unknown; valid tables are [hosts.NAME] and [groups.NAME]"
        )
    return str(path), _InventoryFile(
        hosts=_convert(path, raw, "hosts", _Host), groups=_convert(path, raw, "groups", _Group)
    )


def _convert(path: Path, raw: Mapping[str, object], table: str, kind: type[_T]) -> dict[str, _T]:
    """Return the tables of one kind, by name. Raises Refused with the name of an invalid table."""
    tables = raw.get(table, {})
    found = {}
    for name, content in tables.items() if isinstance(tables, dict) else [("NAME", tables)]:
        try:
            found[name] = msgspec.convert(content, kind)
            for label, value in found[name].labels.items():
                if wrong := object_to_label(label, value):
                    raise Refused(f"{path}: [{table}.{name}] labels: {wrong}")
        except msgspec.ValidationError as error:
            known = ", ".join(field.name for field in msgspec.structs.fields(kind))
            raise Refused(f"{path}: [{table}.{name}]: {error}; valid keys are {known}") from error
    return found


def _named(text: str, config: Path, idle: list[str]) -> Iterator[str]:
    """Yield the hosts in the setting `hosts`. Patterns are matched against the names in the `Host`
    lines of the SSH configuration.

    Patterns that match nothing are added to `idle`.
    """
    known: Sequence[str] | None = None
    for word in text.replace(",", " ").split():
        if not set("*?[") & set(word):
            yield word
            continue
        if known is None:
            known = list(_aliases(config))
        matches = [name for name in known if fnmatchcase(name, word)]
        if not matches:
            idle.append(word)
        yield from matches


def _split(word: str) -> tuple[str, _Host]:
    """Split `user@name:port` into the name and the properties of a host."""
    user, _, where = word.rpartition("@")
    name, colon, port = where.partition(":")
    if not user and not colon:
        return name, _Host()
    if colon and not port.isdigit():
        raise Refused(f"[providers.ssh] hosts: {word!r}: expected USER@NAME:PORT")
    return name, _Host(user=user or None, address=name, port=int(port) if colon else None)


def _aliases(config: Path) -> Iterator[str]:
    """Yield the names without wildcards on the `Host` lines of an SSH configuration and of the
    files that it includes.
    """
    try:
        lines = config.read_text(errors="replace").splitlines()
    except OSError:
        return
    for line in lines:
        words = line.replace("=", " ", 1).split()
        if len(words) < 2:
            continue
        if words[0].lower() == "host":
            yield from (word.strip('"') for word in words[1:] if not set("*?!") & set(word))
        elif words[0].lower() == "include":
            for pattern in words[1:]:
                path = Path(pattern).expanduser()
                for file in sorted(
                    path.parent.glob(path.name)
                    if path.is_absolute()
                    else config.parent.glob(pattern)
                ):
                    yield from _aliases(file)
