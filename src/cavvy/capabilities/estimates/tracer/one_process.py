"""Runs a traced script in one process: without other ranks, and without workers of data loaders.

A traced script has one rank and one process. Process groups use PyTorch's backend `fake`, whose
collective operations return immediately.

`find_ranks` finds the ranks among the processes that a traced script starts.
"""

import dis
import functools
import inspect
import multiprocessing
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from multiprocessing import forkserver, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import distributed
from torch.distributed import device_mesh, distributed_c10d, fsdp
from torch.utils.data import DataLoader

from cavvy.capabilities.estimates.tracer.values import is_own_call

TORCHRUN = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}  # the variables that torchrun sets for the only rank of a node


@contextmanager
def end_processes() -> Iterator[None]:
    """Kill the processes that a script started and that still run when its trace ends, such as
    endless producers of data. Python would wait for these processes when it exits. Other programs
    that the script started, such as a monitor, are terminated.
    """
    before, others = multiprocessing.active_children(), _list_children()
    try:
        yield
    finally:
        for each in multiprocessing.active_children():
            if each not in before:
                each.kill()  # a script may handle SIGTERM
                each.join()
        for number in _list_children() - others:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGTERM)


def _list_children() -> set[int]:
    """Return the process ids of the children of this process, without the children that Python's
    multiprocessing uses itself. The set is empty on a system without /proc.
    """
    found = set[int]()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # The thread has ended.
            found |= {int(each) for each in path.read_text().split()}
    own: Any = resource_tracker._resource_tracker, forkserver._forkserver
    return found - {own[0]._pid, own[1]._forkserver_pid}


@contextmanager
def one_process() -> Iterator[None]:
    """Replace process groups with a group of one rank, wrappers of models with a wrapper that only
    calls the model, and data loaders with loaders without worker processes. `torchrun_environment`
    sets the environment variables of the rank.
    """
    changes: list[tuple[Any, str, Any]] = [
        (each, "init_process_group", _start_group)
        for each in (distributed, distributed_c10d, device_mesh)
    ]
    changes += [
        (distributed, "all_gather_object", _all_gather_object),
        (distributed, "gather_object", _gather_object),
        (torch.nn.parallel, "DistributedDataParallel", _OneRank),
        (torch.nn.parallel.distributed, "DistributedDataParallel", _OneRank),
        (fsdp, "FullyShardedDataParallel", _OneRank),
        (fsdp, "fully_shard", _leave_whole),
        (torch.multiprocessing, "spawn", _run_first),
        (torch.multiprocessing, "start_processes", _run_first),
        (BaseProcess, "start", _start_first(BaseProcess.start)),
        (DataLoader, "__init__", _without_workers(DataLoader.__init__)),
    ]
    started = distributed.is_initialized()
    with ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(patch.object(where, name, new))
        try:
            yield
        finally:
            if distributed.is_initialized() and not started:
                distributed.destroy_process_group()


def torchrun_environment() -> AbstractContextManager[Any]:
    """Set the environment variables that torchrun sets, with the values for a single rank."""
    return patch.dict(os.environ, TORCHRUN)


@contextmanager
def watch_rank_variables(missed: set[str]) -> Iterator[None]:
    """Record in `missed` each variable of torchrun that the user's own code reads although the
    variable is not set. A variable that only a library reads is not added, because libraries also
    work without these variables.
    """
    kind = type(os.environ)
    before = kind.__getitem__

    def read(environment: Any, name: str) -> str:
        try:
            return before(environment, name)
        except KeyError:
            if name in TORCHRUN and is_own_call():
                missed.add(name)
            raise

    with patch.object(kind, "__getitem__", read):
        yield


def is_rank_missing(error: BaseException, missed: set[str]) -> bool:
    """Return whether a script may have failed because it does not run under torchrun. `missed` are
    the variables of torchrun that the script did not find.
    """
    if isinstance(error, ValueError):  # `init_process_group` did not find a variable.
        return "env:// rendezvous" in str(error)
    # Scripts that parse their arguments exit with 0 or 2 if the arguments are wrong.
    is_usage = isinstance(error, SystemExit) and error.code in (None, 0, 2)
    kinds = KeyError, TypeError, AssertionError, SystemExit
    return bool(missed) and isinstance(error, kinds) and not is_usage


