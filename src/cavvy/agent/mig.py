"""Makes the MIG instance of work that asks for one, on the slices of a GPU that the work holds, and
removes it when the work has ended.

A record in FOLDER belongs to each instance that Cavvy makes on this host. It names the lock of the
agent, which the reaper of the agent's work holds, too. If no process holds the lock, the agent was
killed, and the next agent removes the instance. Instances without a record are never touched.
Instances and records both end with a restart of the host. Commands and their output are those of
nvidia-smi (NVIDIA's MIG user guide).
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import time
from contextlib import contextmanager

from .control_client import complain
from .disk import write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator

    from .config import AgentConfig

FOLDER = "/run/cavvy-mig"
SMI_TIMEOUT_S = 60.0
PAUSES_S = (0.3, 1, 3, 0)
# a row of `nvidia-smi mig -lgi`: GPU, profile, its ID, the instance's ID, first slice, slices
INSTANCE = re.compile(r"^\|\s+\d+\s+MIG (\S+)\s+\d+\s+(\d+)\s+(\d+):(\d+)\s", re.MULTILINE)
NONE = "No GPU instances found"
GONE = "Not Found"


@contextmanager
def hold_instance(config: AgentConfig, *, makes: bool) -> Iterator[AgentConfig]:
    """Give the work its instance as its only device. Does nothing if the work asks for none. If
    `makes` is not set, only remove what killed agents have left. Raises OSError."""
    if not config.instance:
        yield config
        return
    os.makedirs(folder(), mode=0o755, exist_ok=True)
    sweep(config.private)
    if not makes:
        yield config
        return
    gpu, start = split_slice(config.devices[0] if config.devices else "")
    path = f"{folder()}/{gpu}-{start}.json"
    entry: dict[str, object] = {"gpu": gpu, "start": start, "profile": config.instance}
    entry["lock"] = lock_of(config.private)
    try:
        with alone():
            if os.path.exists(path):
                raise OSError(f"MIG: the work of a killed agent still uses slice {start} of {gpu}")
            config.devices, config.device_indices = [make_instance(path, entry)], []
        yield config
    finally:
        sweep(config.private)


def folder() -> str:
    return os.environ.get("CAVVY_MIG_FOLDER", FOLDER)


def split_slice(device: str) -> tuple[str, int]:
    """Return the GPU and the number of a slice."""
    gpu, _, number = device.rpartition("/")
    return gpu, int(number)


@contextmanager
def alone() -> Iterator[None]:
    """Wait until no other process of Cavvy changes or lists the instances of this host."""
    with open(folder() + "/lock", "a", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def lock_of(private: str) -> str:
    """Return the lock of the agent with this private folder."""
    return private + "/lock"


def sweep(private: str = "") -> bool:
    """Remove the instances of killed agents, and that of the agent with this private folder. Return
    False if any of them is still in use."""
    names = os.listdir(folder()) if os.path.isdir(folder()) else []
    paths = [f"{folder()}/{name}" for name in names if name.endswith(".json")]
    return all([try_to_remove(path, private) for path in paths])


def try_to_remove(path: str, private: str) -> bool:
    """Remove a record's instance unless its agent lives. The driver needs a moment after the last
    process in it has ended. Return False if a process still uses it: a later sweep tries again."""
    for pause_s in PAUSES_S:
        try:
            with alone():
                remove(path, private)
            return True
        except (OSError, ValueError, KeyError) as error:
            problem = error
        time.sleep(pause_s)
    complain(f"the MIG instance of {path} was not removed: {problem}")
    return False


def remove(path: str, private: str) -> None:
    try:
        with open(path, encoding="utf-8") as file:
            entry = json.load(file)
    except FileNotFoundError:
        return  # removed meanwhile
    if entry["lock"] != lock_of(private) and is_locked(entry["lock"]):
        return
    for number, place in list_instances(entry["gpu"], entry["profile"]).items():
        if place == entry["start"] and number not in entry["before"]:
            destroy(entry["gpu"], number)
    os.unlink(path)


def is_locked(path: str) -> bool:
    """Return whether the agent may live: also if its lock cannot be read, as in a folder on NFS
    that this user may not read."""
    try:
        with open(path, "r+", encoding="utf-8") as lock:  # NFS locks only files that are writable
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # the gang's folder was deleted
    except OSError:
        return True
    return False


def make_instance(path: str, entry: dict[str, object]) -> str:
    """Make an instance and record it. Return its UUID. Raises OSError."""
    gpu, start, profile = str(entry["gpu"]), entry["start"], entry["profile"]
    before = list_instances(gpu)
    entry["before"] = list(before)
    # if the agent is killed, this tells the instance that it may have made
    note(path, entry)
    run("-i", gpu, "-cgi", f"{profile}:{start}", "-C")
    found = [each for each, place in list_instances(gpu).items() if place == start]
    if len(found) != 1 or found[0] in before:
        raise OSError(f"MIG: nvidia-smi made no {profile} at slice {start} of {gpu}")
    entry["uuid"] = find_uuid(gpu, found[0])
    note(path, entry)
    return str(entry["uuid"])


def note(path: str, entry: dict[str, object]) -> None:
    write_whole(path, json.dumps(entry))
    os.chmod(path, 0o644)  # servers of other users must not offer the instance


def destroy(gpu: str, number: int) -> None:
    place = ("-i", gpu, "-gi", str(number))
    try:
        run(*place, "-dci")
    except OSError as error:
        if GONE not in str(error):
            raise
    run(*place, "-dgi")


def list_instances(gpu: str, profile: object = None) -> dict[int, int]:
    """Return the first slice of each instance on the GPU, by the instance's number. With `profile`,
    only instances of this profile are returned."""
    try:
        text = run("-i", gpu, "-lgi")
    except OSError as error:
        if NONE in str(error):
            return {}
        raise
    found = INSTANCE.findall(text)
    return {int(n): int(start) for name, n, start, _ in found if profile in (None, name)}


def find_uuid(gpu: str, instance: int) -> str:
    """Return the UUID of an instance. `nvidia-smi -q -x` tells the number of its device, and
    `nvidia-smi -L` the UUID of each device."""
    devices = smi("-q", "-x", "-i", gpu)
    pattern = r"<mig_device>\s*<index>(\d+)</index>\s*<gpu_instance_id>(\d+)</gpu_instance_id>"
    number = {int(each): device for device, each in re.findall(pattern, devices)}.get(instance)
    for part in re.split(r"(?m)^(?=GPU \d+:)", smi("-L")):
        if f"(UUID: {gpu})" in part:
            found = re.search(rf"Device\s+{number}: \(UUID: ([^)]+)\)", part)
            if found:
                return found[1]
    raise OSError(f"MIG: nvidia-smi -L does not list the instance {instance} of {gpu}")


def run(*arguments: str) -> str:
    return smi("mig", *arguments)


def smi(*arguments: str) -> str:
    """Return what nvidia-smi prints. Raises OSError with its message."""
    command = ["nvidia-smi", *arguments]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SMI_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{' '.join(command)}: no answer in {SMI_TIMEOUT_S:g} s") from error
    text = done.stdout.decode(errors="replace").strip()
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {text[-500:] or done.returncode}")
    return text
