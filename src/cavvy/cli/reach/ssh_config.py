"""Writes ~/.ssh/config.d/cavvy with a host for each running job, and a pattern that matches all
hosts NAME.cavvy. Plain ssh reaches these hosts through `cavvy ssh --stdio`, and so do editors of
this machine: prints an editor's command and link for a session, and runs the command if the editor
is installed.
"""

import getpass
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

import click

from cavvy.cli.reach.session import named
from cavvy.cli.view.failure import note_out
from cavvy.client.state import default_home, write_private

_INCLUDE = "Include config.d/cavvy"
_HEAD = "# Written by `cavvy ssh`, which overwrites changes. `ssh NAME` opens a shell on a node.\n"

# The name of each editor, and the command that its installation adds to the PATH.
EDITORS = {
    "vscode": ("VS Code", "code"),
    "cursor": ("Cursor", "cursor"),
    "zed": ("Zed", "zed"),
    "jetbrains": ("JetBrains Gateway", "gateway"),
}


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


def open_editor(project: str, name: str, folder: str, ide: str, *, no_open: bool) -> None:
    """Write Cavvy's hosts into the SSH configuration, and print or run the command that opens the
    editor.
    """
    for message in write_config():
        click.echo(message)
    host = f"{name}.cavvy" if named(project, name) == name else name
    title, program = EDITORS[ide]
    link = make_link(ide, host, folder)
    words = make_command(ide, host, folder)
    click.echo(shlex.join(words))
    click.echo(f"or open this link: {link}")
    if shutil.which(program) is None:
        note_out(f"{title}'s `{program}` command is not installed here")
    elif not no_open:
        subprocess.run(words, check=False)


def make_command(ide: str, host: str, folder: str) -> "Sequence[str]":
    """Return the words of the command that opens the folder of an SSH host."""
    program = EDITORS[ide][1]
    if ide == "zed":
        return [program, f"ssh://{host}{quote(folder)}"]
    if ide == "jetbrains":
        return [program, make_link(ide, host, folder)]
    return [program, "--remote", f"ssh-remote+{host}", folder]


def make_link(ide: str, host: str, folder: str) -> str:
    """Return the link that opens the folder of an SSH host.

    The forms are those of the editors: https://code.visualstudio.com/docs/remote/ssh (Cursor's is
    the same with its own scheme), https://zed.dev/docs/remote-development, and
    https://www.jetbrains.com/help/idea/remote-development-a.html for Gateway, which also needs a
    user and a port; the tunnel ignores both.
    """
    if ide == "zed":
        return f"zed://ssh/{host}{quote(folder)}"
    if ide == "jetbrains":
        values = {"host": host, "port": "22", "user": getpass.getuser(), "projectPath": folder}
        fields = "&".join(f"{key}={quote(value, safe='')}" for key, value in values.items())
        return f"jetbrains-gateway://connect#type=ssh&deploy=true&{fields}"
    return f"{ide}://vscode-remote/ssh-remote+{host}{quote(folder)}"
