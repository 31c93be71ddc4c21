"""`cavvy dev`: gets a machine for interactive work, and opens a shell, an editor over SSH, or
Jupyter on it.
"""

import getpass
import json
import os
import re
import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

import click

from cavvy.cli.reach.session import list_jobs, named, session, task_project
from cavvy.cli.reach.tunnel import wait_lost, with_kept_tunnel
from cavvy.cli.task.load import param_option, read_params, read_task, yes_option
from cavvy.cli.task.options import replace_command, task_options
from cavvy.cli.task.programs import DevProgramCommand
from cavvy.cli.view.failure import CommandFailure, escape_controls, note_out
from cavvy.cli.view.formatting import ENDED, UNFINISHED
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine, Mapping, Sequence

    from cavvy.capabilities.dev.devcontainer import DevContainer
    from cavvy.capabilities.dev.mirror import FolderMirror
    from cavvy.cli.reach.tunnel import LatestTunnel
    from cavvy.client import ApiClient
    from cavvy.client.tunnel import NodeTunnel
    from cavvy.client.wire import JobDetail, JobListing
    from cavvy.domain.tasks import TaskSpec
    from cavvy.task_files import LoadedTask, ReadOptions

_T = TypeVar("_T")
_USUAL_NAME = "dev"
_USUAL_IDLE = "30m"
_HAS_JUPYTER = "jupyter lab --version > /dev/null 2>&1"
_INSTALL = f"{_HAS_JUPYTER} || python3 -m pip install --progress-bar off jupyterlab"
_START_JUPYTER = "exec jupyter lab --no-browser --ip=127.0.0.1"
_JUPYTER = f"""\
{_INSTALL}
if [ "$(id -u)" = 0 ]; then set -- --allow-root; fi
set -- --port="${{MASTER_PORT:-8888}}" --port-retries=50 --ServerApp.root_dir="$(pwd -P)" "$@"
# Kernels and terminals without work end after this time, and then Jupyter and the session. An open
# browser is no work.
set -- --MappingKernelManager.cull_idle_timeout=@IDLE_S@ \\
    --MappingKernelManager.cull_connected=True --TerminalManager.cull_inactive_timeout=@IDLE_S@ \\
    --ServerApp.shutdown_no_activity_timeout=@IDLE_S@ "$@"
{_START_JUPYTER} "$@"
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
# Starts an editor in the browser, which is installed into the session's folder if the session has
# none. Its password is in a file that only the session's user can read.
_ADD_CODE_SERVER = """\
mkdir -p .code-server && chmod 700 .code-server && cd .code-server || exit 1
PATH="$PWD/bin:$PATH"
if [ -e pid ] && kill -0 "$(cat pid)" 2> /dev/null; then exit 0; fi
if ! command -v code-server > /dev/null; then
    curl -fsSL https://code-server.dev/install.sh |
        sh -s -- --method=standalone --prefix="$PWD" > install.log 2>&1 &&
        command -v code-server > /dev/null || { tail -n 1 install.log >&2; exit 1; }
fi
PASSWORD="$(od -An -N16 -tx1 /dev/urandom | tr -d ' \\n')"
export PASSWORD
printf %s "$PASSWORD" > password
nohup setsid code-server --auth password --bind-addr 127.0.0.1:0 --disable-telemetry \\
    --disable-update-check "${PWD%/.code-server}" > log 2>&1 < /dev/null &
