"""Recognises connections of other users of this machine. Other users can see the address that opens
the browser, because it is an argument of the browser's process.
"""

import ipaddress
import os
import sys
from contextlib import suppress

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_CLOSED = "06"  # the state TIME_WAIT, in which the kernel no longer knows the user


def is_other_user(host: str, port: int, tables: tuple[str, ...] = _TABLES) -> bool:
    """Return whether the program with this end of a connection belongs to another user of this
    machine than us and root. Returns False where only the kernel knows this, as on macOS.
    """
    try:
        ends = _write_ends(host, port)
    except ValueError:
        return False
    for table in tables:
        with suppress(OSError), open(table) as file:
            for line in file:
                fields = line.split()
                if len(fields) > 7 and fields[1] in ends and fields[3] != _CLOSED:
                    return int(fields[7]) not in (0, os.geteuid())
    return False


def _write_ends(host: str, port: int) -> set[str]:
    """Return the end as the kernel's tables write it, in words of the machine's byte order."""
    address = ipaddress.ip_address(host)
    forms = [address.packed]
    if address.version == 4:
        forms.append(b"\0" * 10 + b"\xff\xff" + address.packed)
    return {f"{_write_words(each)}:{port:04X}" for each in forms}


def _write_words(packed: bytes) -> str:
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    return "".join(f"{int.from_bytes(each, sys.byteorder):08X}" for each in words)