class _Mixed(torch.nn.Module):
    """A stand-in for a model that is wrapped in fully sharded data parallelism (FSDP). If
    `use_policy` has received FSDP's mixed precision, the model runs under autocast with the
    parameter type of this mixed precision.
    """

    _dtype: torch.dtype | None = None

    def use_policy(self, policy: Any) -> None:
        self._dtype = getattr(policy, "param_dtype", None)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._dtype is None:
            return super().__call__(*args, **kwargs)
        with torch.autocast("cuda", self._dtype):
            return super().__call__(*args, **kwargs)


class _OneRank(_Mixed):
    """A wrapper of a model, in place of DistributedDataParallel and FullyShardedDataParallel. With
    one rank, DistributedDataParallel and FullyShardedDataParallel return the results of the model.
    """

    def __init__(self, module: torch.nn.Module, *_: Any, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.use_policy(options.get("mixed_precision"))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @staticmethod
    def no_sync(*_: Any, **__: Any) -> AbstractContextManager[None]:
        return nullcontext()

    join = summon_full_params = state_dict_type = no_sync

    def register_comm_hook(self, *_: Any, **__: Any) -> None:
        """Do nothing, because gradients are not sent."""

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)


def _leave_whole(module: Any, *_: Any, **options: Any) -> Any:
    """Act like `fully_shard`, with one rank: add the methods of `FSDPModule`, which do nothing, to
    the module's class.
    """
    kind = type(module)
    methods = {
        name: lambda *_, **__: None for name in vars(fsdp.FSDPModule) if not name.startswith("_")
    }
    module.__class__ = type(kind.__name__, (_Mixed, kind), methods)
    module.use_policy(options.get("mp_policy"))
    return module


def _run_first(function: Any, args: tuple[Any, ...] = (), *_: Any, **__: Any) -> None:
    """Act like `torch.multiprocessing.spawn`, but run only the first process, in this process."""
    function(0, *args)


def _start_first(before: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a `Process.start` that runs the process of rank 0 in this process, and does not start
    the processes of other ranks. Processes without a rank start as usual.
    """

    def start(process: Any) -> None:
        ranks = find_ranks(process)
        if not ranks:
            before(process)
            return
        process._popen = _EndedProcess()
        process._sentinel = process._popen.sentinel
        if not any(ranks):
            process.run()

    return start


class _EndedProcess:
    """A handle for a process that the trace does not start."""

    pid = returncode = 0

    def __init__(self) -> None:
        self.sentinel = os.open(os.devnull, os.O_RDONLY)  # can always be read, as after an end

    def poll(self) -> int:
        return 0

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def close(self) -> None:
        os.close(self.sentinel)

    def terminate(self) -> None:
        """Do nothing, because no process has started."""

    kill = terminate


_init_process_group = distributed_c10d.init_process_group


def _start_group(*_: Any, **__: Any) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _init_process_group("fake", rank=0, world_size=1, store=FakeStore())


def _all_gather_object(objects: list[Any], own: Any, *_: Any, **__: Any) -> None:
    objects[0] = own


def _gather_object(own: Any, objects: list[Any] | None = None, *_: Any, **__: Any) -> None:
    if objects is not None:
        objects[0] = own


def _without_workers(before: Any) -> Any:
    """Return a `DataLoader.__init__` whose loader uses no worker processes and no pinned memory. A
    worker process would have to send the storages of tensors, but fake tensors have no storage.
    """
    signature = inspect.signature(before)

    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        given.arguments |= {"num_workers": 0, "pin_memory": False}
        for name in ("prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout"):
            given.arguments.pop(name, None)
        before(*given.args, **given.kwargs)

    return init


_RANK_NAME = re.compile("(.+_)?rank|gpu")
# Only code that trains, or that joins a process group, uses these names.
_TRAINING = frozenset(
    {
        *("backward", "init_process_group", "init_device_mesh"),
        *("DistributedDataParallel", "DDP", "Trainer", "Accelerator", "Fabric"),
    }
)
# methods that Python calls without naming them
_IMPLICIT = ("__init__", "__new__", "__call__", "__iter__", "__next__", "__getitem__", "forward")
_EMPTY = CellType()
_LIBRARIES = ("-packages", os.path.dirname(os.__file__), "<frozen")


def find_ranks(process: Any) -> list[int]:
    """Return the rank numbers that a process received, or [] if the process is not a rank.

    A rank number is an integer whose name is `rank` or `gpu`, or ends with `_rank`. A rank number
    is an argument of the function that the process runs. If a subclass of `Process` overrides
    `run`, a rank number can also be an attribute of the process. A process that only produces data
    can also have a rank number, and can run forever. Therefore a process is a rank only if its code
    trains: see `_trains`.
    """
    overrides = type(process).run is not BaseProcess.run
    named = {**_bind(process), **(vars(process) if overrides else {})}.items()
    found = [
        each for name, each in named if _RANK_NAME.fullmatch(name.lstrip("_")) and type(each) is int
    ]
    return found if found and _trains(process.run if overrides else process._target) else []


def _bind(process: Any) -> Mapping[str, Any]:
    """Return the arguments of a process's function by name."""
    try:
        given = inspect.signature(process._target).bind(*process._args, **process._kwargs)
    except (TypeError, ValueError):  # no function, wrong arguments, or a function without names
        return {}
    return given.arguments


def _trains(start: Any) -> bool:
    """Return whether a function uses one of the names in `_TRAINING`, itself or in other code of
    the user that the function uses.
    """
    attributes, scopes, seen = set(_IMPLICIT), list[Any](), set[int]()
    todo = [start]
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, functools.partial):
            todo.append(each.func)
        elif isinstance(each, MethodType):
            scopes.append(type(each.__self__))
            todo.append(each.__func__)
        elif isinstance(each, FunctionType):
            used = set(_list_names(each.__code__))
            attributes |= {name for name, is_global in used if not is_global}
            todo += _list_outside(each, {name for name, is_global in used if is_global})
            todo.append(each.__code__)
        elif isinstance(each, CodeType):
            if {name for name, _ in _list_names(each)} & _TRAINING:
                return True
            todo += _list_imported(each)
        elif isinstance(each, type | ModuleType):
            scopes.append(each)
        # The type of an object is not known, so a method of any class in use may be called.
        todo += [_find_method(scope, name) for scope in scopes for name in attributes]
        todo = [other for other in todo if id(other) not in seen and _is_own(other)]
    return False


