"""Moves threads of tests between network namespaces."""

import ctypes

_CLONE_NEWNET = 0x40000000


def enter(descriptor: int) -> None:
    """Move this thread into the network namespace of an open file."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
