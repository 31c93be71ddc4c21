"""Runs setup and run in a container of podman or docker; in a process of its own, which waits for the engine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal

from .environment import BASE, SHELL_LINE, write_whole
from .folder import CannotBuild
from .guardian import Command, exit_code

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import Config, Work
    from .environment import Places

ENGINES = ("podman", "docker")
# Some hosts let us raise no limits, have control groups that crun cannot use, or allow no memory limit at all.
ULIMITS = ["--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"]
# The first process of a container gets the signals of all, and the engine gives SIGTERM to it alone.
ENTRY = """\
trap 't=1; kill -TERM -1 2>/dev/null' TERM
if command -v bash >/dev/null 2>&1; then s=bash; else s=sh; fi
go() {
  "$s" -e -c {line} "$1" & p=$!
  while :; do t=0; wait $p; c=$?; [ $t = 1 ] || return $c; done
}
{setup}echo run >{phase}
go {run}
exit $?
"""
SETUP = """\
echo setup >{phase}
go {setup} || { c=$?; echo failed >{phase}; exit $c; }
"""


def make_container(config: Config, work: Work, places: Places, env: dict[str, str]) -> Command:
    """The command whose process group is the engine's client. Raises CannotBuild where there is no engine."""
    engine = next((path for path in map(shutil.which, ENGINES) if path), None)
    if engine is None:
        raise CannotBuild(
            f"the image {work.image} needs podman or docker, and this node has neither; install one of them"
        )
    write_entry(work, places)
    name = make_name(config)
    inner = dict(env, **_devices(config))
    command = Command([], dict(os.environ, **inner), places.home)
    command.call = lambda: run_container(engine, name, config, work, places, inner, command)
    command.cleanup = [engine, "rm", "-f", name]
    return command


def make_name(config: Config) -> str:
    """The container's name: what a killed agent leaves behind is found by it and removed."""
    return f"{config.gang}-{config.rank}"


def make_exec(config: Config, command: list[str], places: Places) -> list[str]:
    """How to run a command in the work's container."""
    engine = next(path for path in map(shutil.which, ENGINES) if path)
    return [engine, "exec", "--workdir", places.work, make_name(config), *command]


def write_entry(work: Work, places: Places) -> None:
    """Write the script that the container starts with."""
    phase = shlex.quote(places.phase)
    setup = ""
    if work.setup is not None:
        write_whole(places.setup, work.setup + "\n")
        setup = SETUP.replace("{phase}", phase).replace("{setup}", shlex.quote(places.setup))
    text = ENTRY.replace("{setup}", setup).replace("{phase}", phase).replace("{run}", shlex.quote(places.run))
    write_whole(places.entry, text.replace("{line}", shlex.quote(SHELL_LINE)))


def run_container(
    engine: str, name: str, config: Config, work: Work, places: Places, env: dict[str, str], command: Command
) -> int:
    """Get the image, run the container to its end, and return the exit code of what ran in it."""
    stopped: list[int] = []  # the engine's client gets SIGTERM too and passes it on; this process waits for it
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    image = work.image or ""
    if _quiet([engine, "image", "inspect", image], command.env) and _wait([engine, "pull", image], command.env):
        _tell(command, f"the image {image} could not be pulled; the engine's reason is in the log")
        return 125
    os.write(command.channel, f"image {image} {_digest(engine, image, command.env)}\n".encode())
    _quiet([engine, "rm", "-f", name], command.env)
    code, known = 125, f"{config.cache}/{os.path.basename(engine)}-way"
    for way, extra in sorted(enumerate(_ways(engine, config.memory_mib)), key=lambda item: item[0] != _read_way(known)):
        argv = [*_engine_with(engine, extra), *_flags(engine, name, config, work, places, env), *extra]
        code = _wait([*argv, image, "sh", places.entry], command.env)
        if os.path.exists(places.phase) or stopped:
            os.makedirs(config.cache, mode=0o700, exist_ok=True)
            write_whole(known, str(way))
            return code
    _tell(command, f"{os.path.basename(engine)} could not start a container of {image}; its reason is in the log")
    return code


