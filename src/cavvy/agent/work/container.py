"""Runs the setup and the task in a container of podman, docker or Apptainer. A separate process
starts the container and waits for the engine.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from contextlib import suppress

from ..config import AgentConfig
from ..control_client import complain
from ..disk import read_number, read_text, write_whole
from ..documents import WorkConfig
from ..images.apptainer import PROGRAMS, bring_sif, inner_environment, make_argv
from ..images.devices import make_device_flags, make_specs_command
from ..images.engine import ask, bring_image, find_config, quiet, wait
from ..images.own_command import fill_in_command, names_own_command
from .container_signals import make_functions
from .environment import BASE, SHELL_LINE
from .folder import CannotBuild
from .reaper import ChildCommand, report

ENGINES = ("podman", "docker")
# These options are used on hosts that refuse the default limits. Some hosts also need a runtime
# other than crun, or refuse a memory limit: see `_ways`.
ULIMITS = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
# The script of a container's first process. Docker and podman send SIGTERM only to this process, so
# it chooses which processes get it (`ask`), and waits for these. Apptainer's processes need no such
# help: the agent chooses among them, and `kill -1` would reach all processes of the user on the
# node. The pipe at its end tells the work's shell from commands in the background, whose input is
# /dev/null.
ENTRY = """\
{variables}{functions}p= q=
trap 't=1{passed_on}' TERM
if command -v bash >/dev/null 2>&1; then s=bash; else s=sh; fi
go() {
  : | "$s" -e -c {line} "$1" & p=$!
  while :; do t=0; wait $p; c=$?; [ $t = 1 ] || return $c; done
}
{links}{setup}echo run >{phase}
go {run}
c=$?
while [ -n "$q" ] && kill -0 "$q" 2>/dev/null; do wait "$q"; done
exit $c
"""
# On the first SIGTERM; in a shell of its own, since this one waits for the work's shell $p.
PASS_ON = (
    '; [ -n "$q" ] || { if [ -n "$p" ]; then ask "$p" 2>/dev/null & q=$!; else kill -TERM -1; fi; }'
)
# Shell commands that create a link in the home folder of the image's user.
LINK = """\
[ -L ~/{path} ] || rmdir ~/{path} 2>/dev/null
if [ -e ~/{path} ] && [ ! -L ~/{path} ]; then
  echo "cavvy: the image has files at ~/"{path} >&2; exit 1