echo $! > pid
"""
# prints the port and the password of a code-server that listens
_FIND_CODE_SERVER = """\
cd .code-server 2> /dev/null || exit 0
sed -n 's/.*HTTP server listening on http:\\/\\/127.0.0.1:\\([0-9]*\\).*/\\1/p' log | tail -n 1
cat password
"""
_DEVCONTAINERS = (".devcontainer/devcontainer.json", ".devcontainer.json", "devcontainer.json")
_HOME = "home"  # the session's checkpoint folder, if its home folder is kept
_RESUMES = "cavvy.dev.resume"  # whether the command is `cavvy dev resume`
_MOST_ENDED = 200  # ended jobs among which a session to resume is looked for
# A shell whose home folder is kept starts there.
_HOME_SHELL = """\
export HOME="$CAVVY_CHECKPOINT_DIR"
mkdir -p "$HOME" && cd && exec "${SHELL:-/bin/sh}"
"""
_SHELL_NAME = "dev"  # of the shell that stays while its user is not connected
_LOOK_AGAIN_S = 0.5
_START_S = 300.0  # maximum seconds to wait for Jupyter, which may have to be installed first


class DevCommand(DevProgramCommand):
    """A command that accepts a task file. Instead of running the file's `run`, the command starts a
    session.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.takes(ctx, args):
            return []
        if "--" in args:
            raise click.UsageError("`cavvy dev` takes no command; use `cavvy run --machine NAME`")
        if args[:1] == ["resume"]:
            ctx.meta[_RESUMES], args = True, ["--home", *args[1:]]
        rest = super().parse_args(ctx, args)  # `--help` ends here
        from cavvy.spec.translation import WAIT

        line = _JUPYTER if ctx.params.get("ide") == "jupyter" else WAIT
        replace_command(ctx, line, "dev", starts=not ctx.meta.get(_RESUMES))
        if ctx.params.get("file") is None and not ctx.params.get("no_devcontainer"):
            ctx.params["file"] = _find_devcontainer(Path())
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return click.Command.collect_usage_pieces(self, ctx)  # without `-- COMMAND`


@click.command("dev", cls=DevCommand)
@task_options
@param_option
@yes_option
@click.option("-p", "--project", default=None, help="The project of the machine.")
@click.option(
    "--ide",
    type=click.Choice(["ssh", "vscode", "cursor", "zed", "jetbrains", "jupyter", "code-server"]),
    default="ssh",
    help="What to open: a shell; VS Code, Cursor, Zed or JetBrains Gateway over SSH; Jupyter or "
    "code-server in a browser.",
)
@click.option(
    "--idle-gpu",
    metavar="PERCENT",
    help="Also end the session if GPU use stays below PERCENT for the time of --keep, even if CPUs "
    "or users are busy.",
)
@click.option(
    "--home",
    is_flag=True,
    help="Keep the shell's home folder: save it as it changes, and restore it when the command "
    "starts a session on this machine again, also on other nodes.",
)
@click.option(
    "--sync",
    "sync_folder",
    metavar="FOLDER",
    type=click.Path(exists=True, file_okay=False),
    help="While the command runs, mirror FOLDER and the session's folder, in both directions.",
)
@click.option(
    "--take-new",
    is_flag=True,
    help="With --sync: fetch files whose names are new in the session without a question, although "
    "commands here may obey files by their names.",
)
@click.option("--no-open", is_flag=True, help="Only start the session and show how to connect.")
@click.option(
    "--no-devcontainer", is_flag=True, help="Do not read this folder's devcontainer.json."
)
def command(
    file: str,
    options: "ReadOptions",
    param: tuple[str, ...],
    yes: bool,
    project: str | None,
    ide: str,
    idle_gpu: str | None,
    home: bool,
    sync_folder: str | None,
    take_new: bool,
    no_open: bool,
    no_devcontainer: bool,
) -> None:
    """Get a machine for interactive work, and open a shell, an editor or Jupyter on it.

    The machine's name is --machine (default: dev). Run the command again to reconnect. The
    session and its machine end after they have been idle for --keep (default: 30m): no output, no
    CPU use by your programs and no connection. Before the session ends, a warning appears in the
    job's events. With --idle-gpu 5%, the session also ends when the GPUs have been idle for the
    time --keep, even if CPUs or users are busy. With a task file, the session has the file's
    resources, setup, folder and environment, but does not run the file's commands. Without a task
    file, the session follows the folder's devcontainer.json, if there is one.

    `cavvy dev app.py` is for a file that makes an app of functions: it calls the app's main
    function, and calls it again with the new code whenever a file of the folder is saved.

    `cavvy dev resume` reconnects to the session of --machine, or if it has ended starts it again
    with the files of its kept home (--home), on the nodes that are cheapest then. --provider,
    --region, --gpu, --spot and --max-price say where. It never starts a session without the files.

    With --pool, the session takes over an idle node of the pool, such as those of the pool's min,
    and `cavvy stop` returns the node to the pool. --machine then names the session (default:
    dev-USER).
    """
    from cavvy.cli.task.submission import submit_loaded

    params = read_params(param)
    sync = _read_sync(sync_folder, take_new=take_new)
    container = _read_devcontainer(file, options)
    if container is not None:
        options = _follow_devcontainer(container, options)
    loaded = _read_session(file, params, options, ide, idle_gpu, home)
    name = loaded.task.machine or loaded.task.name
    with session() as client:
        project = task_project(project, loaded.task)
        resources = json.loads(options.overrides or "{}").get("resources", {}) if home else None
        job, seen = _find_or_resume(client, loaded, project, name, resources, yes)
        if job is None:
            made = submit_loaded(client, loaded, file, params, project, name, yes)
            job = client.job(project, made.name)
        try:
            _wait(client, job, seen)
            _say_machine(client, job)
            ports = container.ports if container is not None else ()
            way = _find_way(client, job, name, ide, ports, sync)
            _connect(way, ide, no_open=no_open)
        except KeyboardInterrupt:
            _say_continues(job, name)
            raise