def _ways(engine: str, memory_mib: int) -> list[list[str]]:
    """What to add to the command, the best first; the next is tried only if the container did not begin."""
    memory = ["--memory", f"{memory_mib}m"] if memory_mib else []
    ways = [memory, [*memory, *ULIMITS]]
    if engine.endswith("podman"):
        ways += [["--runtime=runc", *memory, *ULIMITS], ["--runtime=runc", *ULIMITS]]
    elif memory:
        ways.append(ULIMITS)
    return ways


def _read_way(path: str) -> int:
    """The way that worked last on this machine, so that a job's log does not tell of those that did not."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


def _engine_with(engine: str, extra: list[str]) -> list[str]:
    """The runtime is podman's own option and stands before `run`; it is taken out of `extra`."""
    if extra[:1] == ["--runtime=runc"]:
        del extra[0]
        return [engine, "--cgroup-manager", "cgroupfs", "--runtime", "runc", "run"]
    return [engine, "run"]


def _flags(engine: str, name: str, config: Config, work: Work, places: Places, env: dict[str, str]) -> list[str]:
    flags = [
        "--rm",
        "--name",
        name,
        "--network",
        "host",
        "--ipc",
        "host",
        "--workdir",
        places.work,
        "--entrypoint",
        "",
    ]
    mounts = [places.home]
    if work.checkpoint is not None and work.checkpoint.storage is not None:
        mounts.append(work.checkpoint.storage)
    for folder in mounts:
        flags += ["--volume", f"{folder}:{folder}"]
    if work.volumes:
        from ..data.mounts import list_binds

        for bind in list_binds(config, work, places.work):
            flags += ["--volume", bind]
    for variable in sorted(env):
        if variable not in BASE:
            flags += ["--env", variable]  # the value comes from the client's environment: arguments can be read by all
    if engine.endswith("podman"):
        flags += ["--security-opt", "label=disable"]
    elif os.getuid():
        flags += ["--user", f"{os.getuid()}:{os.getgid()}"]
    return flags + _device_flags(engine, config)


def _device_flags(engine: str, config: Config) -> list[str]:
    devices = config.devices or []
    if not devices:
        return []
    if config.vendor == "amd":
        return ["--device", "/dev/kfd", "--device", "/dev/dri", "--group-add", "video"]
    if config.vendor not in ("nvidia", ""):
        return ["--device", "/dev/dri"]
    if engine.endswith("podman"):
        return [part for device in devices for part in ("--device", f"nvidia.com/gpu={device}")]
    return ["--gpus", '"device={}"'.format(",".join(devices))]


def _devices(config: Config) -> dict[str, str]:
    """Inside, the container's own NVIDIA devices are counted from 0."""
    if config.devices and config.vendor in ("nvidia", ""):
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(index) for index in range(len(config.devices)))}
    return {}


def _digest(engine: str, image: str, env: dict[str, str]) -> str:
    """The digest by which the image can be had again; of an image that came from no registry, its id."""
    reader, writer = os.pipe()
    shape = "{{if .RepoDigests}}{{index .RepoDigests 0}}{{else}}{{.Id}}{{end}}"
    actions = [(os.POSIX_SPAWN_DUP2, writer, 1)]
    argv = [engine, "image", "inspect", "--format", shape, image]
    pid = os.posix_spawn(engine, argv, env, file_actions=actions, setsigdef=[signal.SIGTERM])
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        text = file.read().strip()
    os.waitpid(pid, 0)
    return text.splitlines()[-1] if text else "unknown"


def _wait(argv: list[str], env: dict[str, str]) -> int:
    pid = os.posix_spawn(argv[0], argv, env, setsigdef=[signal.SIGTERM])
    return exit_code(os.waitpid(pid, 0)[1])


def _quiet(argv: list[str], env: dict[str, str]) -> int:
    """Run without a word in the task's log."""
    null = os.open(os.devnull, os.O_RDWR)
    try:
        actions = [(os.POSIX_SPAWN_DUP2, null, 1), (os.POSIX_SPAWN_DUP2, null, 2)]
        pid = os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=[signal.SIGTERM])
    finally:
        os.close(null)
    return exit_code(os.waitpid(pid, 0)[1])


def _tell(command: Command, reason: str) -> None:
    result = {"outcome": "setup", "exit_code": None, "reason": reason, "reused": False}
    os.write(command.channel, (json.dumps(result) + "\n").encode())
