"""Says how much memory the training of a model needs, if the model is named in a task's command or
variables and an offer of the plan has less.
"""

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from cavvy.cli.task.model_names import read_size, suggest_model
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import Struct

if TYPE_CHECKING:
    from cavvy.domain.offers import Offer

# Options and variables that name a model: --model, --model_name_or_path, model.path=, MODEL_ID, ...
_NOUN = r"(?:id|name|path|name[_-]or[_-]path)"
_KEY = rf"(?:base[_-]?|pretrained[_-]?|hf[_-]?)?model(?:[._-]{_NOUN})?"
_OPTION = re.compile(rf"(?:^|\s)-{{1,2}}{_KEY}(?:=|\s+)[\"']?([^\s\"']+)", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?:^|\s)\+*{_KEY}=[\"']?([^\s\"']+)", re.IGNORECASE)
_VARIABLE = re.compile(rf"^{_KEY}$", re.IGNORECASE)
_REFERENCE = re.compile(r"^\$\{?(\w+)\}?$")
# what needs far less memory than training all weights: adapters, small numbers, and inference
_LESS = re.compile(r"lora|peft|adapter|4bit|8bit|quant|infer|predict|serve|generate|eval", re.I)
_MOST = 1e14  # parameters of a model; more is a mistake
_SIZES_GIB = (16, 24, 32, 40, 48, 64, 80, 96, 141, 180, 192, 256, 288)  # of accelerators


class ModelNeed(Struct, frozen=True, kw_only=True):
    """The memory in MiB that one accelerator needs to train all weights of a model. `like` is the
    built-in model from which the memory is computed, in proportion to the parameters.
    """

    name: str  # as the task states it
    like: str
    step: str  # the batch of one accelerator
    sharded: float  # if all accelerators share the state (FSDP)
    lean: float  # the same with activation checkpointing
    whole: float  # if each accelerator has a copy of the state (DDP)


def find_names(task: TaskSpec) -> Iterator[str]:
    """Yield the models that the command or a variable names."""
    for pattern in (_OPTION, _ASSIGNED):
        for name in pattern.findall(task.run):
            reference = _REFERENCE.match(name)
            yield task.env.get(reference[1], "") if reference else name
    yield from (value for name, value in task.env.items() if _VARIABLE.match(name))


def find_need(task: TaskSpec, count: int) -> ModelNeed | None:
    """Return what the model of the task needs on `count` accelerators of each node. Returns None if
    no model of a known size is named, or if the command does not train all its weights.
    """
    names = [each for each in find_names(task) if each]
    if not names or task.service is not None or _LESS.search(task.run):
        return None
    from cavvy.cli.task.profiles import find_memory, model_parameters

    known = model_parameters()
    for name in names:
        size, like = read_size(name), suggest_model(name, known)
        if like is None or (like != name and not (size and size < _MOST)):
            continue
        ratio = size / known[like] if size and like != name else 1.0
        step, sharded, lean, whole = find_memory(like, count, task.nodes)
        return ModelNeed(
            name=name,
            like=like,
            step=step,
            sharded=sharded * ratio,
            lean=lean * ratio,
            whole=whole * ratio,
        )
    return None


def say_need(task: TaskSpec, offers: "Iterable[Offer]") -> str:
    """Return a hint if one of these offers has less memory than the training of the task's model
    needs. Returns "" if all have enough, or if the model is not known.
    """
    found = [each for each in offers if each.accelerator and each.accelerator_memory_mib]
    if not found or not task.resources.accelerators:
        return ""
    count = task.resources.accelerators[0].count_min
    need = find_need(task, count)
    if need is None:
        return ""
    from cavvy.cli.task.profiles import has_room

    small = sorted(
        {
            each.accelerator_memory_mib
            for each in found
            if not has_room(need.sharded, each.accelerator_memory_mib)
        }
    )
    if not small:
        return ""
    sizes = " and ".join(f"{mib / 1024:g} GiB" for mib in small)
    first = next(each for each in found if each.accelerator_memory_mib == small[0])
    sure = f"cavvy estimate --model {need.like} --gpu {first.accelerator}:{count}"
    sure += f" --nodes {task.nodes}" if task.nodes > 1 else ""
    sure += " --fsdp" if count * task.nodes > 1 else ""
    every = count * task.nodes
    shared = f" if {every} accelerators share its state (FSDP)" if every > 1 else ""
    parts = [f"about {need.sharded / 1024:.0f} GiB of each accelerator{shared}"]
    if need.lean < need.sharded:
        parts.append(f"{need.lean / 1024:.0f} GiB with activation checkpointing")
    if every > 1:
        parts.append(f"{need.whole / 1024:.0f} GiB if each has a copy (DDP)")
    return (
        f"training all weights of {need.name} ({need.step}) needs {', '.join(parts)}, and some of "
        f"these offers have {sizes}; {_ask_for(task, need)}. `{sure}` makes sure"
    )


def _ask_for(task: TaskSpec, need: ModelNeed) -> str:
    """Return the request of a size that is large enough."""
    from cavvy.catalog.accelerators import find_accelerator
    from cavvy.cli.task.profiles import has_room

    wanted = task.resources.accelerators[0]
    known = find_accelerator(wanted.name) if wanted.name else None
    sizes = [each.mib // 1024 for each in known.accelerator.memory] if known else _SIZES_GIB
    enough = sorted(each for each in sizes if has_room(need.sharded, each * 1024))
    name = known.accelerator.name if known else ""
    if not enough:
        return "request more accelerators, or others with more memory"
    request = ":".join(filter(None, (name, f"{enough[0]}GB", f"{wanted.count_min}")))
    return f"`gpu: {request}` asks for enough"