def _find_or_resume(
    client: "ApiClient",
    loaded: "LoadedTask",
    project: str,
    name: str,
    resources: dict[str, object] | None,
    yes: bool,
) -> "tuple[JobDetail | None, int]":
    """Return the job of the session, and the number of its last event before it was resumed. A
    session whose home is kept is resumed with these keys of its resources replaced; `resources` is
    None if the home is not kept. Raises CommandFailure if `cavvy dev resume` finds no session.
    """
    resumes = click.get_current_context().meta.get(_RESUMES)
    job, seen = _find_session(client, project, name), 0
    if job is not None:
        if resources and resumes:
            raise CommandFailure(
                f"session {job.name} still has its nodes",
                f"`{_end_command(job)}` ends it, and then this command resumes it elsewhere",
            )
        click.echo(f"session {job.name} is already running; the options are ignored", err=True)
    elif resources is not None:
        job, seen = _resume_session(client, project, name, resources, yes)
    if job is None and resumes:
        there = named(project, name)
        pool = f" --pool {loaded.task.pool}" if loaded.task.pool else ""
        raise CommandFailure(
            f"no session {there} has a kept home",
            f"`cavvy dev --home --machine {there}{pool}` starts one; "
            "`cavvy machines` lists the names of machines",
        )
    return job, seen


def _find_way(
    client: "ApiClient",
    job: "JobDetail",
    name: str,
    ide: str,
    ports: "Sequence[int]",
    sync: "_SyncedFolder | None",
) -> "_SessionWay":
    """Return the way to the session, in which Jupyter or code-server runs if `ide` needs it."""
    folder = _read_folder(_output(client, job, ["pwd", "-P"]))
    if ide == "jupyter" and _START_JUPYTER not in _task(job)["run"]:
        _add_jupyter(client, job, folder)
    if ide == "code-server":
        _add_code_server(client, job)
    return _SessionWay(
        project=job.project,
        name=name if job.machine is not None else job.name,
        again=_again_command(job, name),
        end=_end_command(job),
        folder=folder,
        ports=ports,
        home=(_task(job).get("checkpoint") or {}).get("path") == _HOME,
        sync=sync,
    )


def _say_continues(job: "JobDetail", name: str) -> None:
    there = named(job.project, job.machine or job.name)
    click.echo(
        f"\nsession {there} continues; reconnect with: {_again_command(job, name)}    "
        f"end the session: {_end_command(job)}",
        err=True,
    )


