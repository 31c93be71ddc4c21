"""Prepares the working folder and runs the setup, in a separate process because both steps may take
a long time.

A setup that has finished on this machine is not run again. `cache/setups/KEY@HOST/` contains the
results of a setup. `venv` is the virtual environment that comes first in the PATH of the setup and
the task. `dir` is a folder for the setup's own files; the variable CAVVY_SETUP_DIR contains the
folder's path. `tree` is a copy of the working folder after the setup; later attempts start with
this copy. The file `finished` is written last. KEY is a hash of the setup and of the files that the
setup uses. If several agents need the setup with the same key, one agent runs the setup and the
other agents wait.

If a setup lists the files that it uses, the setup runs in a folder with only these files. After the
setup, the setup's results are copied into the complete working folder.

Creates the virtual environment of a setup, in which the setup can install packages with pip
without changing the node's own Python.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import pkgutil
import shutil
import sys
from collections.abc import Iterator

from ..allowed_folders import AllowedFolders, LeadsOutside
from ..config import AgentConfig
from ..disk import open_private, write_whole
from ..documents import CheckpointConfig, WorkConfig
from ..gpu_faults import NETWORK
from ..http_client import StorageTimeout, TransferFailed
from ..images.compatibility import find_misfit
from ..tunnel import TunnelFailed, check_tunnel
from .cache import touch
from .environment import SHELL_LINE, find_shell
from .folder import CannotBuild, build_folder, inside, link_checkpoint, run, transfer
from .reaper import report
from .setup_meter import end_turn, take_turn
from .trees import copy_tree, remove_tree, replace_in
from .view import find_setup, make_view

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from .view import WorkView


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)

# A program that stands in for a missing pip, so that no pip of another Python is found on PATH.
NO_PIP = """#!/bin/sh
echo "cavvy: this node has no pip for the job's virtual environment: install python3-venv or uv \
on the node, or name an image" >&2
exit 1
"""
PUT_PIP = """mkdir -p "$0/bin"
for name in pip pip3; do printf %s "$1" >"$0/bin/$name"; chmod 755 "$0/bin/$name"; done"""
WITHOUT_PIP = 3  # exit code of make_venv.py if there is no pip


class SetupFailed(Exception):
    """Raised if the setup script ended with a non-zero exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the setup ended with exit code {code}")
        self.code = code


def prepare(config: AgentConfig, work: WorkConfig, env: dict[str, str], channel: int) -> int:
    """Prepare the folder, the inputs and the setup. Lines written to `channel` report the start of
    the setup, events, and at the end the result as JSON.
    """
    outcome, code, reason, reused = "", None, "", False
    try:
        reused = _prepare(config, work, env, channel)
    except SetupFailed as error:
        outcome, code, reason = "setup", error.code, str(error)
    except (CannotBuild, TunnelFailed) as error:
        outcome, reason = "setup", str(error)
    except StorageTimeout as error:
        # Not the task's fault: another attempt may reach the storage.
        outcome, reason = NETWORK, str(error)
    except OSError as error:
        outcome = "node" if error.errno in FULL else "setup"
        reason = f"the working folder could not be created: {error}"
    return report(channel, outcome, reason, code, reused=reused)


def carry_out(config: AgentConfig, work: WorkConfig, channel: int) -> int:
    """Copy the outputs of successful work to their targets. Return the process's exit code: 0 or a
    code of sysexits.h."""
    try:
        copy_outputs(config, work, write_log)
        for index, each in enumerate(work.outputs):
            if "://" in each.target:
                _send(config, work, index, channel)
    except (CannotBuild, OSError) as error:
        write_log(f"an output could not be copied: {error}")
        return os.EX_IOERR
    return 0


def write_log(text: str) -> None:
    """Write a line to the job's log."""
    os.write(2, f"cavvy: {text}\n".encode("utf-8", "backslashreplace"))


def copy_outputs(config: AgentConfig, work: WorkConfig, refuse: Callable[[str], None]) -> None:
    """Copy the outputs whose targets are paths of this node; `refuse` is called for each link that
    leads out of the job's folders. Raises CannotBuild, OSError."""
    from ..data.paths import find_folders, find_output

    for index, target in enumerate(each.target for each in work.outputs):
        if "://" not in target:
            path, _ = find_output(config, work, index)
            own, full = find_folders(config, work), os.path.abspath(os.path.expanduser(target))
            try:
                transfer(config, own, path, None, full, "output", refuse)
            except LeadsOutside as error:
                raise CannotBuild(f"{path}: {error}") from error


def _send(config: AgentConfig, work: WorkConfig, index: int, channel: int) -> None:
    from ..data.paths import find_folders, find_output
    from ..data.transfer import tell_to
    from ..data.upload import send_output

    source, known = find_output(config, work, index)
    folders, target = find_folders(config, work), work.outputs[index].target
    try:
        meter = send_output(
            config,
            folders,
            index,
            source,
            target,
            tell_to(channel),
            known,
            refuse=write_log,
            sent=lambda size: tell_to(channel, f"sent {index}")(str(size)),
        )
    except TransferFailed as error:
        raise CannotBuild(str(error)) from error
    except LeadsOutside as error:
        raise CannotBuild(f"{source}: {error}") from error
    if meter.files or index not in work.mirrored:
        meter.end()  # report only files that were not reported while the work ran


