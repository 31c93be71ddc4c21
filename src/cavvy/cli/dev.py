"""`cavvy dev`: gets a machine for interactive work, and opens a shell, an editor over SSH, or
Jupyter on it.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import click

from cavvy.cli.reach.session import list_jobs, named, session
from cavvy.cli.reach.tunnel import with_tunnel
from cavvy.cli.task.load import param_option, read_params, read_task, yes_option
from cavvy.cli.task.options import TaskCommand, replace_command, task_options
from cavvy.cli.view.failure import CommandFailure
from cavvy.cli.view.formatting import UNFINISHED

if TYPE_CHECKING:
    from cavvy.client import ApiClient
    from cavvy.client.tunnel.mux import NodeTunnel
    from cavvy.client.wire import JobDetail
    from cavvy.task_files import LoadedTask, ReadOptions

_USUAL_NAME = "dev"
_USUAL_IDLE = "30m"
_HAS_JUPYTER = "jupyter lab --version > /dev/null 2>&1"
_INSTALL = f"{_HAS_JUPYTER} || python3 -m pip install --progress-bar off jupyterlab"
_JUPYTER = f"""\
{_INSTALL}
if [ "$(id -u)" = 0 ]; then set -- --allow-root; fi
set -- --port="${{MASTER_PORT:-8888}}" --port-retries=50 --ServerApp.root_dir="$(pwd -P)" "$@"
exec jupyter lab --no-browser --ip=127.0.0.1 "$@"
"""
# Starts Jupyter in a session that was started without it, from an environment of its own if the
# session has none.
_ADD_JUPYTER = f"""\
PATH="$PWD/.jupyter/bin:$PATH"
if ! {_HAS_JUPYTER}; then
    python3 -m venv --system-site-packages .jupyter && .jupyter/bin/pip install -q jupyterlab ||
        exit 1
fi
nohup setsid sh -c {shlex.quote(_JUPYTER)} > .jupyter.log 2>&1 < /dev/null &
"""
_LIST = 'PATH="$PWD/.jupyter/bin:$PATH"; jupyter server list --json'
_SHELL = """\
if command -v tmux > /dev/null; then exec tmux new-session -A -s cavvy; fi
echo "note: tmux is not installed here; this shell ends when you disconnect" >&2
exec "${SHELL:-/bin/sh}"
"""
_LOOK_AGAIN_S = 0.5
_JUPYTER_S = 300.0  # maximum seconds to wait for Jupyter, which may have to be installed first


class DevCommand(TaskCommand):
    """A command that accepts a task file. Instead of running the file's `run`, the command starts a
    session.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if "--" in args:
            raise click.UsageError("`cavvy dev` takes no command; use `cavvy run --machine NAME`")
        rest = super().parse_args(ctx, args)  # `--help` ends here
        from cavvy.spec.translation import WAIT

        replace_command(ctx, _JUPYTER if ctx.params.get("ide") == "jupyter" else WAIT)
        return rest


@click.command("dev", cls=DevCommand)
@task_options
@param_option
@yes_option
@click.option("-p", "--project", default=None, help="The project of the machine.")
@click.option(
    "--ide",
    type=click.Choice(["ssh", "vscode", "jupyter"]),
    default="ssh",
    help="What to open: a shell, VS Code, or Jupyter in a browser.",
)
@click.option(
    "--idle-gpu",
    metavar="PERCENT",
    help="Also end the session if GPU use stays below PERCENT for the time of --keep, even if CPUs "
    "or users are busy.",
)
@click.option("--no-open", is_flag=True, help="Only start the session and show how to connect.")
def command(
    file: str,
    options: "ReadOptions",
    param: tuple[str, ...],
    yes: bool,
    project: str | None,
    ide: str,
    idle_gpu: str | None,
    no_open: bool,
) -> None:
    """Get a machine for interactive work, and open a shell, VS Code or Jupyter on it.

    The machine's name is --machine (default: dev). Run the command again to reconnect. The
    session and its machine end after they have been idle for --keep (default: 30m): no output, no
    CPU use by your programs and no connection. Before the session ends, a warning appears in the
    job's events. With --idle-gpu 5%, the session also ends when the GPUs have been idle for the
    time --keep, even if CPUs or users are busy. With a task file, the session has the file's
    resources, setup, folder and environment, but does not run the file's commands.
    """
    from cavvy.cli.run import say_machine, submit_loaded

    params = read_params(param)
    loaded = _read_session(file, params, options, ide, idle_gpu)
    name = loaded.task.machine or _USUAL_NAME
    with session() as client:
        project = project or loaded.task.project
        job = _find_session(client, project, name)
        if job is None:
            made = submit_loaded(client, loaded, file, params, project, name, yes)
            job = client.job(project, made.name)
        else:
            click.echo(f"session {job.name} is already running; the options are ignored", err=True)
        try:
            _wait(client, job)
            click.echo(say_machine(client.machine(project, name)), err=True)
            folder = _read_folder(_output(client, job, ["pwd", "-P"]))
            if ide == "jupyter" and _JUPYTER.strip() not in _task(job)["run"]:
                _add_jupyter(client, job, folder)
            _connect(project, name, folder, ide, no_open=no_open)
        except KeyboardInterrupt:
            there = named(project, name)
            click.echo(
                f"\nsession {there} continues; reconnect with: cavvy dev --machine {there}    "
                f"end the session: cavvy machines stop {there}",
                err=True,
            )
            raise


