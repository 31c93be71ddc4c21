"""Finds the line of the user's own code that is being executed."""

import os
import sys
from typing import Any

import torch


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
