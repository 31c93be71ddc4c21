"""Opens a session in an editor of this machine, which connects over SSH: prints the editor's
command and link, and runs the command if the editor is installed.
"""

import getpass
import shlex
import shutil
import subprocess
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from cavvy.cli.reach.session import named

if TYPE_CHECKING:
    from collections.abc import Sequence

# The name of each editor, and the command that its installation adds to the PATH.
EDITORS = {
    "vscode": ("VS Code", "code"),
    "cursor": ("Cursor", "cursor"),
    "zed": ("Zed", "zed"),
    "jetbrains": ("JetBrains Gateway", "gateway"),
}


def open_editor(project: str, name: str, folder: str, ide: str, *, no_open: bool) -> None:
    """Write Cavvy's hosts into the SSH configuration, and print or run the command that opens the
    editor.
    """
    from cavvy.cli.reach.ssh_config import write_config

    for message in write_config():
        click.echo(message)
    host = f"{name}.cavvy" if named(project, name) == name else name
    title, program = EDITORS[ide]
    link = make_link(ide, host, folder)
    words = make_command(ide, host, folder)
    click.echo(shlex.join(words))
    click.echo(f"or open this link: {link}")
    if shutil.which(program) is None:
        click.echo(f"note: {title}'s `{program}` command is not installed here", err=True)
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