def _list_outside(function: FunctionType, names: set[str]) -> list[Any]:
    """Return the global variables and the variables of enclosing functions that a function uses."""
    cells = [each.cell_contents for each in function.__closure__ or () if each != _EMPTY]
    return [*cells, *(function.__globals__.get(name) for name in names)]


def _list_names(code: CodeType) -> Iterator[tuple[str, bool]]:
    """Yield each name that the code uses, and whether the name is global."""
    for each in _list_instructions(code):
        if each.opcode in dis.hasname:
            yield each.argval, each.opname in ("LOAD_GLOBAL", "LOAD_NAME")


def _list_imported(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of each of the user's own modules that `code` imports, without running the
    module.
    """
    for each in _list_instructions(code):
        if each.opname != "IMPORT_NAME":
            continue
        try:
            spec = find_spec(each.argval)
        except (ImportError, ValueError):  # a relative import, or a module without a file
            continue
        if spec and isinstance(spec.loader, SourceFileLoader) and _is_own_file(spec.loader.path):
            found = spec.loader.get_code(spec.name)
            if found is not None:
                yield found


def _list_instructions(code: CodeType) -> Iterator[dis.Instruction]:
    """Yield the instructions of the code, including the functions and classes that it defines."""
    yield from dis.get_instructions(code)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _list_instructions(inner)


def _find_method(scope: Any, name: str) -> Any:
    """Return a function of a class or module by name, without running its code."""
    found = inspect.getattr_static(scope, name, None)
    if isinstance(found, property):
        return found.fget
    return getattr(found, "__func__", found)


def _is_own(value: Any) -> bool:
    """Return whether a value is a class, a module, a partial function, a method, or code that does
    not belong to a library.
    """
    if isinstance(value, type | ModuleType | functools.partial | MethodType):
        return True
    code = value if isinstance(value, CodeType) else getattr(value, "__code__", None)
    return code is not None and _is_own_file(code.co_filename)


def _is_own_file(path: str) -> bool:
    return not any(part in path for part in _LIBRARIES)
