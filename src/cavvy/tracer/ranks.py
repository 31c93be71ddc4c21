"""Finds the ranks among the processes that a traced script starts."""

import dis
import functools
import inspect
import os
import re
from collections.abc import Iterator, Mapping
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec
from multiprocessing.process import BaseProcess
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

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