fi
mkdir -p "$(dirname ~/{path})" && ln -sfn {source} ~/{path} || exit 1
"""
# A variable that the task names reaches the container under another name, so that the variable does
# not change what the engine's own program does on the node.
ALIAS = "CAVVY_GIVEN_"
EXPORT = 'export {name}="${alias}{name}"; unset {alias}{name}\n'
READ_ONLY = {"BASHOPTS", "BASH_VERSINFO", "EUID", "PPID", "SHELLOPTS", "UID"}  # no shell sets these
# The script that starts a user's command in the container. It writes the ID of the command's
# process group to a file, and empties the file when the command has ended.
STARTED = 'echo $$ >"$0"; "$@"; c=$?; : >"$0"; exit $c'
# The script that sends SIGHUP to such a process group, and to the command itself, because an
# interactive shell has a group of its own. SIGCONT follows, because a stopped program receives no
# signal.
HANG_UP = """\
read -r p <"$0" || exit 0
read -r c </proc/$p/task/$p/children
kill -HUP "-$p" $c; kill -CONT "-$p" $c
"""
SETUP = """\
echo setup >{phase}
go {setup} || { c=$?; echo failed >{phase}; exit $c; }
"""


def make_container(config: AgentConfig, work: WorkConfig, env: dict[str, str]) -> ChildCommand:
    """Return the command that runs the work's container. The process group of the command contains
    the engine's client program. Raises CannotBuild if no engine is installed.
    """
    engine = find_engine()
    if engine is None:
        raise CannotBuild(
            f"the image {work.image} needs podman, docker or Apptainer; install one of them on "
            "this node"
        )
    write_entry(config, work)
    inner = dict(env, **_devices(config))
    command = ChildCommand([], dict(os.environ), config.home)
    run = run_sif if os.path.basename(engine) in PROGRAMS else run_container

    def call(channel: int) -> int:
        try:
            return run(engine, config, work, inner, command)
        except (CannotBuild, OSError) as error:
            report(channel, "setup", str(error))
            return 125

    command.call = call
    if run is run_sif:  # whose processes are below the agent's
        command.entry = config.entry_script
    else:
        command.cleanup = [engine, "rm", "-f", make_name(config)]
    return command


def fetch_image(config: AgentConfig, work: WorkConfig) -> None:
    """Store the work's image on this node, as the start of its container would, unless that start
    would copy it again: Apptainer does so if there is a login. Raises CannotBuild, OSError."""
    engine, command = find_engine(), ChildCommand([], dict(os.environ), config.home)
    if engine is None:
        return
    if os.path.basename(engine) not in PROGRAMS:
        bring_image(engine, config, work, command, {})
    elif not work.image_login:
        bring_sif(engine, config, work, command.env)


def find_engine() -> str | None:
    """Return the program that runs containers on this node: the first installed program among
    podman, docker, Apptainer and Singularity. The result is None if no container engine is
    installed.
    """
    return next((path for path in map(shutil.which, (*ENGINES, *PROGRAMS)) if path), None)


def make_name(config: AgentConfig) -> str:
    """Return the container's name, by which a later agent finds and removes the container of a
    killed agent."""
    return f"{config.gang}-{config.rank}"


def make_exec(config: AgentConfig, command: list[str]) -> list[str]:
    """Return the command line that runs `command` in the work's container."""
    engine = find_engine() or ENGINES[0]
    if os.path.basename(engine) in PROGRAMS:
        return (
            make_argv(engine, read_text(config.private + "/sif"), config, [config.home]) + command
        )
    within = [engine, "exec", "--workdir", config.folder, make_name(config)]
    return [*within, "sh", config.enter_script, *command]


def enter_container(config: AgentConfig, command: ChildCommand, name: str) -> None:
    """Let a user's command run in the work's container. `name` is unique among the commands.

    If the command's process here ends before the command, such as after SIGHUP, the command gets
    SIGHUP too.
    """
    argv, hang_up = follow_exec(config, name)
    command.argv, command.env = [*argv, *command.argv], dict(os.environ)
    if hang_up:
        command.cleanup = hang_up


def follow_exec(config: AgentConfig, name: str) -> tuple[list[str], list[str]]:
    """Return the start of a command line as `make_exec` does, and a second command line. The second
    command line sends SIGHUP to the command in the container, unless the command has ended: docker
    and podman do not pass signals on. With Apptainer, which does, the second command line is empty.
    """
    engine, file = find_engine() or ENGINES[0], f"{config.home}/exec-{name}"
    if os.path.basename(engine) in PROGRAMS:
        return make_exec(config, []), []
    hang_up = [engine, "exec", make_name(config), "sh", "-c", HANG_UP, file]
    return (
        make_exec(config, ["sh", "-c", STARTED, file]),
        ["/bin/sh", "-c", '[ ! -s "$0" ] || exec "$@"', file, *hang_up],
    )


def answer_question(config: AgentConfig, *, complete: bool) -> None:
    """Tell a container that has asked whether its work is complete. Without an answer, such as on a
    full disk, it is interrupted.
    """
    try:
        write_whole(config.answer_file, "complete\n" if complete else "interrupted\n")
    except OSError as error:
        complain(f"cannot answer the container; its work is interrupted: {error}")


