"""Finds and records one training step of a traced script, with the copies of parameters that the
script keeps, such as a moving average.

`SampleCount` counts the samples of the step.
"""

import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from unittest.mock import patch

import torch
from torch._C import _functorch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data._utils import fetch

from cavvy.capabilities.estimates.tracer.operations import find_place
from cavvy.capabilities.estimates.tracer.trace import (
    TraceRecorder,
    TraceTape,
    allows_tf32,
    summarize,
)
from cavvy.capabilities.estimates.tracer.values import own_line

_STEPS = 10  # of the first optimizer until the other optimizers are assumed not to step
_ITERATIONS = 20  # of one step of LBFGS, the default of PyTorch


class StepDone(BaseException):
    """Raised to end a traced script. This class is not an `Exception`, so the script's own
    `except Exception` does not catch it.
    """


class StepWatch:
    """Records one step, with hooks on all modules and optimizers while it is used as a context:

    * With one optimizer, the step lasts from the model's first forward pass to the first
      `optimizer.step`, or to the second forward pass if the script accumulates gradients.
    * With several optimizers, for example of a generator and a discriminator, all optimizers take
      turns in one recorded step. The recorded step begins when the first optimizer steps, and ends
      when the first optimizer steps again after another optimizer. Unless two optimizers simply
      alternate, the second round is recorded, because the first may be shorter, for example if a
      generator steps in the first iteration and in every fifth iteration after it. If no other
      optimizer makes a step soon, the others are ignored, and the first is treated as the only one.
      If no model runs between the steps of the optimizers, these steps count as one step, as if
      there were a single optimizer.
    * Without an optimizer of PyTorch, the step lasts up to the second forward pass after a backward
      pass. The script is assumed to update parameters as SGD does.

    Passes whose results get no gradients, before the first pass whose results do, only tried the
    model, and do not belong to the step.
    """

    def __init__(self) -> None:
        self._model: torch.nn.Module | None = None
        self._first: Optimizer | None = None
        self._optimizers: list[Optimizer] = []
        self._recorder = TraceRecorder()
        self._copies = CopyWatch(lambda: self._on and not self._tries)
        self._made: dict[str, Any] | None = None
        self._samples, self._batch, self._micro, self._on = SampleCount(), 0, 1, False
        # whether a model ran since the last step, and before the step of another optimizer
        self._ran, self._rounds = False, False
        # whether the optimizer's step may compute the last batch of an accumulation
        self._calls_last = False
        self._trained: set[int] = set()  # the ids of parameters that had gradients at a step
        self._others = False  # whether another optimizer has stepped
        # the steps of the first optimizer after its first step
        self._steps = 0
        self._whole = 0  # the value of `_steps` at which the second round begins
        self._has_state = True
        # whether a model has computed gradients, and the modules that ran before
        self._trains, self._called = False, weakref.WeakSet[torch.nn.Module]()
        # whether passes without a backward pass ran before the first optimizer was made; if others
        # follow, they only tried the model
        self._tries = False
        # the ends of the model's passes before the first gradients (the events and views until
        # then, and a function that restores the input), and which passes got gradients
        self._passes: list[tuple[int, int, Callable[[], None]]] = []
        self._used: set[int] = set()
        self._hooks = ExitStack()
        self.assumed: list[str] = []

    def __enter__(self) -> "StepWatch":
        begin, optimizers = Optimizer.__init__, self._optimizers

        def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            begin(optimizer, *args, **kwargs)
            self._tries |= not optimizers and self._trains and not self._has_gradients()
            optimizers.append(optimizer)

        self._hooks.enter_context(patch.object(Optimizer, "__init__", init))
        self._hooks.enter_context(self._samples.watch())
        self._hooks.enter_context(self._copies)
        for handle in (
            register_module_forward_pre_hook(self._forward),
            register_module_forward_hook(self._forwarded),
            register_optimizer_step_pre_hook(self._step),
            register_optimizer_step_post_hook(self._stepped),
        ):
            self._hooks.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._off()
        self._hooks.close()

    def profile(self, name: str) -> dict[str, Any] | None:
        """Return the work profile of the step, or None if the script has not finished a step."""
        if self._made is None and not self._optimizers and self._has_gradients():
            self._finish_without_optimizer()
        if self._made is None:
            return None
        state = {"optimizer": _count_state(self._optimizers)} if self._has_state else {}
        return {**self._made, "name": name, "memory": {**self._made["memory"], **state}}

    def _forward(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        has_parameters = any(True for _ in module.parameters())
        if self._tries:
            self._tries = False
            if not self._has_gradients():
                self._off()
                self._forget()
        if not self._trains and torch.is_grad_enabled() and has_parameters:
            self._train(module)
        again = module is self._model and self._ran and self._first is None
        if again and not self._has_gradients():
            tape = self._recorder.tape
            self._passes.append((len(tape.events), tape.views, self._samples.keep()))
            self._samples.restart()
        # Modules that run before the model, such as transforms of images, are no parts of it.
        if has_parameters or self._model is not None:
            self._samples.see(module, given)
        self._recorder.watch(
            module, recurse=False
        )  # also of other models, such as a target network
        if self._model is None and has_parameters:
            self._watch(module)
        elif again:
            self._forward_again(module)
        self._ran = True
        if not self._trains:
            self._called.add(module)

    def _forwarded(self, module: torch.nn.Module, _: Any, out: Any) -> None:
        """Note whether the results of the model's pass get gradients."""
        if module is not self._model or self._first is not None:
            return
        used, number = self._used, len(self._passes)
        outs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        trained = [leaf for leaf in outs if leaf.requires_grad]
        if not trained:
            used.add(number)
        for each in trained:
            each.register_hook(lambda _: used.add(number))  # type: ignore[no-untyped-call]

    def _train(self, module: torch.nn.Module) -> None:
        """Handle the first forward pass that computes gradients. The passes of another model, such
        as a teacher, that ran before this pass belong to the step. Earlier passes of the trained
        model do not belong to the step, because these passes only evaluate the model or choose
        actions with it.
        """
        self._trains = True
        if self._model is None:
            return
        self._samples.restart()
        self._ran = False
        if module in self._called:
            self._off()
            self._recorder = TraceRecorder()
        self._watch(module)

    def _watch(self, module: torch.nn.Module) -> None:
        self._model = module
        self._passes, self._used = [], set()
        self._recorder.watch(module)
        self._start()

    def _forward_again(self, module: torch.nn.Module) -> None:
        """Handle the model's second and each later forward pass, as long as no optimizer has
        stepped.
        """
        if not self._optimizers and self._has_gradients():
            self._finish_without_optimizer()
            raise StepDone
        if any(each.grad is not None for each in module.parameters()):
            self._micro += 1
            self._off()

    def _step(self, optimizer: Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for group in optimizer.param_groups:
            if "tolerance_change" in group:  # LBFGS; losses that are read as 1 do not change
                group["tolerance_change"] = -1
            if group.get("max_iter", 0) > _ITERATIONS:
                more = f"{group['max_iter']:,} iterations of a step"
                self.assumed = [
                    f"{own_line()}: the optimizer permits {more}; the trace assumes that a step "
                    f"ends after {_ITERATIONS} iterations"
                ]
                group |= {"max_iter": _ITERATIONS, "max_eval": _ITERATIONS * 5 // 4}
            self._trained |= {id(each) for each in group["params"] if each.grad is not None}
        if self._model is None:
            return
        self._off()
        closure = next(iter((*args[1:], *options.values())), None)
        if self._first is None and closure is not None:
            self._begin_closure()
        elif self._first is None:
            self._first = optimizer
            self._made = self._summarize([optimizer], self._micro)
            if len(self._optimizers) == 1:
                self._has_state = _fill_state(optimizer)
                raise StepDone
        else:
            self._take_turn(optimizer)

    def _take_turn(self, optimizer: Optimizer) -> None:
        """Handle a step of several optimizers after the first step. Raises StepDone at the end of
        the recorded round.
        """
        if optimizer is self._first:
            self._steps += 1
            if self._rounds:
                self._made = self._summarize(self._optimizers, 1)
            if self._rounds and not self._whole:
                self._whole, self._others, self._rounds = self._steps, False, False
            elif self._others or self._steps == self._whole + _STEPS:
                raise StepDone
        elif self._whole == self._steps == 1:
            raise StepDone  # The optimizers alternate, so all rounds are equal.
        else:
            self._others = True
            self._rounds |= self._ran

    def _begin_closure(self) -> None:
        """Handle a step that calls the model itself. If the passes before this step computed
        gradients, the step may compute the last batch of an accumulation; otherwise, the passes
        before do not train.
        """
        self._calls_last = self._has_gradients()
        if not self._calls_last:
            self._forget()

    def _forget(self) -> None:
        """Forget passes that are not a part of the step."""
        self._model, self._trains = None, False
        self._recorder = TraceRecorder()
        self._samples.restart()

    def _stepped(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        """Start or end the recording after a step of an optimizer. If the script's only optimizer
        calls the model during the optimizer's step, as LBFGS does, the recording ends after that
        step.
        """
        if self._model is None:
            return
        if self._first is None:
            self._off()
            self._made = self._summarize([optimizer], self._micro if self._calls_last else 1)
            if len(self._optimizers) == 1 or not self._calls_last:
                raise StepDone
            self._first = optimizer
        if optimizer is self._first and self._steps == self._whole:
            self._recorder = TraceRecorder()
            self._recorder.watch(self._model)
            for each in self._list_parameters(self._optimizers):
                self._recorder.see(each, "parameter")
        self._ran = False
        self._start()

    def _start(self) -> None:
        if self._on:
            return
        self._recorder.__enter__()  # type: ignore[no-untyped-call]  # as torch declares it
        self._on = True

    def _off(self) -> None:
        if self._on:
            # as torch declares it
            self._recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._on = False

    def _has_gradients(self) -> bool:
        return any(each.backward for each in self._recorder.tape.events)

    def _finish_without_optimizer(self) -> None:
        self._off()
        self._made = self._summarize([], 1)

    def _list_parameters(self, optimizers: list[Optimizer]) -> list[torch.nn.Parameter]:
        assert self._model is not None
        groups = itertools.chain.from_iterable(each.param_groups for each in optimizers)
        every = [*self._model.parameters(), *(each for group in groups for each in group["params"])]
        return list({id(each): each for each in every}.values())

    def _forget_tries(self) -> None:
        """Forget the passes before the first whose results got gradients."""
        first = min(self._used, default=0)
        if first < len(self._passes):
            self._passes[first][2]()
        if first:
            self._recorder.tape.drop(*self._passes[first - 1][:2])
        self._passes, self._used = [], set()

    def _summarize(self, optimizers: list[Optimizer], micro: int) -> dict[str, Any]:
        self._forget_tries()
        every = self._list_parameters(optimizers)
        for each in every:
            self._recorder.see(each, "parameter")
        self._copies.add_to(
            self._recorder,
            {each.untyped_storage()._cdata for each in _list_state(self._optimizers)},
        )
        self._recorder.close(every)
        self._batch = self._batch or self._samples.count(micro)  # of the first round
        kind = type(optimizers[0]).__name__.lower() if optimizers else "sgd"
        if kind == "sgd" and optimizers and optimizers[0].defaults.get("momentum"):
            kind = "momentum"
        made = summarize(
            self._recorder.tape,
            [each for each in every if each.requires_grad or id(each) in self._trained],
            batch=self._batch,
            precision=_find_precision(self._recorder.tape),
            optimizer=kind,
            name="",
        )
        return {**made, "run": {"accumulate": micro}}


def _fill_state(optimizer: Optimizer) -> bool:
    """Call the optimizer's `step` without its hooks, so that the optimizer creates its state.
    Return False if the step fails, as some optimizers do without a GPU.
    """
    with suppress(Exception):  # The optimizer may be the user's own code.
        type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]  # as torch sets
        return True
    return False


def _list_state(optimizers: list[Optimizer]) -> list[torch.Tensor]:
    states = tree_leaves([[*each.state.values()] for each in optimizers])
    return [each for each in states if isinstance(each, torch.Tensor)]


def _count_state(optimizers: list[Optimizer]) -> int:
    """Return the bytes of the states of the optimizers. LBFGS fills its history in later steps:
    for each parameter, two elements for each entry of the history.
    """
    kept = {id(each): each.nbytes for each in _list_state(optimizers)}
    groups = itertools.chain.from_iterable(each.param_groups for each in optimizers)
    history: int = sum(
        2 * group.get("history_size", 0) * sum(each.nbytes for each in group["params"])
        for group in groups
    )
    return sum(kept.values()) + history


def _find_precision(tape: TraceTape) -> str:
    """Return the precision of a step: a half precision if any matrix product of the step has a half
    precision, otherwise "tf32" if the script allows it, or "fp32". The estimate of a float32
    product uses one of these even if the precision of the step is half. The model's first call does
    not show the precision, because wrappers of models start autocast inside the call.
    """
    flops = dict.fromkeys(_HALF, 0.0)
    for each in tape.events:
        if each.dtype in flops:
            flops[each.dtype] += each.flops
    half = max(flops, key=lambda dtype: flops[dtype])
    if flops[half]:
        return _HALF[half]
    return "tf32" if allows_tf32() else "fp32"


_HALF = {"bfloat16": "bf16", "float16": "fp16"}

_CLONES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_COPY = torch.ops.aten.copy_.default


class CopyWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # as torch declares it
    """Records which storages are copies of which other storages, except while `is_paused` returns
    true. Within a step, most copies are temporary, and the trace records these copies itself.
    """

    def __init__(self, is_paused: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as torch declares it
        self._is_paused = is_paused
        # for each copy: its source, the source of its source, and so on
        self._sources = weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (func in _CLONES or func is _COPY) and not self._is_paused():
            self._note(out, args[func is _COPY])
        return out

    def _note(self, made: torch.Tensor, source: torch.Tensor) -> None:
        try:
            own, other = made.untyped_storage(), source.untyped_storage()
        except NotImplementedError:  # Sparse tensors, for example, have no storage.
            return
        known = (*self._sources.get(other, ()), *self._sources.get(own, ()))
        self._sources[own] = tuple(dict.fromkeys((weakref.ref(other), *known)))
        place = find_place(other)
        if place:
            own.place = place  # type: ignore[attr-defined]  # an attribute of this module

    def add_to(self, recorder: TraceRecorder, others: set[int]) -> None:
        """Mark each copy of a parameter or buffer that exists now as a parameter or buffer. A copy
        on another device than its source does not count. `others` are the ids of storages that
        count elsewhere.
        """
        for copy, sources in [*self._sources.items()]:
            alive = [each for ref in sources if (each := ref()) is not None]
            kinds = [
                recorder.find_kept(each) for each in alive if find_place(each) == find_place(copy)
            ]
            kept = next((each for each in kinds if each in ("parameter", "buffer")), "")
            if kept and copy._cdata not in others and not recorder.find_kept(copy):
                recorder.see_storage(copy, kept)


class SampleCount:
    """Counts the samples of a micro-batch. The number is the size of the first dimension of the
    model's input, or of the second dimension if layers expect the samples there. If the data loader
    loaded fewer samples than this size, the number of loaded samples is used. For example, a data
    loader counts graphs, but the first dimension counts the nodes of all graphs. In
    `torch.func.vmap`, each element of the mapped dimension is a sample. If the input is a list of
    tensors that the model stacks, such as pictures, each tensor of the list is a sample.
    """

    def __init__(self) -> None:
        self._first = 0  # samples of the model's input
        self._sizes: tuple[int, ...] = ()  # of the input's first two dimensions
        self._listed = 0, 0  # number of tensors in the input's list, and their dimensions
        # loaded since the last run of a model, and loaded for the step
        self._fresh, self._loaded = 0, 0
        self._ran = False

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Count the samples that data loaders load in this context."""
        with ExitStack() as stack:
            for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):
                stack.enter_context(patch.object(kind, "fetch", self._counted(kind.fetch)))
            yield

    def _counted(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def load(fetcher: Any, index: Any) -> Any:
            count = len(index) if fetcher.auto_collation else 0
            self._fresh = count if self._ran else self._fresh + count
            self._loaded, self._ran = self._loaded + count, False
            return before(fetcher, index)

        return load

    def restart(self) -> None:
        """Forget the input of passes that are not a part of the step."""
        self._first = 0

    def keep(self) -> Callable[[], None]:
        """Return a function that restores the input that this object has seen until now."""
        kept = self._first, self._sizes, self._listed

        def restore() -> None:
            self._first, self._sizes, self._listed = kept

        return restore

    def see(self, module: torch.nn.Module, given: tuple[Any, ...]) -> None:
        """Read the input of a module that is about to run."""
        self._ran = True
        tensors = [
            leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if not tensors:
            return
        # If the model gets only keyword arguments, its first module with a tensor input is used.
        if not self._first:
            self._first, self._sizes = _count_mapped(module, tensors[0]), tensors[0].shape[:2]
            self._loaded = self._fresh
            listed = given[0] if given and isinstance(given[0], list | tuple) else ()
            is_list = all(isinstance(each, torch.Tensor) for each in listed)
            self._listed = len(listed) if is_list else 0, tensors[0].dim()
        elif (tensors[0].shape[0], tensors[0].dim() - 1) == self._listed:
            self._first = tensors[0].shape[0]
        # A layer may expect the samples in the second dimension of the model's input.
        is_second = getattr(module, "batch_first", True) is False
        if is_second and tensors[0].dim() == 3 and tensors[0].shape[:2] == self._sizes:
            self._first = tensors[0].shape[1]

    def count(self, micro: int) -> int:
        """Return the number of samples of each of the step's `micro` micro-batches."""
        loaded = self._loaded // micro or self._loaded
        return min(self._first, loaded or self._first) or 1


def _count_mapped(module: torch.nn.Module, tensor: torch.Tensor) -> int:
    """Return the number of samples in the first dimension of a tensor, and in the dimensions over
    which `vmap` maps. If `vmap` maps only over the tensor and not over the module's parameters, it
    maps over single samples.
    """
    mapped = _find_mapped(tensor)
    if mapped == 1 or any(_find_mapped(each) > 1 for each in module.parameters()):
        return mapped * tensor.shape[0]
    return mapped


def _find_mapped(tensor: torch.Tensor) -> int:
    """Return how many slices of a tensor `vmap` maps over. Nested calls of `vmap` multiply the
    sizes of their mapped dimensions.
    """
    size = 1
    while _functorch.is_functorch_wrapped_tensor(tensor):
        inner = _functorch.get_unwrapped(tensor)
        if _functorch.is_batchedtensor(tensor):
            size *= inner.shape[_functorch.maybe_get_bdim(tensor)]
        tensor = inner
    return size
