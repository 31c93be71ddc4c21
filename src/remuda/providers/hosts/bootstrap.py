"""The POSIX-shell part of every script that makes a node out of a machine; see `Outside`. It holds no secret."""

import shlex
from pathlib import Path

from remuda.providers.base import Outside

_SCRIPT = Path(__file__).with_name("bootstrap.sh")


def make_preamble(outside: Outside, folder: str) -> str:
    """Functions and addresses; blocks for seconds when it packs a Python for the first time.

    `folder` is expanded by the shell within double quotes. Afterwards `remuda_start` has made it and set
    `$REMUDA_PYTHON`, and `remuda_fetch HASH NAME` brings a file into it.
    """
    cases = "".join(f"    {shlex.quote(name)}) echo {digest} ;;\n" for name, digest in outside.pythons().items())
    lines = [
        f"REMUDA_ADDRESS={shlex.quote(outside.address)}",
        f"REMUDA_PIN={outside.pin}",
        f'REMUDA_FOLDER="{folder}"',
        f'remuda_brought() {{ # which Python is for "`uname -s` `uname -m`"\n  case $1 in\n{cases}  esac\n}}',
    ]
    return "\n".join([_SCRIPT.read_text(), *lines, ""])