def _again_command(job: "JobDetail", name: str) -> str:
    """Return the command that reconnects, and starts another session if this one has ended."""
    pool = _task(job).get("pool")
    return f"cavvy dev {f'--pool {pool} ' if pool else ''}--machine {named(job.project, name)}"


def _end_command(job: "JobDetail") -> str:
    """Return the command that ends the session. The node of a pool then waits for the next job."""
    if job.machine is None:
        return f"cavvy stop {named(job.project, job.name)}"
    return f"cavvy machines stop {named(job.project, job.machine)}"


def _find_devcontainer(folder: Path) -> str | None:
    """Return the file that describes the folder, or None. Raises CommandFailure if there are
    several.
    """
    for name in _DEVCONTAINERS:
        if (folder / name).is_file():
            return str(folder / name)
    found = sorted(str(each) for each in folder.glob(".devcontainer/*/devcontainer.json"))
    if len(found) > 1:
        hint = f"name one, as in `cavvy dev {shlex.quote(found[0])}`, or add --no-devcontainer"
        raise CommandFailure(f"there are several of them: {', '.join(found[:5])}", hint, 2)
    return found[0] if found else None


def _read_devcontainer(file: str, options: "ReadOptions") -> "DevContainer | None":
    """Return the file's content if it is a `devcontainer.json`. Raises CommandFailure."""
    if options.text is not None or Path(file).name not in _DEVCONTAINERS[1:]:
        return None
    from cavvy.capabilities.dev.devcontainer import read_file
    from cavvy.spec import SpecError

    try:
        found = read_file(Path(file), os.environ)
    except SpecError as error:
        raise CommandFailure(str(error), "--no-devcontainer ignores the file", 2) from error
    except OSError as error:
        raise CommandFailure(f"{file}: {error.strerror}", exit_code=2) from error
    click.echo(f"the session follows {file}", err=True)
    for each in found.kept:
        note_out(str(each))
    if found.extensions:
        listed = " ".join(f"--install-extension {each}" for each in found.extensions)
        note_out(f"extensions of VS Code that the file names: {listed}")
    return found


def _follow_devcontainer(container: "DevContainer", options: "ReadOptions") -> "ReadOptions":
    """Return options by which the task is that of the `devcontainer.json`. Raises CommandFailure if
    no GPU was chosen for a new session although the file needs one.
    """
    from cavvy.domain.values import replace

    overrides = json.loads(options.overrides or "{}")
    context = click.get_current_context(silent=True)
    starts = context is None or not context.meta.get(_RESUMES)
    if starts and container.needs_gpu and "gpu" not in overrides.get("resources", {}):
        hint = "name one, such as --gpu A10; `cavvy offers` lists them"
        raise CommandFailure(f"{container.file}: `hostRequirements.gpu` needs a GPU", hint, 2)
    _agree_to_variables(container, overrides.get("env", {}))
    # the folder around the file, which the file cannot change
    overrides.setdefault("workdir", container.task["workdir"])
    text = json.dumps(container.task)
    return replace(options, text=text, dialect="cavvy", overrides=json.dumps(overrides))


def _agree_to_variables(container: "DevContainer", named: "Mapping[str, str]") -> None:
    """Ask before values of this machine's variables leave it, except of those that the command line
    has `named`: a file that was cloned may name any token. Raises CommandFailure without a
    terminal.
    """
    from cavvy.cli.task.submission import may_ask

    taken = [each for each in container.taken if each not in named]
    if not taken:
        return
    told = f"{container.file} takes the values of variables of this machine: {', '.join(taken)}"
    if not may_ask():
        options = " ".join(f"--env {each}" for each in taken)
        hint = f"if the session may have them, name them: {options}; --yes does not agree to it"
        raise CommandFailure(f"{told}; nothing was sent", hint, 2)
    click.echo(escape_controls(told), err=True)
    click.confirm("send them to the session?", abort=True, err=True)


