"""The state of optimizers in checkpoints, such as Adam's moments, by parameter name.

A parameter that no step has updated yet has no state, in the optimizer and in checkpoints. When a
checkpoint is loaded, torch first creates the state of every parameter as the target of the load.
The state of parameters without saved state is removed again after the load.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

FLAT = StateDictOptions(
    flatten_optimizer_state_dict=True
)  # keys that contain parameter names, which differ between the stages of a pipeline
State = dict[str, Any]


def collect(model: Any, optimizers: Sequence[Any]) -> State:
    """Return the state of the optimizers for a save."""
    return {str(n): _collect(model, each) for n, each in enumerate(optimizers)}


def make_targets(model: Any, optimizers: Sequence[Any]) -> State:
    """Create the state of all parameters, also of frozen ones, and return it."""
    with _unfrozen(optimizers):
        return {
            str(n): get_optimizer_state_dict(model, each, options=FLAT)
            for n, each in enumerate(optimizers)
        }


def drop_unsaved(model: Any, targets: State, saved: Sequence[str]) -> State:
    """Return the targets without the state of parameters for which the checkpoint has no state.
    `saved` contains the sorted keys of the checkpoint.
    """
    kept = {}
    for number, state in targets.items():
        keys = sorted(state)
        unsaved = {
            key
            for name, _ in model.named_parameters()
            if not any(_starting(saved, f"optimizers.{number}.state.{name}."))
            for key in _starting(keys, f"state.{name}.")
        }
        kept[number] = {key: value for key, value in state.items() if key not in unsaved}
    return kept


def load(model: Any, optimizers: Sequence[Any], state: State, saved: Sequence[str]) -> None:
    """Give the optimizers the state that was loaded into the tensors of `make_targets`."""
    with _unfrozen(optimizers):
        for number, optimizer in enumerate(optimizers):
            set_optimizer_state_dict(model, optimizer, state[str(number)], options=FLAT)
            for name, parameter in model.named_parameters():
                if not any(_starting(saved, f"optimizers.{number}.state.{name}.")):
                    optimizer.state.pop(parameter, None)


def _collect(model: Any, optimizer: Any) -> State:
    parameters = _list_parameters([optimizer])
    if optimizer.state or any(p.grad is not None for p in parameters):
        return dict(get_optimizer_state_dict(model, optimizer, options=FLAT))
    # Without a gradient, torch would create the missing state by a step, which is not the state
    # that the first step of the script creates.
    least = min(parameters, key=lambda p: p.numel())
    least.grad = torch.zeros_like(least)
    try:
        return dict(get_optimizer_state_dict(model, optimizer, options=FLAT))
    finally:
        least.grad = None


@contextmanager
def _unfrozen(optimizers: Sequence[Any]) -> Iterator[None]:
    """Torch ignores the state of frozen parameters, but the script may train them later."""
    frozen = [p for p in _list_parameters(optimizers) if not p.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _list_parameters(optimizers: Sequence[Any]) -> list[Any]:
    return [p for o in optimizers for group in o.param_groups for p in group["params"]]


def _starting(keys: Sequence[str], prefix: str) -> Iterator[str]:
    """Yield the keys that start with a prefix. The keys are sorted."""
    at = bisect_left(keys, prefix)
    while at < len(keys) and keys[at].startswith(prefix):
        yield keys[at]
        at += 1
