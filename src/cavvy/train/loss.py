"""The loss of a batch that is computed in parts. The loss is the weighted mean over all parts.

The weight of a mean over samples is the number of samples. Many losses are means over items that
are not samples, for example over the tokens that are not padding. The weight of a mean is the
denominator of the mean. The denominator is read from the autograd graph of the loss, or the script
returns (mean, weight).
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

THROUGH = ("Add", "Sub", "Mul", "Neg", "Div", "ToCopy", "View", "Squeeze", "Clone")
DEEPEST = 8  # maximum number of operations in the graph between the loss and its means
MEAN = 1  # torch's number for reduction="mean"


def spread(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Convert a loss function to a function whose only argument is a batch. A loss function with
    several arguments receives the members of the batch, such as input and target.
    """
    if not takes_several(function):
        return function
    return lambda part: function(*part) if isinstance(part, list | tuple) else function(part)


def takes_several(function: Callable[..., Any]) -> bool:
    """Return whether a function has more than one positional argument without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters) > 1


class LossSum:
    """The weighted sum of the losses of one rank. The sums stay on the device."""

    def __init__(self) -> None:
        self.total: Any = 0.0
        self.weight: Any = 0.0
        self.is_weighted = False  # whether some part's weight differs from its number of samples
        self.is_sum = False  # whether some part's loss is a sum over samples, not a mean
        self.only: Any = None  # the loss, if there was only one part
        self._parts = 0

    def add(self, result: Any, samples: int) -> tuple[Any, Any]:
        """Add the loss of one part of the batch to the sum. Returns the mean to differentiate and
        its weight. The weight is 0 if the part of the batch is empty or contains only padding.
        """
        value, weight = result if isinstance(result, tuple) else (result, find_weight(result))
        if weight is None and _is_sum(value.grad_fn):
            self.is_sum = True
        if isinstance(weight, torch.Tensor):
            weight = weight.detach().to(value.device) * bool(samples)
            value = torch.where(weight > 0, value, torch.zeros_like(value))
            self.is_weighted = True
        elif weight is None or not samples:
            weight = samples
        else:
            self.is_weighted |= weight != samples
        self._parts += 1
        self.only = value.detach() if self._parts == 1 else None
        mean = value.detach().to(torch.promote_types(value.dtype, torch.float32))
        self.total, self.weight = self.total + mean * weight, self.weight + weight
        return value, weight

    def numbers(self) -> Any:
        """Return the total and the weight as one tensor, so that one operation can sum both numbers
        over the ranks.
        """
        kind = torch.float32 if self.total.device.type == "mps" else torch.float64
        weight = torch.as_tensor(self.weight, device=self.total.device)
        return torch.stack([self.total.to(kind), weight.to(kind)])


def find_weight(loss: Any) -> Any:
    """Return the denominator of a loss that is a mean, or None if the loss is not a mean. The
    denominator is a tensor if it depends on the data, for example on a mask that excludes some
    targets; otherwise the denominator is a number.

    A sum of several losses has the weight of the first loss whose weight depends on the data. If
    this weight is 0, the loss passes back a gradient of 0 instead of 0 / 0.
    """
    weights = list(_walk(loss.grad_fn, 0))
    for node, weight in weights:
        if isinstance(weight, torch.Tensor):
            node.register_hook(partial(_without_zero, weight))
    found = (weight for _, weight in weights if isinstance(weight, torch.Tensor))
    return next(found, weights[0][1] if weights else None)


def _without_zero(weight: Any, inputs: Any, outputs: Any) -> Any:
    """Replace the gradients of a mean's inputs by 0 if the denominator `weight` is 0."""
    return tuple(
        None if each is None else torch.where(weight != 0, each, torch.zeros_like(each))
        for each in inputs
    )


def _walk(node: Any, depth: int) -> Iterator[tuple[Any, Any]]:
    """Yield each node of the loss's graph that computes a mean, together with the mean's
    denominator.
    """
    if node is None or depth > DEEPEST:
        return
    kind = node.name().partition("Backward")[0]
    numerator, *rest = (each for each, _ in node.next_functions) if node.next_functions else (None,)
    if getattr(node, "_saved_reduction", None) == MEAN:
        weight = getattr(node, "_saved_total_weight", None)
        yield node, node._saved_self.numel() if weight is None else weight
    elif kind == "Mean":
        yield node, node._saved_self_sym_numel
    elif kind == "Div" and rest == [None] and _is_sum(numerator):
        yield node, node._saved_other
    elif kind in THROUGH:
        for each in (numerator, *rest):
            yield from _walk(each, depth + 1)


def _is_sum(node: Any) -> bool:
    """Return whether a node of an autograd graph is a sum. The sum may be negated or scaled."""
    while node is not None and node.name().partition("Backward")[0] in ("Neg", "Mul", "ToCopy"):
        node = node.next_functions[0][0]
    if node is None:
        return False
    return node.name().startswith("Sum") or getattr(node, "_saved_reduction", MEAN) != MEAN