def _read_session(
    file: str,
    params: dict[str, str],
    options: "ReadOptions",
    ide: str,
    idle_gpu: str | None,
    home: bool = False,
) -> "LoadedTask":
    """Read the task file, and return the task of a session. The session's idle limit is the keep
    time of its machine. A session in a pool has no machine, because it takes over a node of the
    pool: its job has the name that the machine would have, or is named after the user.

    If the file itself describes a session, such as a dstack `dev-environment`, the file's commands
    and idle limit are used.
    """
    from cavvy.domain.values import replace
    from cavvy.spec.problems import slug

    overrides = json.loads(options.overrides or "{}")
    pooled = "pool" in overrides
    given = {key: overrides.pop(key) for key in ("machine", "keep") if key in overrides}
    if options.text is None or file == "-" or Path(file).name in _DEVCONTAINERS[1:]:
        own = {key: value for key, value in overrides.items() if key != "run"}
        task = read_task(file, params, replace(options, overrides=json.dumps(own))).task
        pooled = task.pool is not None
        if task.session and ide != "jupyter":
            overrides = own
        if task.machine is not None:
            given.setdefault("machine", task.machine)
        if length := task.limits.idle or task.keep:
            given.setdefault("keep", length.total_seconds())
        idle_gpu = idle_gpu or str(task.limits.idle_gpu_percent or "")
    idle = given.setdefault("keep", _USUAL_IDLE)
    if pooled:
        overrides["name"] = given.get("machine") or slug(f"{_USUAL_NAME}-{getpass.getuser()}")
    else:
        overrides |= {"machine": _USUAL_NAME} | given
    limits = overrides.setdefault("limits", {})
    limits["idle"] = {"gpu": idle_gpu, "for": idle} if idle_gpu else idle
    overrides["session"] = True
    if home:
        overrides["checkpoint"] = {"path": _HOME, "every": "10m"}
    loaded = read_task(file, params, replace(options, overrides=json.dumps(overrides)))
    if ide == "jupyter":
        if loaded.task.setup is None:
            overrides["setup"] = _INSTALL  # Jupyter is installed into a separate environment.
        overrides["run"] = _JUPYTER.replace("@IDLE_S@", _idle_s(loaded.task))
        loaded = read_task(file, params, replace(options, overrides=json.dumps(overrides)))
    return loaded