def write_entry(config: AgentConfig, work: WorkConfig) -> None:
    """Write the script with which the container starts, and the script with which later commands in
    the container start."""
    for path in (config.halted_file, config.answer_file):  # of an earlier start
        with suppress(OSError):  # the work may have placed a folder there
            os.unlink(path)
    bare = os.path.basename(find_engine() or "") in PROGRAMS  # without a namespace of processes
    given = "" if bare else _export_given(work)
    write_whole(config.enter_script, given + 'exec "$@"\n')
    phase = shlex.quote(config.phase_file)
    setup = ""
    if work.setup is not None:
        write_whole(config.setup_script, work.setup + "\n")
        setup = SETUP.replace("{phase}", phase).replace("{setup}", shlex.quote(config.setup_script))
    links = ""
    if work.inputs or work.volumes:
        from ..data.mounts import list_home_links

        for source, path in list_home_links(config, work):
            links += LINK.replace("{path}", shlex.quote(path)).replace(
                "{source}", shlex.quote(source)
            )
    text = (
        ENTRY.replace("{variables}", given)
        .replace("{passed_on}", "" if bare else PASS_ON)
        .replace("{functions}", "" if bare else make_functions(work, config))
        .replace("{links}", links)
        .replace("{setup}", setup)
        .replace("{phase}", phase)
        .replace("{run}", shlex.quote(config.run_script))
    )
    write_whole(config.entry_script, text.replace("{line}", shlex.quote(SHELL_LINE)))


def run_container(
    engine: str, config: AgentConfig, work: WorkConfig, env: dict[str, str], command: ChildCommand
) -> int:
    """Pull the image, run the container, wait until it ends, and return the exit code of the
    container's command. Raises CannotBuild, OSError.
    """
    stopped = _outlive_stop()
    name, image = make_name(config), str(work.image)
    bring_image(engine, config, work, command, env)
    if names_own_command(work.run):
        _write_own_command(config, work, find_config(engine, image, command.env))
    mounts = [part for mount in list_mounts(config, work) for part in ("--volume", mount)]
    os.write(command.channel, f"image {image} {_digest(engine, image, command.env)}\n".encode())
    for each in (make_specs_command(engine, config), [engine, "rm", "-f", name]):
        if each:
            quiet(each, command.env)
    program = os.path.basename(engine)
    known = f"{config.cache}/{program}-way"
    passed = _pass_variables(work, env)
    flags, first = _flags(engine, name, config, passed), read_number(known) or 0
    ways = enumerate(_ways(engine, config))
    for way, extra in sorted(ways, key=lambda item: item[0] != first):
        argv = [*_engine_with(engine, extra), *flags, *mounts, *extra]
        code = wait([*argv, image, "sh", config.entry_script], {**command.env, **passed})
        if os.path.exists(config.phase_file) or stopped:
            os.makedirs(config.cache, mode=0o700, exist_ok=True)
            # Record the options that worked. The next container tries them first, because failed
            # tries would fill the log.
            write_whole(known, str(way))
            return code
    raise CannotBuild(f"{program} could not start a container of {image}; see the log")


def run_sif(
    program: str, config: AgentConfig, work: WorkConfig, env: dict[str, str], command: ChildCommand
) -> int:
    """Like `run_container`, with Apptainer."""
    _outlive_stop()
    os.makedirs(config.folder, exist_ok=True)
    if names_own_command(work.run):
        raise CannotBuild(
            f"{program} does not tell the command of the image {work.image}, and its registry did "
            "not tell it to the server: write `run`"
        )
    sif = bring_sif(program, config, work, command.env)
    mounts = list_mounts(config, work)
    write_whole(config.private + "/sif", sif)
    os.write(command.channel, f"image {work.image} {os.path.basename(sif)}\n".encode())
    argv = [*make_argv(program, sif, config, mounts), "sh", config.entry_script]
    return wait(argv, inner_environment(command.env, env))


def _write_own_command(config: AgentConfig, work: WorkConfig, image: dict[str, object]) -> None:
    """Write the work's commands with the image's own command. Raises CannotBuild, OSError."""
    try:
        write_whole(config.run_script, fill_in_command(work.run, image) + "\n")
    except ValueError as error:
        raise CannotBuild(f"{work.image}: {error}") from error


