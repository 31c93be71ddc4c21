"""What a command does where its output has nowhere to go."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LISTING = [str(Path(sys.executable).with_name("cavvy")), "offers", "--accelerators"]


def run(command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The shell gives the command its output."""
    return subprocess.run(
        ["sh", "-c", command, "sh", *arguments],
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_in_one_line() -> None:
    done = run('exec "$@" >/dev/full', *LISTING)
    assert done.returncode == 1
    assert done.stderr == f"error: cannot write: {os.strerror(28)}\n"


def test_a_closed_output_is_no_error() -> None:
    done = run('exec "$@" >&-', *LISTING)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("reader", ["head -n 1", "true"])
def test_a_reader_that_leaves_early_is_no_failure(reader: str) -> None:
    command = f'{{ "$@"; echo "code $?" >&2; }} | {reader} >/dev/null'
    done = run(command, *LISTING, "-o", "csv")
    assert done.stderr == "code 0\n"
