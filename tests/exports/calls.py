"""Runs an exported script with a program in place of the service's command, which keeps its
arguments and its standard input.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

_KEEP = f"""#!{sys.executable}
import json, os, sys
with open(os.environ["CALLS"], "a") as file:
    name = os.path.basename(sys.argv[0])
    file.write(json.dumps([name, sys.argv[1:], sys.stdin.read()]) + "\\n")
"""


def run_script(script: str, folder: Path, command: str = "aws") -> list[tuple[list[str], Any]]:
    """The arguments and the request of each call of `command`, in order."""
    program, calls = folder / "bin" / command, folder / "calls"
    program.parent.mkdir(exist_ok=True)
    program.write_text(_KEEP)
    program.chmod(0o755)
    calls.write_text("")
    environment = {
        **os.environ,
        "PATH": f"{program.parent}:{os.environ['PATH']}",
        "CALLS": str(calls),
    }
    done = subprocess.run(
        ["bash"], input=script, env=environment, capture_output=True, text=True, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    kept = [json.loads(line) for line in calls.read_text().splitlines()]
    return [(arguments, yaml.safe_load(request)) for _, arguments, request in kept]