def bring_inputs(config: AgentConfig, work: WorkConfig, channel: int) -> None:
    """Copy every input to its path in the working folder. Raises CannotBuild, StorageTimeout,
    OSError."""
    from ..data.paths import find_input, link_input, link_mount, list_input_folders, remember

    folders = list_input_folders(config)
    for index, each in enumerate(work.inputs):
        source, target = each.source, each.target
        if target in config.placed:
            continue
        if index in work.mounted:
            if work.image is None:
                link_mount(config, index, target)
            continue
        path = find_input(config, index, target)
        if index in work.streams:
            from ..data.stream import make_pipe

            make_pipe(folders, path)
            if work.image is None:
                link_input(config, path, target)
            continue
        if "://" not in source:
            sources = AllowedFolders([], ["/"])  # the user named the source, so it may be anywhere
            transfer(config, sources, os.path.abspath(source), folders, path, "input")
        else:
            from ..data.fetch import fetch_input
            from ..data.transfer import tell_to

            try:
                fetch_input(config, folders, index, source, path, tell_to(channel))
            except TransferFailed as error:
                kind = StorageTimeout if isinstance(error, StorageTimeout) else CannotBuild
                raise kind(f"the input {source} cannot be copied: {error}") from error
            if any(output.target == source for output in work.outputs):
                remember(config, index, path)
        if work.image is None:
            link_input(config, path, target)


def _prepare(config: AgentConfig, work: WorkConfig, env: dict[str, str], channel: int) -> bool:
    """Prepare the folder; return whether a finished setup was reused. Raises SetupFailed,
    CannotBuild, StorageTimeout, OSError.
    """
    reused = False
    if work.tunnel is not None:
        check_tunnel(config, work)
    if (
        work.setup is None or work.image is not None
    ):  # a container runs the setup itself, in its own file system
        build_folder(config, work, config.folder, env)
        _check_fit(config, work)
    else:
        reused = _set_up(config, work, env, channel)
    if work.volumes and work.image is None:
        from ..data.mounts import link_volumes

        link_volumes(config, work, config.folder)
    pulling = _begin_pull(config, work)
    bring_inputs(config, work, channel)  # runs after the setup, which must not depend on inputs
    if pulling is not None:
        os.waitpid(pulling, 0)
    if work.checkpoint is not None:
        if work.checkpoint.sync:
            _go_on(
                config, work, work.checkpoint, inside(config.folder, work.checkpoint.path), channel
            )
        link_checkpoint(work.checkpoint, config.folder)
    return reused


def _begin_pull(config: AgentConfig, work: WorkConfig) -> int | None:
    """Begin to pull the image while inputs are copied, in a process whose ID is returned. If this
    fails, the start of the container tries again and reports the error.
    """
    copied = any("://" in each.source for each in work.inputs)
    if work.image is None or work.build is not None or not copied:
        return None
    from .container import fetch_image

    pid = os.fork()
    if pid == 0:
        try:
            fetch_image(config, work)
        finally:
            os._exit(0)
    return pid


def _go_on(
    config: AgentConfig, work: WorkConfig, checkpoint: CheckpointConfig, folder: str, channel: int
) -> None:
    """Download the newest checkpoint that the control plane has stored. Raises CannotBuild,
    StorageTimeout, OSError.
    """
    from ..data.transfer import tell_to
    from .checkpoint_restore import restore, settle

    heard = tell_to(channel, "waits")

    def tell(text: str) -> None:
        heard(f"while fetching the newest checkpoint: {text}")

    try:
        if checkpoint.storage is None:
            told = restore(config, folder, tell)
        else:
            told = settle(config, checkpoint.storage, work.attempt, tell)
    except TransferFailed as error:
        kind = StorageTimeout if isinstance(error, StorageTimeout) else CannotBuild
        raise kind(f"the newest checkpoint cannot be fetched: {error}") from error
    if told:
        os.write(channel, f"restored {told}\n".encode())


