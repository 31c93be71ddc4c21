"""Connects to a host as the user's own `ssh` does: with the user's configuration, keys, SSH agents,
jump hosts and known hosts.

Each connection has its own OpenSSH configuration, which sets Cavvy's requirements and includes the
user's configuration. ProxyJump uses the whole configuration for jump hosts too, so Cavvy's
requirements also apply to jump hosts.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from cavvy.domain.values import Struct
from cavvy.providers.hosts.connection import (
    OPEN_TIMEOUT_S,
    HostAddress,
    HostConnection,
    LoginRefused,
    open_connection,
    spawn,
    write_rules,
)
from cavvy.providers.hosts.ssh_link import SshRoute
from cavvy.providers.ssh.inventory import InventoryHost

_UNCHECKED = {"none", "/dev/null"}
_SYSTEM_CONFIG = Path("/etc/ssh/ssh_config")


class SshOptions(Struct, frozen=True, kw_only=True):
    """The settings for reaching hosts."""

    ssh_config: Path
    accept_new: bool
    known_hosts: Path  # the file with the accepted keys of new hosts
    sockets: Path  # the folder of master sockets; its path is short


async def dial(entry: InventoryHost, ways: SshOptions) -> tuple[HostConnection, SshRoute]:
    """Connect to a host. Raises CannotConnect, LoginRefused, Refused."""
    target, overrides = entry.address or entry.name, _overrides(entry)
    user_config = ways.sockets / f"{entry.name}.user"
    user_config.write_text(_includes(ways.ssh_config))
    base = ("-F", str(user_config))
    route = await _find_route(entry.name, [*overrides, *base, target])
    known = list(route.known_hosts)
    for jump in route.jumps:
        uri = jump if jump.startswith("ssh://") else f"ssh://{jump}"
        known += (await _find_route(entry.name, [*base, uri])).known_hosts
    config = user_config.with_suffix(".config")
    config.write_text(_write_config(ways, known, checked=route.checked))
    address = HostAddress(
        name=entry.name,
        ssh=["ssh", "-T", "-F", str(config), *overrides],
        destination=target,
        control=ways.sockets / os.urandom(4).hex(),
        host_key_hint=', or set host_keys = "accept-new" for new hosts',
    )
    return await open_connection(address, timeout_s=OPEN_TIMEOUT_S), route


def _overrides(entry: InventoryHost) -> Sequence[str]:
    """Return the options of `ssh` for the host's settings in the inventory."""
    given = (("-l", entry.user), ("-p", entry.port), ("-J", entry.jump))
    words = [word for option, value in given if value for word in (option, str(value))]
    if entry.identity_file is not None:
        words += ["-o", "IdentitiesOnly=yes", "-i", str(Path(entry.identity_file).expanduser())]
    return words


def _write_config(ways: SshOptions, known: Sequence[str], *, checked: bool) -> str:
    """Return the connection's SSH configuration. Cavvy's requirements come before the user's
    configuration, because `ssh` uses the first value of each option.
    """
    os.close(os.open(ways.known_hosts, os.O_WRONLY | os.O_CREAT, 0o600))
    checking = "accept-new" if ways.accept_new else "yes"
    files = dict.fromkeys([str(ways.known_hosts), *known])
    rules = write_rules(checking if checked else "no", files)
    return rules + _includes(ways.ssh_config)


def _includes(config: Path) -> str:
    """Return `Include` lines for the configuration files that `ssh` would read, and a line that
    names the known-hosts file in `~/.ssh`. The system's configuration is included only if `config`
    is the user's own `~/.ssh/config`.
    """
    home = Path("~/.ssh").expanduser()
    wanted = [config, _SYSTEM_CONFIG] if config.expanduser() == home / "config" else [config]
    lines = [f'Include "{path}"' for path in wanted if path.is_file()]
    return "\n".join([*lines, f'UserKnownHostsFile "{home}/known_hosts"', ""])


async def _find_route(name: str, words: Sequence[str]) -> SshRoute:
    """Resolve a host name with `ssh -G`. Raises LoginRefused if the configuration is invalid."""
    process = await spawn(["ssh", "-G", *words])
    out, err = await process.communicate()
    if process.returncode != 0:
        raise LoginRefused(f"{name}: {err.decode('utf-8', 'replace').strip()[-500:]}")
    pairs = (line.partition(" ") for line in out.decode().splitlines())
    said = {key: value for key, _, value in pairs}
    known = said.get("userknownhostsfile", "").split()
    jump = said.get("proxyjump", "none")
    return SshRoute(
        address=said.get("hostname", ""),
        port=int(said.get("port", 22)),
        jumps=() if jump == "none" else jump.split(","),
        known_hosts=[file for file in known if file not in _UNCHECKED],
        checked=not _UNCHECKED & set(known)
        or said.get("stricthostkeychecking") not in ("no", "off", "false"),
    )