def _outlive_stop() -> list[int]:
    """Keep this process alive when SIGTERM arrives, so that it can wait for the engine's client.
    The client receives the signal too and passes the signal on to the container. Returns a list
    that contains the signal once the signal has arrived.
    """
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    return stopped


def list_mounts(config: AgentConfig, work: WorkConfig) -> list[str]:
    """Return the node's files that the container sees, each as SOURCE:PATH. Raises CannotBuild,
    OSError."""
    mounts = [f"{config.home}:{config.home}"]
    if work.checkpoint is not None and work.checkpoint.storage is not None:
        mounts.append(f"{work.checkpoint.storage}:{work.checkpoint.storage}")
    if work.inputs:
        from ..data.paths import list_input_binds

        mounts += list_input_binds(config, work)
    if work.volumes:
        from ..data.mounts import list_binds

        mounts += list_binds(config, work, config.folder)
    return mounts


def _ways(engine: str, config: AgentConfig) -> list[list[str]]:
    """Return lists of options to add to the command, the best list first. If the container does not
    start with the options of one list, the next list is tried. If the work uses devices, the first
    list of options permits the work to lock all memory, as RDMA requires.
    """
    memory = ["--memory", f"{config.memory_mib}m"] if config.memory_mib else []
    locks = ["--ulimit", "memlock=-1:-1"] if make_device_flags(engine, config) else []
    ways = [[*memory, *locks], memory, [*memory, *ULIMITS]]
    if engine.endswith("podman"):
        ways += [["--runtime=runc", *memory, *ULIMITS], ["--runtime=runc", *ULIMITS]]
    elif memory:
        ways.append(ULIMITS)
    return ways


def _engine_with(engine: str, extra: list[str]) -> list[str]:
    """Return the start of the engine's command line. Podman accepts the option `--runtime` only
    before the subcommand `run`. The function therefore removes this option from `extra` and writes
    it before `run`.
    """
    if extra[:1] == ["--runtime=runc"]:
        del extra[0]
        return [engine, "--cgroup-manager", "cgroupfs", "--runtime", "runc", "run"]
    return [engine, "run"]


def _pass_variables(work: WorkConfig, env: dict[str, str]) -> dict[str, str]:
    """Return the variables that the engine's program passes from its environment to the
    container."""
    given = _list_given(work)
    return {
        ALIAS + name if name in given else name: value
        for name, value in env.items()
        if name not in BASE
    }


def _list_given(work: WorkConfig) -> list[str]:
    """Return the names that the task has chosen for variables."""
    return sorted({*work.env, *work.secrets} - BASE - READ_ONLY)


def _export_given(work: WorkConfig) -> str:
    """Return shell commands that give the task's variables their own names."""
    return "".join(EXPORT.format(name=name, alias=ALIAS) for name in _list_given(work))


def _flags(engine: str, name: str, config: AgentConfig, passed: dict[str, str]) -> list[str]:
    flags = [
        "--rm",
        "--name",
        name,
        "--network",
        "host",
        "--ipc",
        "host",
        "--workdir",
        config.folder,
        "--entrypoint",
        "",
    ]
    # pass only names: the client's environment has the values, and all users can read arguments
    for variable in sorted(passed):
        flags += ["--env", variable]
    if engine.endswith("podman"):
        flags += ["--security-opt", "label=disable"]
    elif os.getuid():
        flags += ["--user", f"{os.getuid()}:{os.getgid()}"]
    return flags + make_device_flags(engine, config)


def _devices(config: AgentConfig) -> dict[str, str]:
    """Return the environment variable that selects the work's GPUs in a container, where NVIDIA
    devices are numbered from 0."""
    if config.devices and config.vendor in ("nvidia", ""):
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(len(config.devices)))
        }
    return {}


def _digest(engine: str, image: str, env: dict[str, str]) -> str:
    """Return the image's digest, or its ID if the image did not come from a registry."""
    shape = "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}"
    text = ask([engine, "image", "inspect", "--format", shape, image], env)
    return text.splitlines()[-1] if text else "unknown"
