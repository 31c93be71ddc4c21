"""Ctrl-C while the `cavvy` command starts or exits ends it without a traceback."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["cavvy"]
# Runs the command as its script does, and presses Ctrl-C at one import.
RUN = """
import os, signal, sys
if {ignored}:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
def press(event, arguments):
    if event == "import" and arguments[0] == {name!r}:
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(press)
from {module} import main
sys.argv = ["cavvy", "--version"]
{end}
main()
"""


def run(name: str, *, ignored: bool = False, end: str = "") -> "subprocess.CompletedProcess[str]":
    code = RUN.format(name=name, ignored=ignored, module=SCRIPT.partition(":")[0], end=end)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("name", ["cavvy.cli.main", "click", "click.exceptions"])
def test_an_interrupted_start_prints_nothing(name: str) -> None:
    done = run(name)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_an_interrupted_exit_prints_no_traceback() -> None:
    done = run("colorsys", end="import atexit; atexit.register(__import__, 'colorsys')")
    assert (done.returncode, done.stderr) == (130, "")


def test_a_command_in_the_background_ignores_the_interrupt() -> None:
    done = run("click", ignored=True)
    assert (done.returncode, done.stdout[:5], done.stderr) == (0, "cavvy", "")


def test_an_interrupt_that_python_cannot_raise_comes_again_after_the_callback() -> None:
    code = """
import os, signal, sys, time, weakref
from cavvy.cli.entry import main
import cavvy.cli.main
class Ended: pass
def run():
    ended = Ended()
    seen = weakref.ref(ended, lambda each: os.kill(os.getpid(), signal.SIGINT))
    try:
        del ended
        time.sleep(60)
        print("went on")
    finally:
        print("cleaned up", flush=True)
cavvy.cli.main.main = run
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "cleaned up\n", "")
