"""`python -m cavvy.edge FOLDER [ADDRESS PIN]`: enrols this device with the token in the variable
CAVVY_EDGE_TOKEN, unless it has enrolled, and runs its program. Other users of the device could read
a token among the arguments."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from .program import (
    AGAIN,
    DeviceOptionInvalid,
    choose,
    forget_versions,
    hold,
    start_again,
    tell_end,
)
from .tasks import say


def main(arguments: list[str]) -> int:
    folder, *server = arguments
    token = os.environ.pop("CAVVY_EDGE_TOKEN", "")
    try:
        lock = hold(folder)
        if server and (problem := _enrol(folder, server, token)):
            say(f"not enrolled: {problem}")
            return 1
    except DeviceOptionInvalid as error:
        say(f"not started: {error}")
        return 1
    if (code := choose(folder, lock)) is not None:
        return code
    from .device import run  # a program that only waits for another one needs no more

    code = run(folder)
    code = start_again(folder, lock) if code == AGAIN else code
    tell_end(code)
    return code


def _enrol(folder: str, server: list[str], token: str) -> str:
    """Return what is wrong, or ""."""
    from .device import enrol
    from .server_calls import DeviceRefused

    try:
        card = enrol(folder, server[0], server[1], token)
        say(f"enrolled as {card['device']} of site {card['site']}")
        forget_versions(folder)
    except (OSError, ValueError, DeviceRefused) as error:
        return str(error) or type(error).__name__
    return ""


if __name__ == "__main__":
    # not in `main`: tests call it in their own process
    os.umask(0o077)
    with suppress(ChildProcessError):  # of the shell that this process was
        os.waitpid(-1, os.WNOHANG)
    sys.exit(main(sys.argv[1:]))
