"""The settings that `cavvy tune` can change in a plain training loop (levers), and the lines of the
script that make a change permanent.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

GROWTHS = (2, 4, 8)  # batch sizes to try, as multiples of the script's own batch size


def list_exact_levers(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the changes that do not alter results. Results change only if the data set draws random
    numbers.
    """
    loader = facts["loader"]
    if loader is None:
        return
    cores = max(facts["cores"] // facts["ranks"], 1)
    if not loader["iterable"]:
        for workers in sorted({cores, max(cores // 2, 1)}):
            if workers != loader["workers"]:
                yield {"workers": workers}
    if facts["device"] != "cpu" and not loader["pin"]:
        yield {"pin": True}


def list_other_levers(facts: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the changes that alter results."""
    if facts["tensor_cores"] and facts["precision"] in ("fp32", "tf32"):
        if facts["precision"] == "fp32":
            yield {"precision": "tf32"}
        yield {"precision": "bf16"}
    if facts["images"]:
        yield {"channels_last": True}
    if not facts["compiled"]:
        yield {"compile": True}
    loader = facts["loader"]
    if loader is not None and loader["batch_size"]:
        for growth in GROWTHS:
            if growth * loader["batch_size"] * facts["ranks"] <= loader["samples"]:
                yield {"batch_size": growth * loader["batch_size"]}


def describe_levers(chosen: dict[str, Any], facts: dict[str, Any]) -> list[str]:
    """Return one line for each chosen lever: the change to the script that has the same effect."""
    loader = facts["loader"] or {"line": ""}
    at, call = show_line(loader["line"]), show_line(facts["model_line"])
    kind = facts["device"]
    texts = {
        "workers": f"{at}: DataLoader(..., num_workers={chosen.get('workers')})",
        "pin": f"{at}: DataLoader(..., pin_memory=True), and copy each batch with "
        ".to(device, non_blocking=True)",
        "channels_last": "before the optimizer is created: "
        "model.to(memory_format=torch.channels_last)",
        "compile": "before the loop: model.compile()",
    }
    if "batch_size" in chosen:
        texts["batch_size"] = f"{at}: " + _describe_batch(chosen["batch_size"], loader)
    if chosen.get("precision") == "tf32":
        texts["precision"] = 'before the loop: torch.set_float32_matmul_precision("high")'
    else:
        texts["precision"] = (
            f"{call}: compute this forward pass and the loss, but not the backward pass, within "
            f'`with torch.autocast("{kind}", torch.bfloat16):`'
        )
    return [texts[name] for name in chosen]


def _describe_batch(size: int, loader: dict[str, Any]) -> str:
    growth = size // loader["batch_size"]
    text = f"DataLoader(..., batch_size={size})"
    if loader["reads"] % growth == 0:
        rest = loader["reads"] // growth
        return f"{text}, and one optimizer step after {rest} instead of {loader['reads']} batches"
    return (
        f"{text}; a step then learns from {growth} times as many samples, so adapt the learning "
        "rate and the number of steps"
    )


def list_fixed(facts: dict[str, Any]) -> list[str]:
    """Return the settings that `tune` cannot change from outside the script, each with the line of
    the script to change.
    """
    loader, call = facts["loader"], show_line(facts["model_line"])
    if loader is None:
        return [
            f"workers, pinning and batch size: the batches for {call} do not come from a "
            "DataLoader; use one, or change the batch size in the code that creates the batches"
        ]
    at, found = show_line(loader["line"]), []
    if loader["iterable"]:
        found.append(
            f"workers: {at} reads an IterableDataset, which repeats its samples in each worker; "
            "divide them with torch.utils.data.get_worker_info(), and then set num_workers"
        )
    if not loader["batch_size"]:
        found.append(
            f"batch size: {at} has no batch_size, because its data set or its batch_sampler "
            "creates the batches; change the size there"
        )
    return found


def show_line(line: str) -> str:
    """Return a line of the script as NAME:NUMBER; "the script" if the line is unknown."""
    return Path(line).name if line else "the script"