def _await_turn(lock: int, channel: int) -> None:
    """Wait until no other agent on this machine runs the same setup. Its output is only in the log
    of the other agent's job, so the user is told of the wait.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        from ..data.transfer import tell_to

        text = "another job on this machine runs the same setup; this job then uses its result"
        write_log(text)
        tell_to(channel, "waits")(text)
        fcntl.flock(lock, fcntl.LOCK_EX)


def _set_up(config: AgentConfig, work: WorkConfig, env: dict[str, str], channel: int) -> bool:
    kept = find_setup(config, work)
    os.makedirs(kept, mode=0o700, exist_ok=True)
    lock = open_private(kept + "/lock")
    if not os.path.exists(kept + "/finished"):
        os.write(
            channel, b"setup\n"
        )  # report the setup even if another agent is running the same setup
    _await_turn(lock, channel)
    try:
        if os.path.exists(kept + "/finished"):
            _restore(config, work, kept, config.folder, env)
            return True
        take_turn(kept, config)
        build_folder(config, work, config.folder, env, work.setup_uses)
        _check_fit(config, work)
        remove_tree(kept + "/dir")  # remove the partial results of a failed setup
        os.mkdir(kept + "/dir")
        view = make_view(config)
        if not config.boxed:
            make_venv(kept + "/venv", env, view)
        write_whole(config.setup_script, (work.setup or "") + "\n")
        os.chdir(config.folder)
        code = run(
            [find_shell(), "-e", "-c", SHELL_LINE, config.setup_script],
            setup_environment(work, env),
            view,
        )
        if code:
            raise SetupFailed(code)
        _keep(kept, config.folder)
        if work.setup_uses is not None:
            os.chdir(config.home)
            _restore(config, work, kept, config.folder, env)
    finally:
        end_turn(kept)
        os.close(lock)
    return False


def _check_fit(config: AgentConfig, work: WorkConfig) -> None:
    """Raises CannotBuild if the work's packages or image cannot use this node's accelerators."""
    if reason := find_misfit(config, work, config.folder):
        raise CannotBuild(reason)


def _keep(kept: str, folder: str) -> None:
    """Save the folder as it is after the setup, and list the files that contain the folder's
    path."""
    remove_tree(kept + "/tree")
    marked = copy_tree(folder, kept + "/tree", folder.encode())
    write_whole(kept + "/finished", json.dumps({"folder": folder, "marked": marked}), sync=True)


def setup_environment(work: WorkConfig, env: dict[str, str]) -> dict[str, str]:
    """Return the environment of a setup. The environment contains the task's parameters only if the
    setup mentions parameters; in this case, the setup's key includes the parameters' values.
    """
    if "CAVVY_PARAM_" in (work.setup or ""):
        return env
    return {name: value for name, value in env.items() if not name.startswith("CAVVY_PARAM_")}


def _restore(
    config: AgentConfig, work: WorkConfig, kept: str, folder: str, env: dict[str, str]
) -> None:
    """Recreate the working folder in its state after the setup. In all scripts, the path of the
    original folder is replaced by the path of the new folder.
    """
    if work.setup_uses is None:
        remove_tree(folder)
    else:
        build_folder(config, work, folder, env)
    copy_tree(kept + "/tree", folder)
    with open(kept + "/finished", encoding="utf-8") as file:
        found = json.load(file)
    for path in found["marked"]:
        replace_in(folder, path, found["folder"].encode(), folder.encode())
    touch(kept + "/finished")


def use_venv(env: dict[str, str], folder: str) -> None:
    """Add the environment at `folder`, which need not exist yet, at the beginning of the PATH."""
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    env["VIRTUAL_ENV"] = folder


def make_venv(folder: str, env: dict[str, str], view: WorkView | None = None) -> None:
    """Replace the environment with a new one, created with uv if uv is installed. The environment
    uses the first suitable Python on the job's PATH, else the agent's own Python. The task
    chooses the programs that run here, so they see only what `view` shows.

    If no Python is suitable, the environment contains only a program `pip` that explains the
    problem. Raises OSError.
    """
    source = (pkgutil.get_data(__package__ or "", "make_venv.py") or b"").decode()
    uv = shutil.which("uv", path=f"{env['PATH']}:{env.get('HOME', '')}/.local/bin") or ""
    code = 1
    # a setup that failed has left an environment there, which goes now
    path = ":".join(each for each in env["PATH"].split(":") if each != f"{folder}/bin")
    for python in _list_pythons(path):
        _make_anew(folder)
        code = run([python, "-I", "-c", source, folder, uv], env, view)
        if code in (0, WITHOUT_PIP):
            break
    if code and not (uv and _repair(uv, folder, env, code, view)):
        run(["/bin/sh", "-c", PUT_PIP, folder, NO_PIP], env, view)


def _list_pythons(path: str) -> Iterator[str]:
    found = shutil.which("python3", path=path)
    if found is not None:
        yield found
    yield getattr(sys, "_base_executable", sys.executable)


def _make_anew(folder: str) -> None:
    """Make the folder empty. A view shows only folders that exist."""
    remove_tree(folder)
    os.mkdir(folder)


def _repair(
    uv: str, folder: str, env: dict[str, str], code: int, view: WorkView | None = None
) -> bool:
    """Let uv install the missing pip or, if `code` shows that the environment does not exist,
    create the whole environment. Return whether the repair succeeded.
    """
    if code == WITHOUT_PIP:
        command = [uv, "pip", "install", "--quiet", "--python", folder + "/bin/python", "pip"]
    else:
        _make_anew(folder)
        command = [uv, "venv", "--quiet", "--seed", folder]
    return run(command, env, view) == 0
