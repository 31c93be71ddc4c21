"""Work profiles for plans and estimates. A profile is built in, or read from a file."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cavvy.cli.task.model_names import say_suggestion
from cavvy.cli.view.failure import CommandFailure
from cavvy.domain.tasks import TaskSpec
from cavvy.named_files import read_named_text

if TYPE_CHECKING:
    from cavvy.planner.estimate.measured import DeviceProfile
    from cavvy.planner.estimate.profile import WorkProfile

_WRITES_ONE = "`cavvy estimate TRAIN.PY --save WORK.JSON` writes a profile"


def list_models() -> list[str]:
    """Return the models with a built-in profile."""
    return list(dict.fromkeys(str(each["name"]) for each in _zoo()))


def find_model(name: str, precision: str, checkpointing: bool) -> "WorkProfile":
    """Return the built-in profile of a model. Raises CommandFailure."""
    wide = "fp32" if precision in ("fp32", "tf32") else "bf16"
    if name not in list_models():
        hint = say_model(name) or f"built-in profiles: {', '.join(list_models())}; or pass a script"
        raise CommandFailure(f"there is no built-in profile of {name!r}", hint, exit_code=2)
    for each in _zoo():
        if (each["name"], each["precision"], each["checkpointing"]) == (name, wide, checkpointing):
            return read(each, name)
    raise CommandFailure(
        f"no profile of {name} with activation checkpointing is built in",
        "pass a script instead",
        exit_code=2,
    )


def find_memory(name: str, count: int, nodes: int) -> tuple[str, float, float, float]:
    """Return the batch of a built-in model's step, and the MiB that the step needs on each of
    `count` accelerators of `nodes` nodes: with shared state, the same with activation
    checkpointing, and with a copy of the state on each.
    """
    from cavvy.planner.estimate.profile import StepSettings
    from cavvy.planner.estimate.table import estimate_memory

    plain = find_model(name, "bf16", False)
    has_lean = any(each["name"] == name and each["checkpointing"] for each in _zoo())
    lean = find_model(name, "bf16", True) if has_lean else plain
    alone = StepSettings(accelerators=count, nodes=nodes)
    shared = StepSettings(accelerators=count, nodes=nodes, shard=True)
    return (
        f"batch {plain.batch}" + (f" x {plain.sample}" if plain.sample else ""),
        estimate_memory(plain, shared).needed,
        estimate_memory(lean, shared).needed,
        estimate_memory(plain, alone).needed,
    )


def has_room(needed_mib: float, memory_mib: int) -> bool:
    """Return whether an accelerator with `memory_mib` has `needed_mib` for a program."""
    from cavvy.planner.estimate.table import fits_memory

    return fits_memory(needed_mib, memory_mib)


def say_model(name: str) -> str:
    """Return a hint with the built-in model that is nearest to a name, or "" if none is similar."""
    return say_suggestion(name, model_parameters())


def model_parameters() -> dict[str, int]:
    """Return the number of parameters of each built-in model."""
    return {str(each["name"]): int(each["parameters"]) for each in _zoo()}


def read_file(path: str | Path) -> dict[str, Any]:
    """Return the decoded contents of a profile file. Raises CommandFailure."""
    try:
        data = json.loads(read_named_text(path))
    except OSError as error:
        raise CommandFailure(f"cannot read {path}: {error.strerror}", exit_code=2) from error
    except (ValueError, RecursionError) as error:
        raise CommandFailure(f"{path} is not JSON", _WRITES_ONE, exit_code=2) from error
    if not isinstance(data, dict):
        raise CommandFailure(f"{path} is not a work profile", _WRITES_ONE, exit_code=2)
    return data


def read(data: object, where: str) -> "WorkProfile":
    """Return a work profile from decoded data. Raises CommandFailure."""
    from cavvy.planner.estimate.profile import ProfileError, read_profile

    try:
        return read_profile(data)
    except ProfileError as error:
        raise CommandFailure(f"{where}: {error}", _WRITES_ONE, exit_code=2) from error


def with_rates(task: "TaskSpec", folder: Path) -> "TaskSpec":
    """Return the task with the rates of its work profile added. Rates in the task file take
    precedence over rates in the profile.
    """
    from cavvy.domain.values import replace

    work = task.work
    if work is None or work.profile is None:
        return task
    from cavvy.planner.estimate.profile import StepSettings
    from cavvy.planner.estimate.table import CARRIED, COUNTS, find_margin, make_rates, merge_rates

    data = read_file(folder / work.profile)
    _check_measured(data, work.profile)
    run = replace(StepSettings(**data.get("run", {})), nodes=task.nodes)
    needs = task.resources.accelerators
    counts = [
        count
        for count in COUNTS
        if not needs
        or any(need.count_min <= count <= (need.count_max or need.count_min) for need in needs)
    ]
    rates, margin, known = {}, work.margin, data.get("measured") or {}
    if "ops" in data:
        profile, devices = read(data, work.profile), measured_devices()
        rates = make_rates(profile, run, counts, devices, known)
        margin = max(margin, find_margin(profile, run, devices))
    if known:
        # The measured machines need no margin: the planner knows their own rates.
        margin = max(work.margin, CARRIED) if rates else work.margin
        rates = merge_rates(rates, known, run.precision or "bf16", counts)
    rates |= data.get("machines", {})
    if not rates:
        raise CommandFailure(f"{work.profile} has neither a trace nor a measured rate", exit_code=2)
    rates = {**rates, **work.rates}
    return replace(task, work=replace(work, rates=rates, margin=round(margin, 3)))


def _check_measured(data: dict[str, Any], where: str) -> None:
    """Raise CommandFailure if the settings or the measured rates of a profile are wrong."""
    from cavvy.planner.estimate.profile import StepSettings

    run = data.get("run", {})
    if not isinstance(run, dict) or not set(run) <= set(StepSettings.__struct_fields__):
        raise CommandFailure(f"{where}: `run` is no table of settings", _WRITES_ONE, exit_code=2)
    for name in ("measured", "machines"):
        rates = data.get(name) or {}
        keys = rates if isinstance(rates, dict) else {"": None}
        for key, rate in keys.items():
            count = key.partition(":")[2] if name == "measured" else ""
            is_rate = isinstance(rate, int | float) and 0 < rate < 1e18
            if not is_rate or (count and not (count.isdecimal() and int(count))):
                message = f"{where}: `{name}` states {rate!r:.40} for {key!r:.80}"
                hint = "expected samples per second above 0, keyed by a node such as H100:8"
                raise CommandFailure(message, hint, exit_code=2)


def text_with_rates(text: str, task: "TaskSpec", folder: Path) -> str:
    """Return the text of the task file with the rates of its work profile added. The client submits
    the returned text to the server.
    """
    if task.work is None or task.work.profile is None:
        return text
    from cavvy.sdk.values import write_text
    from cavvy.spec.tree import read_table

    full = with_rates(task, folder).work
    data = read_table(text) or {}
    work = data.get("work")
    if full is None or not isinstance(work, dict):
        return text
    rates = {name: float(f"{rate:.4g}") for name, rate in full.rates.items()}
    kept = {name: value for name, value in work.items() if name != "profile"}
    margin = {"margin": full.margin} if full.margin != 1 else {}
    return write_text({**data, "work": {**kept, "rates": rates, **margin}})


def devices_folder() -> Path:
    """Return the folder of the device profiles that this user measured."""
    from cavvy.client.state import default_home

    return Path(default_home()) / "devices"


def list_device_profiles(own: bool = True) -> dict[str, dict[str, Any]]:
    """Return the device profiles by the name of their accelerator: the built-in ones and, if `own`
    is true, those that this user measured with `cavvy bench --kernels`, which replace the built-in
    ones. Raises CommandFailure.
    """
    found = {str(each["accelerator"]): each for each in _read_packed("devices.jsonl.gz")}
    for path in sorted(devices_folder().glob("*.json")) if own else ():
        profile = read_file(path)
        if profile.get("accelerator"):
            found[str(profile["accelerator"])] = profile
    return found


@cache
def measured_devices(own: bool = True) -> "tuple[DeviceProfile, ...]":
    """Return the kernels that were measured on devices. Raises CommandFailure."""
    from cavvy.planner.estimate.measured import read_device

    found = []
    for name, data in list_device_profiles(own).items():
        try:
            found.append(read_device(data))
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            where = f"the device profile of {name} in {devices_folder()}"
            hint = f"`cavvy bench --kernels --gpu {name}` measures the device again"
            raise CommandFailure(f"{where} is wrong: {error!r}", hint, exit_code=2) from error
    return tuple(each for each in found if each is not None)


@cache
def _zoo() -> list[dict[str, Any]]:
    return _read_packed("zoo.jsonl.gz")


def _read_packed(name: str) -> list[dict[str, Any]]:
    import gzip
    from importlib.resources import files

    packed = files("cavvy.planner.estimate").joinpath(name).read_bytes()
    return [json.loads(line) for line in gzip.decompress(packed).splitlines()]