def _read_session(
    file: str, params: dict[str, str], options: "ReadOptions", ide: str, idle_gpu: str | None
) -> "LoadedTask":
    """Read the task file, and return the task of a session. The session's idle limit is the keep
    time of its machine.

    If the file itself describes a session, such as a dstack `dev-environment`, the file's commands
    and idle limit are used.
    """
    from cavvy.domain.values import replace

    overrides = json.loads(options.overrides or "{}")
    if options.text is None or file == "-":
        own = {key: value for key, value in overrides.items() if key != "run"}
        task = read_task(file, params, replace(options, overrides=json.dumps(own))).task
        if task.session and ide != "jupyter":
            overrides = own
        if task.machine is not None:
            overrides.setdefault("machine", task.machine)
        if length := task.limits.idle or task.keep:
            overrides.setdefault("keep", length.total_seconds())
        idle_gpu = idle_gpu or str(task.limits.idle_gpu_percent or "")
    idle = overrides.setdefault("keep", _USUAL_IDLE)
    overrides.setdefault("machine", _USUAL_NAME)
    limits = overrides.setdefault("limits", {})
    limits["idle"] = {"gpu": idle_gpu, "for": idle} if idle_gpu else idle
    overrides["session"] = True
    loaded = read_task(file, params, replace(options, overrides=json.dumps(overrides)))
    if ide == "jupyter" and loaded.task.setup is None:
        overrides["setup"] = _INSTALL  # Jupyter is installed into a separate environment.
        loaded = read_task(file, params, replace(options, overrides=json.dumps(overrides)))
    return loaded


def _task(job: "JobDetail") -> dict[str, Any]:
    task: dict[str, Any] = json.loads(bytes(job.task))
    return task


def _is_session(job: "JobDetail") -> bool:
    """Return whether the job is a session of `cavvy dev`."""
    return bool(_task(job).get("session"))


def _output(client: "ApiClient", job: "JobDetail", argv: list[str]) -> bytes:
    """Run a command in the session and return its output."""
    return b"".join(chunk.data for chunk in client.exec(job.project, job.name, argv))


def _add_jupyter(client: "ApiClient", job: "JobDetail", folder: str) -> None:
    """Start Jupyter in a session that was started without Jupyter, unless Jupyter was added before.
    Raises CommandFailure if Jupyter cannot be installed.
    """
    if _read_servers(_output(client, job, ["sh", "-c", _LIST]), folder):
        return
    click.echo(f"session {job.name} has no Jupyter yet; installing and starting it", err=True)
    chunks = list(client.exec(job.project, job.name, ["sh", "-c", _ADD_JUPYTER]))
    if chunks[-1].exit_code == 0:
        return
    there = named(job.project, job.machine or job.name)
    lines = b"".join(chunk.data for chunk in chunks).decode(errors="replace").split("\n")
    raise CommandFailure(
        f"Jupyter could not be installed in session {job.name}: "
        + (next((line for line in reversed(lines) if line.strip()), "no output")),
        f"`cavvy machines stop {there}` ends the session; "
        f"`cavvy dev --machine {there} --ide jupyter` then starts a session with Jupyter",
    )


def _read_folder(said: bytes) -> str:
    """Return the session's folder from a node's answer. Raises CommandFailure: a node must not be
    able to pass an option to the editor.
    """
    folder = said.decode(errors="replace").strip()
    if not folder.startswith("/") or not folder.isprintable():
        raise CommandFailure(
            f"the node sent {folder!r} instead of the path of the session's folder"
        )
    return folder


def _read_servers(listed: bytes, folder: str) -> list[tuple[int, str]]:
    """Return the port and the token of each Jupyter server of this folder. `listed` is the output
    of `jupyter server list --json`, which also lists the user's servers in other folders.
    """
    servers = [json.loads(line) for line in listed.splitlines() if line.startswith(b"{")]
    return [
        (int(server["port"]), str(server["token"]))
        for server in servers
        if server.get("root_dir", folder) == folder
    ]


