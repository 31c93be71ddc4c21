"""Collects the wheels of the Python packages that a model, or the devices' program, needs."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cavvy.cli.view.failure import CommandFailure, note_out
from cavvy.client.errors import ApiError
from cavvy.client.paths import query
from cavvy.client.wire import Answer

if TYPE_CHECKING:
    from cavvy.client import ApiClient

_TARGET = re.compile(r"(3\.\d{1,2})-([a-z0-9_]{1,20})(?:-2\.(\d{1,2}))?")
_GLIBC = 28  # 2.28, of Debian 10 and of manylinux_2_28, if a target names none
_OLD_NAMES = {5: "manylinux1", 12: "manylinux2010", 17: "manylinux2014"}
_NAMED = 4  # maximum number of targets that a message names


def packages_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --packages and --for, as the arguments `packages` and `targets`."""
    command = click.option(
        "--for",
        "targets",
        multiple=True,
        metavar="PYTHON-PROCESSOR[-GLIBC]",
        help="Collect wheels for such devices, as `cavvy edge show` names them under `python`: "
        "3.11-aarch64-2.36. The default is all enrolled devices. Repeatable.",
    )(command)
    return click.option(
        "--packages",
        type=click.Path(exists=True, path_type=Path),
        metavar="FILE|FOLDER",
        help="Python packages: a requirements.txt with hashes (of `pip-compile --generate-hashes` "
        "or `uv pip compile`), whose wheels pip downloads here, or a folder with wheels. Devices "
        "install the signed wheels, and ask no package index.",
    )(command)


def collect_wheels(
    client: "ApiClient", project: str, packages: Path, targets: Sequence[str], folder: Path
) -> int:
    """Write the wheels for all targets, or for those of the project's devices, to the folder
    `packages` in `folder`. Return their number. Raises CommandFailure."""
    into = folder / "packages"
    into.mkdir(parents=True, exist_ok=True)
    if packages.is_dir():
        for each in packages.glob("*.whl"):
            shutil.copy(each, into)
    else:
        for target in targets or _find_targets(client, project):
            _download(packages, target, into)
    if not (count := len(list(into.glob("*.whl")))):
        raise CommandFailure(
            f"{packages} has no packages",
            "expected a requirements.txt with lines NAME==VERSION --hash=sha256:…, or wheels",
            exit_code=2,
        )
    return count


class _ModelDevice(Answer, frozen=True, kw_only=True):
    name: str
    state: str
    facts: dict[str, str]


def _list_devices(client: "ApiClient", project: str) -> list[_ModelDevice]:
    """Return the devices for which models are published. A server without the capability that knows
    them has none."""
    try:
        return client.ask(f"/v1/edge/devices{query(project=project)}", list[_ModelDevice])
    except ApiError as error:
        if error.status != 404:
            raise
        return []


def _find_targets(client: "ApiClient", project: str) -> Sequence[str]:
    devices = [each for each in _list_devices(client, project) if each.state != "retired"]
    found = {each.facts.get("python", "") for each in devices} - {""}
    if not found:
        raise CommandFailure(
            "no device of the project has told which Python it has",
            "name it: --for 3.11-aarch64-2.36; devices tell it when they enrol",
            exit_code=2,
        )
    if untold := [each.name for each in devices if not each.facts.get("python")]:
        named = ", ".join(untold[:_NAMED]) + (", …" if len(untold) > _NAMED else "")
        note_out(f"the Python of these devices is not known; use --for: {named}")
    return sorted(found)


def _download(lock: Path, target: str, into: Path) -> None:
    found = _TARGET.fullmatch(target)
    if found is None:
        raise CommandFailure(
            f"--for: {target!r} is no device's Python",
            "expected PYTHON-PROCESSOR or PYTHON-PROCESSOR-GLIBC, such as 3.11-aarch64-2.36",
            exit_code=2,
        )
    if not find_spec("pip"):
        raise CommandFailure(
            f"{sys.executable} has no pip to download wheels with",
            f"install pip there, or name a folder with wheels: --packages {lock.parent}",
        )
    version, machine, libc = found[1], found[2], int(found[3] or _GLIBC)
    platforms = [f"linux_{machine}"]
    for minor in range(5, libc + 1):
        platforms.append(f"manylinux_2_{minor}_{machine}")
        if minor in _OLD_NAMES:
            platforms.append(f"{_OLD_NAMES[minor]}_{machine}")
    words = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
    ]
    words += ["--no-input", "--only-binary=:all:", "--require-hashes", "--requirement", str(lock)]
    words += ["--dest", str(into), "--python-version", version, "--implementation", "cp"]
    for each in reversed(platforms):
        words += ["--platform", each]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [each for each in done.stderr.strip().splitlines() if each.strip()]
        told = next((each for each in lines if each.startswith("ERROR")), (lines or ["?"])[-1])
        raise CommandFailure(f"pip has no packages of {lock} for {target}: {told[:500]}")
