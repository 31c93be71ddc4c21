"""Shortens the imports of a traced script, which take most of the CPU time of a trace.

PyTorch imports its compiler for fake tensors, which read three settings of it, and for functions
that it must not compile. In a trace, only a script or library that imports the compiler, or reads
another attribute of it, gets it.
"""

import builtins
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import _disable_current_modes

_COMPILER = "torch._dynamo"
# the modules of the compiler that PyTorch imports although nothing is compiled, and where it does
_UNUSED = (_COMPILER, f"{_COMPILER}.config", f"{_COMPILER}.source")
_ASKING = frozenset(
    {
        "torch._compile",
        "torch._subclasses.fake_tensor",
        "torch._subclasses.meta_utils",
        "torch.optim.optimizer",
    }
)
_SETTINGS = {  # the defaults of torch/_dynamo/config.py
    "fake_tensor_cache_enabled": True,
    "fake_tensor_cache_crosscheck_enabled": False,
    "error_on_nested_fx_trace": True,
    "_custom_ops_profile": None,
}


@contextmanager
def short_imports() -> Iterator[None]:
    """Collect no garbage during imports, and import PyTorch's compiler only if the script uses
    it.
    """
    before = builtins.__import__

    def load(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(_COMPILER) and _COMPILER not in sys.modules:
            scope = (args[0] if args else kwargs.get("globals")) or {}
            if name in _UNUSED and scope.get("__name__") in _ASKING:
                return _SOURCES if name == _UNUSED[-1] else torch
            _load_compiler()
        if not gc.isenabled():
            return before(name, *args, **kwargs)
        gc.disable()
        try:
            return before(name, *args, **kwargs)
        finally:
            gc.enable()

    with _no_compiler(), patch.object(builtins, "__import__", load):
        yield


@contextmanager
def _no_compiler() -> Iterator[None]:
    """Put stand-ins in the place of the compiler unless it is imported."""
    if _COMPILER in sys.modules:
        yield
        return
    disabled = list[Any]()

    def disable(function: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        disabled.append(function)
        return function

    config = _Later(_UNUSED[1], **_SETTINGS)
    later = _Later(
        _COMPILER, config=config, source=_SOURCES, disable=disable, graph_break=lambda: None
    )
    vars(torch)["_dynamo"] = later
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is later:
            del vars(torch)["_dynamo"]
        for each in disabled:
            with suppress(AttributeError):
                del each.__dynamo_disable  # where PyTorch keeps what `disable` returned


class _Sources:
    """Stands for the module of the places that tensors come from, which only the compiler reads."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: object()


class _Later:
    """Stands for a module that is not imported. Reading or writing an attribute imports it, except
    for the `known` ones.
    """

    def __init__(self, name: str, **known: Any) -> None:
        self.__dict__.update(known, _name=name)

    def __getattr__(self, name: str) -> Any:
        _load_compiler()
        return getattr(import_module(self._name), name)

    def __setattr__(self, name: str, value: Any) -> None:
        _load_compiler()
        setattr(import_module(self._name), name, value)


_SOURCES = _Sources()


def _load_compiler() -> None:
    """Import the compiler, whose own tensors are real."""
    with _disable_current_modes():
        import_module(_COMPILER)