def _idle_s(task: "TaskSpec") -> str:
    return str(round((task.limits.idle or task.keep).total_seconds()))


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
    from msgspec.json import decode

    from cavvy.domain.tasks import TaskSpec

    line = _ADD_JUPYTER.replace("@IDLE_S@", _idle_s(decode(job.task, type=TaskSpec)))
    chunks = list(client.exec(job.project, job.name, ["sh", "-c", line]))
    if chunks[-1].exit_code == 0:
        return
    there = named(job.project, job.machine or job.name)
    lines = b"".join(chunk.data for chunk in chunks).decode(errors="replace").split("\n")
    raise CommandFailure(
        f"Jupyter could not be installed in session {job.name}: "
        + (next((line for line in reversed(lines) if line.strip()), "no output")),
        f"`{_end_command(job)}` ends the session; "
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
        if job := _read_named(client, row, name):
            return job  # A session may still be queued and have no node.
    machines = [each for each in client.machines(project) if each.name == name]
    if not machines or machines[0].job is None or machines[0].state not in ("starting", "busy"):
        return None
    job = client.job(project, machines[0].job)
    if job.name.startswith(f"{name}-start") and _task(job)["run"] == "true":
        return None
    there = named(project, job.name)
    raise CommandFailure(
        f"machine {name} runs job {job.name}",
        f"`cavvy ssh {there}` opens a shell in the job's environment; "
        f"`cavvy stop {there}` ends the job",
    )


def _read_named(client: "ApiClient", row: "JobListing", name: str) -> "JobDetail | None":
    """Return the job if it is a session with this name: that of its machine or, in a pool, of its
    job. The server adds a number to the job's name if an earlier session had it.
    """
    names = {row.machine} if row.machine else {row.name, re.sub(r"-[0-9]+$", "", row.name)}
    if name not in names:
        return None
    job = client.job(row.project, row.id)
    known = {row.machine or row.name, None if row.machine else _task(job)["name"]}
    return job if name in known and _is_session(job) else None


def _resume_session(
    client: "ApiClient", project: str, name: str, resources: dict[str, object], yes: bool
) -> "tuple[JobDetail | None, int]":
    """Queue the machine's newest session with a kept home folder again, with these keys of its
    resources replaced. Return it, or None if there is none, and the number of its last event
    before.
    """
    from cavvy.cli.task.submission import ask_consent

    for row in list_jobs(client, project, ENDED, _MOST_ENDED)[0]:
        job = _read_named(client, row, name)
        if job and (_task(job).get("checkpoint") or {}).get("path") == _HOME:
            seen = client.events(project, job.id).last

            def retry(consent: bool, session: str = job.id) -> None:
                client.retry(project, session, resources=resources, consent=consent)

            ask_consent(yes, retry, "add --yes to agree")
            what = (
                "; only the options of its resources apply"
                if resources
                else ("; the options are ignored")
            )
            click.echo(f"session {job.name} is resumed{what}", err=True)
            return client.job(project, job.id), seen
    return None, 0


def _wait(client: "ApiClient", job: "JobDetail", seen: int) -> None:
    """Show the session's events and the output of its setup until the session is running. Events
    up to the number `seen` belong to an earlier attempt. Raises CommandFailure if the session ends.
    """
    if job.phase == "running":
        return
    from cavvy.cli.reach.follow import follow_start

    follow_start(client, job, after=seen, first=job.attempt + 1 if seen else None)
    ended = client.job(job.project, job.id)
    if ended.phase in UNFINISHED:
        return
    raise CommandFailure(
        f"session {job.name}: {ended.phase}, {ended.reason}",
        f"`cavvy logs {named(job.project, job.name)}` shows the session's output",
    )


def _say_machine(client: "ApiClient", job: "JobDetail") -> None:
    from cavvy.cli.run import say_machine

    if job.machine is not None:
        click.echo(say_machine(client.machine(job.project, job.machine)), err=True)


class _SyncedFolder(Struct, frozen=True, kw_only=True):
    """The folder of this machine that is mirrored."""

    path: Path
    take_new: bool  # whether names that are new in the session arrive without a question


class _SessionWay(Struct, frozen=True, kw_only=True):
    """The session to connect to, and what runs beside each connection."""

    project: str
    name: str
    again: str  # the command that reconnects to the session
    end: str  # the command that ends the session
    folder: str  # of the session, on its node
    ports: "Sequence[int]"  # forwarded to this machine
    home: bool  # whether the session's home folder is kept
    sync: "_SyncedFolder | None"

    @property
    def there(self) -> str:
        return named(self.project, self.name)


def _connect(way: _SessionWay, ide: str, *, no_open: bool) -> None:
    if way.sync is not None:
        _agree_to_send(_make_mirror(way, way.sync))
    if ide in ("jupyter", "code-server"):
        _open_page(way, ide, no_open=no_open)
    elif ide != "ssh":
        from cavvy.cli.reach.ssh_config import open_editor

        open_editor(way.project, way.name, way.folder, ide, no_open=no_open)
    if not no_open and ide == "ssh" and sys.stdin.isatty() and sys.stdout.isatty():
        _open_shell(way)
    elif way.sync is not None and (no_open or ide not in ("jupyter", "code-server")):
        _sync(way, once=no_open)
    if way.sync is not None:
        _agree_to_take(way, way.sync)
    click.echo(f"the session continues until it is idle; reconnect with: {way.again}")
    click.echo(f"open a shell: cavvy ssh {way.there}    end the session: {way.end}")


def _read_sync(folder: str | None, *, take_new: bool) -> _SyncedFolder | None:
    """Return what --sync and --take-new ask for. Raises CommandFailure, UsageError."""
    if folder is not None:
        return _SyncedFolder(path=_find_sync(Path(folder)), take_new=take_new)
    if take_new:
        raise click.UsageError("--take-new needs --sync FOLDER")
    return None


def _find_sync(folder: Path) -> Path:
    """Return the real path of a folder to mirror, after a question about a link that leads out of
    its repository. Raises CommandFailure for a folder with the user's keys.
    """
    from cavvy.cli.view.links import agree_to_exit
    from cavvy.client.state import default_home

    hint = f"if you want to mirror that, name it: --sync {folder.resolve()}"
    agree_to_exit(folder, "mirror what is there?", "nothing was sent", hint)
    real = folder.resolve()
    if real == Path.home().resolve() or Path(default_home()).resolve().is_relative_to(real):
        raise CommandFailure(
            f"{folder} is a home folder, or has Cavvy's own state in it, with keys that a session "
            "must not read; nothing was sent",
            "name a folder below it: --sync FOLDER",
            exit_code=2,
        )
    return real


def _make_mirror(way: _SessionWay, sync: _SyncedFolder) -> "FolderMirror":
    from cavvy.capabilities.dev.mirror import FolderMirror

    name = f"{way.project}/{way.name}"
    return FolderMirror(sync.path, way.folder, name, take_new=sync.take_new)


def _agree_to_send(mirror: "FolderMirror") -> None:
    """Ask about what was ignored when the folder was first mirrored, and no longer is. --yes agrees
    to costs only; without a terminal, it stays here.
    """
    from cavvy.cli.task.submission import may_ask
    from cavvy.cli.view.formatting import show_size

    released = mirror.find_released() if may_ask() else {}
    if not released:
        return
    for path, size in released.items():
        told = f"{path} ({show_size(size)}) was ignored when the session began, and no longer is"
        click.echo(escape_controls(told), err=True)
    if click.confirm("send it to the session?", err=True):
        mirror.release(released)


def _agree_to_take(way: _SessionWay, sync: _SyncedFolder) -> None:
    """Ask about names that are new in the session, and fetch them. Without a terminal, they stay
    there.
    """
    from cavvy.cli.reach.received import name_some
    from cavvy.cli.task.submission import may_ask

    mirror = _make_mirror(way, sync)
    if not (names := mirror.list_waiting()) or not may_ask():
        return
    told = f"new in the session, beside files of yours in {sync.path}: {name_some(names)}"
    click.echo(escape_controls(told), err=True)
    click.echo("commands that you run there may obey files by their names", err=True)
    if click.confirm("fetch them?", err=True):
        mirror.take(names)
        _sync(way, once=True)


def _sync(way: _SessionWay, *, once: bool) -> None:
    """Mirror the folder once, or until Ctrl-C."""
    assert way.sync is not None
    mirror = _make_mirror(way, way.sync)

    async def act(tunnel: "NodeTunnel", latest: "LatestTunnel") -> None:
        if not once:
            await mirror.keep(tunnel, _say)
        done = await mirror.settle(tunnel, _say)
        click.echo(f"sync: {done.sent} sent, {done.fetched} fetched, {done.removed} removed")

    if not once:
        click.echo(f"{way.sync.path} is mirrored until Ctrl-C", err=True)
    try:
        with_kept_tunnel(way.project, way.name, act)
    except KeyboardInterrupt:
        click.echo()


def _say(text: str) -> None:
    """Print a message beside a shell, whose terminal is in raw mode."""
    click.echo(f"\r{escape_controls(text)}\r", err=True)


async def _beside(way: _SessionWay, tunnel: "NodeTunnel", act: "Coroutine[Any, Any, _T]") -> "_T":
    """Mirror the folder while `act` runs. The mirror's errors end it."""
    if way.sync is None:
        return await act
    import asyncio

    mirror = _make_mirror(way, way.sync)
    main, copies = asyncio.ensure_future(act), asyncio.ensure_future(mirror.keep(tunnel, _say))
    try:
        await asyncio.wait([main, copies], return_when=asyncio.FIRST_COMPLETED)
        if not main.done() and isinstance(copies.exception(), CommandFailure):
            _say(f"sync has stopped: {copies.exception()}")
        return await main
    finally:
        for each in (main, copies):
            each.cancel()
        await asyncio.gather(main, copies, return_exceptions=True)


def _open_shell(way: _SessionWay) -> None:
    """Open the session's shell, which stays while its user is not connected."""
    from cavvy.cli.access import listen_latest
    from cavvy.cli.reach.tunnel import read_input, run_here

    opened: list[asyncio.Queue[bytes]] = []

    async def act(tunnel: "NodeTunnel", latest: "LatestTunnel") -> int:
        if not opened:
            await listen_latest(tunnel, latest, way.ports)
            opened.append(read_input())
        line = _HOME_SHELL if way.home else None
        shell = run_here(
            tunnel, argv=None, line=line, terminal=True, keep=_SHELL_NAME, keys=opened[0]
        )
        return await _beside(way, tunnel, shell)

    with_kept_tunnel(way.project, way.name, act)


def _add_code_server(client: "ApiClient", job: "JobDetail") -> None:
    """Start code-server in the session, unless it runs. Raises CommandFailure if it cannot be
    installed.
    """
    chunks = list(client.exec(job.project, job.name, ["sh", "-c", _ADD_CODE_SERVER]))
    if chunks[-1].exit_code:
        output = b"".join(chunk.data for chunk in chunks).decode(errors="replace").strip()
        raise CommandFailure(
            f"code-server could not be installed in session {job.name}: "
            + (output.rpartition("\n")[2] or "no output"),
            "use an image that contains code-server, or install it in the task's `setup`",
        )


def _open_page(way: _SessionWay, ide: str, *, no_open: bool) -> None:
    """Forward a local port to the session's Jupyter or code-server until Ctrl-C, and print the
    address with its token or password. With `no_open`, only print the address on the node.
    """
    from cavvy.cli.access import listen_here, listen_latest

    port, secret = (
        _find_jupyter(way.project, way.name, way.folder)
        if ide == "jupyter"
        else _find_code_server(way.project, way.name)
    )
    path = f"/lab?token={quote(secret, safe='')}" if ide == "jupyter" else "/"
    if ide != "jupyter":
        click.echo(f"password: {secret}")
    if no_open:
        click.echo(f"on the node: http://127.0.0.1:{port}{path}")
        click.echo(f"bring it here: {way.again} --ide {ide}")
        return
    said: list[int] = []

    async def act(tunnel: "NodeTunnel", latest: "LatestTunnel") -> None:
        if not said:
            said.append(await listen_here(latest, "127.0.0.1", 0, "127.0.0.1", port))
            click.echo(f"http://127.0.0.1:{said[0]}{path}")
            click.echo(f"Ctrl-C closes the tunnel; {ide.capitalize()} continues")
            await listen_latest(tunnel, latest, way.ports)
        await _beside(way, tunnel, wait_lost(tunnel))

    try:
        with_kept_tunnel(way.project, way.name, act)
    except KeyboardInterrupt:
        click.echo()


def _find_code_server(project: str, name: str) -> tuple[int, str]:
    """Return the port and password of the session's code-server. Raises CommandFailure."""
    until = time.monotonic() + _START_S
    with session() as client:
        while time.monotonic() < until:
            chunks = client.exec(project, name, ["sh", "-c", _FIND_CODE_SERVER])
            said = b"".join(chunk.data for chunk in chunks).decode(errors="replace").split()
            if len(said) == 2 and said[0].isdigit() and said[1].isalnum():
                return int(said[0]), said[1]
            time.sleep(_LOOK_AGAIN_S)
    raise CommandFailure(
        "code-server does not answer",
        f"`cavvy exec {named(project, name)} cat .code-server/log` shows its output",
    )


def _find_jupyter(project: str, name: str, folder: str) -> tuple[int, str]:
    """Return the port and token of the session's Jupyter. Raises CommandFailure."""
    until = time.monotonic() + _START_S
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
