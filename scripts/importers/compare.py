"""Compare what Cavvy and another tool understand of a folder of that tool's files.

    python scripts/importers/compare.py skypilot|dstack FOLDER PYTHON [--mutate] [--verbose]

PYTHON belongs to an environment in which the tool is installed. The script prints how many files
both, one or neither of the two accept, and each difference in a field of a task. With --mutate, it
changes each field of Cavvy's result in turn, and prints in how many files the comparison detects
the change. Cavvy itself does not need the tool.
"""

import argparse
import json
import math
import os
import posixpath
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cavvy.capabilities.importers.common_fields import BARE_SIZES, find_needs
from cavvy.catalog.tpu_slices import HostNeed, spread_slices
from cavvy.domain.tasks import (
    AcceleratorNeed,
    JobSchedule,
    LossPolicy,
    ResourceSpec,
    RetryPolicy,
    SpotPolicy,
    TaskSpec,
    VolumeKind,
    Workdir,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import fields, replace
from cavvy.spec import SpecError
from cavvy.spec.engine_section import OWN_COMMAND
from cavvy.spec.problems import slug
from cavvy.spec.sent_folders import is_credentials
from cavvy.spec.translation import WAIT
from cavvy.task_files import ReadOptions, Translation, load_file

REFERENCE = Path(__file__).with_name("reference.py")
Facts = dict[str, Any]
Point = tuple[Any, ...]  # one way to satisfy resources: cloud, region, instance, device, …
SKYPILOT_DISK_GIB = 256


def main() -> int:
    """Compare and print. Returns 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["skypilot", "dstack"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("python")
    parser.add_argument("--mutate", action="store_true", help="also try what would be noticed")
    parser.add_argument("--verbose", action="store_true", help="also say why a file is refused")
    options = parser.parse_args()
    files = sorted(path for path in options.folder.rglob("*") if path.suffix in (".yml", ".yaml"))
    theirs = {each["file"]: each for each in ask(options.kind, options.python, files)}
    verdicts = ["both", "theirs only", "ours only", "neither", "refused by `run`, with the reason"]
    counts = dict.fromkeys(verdicts, 0)
    mutations: dict[str, list[bool]] = defaultdict(list)
    different = 0
    for path in files:
        their = theirs[str(path)]
        mine = read_ours(path, options.kind)
        if their.get("given") and mine["accepted"] and needs_values(mine["found"]):
            their, mine = give_values(their, path, options.kind)
        verdict = (
            ("both" if mine["accepted"] else "theirs only")
            if their["accepted"]
            else ("ours only" if mine["accepted"] else "neither")
        )
        counts[verdict] += 1
        if verdict.endswith("only") or (verdict == "neither" and options.verbose):
            print(f"{path}: {verdict}: {their.get('reason') or mine.get('reason')}")
        if verdict == "both" and (mine["found"].refused or needs_values(mine["found"])):
            counts["refused by `run`, with the reason"] += 1
            if options.verbose:
                kept = mine["found"].kept
                print(f"{path}:", *(each for each in kept if each.refused or each.until_submitted))
        elif verdict == "both":
            found = list_differences(options.kind, their, mine["found"])
            different += bool(found)
            for line in found:
                print(f"{path}: {line}")
            if options.mutate and not found and len(mine["found"].tasks) == 1:
                for name, seen in try_mutations(options.kind, their, mine["found"]):
                    mutations[name].append(seen)
    print(f"{len(files)} files: " + ", ".join(f"{name} {count}" for name, count in counts.items()))
    print(f"of those that both accept, {different} are understood differently")
    for name, noticed in sorted(mutations.items()):
        print(f"a change of {name} is noticed in {sum(noticed)} of {len(noticed)} files")
    return int(bool(different or counts["theirs only"] or counts["ours only"]))


def ask(kind: str, python: str, files: list[Path]) -> list[Facts]:
    """Let the other tool read these files. Its state is in a temporary folder."""
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


def needs_values(found: Translation) -> bool:
    """Whether `cavvy run` needs `--env` for paths and buckets with empty variables."""
    return any(each.until_submitted and each.key.startswith("file_mounts") for each in found.kept)


def give_values(their: Facts, path: Path, kind: str) -> tuple[Facts, Facts]:
    """Let both tools read a file with `--env NAME=given` for each variable that is empty in the
    file."""
    given = dict.fromkeys(their["given"], "given")
    tasks = [
        {
            **task,
            "env": {**task["env"], **given},
            "secrets": [name for name in task["secrets"] if name not in given],
        }
        for task in their["tasks"]
    ]
    return {**their, "tasks": tasks}, read_ours(path, kind, json.dumps({"env": given}))


def read_ours(path: Path, kind: str, overrides: str = "") -> Facts:
    """Let Cavvy read a file, as with `--as`."""
    try:
        found = load_file(path, options=ReadOptions(dialect=kind, overrides=overrides))
    except SpecError as error:
        return {"accepted": False, "reason": str(error)}
    return {"accepted": True, "found": found}


def list_differences(kind: str, their: Facts, found: Translation) -> list[str]:
    """The differences, as text."""
    if found.kind.lower() != kind:
        return [f"taken for a file of {found.kind}"]
    if len(their["tasks"]) != len(found.tasks):
        return [f"{len(their['tasks'])} tasks, ours {len(found.tasks)}"]
    compare = compare_skypilot if kind == "skypilot" else compare_dstack
    pairs = [
        pair
        for one, task in zip(their["tasks"], found.tasks, strict=True)
        for pair in compare({"file": their.get("file", "task.yaml"), **one}, found, task)
    ]
    return [f"{name}: theirs {one!r}, ours {other!r}" for name, one, other in pairs if one != other]


Pair = tuple[str, object, object]  # a field: theirs, ours


def compare_skypilot(their: Facts, found: Translation, task: TaskSpec) -> list[Pair]:
    """The values of a SkyPilot task, as SkyPilot and Cavvy understand them."""
    wants, needs = their["resources"], task.resources.choices
    first = wants[0]
    images = {_image(each)[0] for each in wants}
    login = _LOGIN & {*their["env"], *their["secrets"]} if images != {None} else set()
    if server := their["env"].get("SKYPILOT_DOCKER_SERVER") if login else None:
        images = {f"{server}/{str(each).removeprefix(f'{server}/')}" for each in images}
    ours = [_points_of(need) for need in needs]
    theirs = [_points(each, ours) for each in wants]
    if not their["ordered"] or len(ours) != len(theirs):
        theirs, ours = [set().union(*theirs)], [set().union(*ours)]
    return [
        ("name", _name(their), task.name),
        ("run", their["run"] if their["run"].strip() else WAIT, task.run),
        ("session", not their["run"].strip(), task.session),
        ("setup", their["setup"], task.setup),
        ("env", {name: each for name, each in their["env"].items() if name not in login}, task.env),
        (
            "secrets",
            sorted({*their["secrets"], *_list_placed(found)} - login),
            sorted({*task.secrets} - {_ENDPOINT}),
        ),
        ("login", bool(login), task.image_login is not None),
        ("nodes", their["nodes"] * max(_spread(each).hosts for each in wants), task.nodes),
        *_of_gang(task),
        ("workdir", _workdir(their["workdir"]), _our_workdir(task)),
        ("resources", theirs, ours),
        (
            "Cloud TPU API",
            {"gcp"} == {each["cloud"] for each in wants if _has_tpu(each)},
            any("tpu" in need.providers for need in needs),
        ),
        (
            "TPU runtime",
            {(each["tpu"] or {}).get("runtime_version") for each in wants if _has_tpu(each)}
            - {None},
            {
                json.loads(each.values).get("runtime")
                for need in needs
                for each in need.options
                if each.provider == "tpu"
            },
        ),
        ("ordered", their["ordered"] and len(wants) > 1, task.resources.ordered),
        ("image", images, {task.image}),
        ("tags", first["labels"], task.tags),
        ("priority", max(-100, min(100, first["priority"])), task.priority),
        ("retry", _recovery(first["recovery"]), task.retry),
        (
            "volumes",
            {path: name or slug(path) for path, name in their["volumes"].items()},
            _our_volumes(task),
        ),
        *_compare_files(their, found, task),
    ]


def _compare_files(their: Facts, found: Translation, task: TaskSpec) -> list[Pair]:
    """The buckets, and this machine's files by their paths."""
    usual = {each["cloud"] for each in their["resources"] if each["cloud"]}
    store = _SCHEMES.get(next(iter(usual)), "s3") if len(usual) == 1 else "s3"
    inputs, outputs, mounts, local = set(), set(), set(), set()
    elsewhere = False
    for path, mount in their["files"].items():
        table = mount if isinstance(mount, dict) else {"source": mount, "mode": "COPY"}
        source, target = table.get("source"), _path(path)
        scheme = _SCHEMES.get(table.get("store", "").lower(), store)
        url = source if "://" in str(source) else f"{scheme}://{table.get('name')}"
        if source is None or "://" in str(source):
            inputs.add((_url(url), target))
            if table["mode"] != "COPY" and not url.startswith("hf:"):
                mounts.add((target, {"MOUNT": "mount", "MOUNT_CACHED": "cached"}[table["mode"]]))
            elsewhere |= _LIKE_S3.match(url) is not None
        else:
            paths = source if isinstance(source, list) else [source]
            for each in paths:
                if len(paths) == 1 and is_credentials(each):
                    continue  # It becomes a secret.
                end = f"{target}/{each.rstrip('/').rpartition('/')[2]}"
                local.add((_path(each), target if len(paths) == 1 else end))
        config = table.get("config", {})
        read_only = any(config.get(key, {}).get("read_only") for key in ("mount", "mount_cached"))
        if table["mode"] != "COPY" and not read_only and not table.get("type", "").endswith("_RO"):
            outputs.add((target, _url(url)))
            elsewhere |= _LIKE_S3.match(url) is not None
    ours = _our_files(found, task)
    pairs: list[Pair] = [
        ("secrets", elsewhere, _ENDPOINT in task.secrets),
        ("inputs", inputs, {(_url(each.source), _path(each.target)) for each in task.inputs}),
        (
            "outputs",
            outputs,
            {(_path(each.source), _url(each.target)) for each in task.outputs}
            | {(_path(each.target), _url(each.source)) for each in task.inputs if each.writable},
        ),
        (
            "mounts",
            mounts,
            {(_path(each.target), each.mount) for each in task.inputs if each.mount},
        ),
    ]
    # Cavvy does not mount a file that is already at its path in the working folder.
    missing = {
        (source, target)
        for source, target in local - ours
        if source != target or target.startswith(("/", "~"))
    }
    return [*pairs, ("files", missing | (local & ours), ours)]


def _list_placed(found: Translation) -> set[str]:
    """The secrets that hold files with credentials."""
    return {name for each in found.kept for name in _PLACED.findall(each.reason)}


def _our_files(found: Translation, task: TaskSpec) -> set[tuple[str, str]]:
    base = task.workdir.path if task.workdir is not None and task.workdir.path else "."
    sources = {each.inside: each.source for each in found.local}
    shown = {
        (_path(sources.get(each.source) or posixpath.join(base, each.source)), _path(each.path))
        for each in task.volumes
        if each.kind is VolumeKind.FOLDER
    }
    within = {
        (_path(each.source), _path(each.inside))
        for each in found.local
        if not each.inside.startswith(".mounts/")
    }
    return shown | within


def _path(path: str) -> str:
    return posixpath.normpath(path.removeprefix("~/sky_workdir/"))


_SCHEMES = {"gcs": "gs", "gcp": "gs", "azure": "az", "ibm": "cos", "coreweave": "cw"}
_SCHEMES |= {name: name for name in ("s3", "r2", "nebius", "oci", "vastdata")}
# stores with S3's protocol at other addresses
_LIKE_S3 = re.compile("(r2|nebius|oci|vastdata|cw|cos)://")
_LOGIN = {f"SKYPILOT_DOCKER_{part}" for part in ("USERNAME", "PASSWORD", "SERVER")}
# notes about files with credentials, which become secrets
_PLACED = re.compile(r"`cavvy secret set (\w+) --file ")
_ENDPOINT = "AWS_ENDPOINT_URL_S3"


def _url(url: str) -> str:
    url = _LIKE_S3.sub("s3://", re.sub("^cos://[^/]+/", "s3://", url))
    return re.sub(r"https://\w+\.blob\.core\.windows\.net/", "az://", url).rstrip("/")


def _workdir(workdir: Any) -> object:
    if isinstance(workdir, dict):
        return (workdir["url"], workdir.get("ref"))
    return workdir


def _our_workdir(task: TaskSpec) -> object:
    if task.workdir is None or task.workdir.path is not None:
        return task.workdir and task.workdir.path
    return (task.workdir.git, task.workdir.commit)


def _our_volumes(task: TaskSpec) -> dict[str, str]:
    return {each.path: each.source for each in task.volumes if each.kind is VolumeKind.NAMED}


def _recovery(recovery: Facts) -> RetryPolicy:
    codes = recovery.get("recover_on_exit_codes") or ()
    codes = tuple(codes) if isinstance(codes, list | tuple) else (codes,)
    tries = recovery.get("max_restarts_on_errors") or 0
    again = (
        RetryPolicy(exit=tries) if tries or not codes else RetryPolicy(exit=None, exit_codes=codes)
    )
    never = str(recovery.get("strategy") or "").lower() == "none"
    return replace(again, preemption=0, node=0) if never else again


def _image(each: Facts) -> tuple[str | None, dict[str, str]]:
    """The container's image, and machine images by region."""
    boxes = {image for image in each["image"].values() if image.startswith("docker:")}
    if each["docker"]:
        boxes.add(each["docker"])
    if each["cloud"] in ("kubernetes", "runpod", "vast", "yotta") and not boxes:
        boxes = set(each["image"].values())
    machines = {
        region: image
        for region, image in each["image"].items()
        if image not in boxes and not image.startswith("skypilot:")
    }
    return (min(boxes).removeprefix("docker:") if boxes else None), machines


def _points(each: Facts, ours: list[set[Point]]) -> set[Point]:
    """All resources that SkyPilot would accept for the task."""
    host = _spread(each).needs
    devices: set[object] = {_describe(need) for need in host.accelerators}
    sized = {point for points in ours for point in points if _is_size(point[3])}
    if sized:  # a size: SkyPilot lists the names that have it
        devices = {point[3] for point in sized}
    _, machines = _image(each)
    region = each["region"] or re.sub("-?[a-z]$", "", each["zone"])
    if each["cloud"] == "gcp" and each["zone"].startswith(f"{region}-"):
        region = each["zone"]  # `regions` takes Google's zones, whose names contain their regions
    else:
        region = "/".join(part for part in (region, each["zone"]) if part)
    places = [(name or region, image) for name, image in machines.items()] or [(region, None)]
    disk = None if each["disk"] == SKYPILOT_DISK_GIB else each["disk"]
    rest = (
        *_bounds(each["cpus"], 1),
        *_memory_bounds(each["memory"]),
        disk,
        {"low": "standard", "high": "gp3"}.get(each["tier"] or ""),
        each["price"],
        each["pod"] and json.dumps(each["pod"], default=str),
        _engine(each.get("containers")),
        json.dumps({k: v for k, v in (each.get("tpu") or {}).items() if k != "tpu_vm"}),
    )
    return {
        (
            each["cloud"],
            place,
            each["instance"] or host.instance,
            device,
            each["spot"],
            image,
            *rest,
        )
        for device in devices or {None}
        for place, image in places
        if not each["region"] or not machines or place == region
    }


def _spread(each: Facts) -> HostNeed:
    """What each host must have, and the hosts of each of SkyPilot's nodes. A slice of TPUs is one
    node for SkyPilot; for Cavvy, each of its hosts is one.
    """
    found: list[AcceleratorNeed] = []
    for name, count in each["accelerators"].items():
        size = BARE_SIZES.get(name.upper())
        wanted = find_needs(name, str(max(1, math.ceil(count))), f"{size}GB" if size else "")
        found += wanted.needs
    return spread_slices(ResourceSpec(accelerators=tuple(found)))


def _has_tpu(each: Facts) -> bool:
    return any(name.lower().startswith("tpu") for name in each["accelerators"])


def _points_of(need: ResourceSpec) -> set[Point]:
    """All resources that Cavvy would accept, in the same form."""
    spots = {SpotPolicy.ONLY: (True,), SpotPolicy.NEVER: (False,), SpotPolicy.AUTO: (True, False)}
    options = {each.provider: json.loads(each.values) for each in need.options}
    pod = options.get("kubernetes", {}).get("pod")
    rest = (
        need.cpus_min,
        need.cpus_max,
        need.memory_min_mib,
        need.memory_max_mib,
        need.memory_per_cpu_mib,
        need.disk_gib,
        need.disk_type,
        need.max_rate and need.max_rate.micros_per_hour / 1e6,
        pod and json.dumps(pod),
        json.dumps(options.get("kubernetes", {}).get("docker")),
    )
    return {
        (
            *(cloud, "/".join(part for part in (region, known.get("zone")) if part)),
            need.instance,
            *(device, spot, known.get("image"), *rest),
            json.dumps({k: v for k, v in known.items() if k not in _OPTIONS}),
        )
        for cloud in need.providers or ("",)
        # SkyPilot has one cloud for both of Google's APIs
        if cloud != "tpu" or "gcp" not in need.providers
        for known in [options.get(cloud, {})]
        for region in need.regions or ("",)
        for device in [_describe(each) for each in need.accelerators] or [None]
        for spot in spots[need.spot]
    }


_OPTIONS = ("image", "zone", "pod", "docker")  # the options that are compared separately


def _engine(wish: Any) -> str:
    """SkyPilot's `enable_docker` as the option `docker` of Kubernetes, in JSON."""
    table = wish if isinstance(wish, dict) else {"mode": "ALL" if wish is True else wish}
    mode, cache = table.get("mode"), table.get("cache_volume")
    plain = mode.lower() if mode else None
    return json.dumps({"mode": plain, "cache": cache} if plain and cache else plain)


def _is_size(device: object) -> bool:
    return isinstance(device, tuple) and device[0] is None


def _bounds(text: str | None, unit: float) -> tuple[float | None, float | None]:
    if text is None:
        return None, None
    low = float(str(text).removesuffix("+")) * unit
    return low, None if str(text).endswith("+") else low


def _memory_bounds(text: str | None) -> tuple[float | None, float | None, float | None]:
    if text is not None and str(text).endswith("x"):
        return None, None, float(str(text)[:-1]) * 1024
    low, high = _bounds(text, 1024)
    return low and round(low), high and round(high), None


def _gib(mib: int | None) -> float | None:
    return None if mib is None else mib / 1024


def compare_dstack(their: Facts, found: Translation, task: TaskSpec) -> list[Pair]:
    """The values of a dstack run, as dstack and Cavvy understand them."""
    need = task.resources
    spot = {SpotPolicy.ONLY: "spot", SpotPolicy.AUTO: "auto", SpotPolicy.NEVER: "on-demand"}
    secrets = {
        match[1]: name
        for name, value in their["env"].items()
        if (match := re.fullmatch(r"\s*\$\{\{\s*secrets\.(\w+)\s*\}\}\s*", value))
    }
    env = {name: value for name, value in their["env"].items() if name not in secrets.values()}
    events = their["retry"]
    again = None if "interruption" in events else 0
    # keys that restrict the place
    placed = {each.key for each in found.kept} & {"docker", "privileged", "instances"}
    hosts = (VolumeKind.NAMED, VolumeKind.HOST)
    git = task.workdir and task.workdir.git
    length = {None: None, "off": None}
    return [
        ("session", their["session"], task.session),
        ("name", _name(their), task.name),
        ("commands", *_commands(their, task.run)),
        ("env", env, task.env),
        (
            "secrets",
            sorted({*their["secrets"], *secrets, *_list_placed(found)}),
            sorted({*task.secrets}),
        ),
        ("nodes", their["nodes"], task.nodes),
        *_of_gang(task),
        ("image", their["image"], task.image),
        ("login", "DSTACK_REGISTRY_LOGIN" if their["login"] else None, task.image_login),
        ("priority", their["priority"], task.priority),
        ("tags", their["tags"], task.tags),
        (
            "workdir",
            [repo[:2] for repo in their["repos"]],
            [[git or task.workdir.path, task.workdir.commit]] if task.workdir else [],
        ),
        (
            "volumes",
            [[name, path] for name, path, optional in their["volumes"] if not optional],
            [[each.source, each.path] for each in task.volumes if each.kind in hosts],
        ),
        ("files", _place_files(their), _our_files(found, task)),
        ("cpus", their["cpus"], [need.cpus_min, need.cpus_max]),
        ("memory", their["memory"], [_gib(need.memory_min_mib), _gib(need.memory_max_mib)]),
        ("disk", their["disk"], need.disk_gib),
        (
            "gpus",
            _name_gpus(their["gpus"]),
            [(each.name, _describe(each)) for each in need.accelerators],
        ),
        ("spot", their["spot"] or "on-demand", spot[need.spot]),
        ("backends", their["backends"], [] if placed else list(need.providers)),
        ("regions", their["regions"], [] if "instances" in placed else list(need.regions)),
        ("instances", their["instances"], [x.instance for x in need.choices if x.instance]),
        ("price", their["price"], need.max_rate and need.max_rate.micros_per_hour / 1e6),
        (
            "retry",
            (again, again, None if "error" in events else 0),
            (task.retry.preemption, task.retry.node, task.retry.exit),
        ),
        (
            "duration",
            length.get(their["duration"], their["duration"]),
            task.limits.duration and task.limits.duration.total_seconds(),
        ),
        (
            "grace",
            {None: 300, "off": 3600}.get(their["grace"], min(3600, their["grace"] or 0)),
            task.grace.total_seconds(),
        ),
        ("cron", their["cron"], [task.schedule.cron] if task.schedule else []),
        (
            "idle",
            length.get(their["idle"], their["idle"]),
            task.limits.idle and task.limits.idle.total_seconds(),
        ),
    ]


def _place_files(their: Facts) -> set[tuple[str, str]]:
    """The files of a dstack run, and where the commands see them."""
    folder = their.get("folder") or ""
    # Without a repository, the commands start deeper if a file is above the working folder.
    paths = [] if folder or their["repos"] else [_path(path) for _, path in their["files"]]
    inner = "/".join(["work"] * max((path.split("/").count("..") for path in paths), default=0))

    def is_address(source: str) -> bool:
        return "://" in source or "@" in source.partition("/")[0]

    def place(path: str) -> str:
        if inner and not path.startswith(("/", "~")):
            return posixpath.normpath(posixpath.join(inner, path))
        is_whole = path.startswith(("/", "~")) or not folder.startswith(("/", "~/"))
        return path if is_whole else posixpath.normpath(posixpath.join(folder, path))

    # A git repository is the working folder.
    repos = [("." if is_address(repo[0]) else repo[0], place(repo[2])) for repo in their["repos"]]
    shown = [(source, path) for source, path in repos if path.startswith(("/", "~/"))]
    sent = [(source, path) for source, path in their["files"] if not is_credentials(source)]
    return {(_path(source), _path(place(path))) for source, path in (*sent, *shown)}


def _of_gang(task: TaskSpec) -> list[Pair]:
    """Fields of gangs for which no other tool has a key: they must be as in a task without them."""
    return [("elastic", None, task.elastic), ("on_loss", LossPolicy.REPAIR, task.on_loss)]


def _name(their: Facts) -> str:
    stem = Path(their["file"]).stem.removesuffix(".dstack").removesuffix(".sky")
    return slug(their["name"] or "") or slug(stem) or "task"


_ARGUMENTS = re.compile(r"\$\{\{\s*run\.args\s*\}\}")  # nothing, without a command line


def _commands(their: Facts, script: str) -> tuple[object, object]:
    """The commands in their order, and other lines of the script."""
    commands = [_ARGUMENTS.sub("", each) for each in (*their["commands"], *their["init"])]
    if their["entrypoint"]:
        return [*shlex.split(their["entrypoint"]), *commands], shlex.split(script)
    rest, found = script.removesuffix(WAIT).removeprefix(f"exec {OWN_COMMAND}"), []
    for command in map(str.strip, commands):
        before, there, rest = rest.partition(command)
        found.append(there if not before.strip("{}& \n") else before + there)
    return [each.strip() for each in commands], found + ([rest] if rest.strip("{}& \n") else [])


def try_mutations(kind: str, their: Facts, found: Translation) -> Iterator[tuple[str, bool]]:
    """Change each field of Cavvy's result in turn. Yields the change, and whether the comparison
    detects it.
    """
    (task,) = found.tasks
    for name, changed in mutate(task):
        yield name, bool(list_differences(kind, their, replace(found, tasks=(changed,))))


def mutate(task: TaskSpec) -> Iterator[tuple[str, TaskSpec]]:
    """The task with one field changed, for each field that has a value."""
    need = task.resources
    for field in fields(TaskSpec):
        value = getattr(task, field.name)
        if field.name not in _NOT_OF_A_FILE and value:
            yield field.name, replace(task, **{field.name: _change(value)})
    for field in fields(ResourceSpec):
        value = getattr(need, field.name)
        if field.name not in ("any_of", "check", "implied", "network", "cpus_max") and value:
            changed = replace(need, **{field.name: _change(value)}, any_of=())
            others = tuple(
                replace(each, **{field.name: changed.__getattribute__(field.name)})
                for each in need.any_of
            )
            yield (
                f"resources.{field.name}",
                replace(task, resources=replace(changed, any_of=others)),
            )
    yield "retry", replace(task, retry=replace(task.retry, exit=7, exit_codes=()))
    for name in ("duration", "idle"):
        if length := getattr(task.limits, name):
            yield f"limits.{name}", replace(task, limits=replace(task.limits, **{name: 2 * length}))
    if task.grace != TaskSpec(name="", run="").grace:
        yield "grace", replace(task, grace=task.grace / 2)
    if need.ordered:
        found = need.any_of[::-1]
        yield "order", replace(task, resources=replace(found[0], any_of=found, ordered=True))
    for name in ("count_min", "count_max", "memory_min_mib", "memory_max_mib"):
        if need.accelerators:
            most = 1 + max(getattr(each, name) or 7 for each in need.accelerators)
            devices = tuple(replace(each, **{name: most}) for each in need.accelerators)
            others = tuple(replace(each, accelerators=devices) for each in need.any_of)
            changed = replace(need, accelerators=devices, any_of=others)
            yield f"gpu.{name}", replace(task, resources=changed)


_NOT_OF_A_FILE = (
    "resources",
    "project",
    "retry",
    "limits",
    "grace",
    "keep",
    "params",
    "setup_uses",
    "service",  # The comparison covers jobs.
    "notify",  # other tools have no key for it
)


def _change(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case SpotPolicy():
            return SpotPolicy.NEVER if value is SpotPolicy.ONLY else SpotPolicy.ONLY
        case LossPolicy():
            return LossPolicy.RESTART if value is LossPolicy.REPAIR else LossPolicy.REPAIR
        case str():
            return value + "x"
        case int() | float():
            return value + 1
        case tuple():
            return value[:-1]
        case dict():
            return {**value, "ADDED": "x"}
        case HourlyRate():
            return HourlyRate(value.micros_per_hour + 1_000_000)
        case Workdir(path=None):
            return replace(value, commit="0" * 40)
        case Workdir():
            return replace(value, path=f"{value.path}/x")
        case JobSchedule():
            return replace(value, cron="1 1 1 1 1")
        case _:
            raise TypeError(f"no change for {value!r}")


def _name_gpus(gpus: Facts | None) -> list[object]:
    if gpus is None:
        return []
    low, high = gpus["count"]
    count = f"{low}.." if high is None else f"{low or 1}..{high}" if low != high else str(low)
    sizes = ["" if end is None else f"{round(end * 1024)}MB" for end in gpus["memory"]]
    memory = "..".join(sizes) if any(sizes) else ""
    names = gpus["names"] or [gpus["vendor"] or ""]
    found = [find_needs(name, count, memory) for name in names]
    return [(need.name, _describe(need)) for each in found for need in each.needs]


def _describe(need: AcceleratorNeed) -> object:
    name = None if need.name in ("gpu", "nvidia", "amd", "google", "intel") else need.name
    return (name, need.count_min, need.count_max, need.memory_min_mib, need.memory_max_mib)


if __name__ == "__main__":
    sys.exit(main())
