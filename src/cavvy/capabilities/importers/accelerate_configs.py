"""Makes a task of a file of `accelerate config` and the script that it launches:
`cavvy run accelerate.yaml -- train.py --lr 0.1`.

Its keys are those of https://huggingface.co/docs/accelerate/package_reference/cli.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import join
from typing import Any

from cavvy.capabilities.importers.plain_yaml import load_plain

_MOST_BYTES = 1 << 16
_OF_MACHINE = ("machine_rank", "main_process_ip", "main_process_port", "gpu_ids")
_ON_GPUS = ("MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM", "NO", "")
_ON_CPUS = ("MULTI_CPU",)
_LAUNCH = (
    'accelerate launch --config_file {config} --num_machines "$NNODES" --machine_rank "$NODE_RANK" '
    '--num_processes {processes} --main_process_ip "$MASTER_ADDR" --main_process_port '
    '"$MASTER_PORT"'
)


def is_accelerate_config(text: str) -> bool:
    """Return whether a text is a file of `accelerate config`."""
    return len(text) <= _MOST_BYTES and read_config(text) is not None


def read_config(text: str) -> dict[str, Any] | None:
    """Return the table of a file of `accelerate config`, or None for another text."""
    if "distributed_type" not in text and "compute_environment" not in text:
        return None
    try:
        found = load_plain(Path(), text)
    except ValueError:
        return None
    if not isinstance(found, dict) or "run" in found or "services" in found:
        return None
    named = {"distributed_type", "compute_environment", "num_processes", "mixed_precision"}
    return found if len(named & found.keys()) > 1 else None


def read_accelerate(
    path: Path, name: str, text: str, arguments: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of the task of a file of `accelerate config`, and notes. `arguments` are the
    script and its own arguments. Raises ValueError.
    """
    config = read_config(text) or {}
    if not arguments:
        hint = f"`cavvy run {path.name} -- train.py --lr 0.1`"
        raise ValueError(f"{path}: the file says how to launch a script, and not which: {hint}")
    place, kind = str(config.get("compute_environment", "LOCAL_MACHINE")), _find_kind(config)
    if "SAGEMAKER" in place:
        raise ValueError(f"{path}: the file is for SageMaker; run `accelerate config` again")
    if kind not in (*_ON_GPUS, *_ON_CPUS):
        raise ValueError(
            f"{path}: distributed_type {kind} is not supported; expected MULTI_GPU, FSDP, "
            "DEEPSPEED, MULTI_CPU or NO"
        )
    nodes = _read_number(path, config, "num_machines")
    processes = _read_number(path, config, "num_processes")
    if processes % nodes:
        raise ValueError(f"{path}: {processes} processes cannot be shared by {nodes} machines")
    each = processes // nodes
    on_gpus = kind not in _ON_CPUS and not config.get("use_cpu")
    notes: list[str] = []
    left = [key for key in _OF_MACHINE if config.get(key) not in (None, "all", "null", 0)]
    if left:
        notes.append(f"the job says what {', '.join(left)} would say")
    # --gpu may ask for another number of GPUs
    count = "$((NNODES * NPROC_PER_NODE))" if on_gpus else str(processes)
    launch = _LAUNCH.format(config=join([name]), processes=count)
    if "gpu_ids" in left:
        launch += " --gpu_ids all"
    if kind == "DEEPSPEED":
        launch += " --deepspeed_multinode_launcher standard"
    keys: dict[str, Any] = {"run": f"exec {launch} {join(arguments)}"}
    if nodes > 1:
        keys["nodes"] = nodes
    if on_gpus:
        keys["resources"] = {"gpu": f"any:{each}"}
    return keys, notes


def _find_kind(config: Mapping[str, Any]) -> str:
    kind = config.get("distributed_type")
    return "NO" if kind is False else str(kind or "")  # YAML takes NO for a switch


def _read_number(path: Path, config: Mapping[str, Any], name: str) -> int:
    value = config.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= 10_000:
        raise ValueError(f"{path}: {name}: {value!r} is no number of at least 1")
    return value
