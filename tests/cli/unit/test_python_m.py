"""`python -m cavvy` is the `cavvy` command."""

import subprocess
import sys


def test_python_runs_the_module_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "cavvy", "--version"], capture_output=True)
    assert done.returncode == 0
    assert done.stdout.startswith(b"cavvy ")
    refused = subprocess.run([sys.executable, "-m", "cavvy", "nonsense"], capture_output=True)
    assert refused.returncode == 2
    assert b"nonsense" in refused.stderr
