"""Compare what Cavvy and another tool understand of a folder of that tool's files.

    python scripts/importers/compare.py skypilot|dstack FOLDER PYTHON [--verbose]

PYTHON is that of an environment in which the tool is installed. Prints how many files both, one or
neither accept, and each difference in commands, environment and resources. Nothing of the tool is
needed for Cavvy itself.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cavvy.domain.tasks import AcceleratorNeed, Resources, SpotPolicy, Task
from cavvy.importers import load_file
from cavvy.importers.accelerators import find_needs
from cavvy.importers.detect import Dialect
from cavvy.spec import SpecError

REFERENCE = Path(__file__).with_name("reference.py")
Facts = dict[str, Any]
OPEN = 65_536


def main() -> int:
    """Compare and print; 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["skypilot", "dstack"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("python")
    parser.add_argument("--verbose", action="store_true", help="also say why a file is refused")
    options = parser.parse_args()
    files = sorted(path for path in options.folder.rglob("*") if path.suffix in (".yml", ".yaml"))
    theirs = {each["file"]: each for each in ask(options.kind, options.python, files)}
    counts = dict.fromkeys(["both", "theirs only", "ours only", "neither"], 0)
    different = 0
    for path in files:
        their = theirs[str(path)]
        mine = read_ours(path, Dialect.SKYPILOT if options.kind == "skypilot" else Dialect.DSTACK)
        verdict = (
            ("both" if mine["accepted"] else "theirs only")
            if their["accepted"]
            else ("ours only" if mine["accepted"] else "neither")
        )
        counts[verdict] += 1
        if verdict.endswith("only") or (verdict == "neither" and options.verbose):
            print(f"{path}: {verdict}: {their.get('reason') or mine.get('reason')}")
        if verdict == "both":
            found = list_differences(options.kind, their, mine["tasks"])
            different += bool(found)
            for line in found:
                print(f"{path}: {line}")
    print(f"{len(files)} files: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    print(f"of those that both accept, {different} are understood differently")
    return int(bool(different or counts["theirs only"] or counts["ours only"]))


def ask(kind: str, python: str, files: list[Path]) -> list[Facts]:
    """The other tool's reading of these files. Its own state goes to a temporary folder."""
    with tempfile.TemporaryDirectory() as home:
        command = [python, str(REFERENCE), kind, *map(str, files)]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
            env={**os.environ, "HOME": home},
        )
    if done.returncode:
        sys.exit(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines()]


def read_ours(path: Path, dialect: Dialect) -> Facts:
    """Cavvy's reading of a file. A file that Cavvy takes for its own format is named."""
    try:
        found = load_file(path)
    except SpecError as error:
        return {"accepted": False, "reason": str(error)}
    if found.kind != dialect:
        print(f"{path}: taken for a file of {found.kind}")
    return {"accepted": True, "tasks": found.tasks}


def list_differences(kind: str, their: Facts, tasks: tuple[Task, ...]) -> list[str]:
    """The differences, in words."""
    if len(their["tasks"]) != len(tasks):
        return [f"{len(their['tasks'])} tasks, ours {len(tasks)}"]
    compare = compare_skypilot if kind == "skypilot" else compare_dstack
    pairs = [
        pair for one, task in zip(their["tasks"], tasks, strict=True) for pair in compare(one, task)
    ]
    return [f"{name}: theirs {one!r}, ours {other!r}" for name, one, other in pairs if one != other]


def compare_skypilot(their: Facts, task: Task) -> list[tuple[str, object, object]]:
    """The values of a SkyPilot task, by SkyPilot and by Cavvy."""
    needs = task.resources.choices
    wanted = [
        find_needs(name, str(max(1, int(-(-count // 1))))) for name, count in their["accelerators"]
    ]
    names = {(one.name, one.count_min) for each in wanted for one in each.needs}
    ours = {(one.name, one.count_min) for need in needs for one in need.accelerators}
    if any(one.name in ("gpu", "nvidia", "amd") for need in needs for one in need.accelerators):
        names = ours  # a size: SkyPilot lists the names that have it
    spots = {SpotPolicy.ONLY: {True}, SpotPolicy.NEVER: {False}, SpotPolicy.AUTO: {False, True}}
    cpus = {_amount(need.cpus_min, need.cpus_max, their["cpus"]) for need in needs}
    memory = {_memory(need, their["memory"]) for need in needs}
    clouds = {name for need in needs for name in need.providers}
    return [
        ("run", their["run"], task.run),
        ("setup", their["setup"], task.setup),
        ("env", their["env"], task.env),
        ("nodes", their["nodes"], task.nodes),
        ("accelerators", names, ours),
        ("cpus", their["cpus"], sorted(cpus)),
        ("memory", their["memory"], sorted(memory)),
        ("spot", their["spot"], sorted(set[bool]().union(*(spots[need.spot] for need in needs)))),
        ("clouds", sorted(set(their["clouds"]) - _implied(task)), sorted(clouds - _implied(task))),
        (
            "regions",
            [name.removeprefix("ssh-") for name in their["regions"]],
            sorted({name for need in needs for name in need.regions}),
        ),
        ("disk", their["disk"], sorted({need.disk_gib or 256 for need in needs})),
    ]


def _implied(task: Task) -> set[str]:
    """SkyPilot adds the cloud that has a TPU."""
    wanted = [one.name or "" for need in task.resources.choices for one in need.accelerators]
    tpu = any(name.lower().startswith("tpu") for name in wanted)
    return {"gcp", "kubernetes"} if tpu else set()


def _memory(need: Resources, their: list[str]) -> str:
    if need.memory_per_cpu_mib is not None:
        return f"{need.memory_per_cpu_mib / 1024:g}x"
    return _amount(_gib(need.memory_min_mib), _gib(need.memory_max_mib), their)


def _gib(mib: int | None) -> float | None:
    return None if mib is None else mib / 1024


def _amount(low: float | None, high: float | None, their: list[str]) -> str:
    """Bounds in SkyPilot's notation, unchanged for equal numbers."""
    if low is None:
        return "None"
    suffix = "" if high is not None else "+"
    same = [text for text in their if text.endswith("+") == bool(suffix) and _is_number(text, low)]
    return same[0] if same else f"{low:g}{suffix}"


def _is_number(text: str, value: float) -> bool:
    try:
        return abs(float(text.removesuffix("+")) - value) < 1 / 1024
    except ValueError:
        return False


def compare_dstack(their: Facts, task: Task) -> list[tuple[str, object, object]]:
    """The values of a dstack run, by dstack and by Cavvy."""
    need = task.resources
    there = (task.run, *shlex.split(task.run)) if their["entrypoint"] else (task.run,)
    missing = [
        command
        for command in their["commands"]
        if not any(command.strip() in text for text in there)
    ]
    spot = {SpotPolicy.ONLY: "spot", SpotPolicy.AUTO: "auto", SpotPolicy.NEVER: "on-demand"}[
        need.spot
    ]
    env = {name: value for name, value in their["env"].items() if name not in task.secrets}
    return [
        ("commands", missing, []),
        ("env", env, task.env),
        ("nodes", their["nodes"], task.nodes),
        ("cpus", their["cpus"], [need.cpus_min, need.cpus_max]),
        ("memory", their["memory"], [_gib(need.memory_min_mib), _gib(need.memory_max_mib)]),
        ("disk", their["disk"], need.disk_gib),
        ("gpus", _name_gpus(their["gpus"]), [_describe(each) for each in need.accelerators]),
        ("spot", their["spot"] or "on-demand", spot),
        ("backends", their["backends"], list(need.providers)),
        ("regions", their["regions"], list(need.regions)),
    ]


def _name_gpus(gpus: Facts | None) -> list[object]:
    if gpus is None:
        return []
    low, high = gpus["count"]
    count = f"{low}.." if high is None else f"{low or 1}..{high}" if low != high else str(low)
    sizes = ["" if end is None else f"{round(end * 1024)}MB" for end in gpus["memory"]]
    memory = "..".join(sizes) if any(sizes) else ""
    found = [find_needs(name, count, memory) for name in gpus["names"] or [""]]
    return [_describe(need) for each in found for need in each.needs]


def _describe(need: AcceleratorNeed) -> object:
    name = None if need.name in ("gpu", "nvidia", "amd", "google", "intel") else need.name
    return (name, need.count_min, need.count_max, need.memory_min_mib, need.memory_max_mib)


if __name__ == "__main__":
    sys.exit(main())
