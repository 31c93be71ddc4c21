"""Supplies the values that a traced script reads from fake tensors. A known value, such as a number
that the script passed to `torch.tensor`, is returned; any other value is guessed.

Finds the line of the user's own code that is being executed.
"""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

# One of so many reads in a line returns another value, so that a loop until a value is small, or
# until a condition is true, ends.
_TURN = 1000
_UNFIT = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape}


class ReadValues(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """Supplies a value when code reads one from a fake tensor (`if x.any():`, `.item()`). An
    unknown boolean is read as False, and an unknown number as 1. If the number was computed from
    another unknown number, such as x + 5, the computation is repeated with x = 1. With False or 1,
    most scripts continue with the same code as in most steps of a real run. A check such as
    `isfinite` gets its usual result: see `mark_likely`.
    """

    def __init__(self, assumed: dict[str, None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch declares it
        self._assumed = assumed  # the texts of all assumptions
        self._reads = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return self._read(args[0])
        return func(*args, **(kwargs or {}))

    def _read(self, tensor: torch.Tensor) -> bool | int | float:
        known = find_known(tensor)
        if known is not None:
            with no_dispatch():
                value: bool | int | float = known.item()
                return value
        line = own_line()
        likely: bool | None = getattr(tensor, "likely", None)
        if tensor.dtype is torch.bool and is_own_read():
            guessed = "true" if likely else "false"
            self._assumed[f"{line}: a condition is assumed to be {guessed}"] = None
        if likely is not None:
            return likely
        self._reads[line] += 1
        turns = self._reads[line] % _TURN == 0
        if tensor.dtype == torch.bool:
            return turns
        with no_dispatch():
            guess: int | float = _guess(tensor).item()
        return type(guess)() if turns else guess


def find_known(tensor: Any) -> torch.Tensor | None:
    """Return a real tensor with the values of a fake tensor, or None if the values are unknown."""
    known: torch.Tensor | None = getattr(tensor, "constant", None)
    return known


def guess_number(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """Guess the result of an operation on numbers if some of the numbers are unknown, and record
    the guess with the result. An unknown number is guessed to be 1. For example, if `n` is unknown,
    the guess of `n + 5` is 6.
    """
    if not isinstance(out, torch.Tensor):
        return
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    vars(out).pop("guess", None)  # of the number before this operation changed it
    if (
        not given
        or any(each.numel() != 1 or each.layout is not torch.strided for each in (*given, out))
        or out.dtype is torch.bool
        or find_known(out) is not None
        or not _UNFIT.isdisjoint(func.tags)
        # The number is a part of a larger storage, which the guess lacks.
        or func is torch.ops.aten.as_strided.default
    ):
        return
    with no_dispatch():
        real = tree_map_only(torch.Tensor, _guess, (args, kwargs))
        made: torch.Tensor = func(*real[0], **real[1])
        if made.isfinite().all():
            out.guess = made  # type: ignore[attr-defined]  # an attribute of this module


def _guess(tensor: torch.Tensor) -> torch.Tensor:
    """Return a real tensor with the known or guessed values of a fake tensor."""
    known = find_known(tensor)
    known = getattr(tensor, "guess", None) if known is None else known
    if known is not None:
        return known.clone()
    number = getattr(tensor, "likely", tensor.dtype is not torch.bool)
    return torch.full(tensor.shape, number, dtype=tensor.dtype)


def find_decided(name: str, leaves: list[torch.Tensor], out: Any) -> torch.Tensor | None:
    """Return the values of a logical operation or a product of integers if one known operand
    decides the result: anything `or` true is true, and anything `and` false is false. Otherwise,
    return None.
    """
    name = name.strip("_").removesuffix("_")
    if name not in _DECIDED or out.is_floating_point() or out.is_complex():
        return None
    value = _DECIDED[name]
    if value and out.dtype is not torch.bool:
        return None
    known = [each for leaf in leaves if (each := find_known(leaf)) is not None]
    with no_dispatch():
        if any(bool((each != 0).eq(value).all()) for each in known if each.numel()):
            return torch.full(out.shape, value, dtype=out.dtype)
    return None


_OR, _AND = ("bitwise_or", "logical_or", "or", "ior"), ("bitwise_and", "logical_and", "and", "iand")


_DECIDED = {**dict.fromkeys(_OR, True), **dict.fromkeys((*_AND, "mul"), False)}


def mark_likely(name: str, args: Any, out: Any, routed: int) -> None:
    """Record the likely value of a boolean result. The result of `all` is likely true unless its
    operand is likely false. The result of a negation is the opposite of its operand's likely value.
    After `topk` has chosen experts, a test whether an expert gets samples is likely true.
    """
    if not isinstance(out, torch.Tensor) or out.dtype is not torch.bool:
        return
    given: bool | None = getattr(args[0], "likely", None) if args else None
    if name in ("logical_not", "bitwise_not") and given is not None:
        out.likely = not given  # type: ignore[attr-defined]  # an attribute of this module
    elif name == "all" or (name == "any" and given is not None):
        out.likely = given is not False  # type: ignore[attr-defined]
    elif routed and name in ("any", "gt", "ge", "ne") and out.numel() == 1:
        out.likely = True  # type: ignore[attr-defined]


class ValueFunctions(TorchFunctionMode):
    """Replaces functions of PyTorch that read the values of many elements, and records the usual
    results of checks such as `isfinite`.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replaced = _FUNCTIONS.get(func)
        if replaced is not None:
            return replaced(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        if func in _CHECKS and isinstance(out, torch.Tensor):
            out.likely = _CHECKS[func]  # type: ignore[attr-defined]  # an attribute of this module
        return out


def _numpy(tensor: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Act like `Tensor.numpy`. Unknown values are guessed as in `ReadValues`."""
    with no_dispatch():
        return _guess(tensor).numpy()


def _array(tensor: torch.Tensor, dtype: Any = None, **_: Any) -> Any:
    array = _numpy(tensor)
    return array if dtype is None else array.astype(dtype, copy=False)


def _list(tensor: torch.Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else _numpy(tensor).tolist()


def _format(tensor: torch.Tensor, spec: str) -> str:
    return format(tensor.item(), spec) if tensor.dim() == 0 else object.__format__(tensor, spec)


def _equal(first: torch.Tensor, second: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
    """Act like `torch.equal` and `torch.allclose`. If the values of a tensor are unknown, the two
    tensors count as equal.
    """
    one, other = find_known(first), find_known(second)
    if one is None or other is None:
        return first.shape == second.shape
    with no_dispatch():
        return torch.equal(one, other)


def _allclose(first: torch.Tensor, second: torch.Tensor, *_: Any, **__: Any) -> bool:
    return True


def _deep_copy(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        copied = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        memo[id(tensor)] = (
            torch.nn.Parameter(copied, tensor.requires_grad) if is_parameter else copied
        )
    made: torch.Tensor = memo[id(tensor)]
    return made


def _make(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a form of `torch.tensor` or `torch.as_tensor` that accepts data with fake tensors."""

    def make(data: Any, *args: Any, **kwargs: Any) -> Any:
        return before(_read_all(data), *args, **kwargs)

    return make


def _read_all(data: Any) -> Any:
    """Return nested sequences in which each tensor is replaced by its values."""
    if isinstance(data, list | tuple) and data:
        first = data[0]
        if isinstance(first, torch.Tensor | list | tuple):
            return [
                _list(each) if isinstance(each, torch.Tensor) else _read_all(each) for each in data
            ]
    return data


def _pack(
    data: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replace `_pack_padded_sequence`. The result has one row for each time step of each sequence.
    If the lengths are unknown, each sequence has the full length.
    """
    steps = data.shape[1 if batch_first else 0]
    known = find_known(lengths)
    each = _list(lengths) if known is not None else [steps] * lengths.shape[0]
    active = [sum(length > step for length in each) for step in range(max(each))]
    rows = data.transpose(0, 1) if batch_first else data
    return rows.reshape(-1, *data.shape[2:])[: sum(each)].clone(), torch.tensor(active)


def _unpack(
    data: torch.Tensor, sizes: torch.Tensor, batch_first: bool, value: float, total: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Act like `_pad_packed_sequence`."""
    active = _list(sizes)
    steps, batch = max(total, len(active)), active[0]
    missing = steps * batch - data.shape[0]
    padded = F.pad(data, [0, 0] * (data.dim() - 1) + [0, missing], value=value)
    padded = padded.view(steps, batch, *data.shape[1:])
    lengths = [sum(count > number for count in active) for number in range(batch)]
    return padded.transpose(0, 1) if batch_first else padded, torch.tensor(lengths)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Replace the CTC loss by a loss that uses the same amount of memory. The CTC loss stores a
    probability for each sample, time step and state. There are 2 n + 1 states for n targets (Graves
    et al. 2006).
    """
    log_probs = log_probs if log_probs.dim() == 3 else log_probs[:, None]
    steps, batch, _ = log_probs.shape
    count = targets.shape[1] if targets.dim() == 2 else -(-targets.numel() // batch)
    states = torch.zeros(batch, steps, 2 * count + 1, dtype=torch.int64)
    loss = -log_probs.transpose(0, 1).gather(2, states).cumsum(1)[:, -1, -1]
    return {"mean": loss.mean, "sum": loss.sum}.get(reduction, lambda: loss)()


_VARIABLE = torch._C._VariableFunctions


_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _array,
    torch.Tensor.tolist: _list,
    torch.Tensor.__format__: _format,
    torch.Tensor.__deepcopy__: _deep_copy,
    torch.Tensor.share_memory_: lambda tensor: tensor,
    torch.equal: _equal,
    torch.Tensor.equal: _equal,
    torch.allclose: _allclose,
    torch.Tensor.allclose: _allclose,
    torch.tensor: _make(torch.tensor),
    torch.as_tensor: _make(torch.as_tensor),
    _VARIABLE._pack_padded_sequence: _pack,
    _VARIABLE._pad_packed_sequence: _unpack,
    F.ctc_loss: _ctc_loss,
}


# functions whose result is usually the same for all elements
_CHECKS = {
    torch.isfinite: True,
    torch.Tensor.isfinite: True,
    torch.isnan: False,
    torch.Tensor.isnan: False,
    torch.isinf: False,
    torch.Tensor.isinf: False,
}


def own_line() -> str:
    """Return the line of the user's own code that is being executed."""
    frame: Any = sys._getframe(1)
    while frame.f_back and any(part in frame.f_code.co_filename for part in _OTHERS):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_own_call() -> bool:
    """Return whether the caller of `is_own_call` was itself called by the user's own code. The
    search skips callers in Python's modules `os` and `collections`.
    """
    frame: Any = sys._getframe(2)
    while frame.f_back and frame.f_code.co_filename.endswith(_ENVIRONMENT):
        frame = frame.f_back
    return not any(part in frame.f_code.co_filename for part in _OTHERS)


def is_own_read() -> bool:
    """Return whether the user's own code reads the value that the trace supplies, rather than code
    of PyTorch or another library.
    """
    frame: Any = sys._getframe(1)
    while frame.f_back and frame.f_code.co_filename.startswith(_DISPATCH):
        frame = frame.f_back
    return not any(part in frame.f_code.co_filename for part in _OTHERS)


_ENVIRONMENT = (os.path.basename(os.__file__), "_collections_abc>", "_collections_abc.py", "os>")


_HERE = os.path.dirname(__file__)


_DISPATCH = (
    _HERE,
    *(
        os.path.join(os.path.dirname(torch.__file__), each)
        for each in ("_ops.py", "_compile.py", "_dynamo", "utils")
    ),
)


_OTHERS = (
    os.path.dirname(torch.__file__),
    _HERE,
    os.path.join(os.path.dirname(_HERE), "train"),  # a script may use the library for training
    "-packages",
    "/lib/python",
    "<",
)
