"""Reads a line of `ray job submit`, so that its command runs as a job here.

The options are those of https://docs.ray.io/en/latest/cluster/running-applications/job-submission.
"""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import urlsplit

from cavvy.domain.targets import is_loopback_name
from cavvy.spec.problems import slug
from cavvy.task_files.foreign import LineTask

_START = ("ray", "job", "submit")
_SWITCHES = ("no-wait", "verify")
# options of the cluster, and of how Ray itself speaks
_UNUSED = ("address", "metadata-json", "log-style", "log-color", "headers", "cookies", "verify")
_READ = (
    *("submission-id", "job-id", "working-dir", "runtime-env-json", "entrypoint-num-cpus"),
    *("entrypoint-num-gpus", "entrypoint-memory"),
)


def read_ray_line(words: Sequence[str]) -> LineTask | None:
    """Return the task of the job that a line submits, or None for another command, also one that
    submits to a cluster of Ray on another machine. Raises ValueError for what a job here lacks.
    """
    if tuple(words[:3]) != _START or _submits_elsewhere(words[3:]):
        return None
    options, command = _split(words[3:])
    notes = [f"--{name} is of a cluster of Ray" for name in options if name in _UNUSED]
    name = options.get("submission-id") or options.get("job-id") or PurePath(command[0]).name
    keys: dict[str, Any] = {"name": slug(name) or "ray"}
    needs: dict[str, Any] = {}
    for name, key, unit in (
        ("entrypoint-num-gpus", "gpu", "any:{}"),
        ("entrypoint-num-cpus", "cpu", "{}"),
    ):
        if (text := options.get(name)) and (count := _read_number(name, text)):
            needs[key] = unit.format(count)
    if memory := options.get("entrypoint-memory"):
        needs["memory"] = f"{-(-_read_number('entrypoint-memory', memory) // (1 << 20))}MB"
    if needs:
        keys["resources"] = needs
    if folder := options.get("working-dir"):
        keys["workdir"] = _check_folder("--working-dir", folder)
    _add_environment(keys, options.get("runtime-env-json", ""))
    return LineTask(command=tuple(command), keys=keys, notes=tuple(notes))


def is_here(address: str) -> bool:
    """Return whether the address of a cluster names this machine."""
    try:
        host = urlsplit(address if "://" in address else f"//{address}").hostname
    except ValueError:
        return False
    return is_loopback_name(host or "")


def _submits_elsewhere(words: Sequence[str]) -> bool:
    own = words[: words.index("--")] if "--" in words else words
    for at, word in enumerate(own):
        name, given, value = word.partition("=")
        if name == "--address":
            address = value if given else "".join(own[at + 1 : at + 2])
            return not is_here(address)
    return False


def _check_folder(option: str, folder: object) -> str:
    if isinstance(folder, str) and "://" not in folder:
        return folder
    hint = "a job's `workdir` is a folder of this machine; name files of a bucket as `inputs`"
    raise ValueError(f"{option} {folder}: {hint}")


def _split(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of a line, and its command. Raises ValueError."""
    options, left = dict[str, str](), list(words)
    while left and left[0].startswith("--") and left[0] != "--":
        name, given, value = left.pop(0)[2:].partition("=")
        if not given and name not in _SWITCHES:
            value = left.pop(0) if left else ""
        if name not in (*_READ, *_UNUSED, *_SWITCHES):
            hint = "delete it, or write a Cavvy file"
            raise ValueError(f"ray job submit --{name} is not read; {hint}")
        options[name] = value
    command = left[1:] if left and left[0] == "--" else left
    if not command:
        hint = "write, for example, `cavvy run -- ray job submit -- python train.py`"
        raise ValueError(f"the line of ray job submit has no command; {hint}")
    return options, command


def _read_number(name: str, text: str) -> int:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not number >= 0 or number % 1:  # nan is not, and inf % 1 is nan
        raise ValueError(f"ray job submit --{name} {text}: a job gets whole ones")
    return int(number)


def _add_environment(keys: dict[str, Any], text: str) -> None:
    """Add what a runtime environment of Ray says. Raises ValueError."""
    if not text:
        return
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, Mapping):
        raise ValueError("--runtime-env-json is no table of JSON")
    for key, value in found.items():
        if key == "env_vars" and isinstance(value, Mapping):
            keys["env"] = {str(name): str(each) for name, each in value.items()}
        elif key == "working_dir":
            keys.setdefault("workdir", _check_folder("working_dir", value))
        elif key == "pip" and isinstance(value, list):
            keys["setup"] = {"run": f"python3 -m pip install {shlex.join(value)}", "uses": []}
        else:
            hint = "write a Cavvy file with `setup`, `image` or `inputs`"
            raise ValueError(f"{key} of --runtime-env-json is not read; {hint}")