def _find_session(client: "ApiClient", project: str, name: str) -> "JobDetail | None":
    """Return the session on this machine, or None if no session exists. Raises CommandFailure if
    the machine runs a job that is not a session; a session waits for the job of `machines start`.
    """
    for row in list_jobs(client, project, UNFINISHED)[0]:
        if row.machine == name and _is_session(job := client.job(project, row.name)):
            return job  # A session may still be queued and have no node.
    found = [each for each in client.machines(project) if each.name == name]
    if not found or found[0].job is None or found[0].state not in ("starting", "busy"):
        return None
    job = client.job(project, found[0].job)
    if job.name.startswith(f"{name}-start") and _task(job)["run"] == "true":
        return None
    there = named(project, job.name)
    raise CommandFailure(
        f"machine {name} runs job {job.name}",
        f"`cavvy ssh {there}` opens a shell in the job's environment; "
        f"`cavvy stop {there}` ends the job",
    )


def _wait(client: "ApiClient", job: "JobDetail") -> None:
    """Show the session's events and the output of its setup until the session is running. Raises
    CommandFailure if the session ends.
    """
    if job.phase == "running":
        return
    from cavvy.cli.reach.follow import follow_start

    follow_start(client, job)
    ended = client.job(job.project, job.id)
    if ended.phase in UNFINISHED:
        return
    raise CommandFailure(
        f"session {job.name}: {ended.phase}, {ended.reason}",
        f"`cavvy logs {named(job.project, job.name)}` shows the session's output",
    )


def _connect(project: str, name: str, folder: str, ide: str, *, no_open: bool) -> None:
    there = named(project, name)
    if ide == "jupyter":
        _open_jupyter(project, name, folder, no_open=no_open)
    elif ide == "vscode":
        _open_editor(project, name, folder, no_open=no_open)
    elif ide == "ssh" and not no_open and sys.stdin.isatty() and sys.stdout.isatty():
        from cavvy.cli.reach.terminal import run_here

        with_tunnel(
            project, name, lambda tunnel: run_here(tunnel, argv=None, line=_SHELL, terminal=True)
        )
    click.echo(
        f"the session continues until it is idle; reconnect with: cavvy dev --machine {there}"
    )
    click.echo(f"open a shell: cavvy ssh {there}    end the session: cavvy machines stop {there}")


def _open_editor(project: str, name: str, folder: str, *, no_open: bool) -> None:
    """Write Cavvy's hosts into the SSH configuration, and print or run the command that opens VS
    Code.
    """
    from cavvy.cli.reach.ssh_config import write_config

    for message in write_config():
        click.echo(message)
    host = f"{name}.cavvy" if named(project, name) == name else name
    words = ["code", "--remote", f"ssh-remote+{host}", folder]
    click.echo(shlex.join(words))
    if not no_open and shutil.which(words[0]):
        subprocess.run(words, check=False)
    elif not shutil.which(words[0]):
        click.echo("note: VS Code's `code` command is not installed here", err=True)


def _open_jupyter(project: str, name: str, folder: str, *, no_open: bool) -> None:
    """Forward a local port to the session's Jupyter until Ctrl-C, and print the address with its
    token. With `no_open`, only print the address on the node.
    """
    from cavvy.cli.forward import listen_here

    port, token = _find_jupyter(project, name, folder)
    if no_open:
        there = named(project, name)
        click.echo(f"on the node: http://127.0.0.1:{port}/lab?token={token}")
        click.echo(f"bring it here: cavvy dev --ide jupyter --machine {there}")
        return

    async def act(tunnel: "NodeTunnel") -> None:
        here = await listen_here(tunnel, "127.0.0.1", 0, "127.0.0.1", port)
        click.echo(f"http://127.0.0.1:{here}/lab?token={quote(token, safe='')}")
        click.echo("Ctrl-C closes the tunnel; Jupyter continues")
        await tunnel.lost.wait()

    try:
        with_tunnel(project, name, act)
    except KeyboardInterrupt:
        click.echo()


def _find_jupyter(project: str, name: str, folder: str) -> tuple[int, str]:
    """Return the port and token of the session's Jupyter. Raises CommandFailure."""
    until = time.monotonic() + _JUPYTER_S
    with session() as client:
        while time.monotonic() < until:
            listed = client.exec(project, name, ["sh", "-c", _LIST])
            for server in _read_servers(b"".join(chunk.data for chunk in listed), folder):
                return server
            time.sleep(_LOOK_AGAIN_S)
    raise CommandFailure(
        "Jupyter does not answer",
        f"`cavvy logs {named(project, name)}` shows the session's output",
    )
