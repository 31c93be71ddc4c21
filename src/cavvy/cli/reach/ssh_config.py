"""Writes ~/.ssh/config.d/cavvy with a host for each running job, and a pattern that matches all
hosts NAME.cavvy. Plain ssh reaches these hosts through `cavvy ssh --stdio`.
"""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from cavvy.client.state import default_home, write_private

_INCLUDE = "Include config.d/cavvy"
_HEAD = "# Written by `cavvy ssh`, which overwrites changes. `ssh NAME` opens a shell on a node.\n"


def write_config(jobs: Sequence[tuple[str, str, int]] | None = None) -> Sequence[str]:
    """Write the file and include it in ~/.ssh/config. Returns messages for the user. Each entry of
    `jobs` is (project, name, number of nodes); `jobs` is None for all running jobs.
    """
    from cavvy.cli.reach.sshd import host_key

    public = host_key().with_suffix(".pub").read_text().split()
    known_hosts = os.path.join(default_home(), "ssh_known_hosts")
    write_private(known_hosts, f"cavvy {public[0]} {public[1]}\n".encode())
    folder = _folder()
    (folder / "config.d").mkdir(mode=0o700, parents=True, exist_ok=True)
    found = _running() if jobs is None else jobs
    write_private(str(folder / "config.d/cavvy"), make_config(found, known_hosts).encode())
    hosts = f"{len(found)} running job{'' if len(found) == 1 else 's'}"
    message = (
        f"wrote {folder}/config.d/cavvy with {hosts}; `ssh NAME.cavvy` also works for later jobs"
    )
    return [message, *_include(folder / "config")]


def refresh_config() -> None:
    """Update the file if the user has created it with `cavvy ssh --setup`."""
    if (_folder() / "config.d/cavvy").exists():
        write_config()


def make_config(jobs: Sequence[tuple[str, str, int]], known_hosts: str) -> str:
    """Return the text of the file: a block for each rank of each job, and one block for all hosts
    NAME.cavvy.
    """
    python = f"{shlex.quote(sys.executable)} -P -c 'from cavvy.cli.main import main; main()'"
    program = shlex.quote(_program()) if _program() else python
    set_here = [
        f"{name}={shlex.quote(value)}"
        for name, value in (
            ("CAVVY_HOME", default_home() if "CAVVY_HOME" in os.environ else ""),
            ("CAVVY_CONTEXT", os.environ.get("CAVVY_CONTEXT", "")),
        )
        if value
    ]
    start = " ".join(["env", *set_here, program]) if set_here else program
    blocks = [_HEAD]
    for project, name, nodes in jobs:
        for rank in range(nodes):
            alias = f"{name} {name}:0 {name}.0" if rank == 0 else f"{name}:{rank} {name}.{rank}"
            blocks.append(
                _block(
                    alias,
                    f"{start} ssh --stdio -p {shlex.quote(project)} {name}:{rank}",
                    known_hosts,
                )
            )
    blocks.append(_block("*.cavvy", f"{start} ssh --stdio $(basename %n .cavvy)", known_hosts))
    return "\n".join(blocks)


def _block(names: str, proxy: str, known_hosts: str) -> str:
    return (
        f"Host {names}\n  ProxyCommand {proxy}\n  HostKeyAlias cavvy\n  UserKnownHostsFile "
        f"{known_hosts}\n"
        "  StrictHostKeyChecking yes\n  ServerAliveInterval 0\n"
    )


def _program() -> str:
    """Return the path of the installed command, or "" if this process was started in another
    way.
    """
    path = os.path.abspath(sys.argv[0])
    return path if os.path.basename(path) == "cavvy" and os.access(path, os.X_OK) else ""


def _folder() -> Path:
    return Path(os.environ.get("HOME") or Path.home()) / ".ssh"


def _include(config: Path) -> Sequence[str]:
    """Include the file at the top of ~/.ssh/config, before any Host block."""
    text = config.read_text() if config.exists() else ""
    if any(line.strip().lower() == _INCLUDE.lower() for line in text.splitlines()):
        return []
    write_private(str(config), f"{_INCLUDE}\n\n{text}".encode())
    return [f"added `{_INCLUDE}` to {config}"]


def _running() -> Sequence[tuple[str, str, int]]:
    from cavvy.cli.reach.session import session

    with session() as client:
        rows, machines = client.nodes(), client.machines()
    ranks: dict[tuple[str, str], int] = {}
    for row in rows:
        if row.job:
            key = (row.project, row.job)
            ranks[key] = max(ranks.get(key, 0), (row.rank or 0) + 1)
    for machine in machines:  # The name of a machine means its newest job.
        if machine.state not in ("stopping", "stopped"):
            ranks[machine.project, machine.name] = machine.nodes
    return [(project, name, nodes) for (project, name), nodes in sorted(ranks.items())]
