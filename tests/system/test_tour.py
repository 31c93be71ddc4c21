"""The README's quick tour, tutorials and guides do what they show: their commands are read from the
pages and run.

A block marked `yaml` whose first line is a comment with a file name is written to that file. Of a
block marked `console` each line after `$ ` is a command. It must exit with 0, or with the code that
its comment `# exit code N` states, and lines below it must be found in its output: the same words
in the same order, where a number stands for any number and a column may be as wide as it likes.
"""

import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.system.server_state import PYTHON, home_at

pytestmark = pytest.mark.system
ROOT = Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "docs/tutorials/first-job.md",
    "docs/tutorials/spot-that-survives.md",
    "docs/guides/export.md",
    "docs/guides/offers.md",
    "docs/guides/schedules.md",
    "docs/guides/serve.md",
    "docs/guides/simulate.md",
)
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A person needs a moment from one command to the next; by then a job runs.
RUNS = """
wait_for() {
    for try in $(seq 300); do
        cavvy status "$1" -o json | grep -q '"progress": {$' && return
        sleep 0.1
    done
    return 1
}
"""


@dataclass(frozen=True)
class Step:
    """A command, and what the page shows below it."""

    command: str
    shown: list[str] = field(default_factory=list)


def read_page(page: str) -> tuple[dict[str, str], list[Step]]:
    """The files that a page has the reader write, by name, and its commands in order."""
    files: dict[str, str] = {}
    steps: list[Step] = []
    for language, text in BLOCK.findall((ROOT / page).read_text("utf-8")):
        name = re.match(r"# (\S+\.yaml)\n", text)
        if language == "yaml" and name:
            files[name[1]] = text
        elif language == "console":
            for line in text.splitlines():
                if line.startswith("$ "):
                    steps.append(Step(line[2:]))
                else:
                    steps[-1].shown.append(line)
    return files, steps


def words(line: str) -> str:
    return " ".join(re.sub(r"\d+(?:[.,]\d+)*(?:[smh]|m\d\ds|h\d\dm)?", "N", line).split())


@pytest.mark.parametrize("page", PAGES)
def test_the_page_was_executed_as_written(page: str, tmp_path: Path) -> None:
    files, steps = read_page(page)
    assert steps
    folder = tmp_path / "tour"
    folder.mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    for name, text in files.items():
        (folder / name).write_text(text)
    with home_at(tmp_path / "home"):
        path = f"{Path(PYTHON).parent}:{os.environ['PATH']}"
        for step in steps:
            waits = re.match(r"cavvy (?:drill preempt|exec) (\S+)", step.command)
            script = f"{RUNS}\nwait_for {waits[1]} && {step.command}" if waits else step.command
            done = subprocess.run(
                ["bash", "-c", script],
                cwd=folder,
                env={**os.environ, "PATH": path, "COLUMNS": "200"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=120,
                check=False,
            )
            stated = re.search(r"# exit code (\d+)$", step.command)
            wanted = int(stated[1]) if stated else 0
            assert done.returncode == wanted, f"$ {step.command}\n{done.stdout}"
            check_shown(step, done.stdout)


def check_shown(step: Step, output: str) -> None:
    """Every line that the page shows is there, in this order."""
    rest = [words(line) for line in output.splitlines()]
    for line in filter(None, map(words, step.shown)):
        at = next((n for n, found in enumerate(rest) if found.startswith(line)), None)
        assert at is not None, f"$ {step.command}\nshows no line {line!r} but\n{output}"
        rest = rest[at + 1 :]


def test_what_a_page_shows_must_be_there() -> None:
    check_shown(
        Step("x", ["done after 2s", "bill  $0.12 here"]),
        "a\ndone after 13m05s, exit code 0\n bill $3.60 here\n",
    )
    with pytest.raises(AssertionError, match="shows no line 'gone'"):
        check_shown(Step("x", ["gone"]), "a\nb\n")
    with pytest.raises(AssertionError):
        check_shown(Step("x", ["second", "first"]), "first\nsecond\n")
