"""Tutorials and guides do what they show: their commands are read from the
pages and run.

A block marked `yaml`, `python`, `toml` or `sh` whose first line, or the one after `#!`, is a comment
with a file name is written to that file. Of a block marked `console` each line after `$ ` is a command. It must exit with 0, or
with the code that its comment `# exit code N` states, and lines below it must be found in its
output: the same words in the same order, where a number stands for any number, a column may be as
wide as it likes, and `…` stands for any text. tests/repository/unit/test_page_blocks.py sees that no page with
such blocks is missing here.
"""

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.pages import ROOT, read_blocks
from tests.system.ports import free_port
from tests.system.prepared import write_command
from tests.system.server_state import PYTHON, home_at, home_with_jobs
from tests.waits import wait_until

from cavvy.client import connect
from cavvy.store.snapshot.choose import SHIPPED

pytestmark = pytest.mark.system
REAL = "docs/tutorials/quick-tour.md"  # its commands are started as users start them, those of other pages by forks
# With a server of its own, as the page stops it, or begins where there is none.
TOURS = (
    REAL,
    "docs/tutorials/first-job.md",
    "docs/tutorials/first-service.md",
    "docs/tutorials/a-team.md",
    "docs/tutorials/money.md",
    "docs/tutorials/spot-that-survives.md",
    "docs/tutorials/lose-a-node.md",
    "docs/guides/serve.md",
    "docs/guides/service-access.md",
    "docs/guides/service-calls.md",
)
# On hosts and on a cluster, by test_ssh_jobs.py and test_slurm_jobs.py.
HOSTS, CLUSTER = "docs/tutorials/own-hosts.md", "docs/tutorials/a-cluster.md"
# These share a server, and what is there before the page begins.
GUIDES: Mapping[str, tuple[str, ...]] = {
    "docs/guides/access.md": (
        "cavvy run --name digits --nodes 2 -d -- 'mkdir out; echo 1 >out/weights.pt; sleep 9m'",
    ),
    "docs/guides/team.md": ("cavvy server user add ci --service",),
    "docs/guides/audit.md": ("cavvy project create vision || true",),
    "docs/guides/aws.md": (),
    "docs/guides/backup.md": ("cavvy ps",),
    "docs/guides/completion.md": (),
    "docs/guides/console.md": (),
    "docs/guides/costs.md": ("printf 'Day,Total,Tag\\n2026-11-01,1.50,cv-1\\n' >bill.csv",),
    "docs/guides/estimate.md": ("cp examples/digits/train.py .",),
    "docs/guides/export.md": (),
    "docs/guides/formats.md": (
        "mkdir -p photos/cat && python -c 'from PIL import Image; "
        'Image.new("RGB", (8, 8)).save("photos/cat/1.jpg")\'',
    ),
    "docs/guides/from-skypilot-and-dstack.md": (),
    "docs/guides/from-slurm.md": (),
    "docs/guides/from-pbs.md": (),
    "docs/guides/from-kubernetes.md": (),
    "docs/guides/curves.md": (),
    "docs/guides/scripts.md": (),
    "docs/guides/join.md": (),
    "docs/guides/machines.md": (),
    "docs/guides/offers.md": (f"cp {SHIPPED} catalog.db",),
    "docs/guides/schedules.md": (),
    "docs/guides/secrets.md": ("echo hf_1 >token",),
    "docs/guides/simulate.md": (
        "mkdir traces; echo '{\"metadata\": {\"gap_seconds\": 3600}, \"data\": '$(printf '%s' '[' ; yes 1, | head -99; echo 1])'}' >traces/a.json",
        "printf 'arrival_s,duration_s,gpus,vc\\n0,60,8,a\\n9,60,8,a\\n' >jobs.csv",
        "printf 'vc,node num\\na,1\\n' >pools.csv",
        "printf 'arrival_s,service_s\\n0,1\\n1,2\\n60,1\\n' >requests.csv",
    ),
    "docs/guides/templates.md": (),
    "docs/guides/this-machine.md": (),
    "docs/guides/arrays.md": (),
    "docs/guides/dependencies.md": ("cavvy rm train -y || true",),  # of another page
    "docs/guides/pools.md": (),
    "docs/guides/shares.md": ("cavvy run --name train -d -- sleep 9m",),
    "docs/guides/policies.md": (),  # the last, as it restricts all projects
}
# A person needs a moment from one command to the next; by then a job runs.
WAIT = """
for try in $(seq 120); do
    cavvy status {name} -o json | grep -q '{sign}' && break
    sleep 0.5  # each look takes a quarter of a second of CPU time from the job
done
"""
# Commands for whose job a reader waits until it runs, or has made progress.
NEEDS_JOB = re.compile(
    r"cavvy (nodes drill preempt|nodes drill lose-node|resize|exec|ssh|cp) ([a-z]+)"
)
# What a shell hands to the next one.
KEEP = "code=$?; {{ export -p; echo cd $PWD; }} >{folder}/.shell; exit $code"
SIGNS = dict.fromkeys(
    ("nodes drill preempt", "nodes drill lose-node", "resize", "exec"), '"progress": {$'
)


@dataclass(frozen=True)
class Step:
    """A command, and what the page shows below it."""

    command: str
    shown: list[str] = field(default_factory=list)


def find_file_name(text: str) -> str:
    """The name in the comment with which a block begins that the reader saves; "" without one."""
    name = re.match(r"(?:#!.*\n)?# ([\w./-]+\.(?:ya?ml|py|toml|sbatch|pbs))\n", text)
    return name[1] if name else ""


def read_page(page: str) -> tuple[dict[str, str], list[Step]]:
    """The files that a page has the reader write, by name, and its commands in order."""
    files: dict[str, str] = {}
    steps: list[Step] = []
    for block in read_blocks(ROOT / page):
        if block.language != "console" and (name := find_file_name(block.text)):
            files[name] = block.text
        elif block.language == "console":
            for line in block.text.splitlines():
                if line.startswith("$ "):
                    steps.append(Step(line[2:]))
                else:
                    steps[-1].shown.append(line)
    return files, steps


def words(line: str) -> str:
    return " ".join(re.sub(r"\d+(?:[.,]\d+)*(?:[smh]|m\d\ds|h\d\dm)?", "N", line).split())


def follow_page(page: str, folder: Path, prepared: tuple[str, ...] = ()) -> None:
    """Write the files of a page to a new folder, and run its commands there."""
    files, steps = read_page(page)
    assert steps
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier try
    folder.mkdir()
    shutil.copytree(ROOT / "examples", folder / "examples")  # a link would lead out of the folder
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    if page != REAL:
        write_command(folder.parent / "bin")
    port = f":{free_port()}"  # another run of these tests may use the port of the page
    for step in [*map(Step, prepared), *steps]:
        run_step(replace(step, command=step.command.replace(":7411", port)), folder)


def run_step(step: Step, folder: Path) -> None:
    """Run one command in the state in which the commands before it left their shell."""
    waits = NEEDS_JOB.match(step.command)
    sign = SIGNS.get(waits[1], '^  "phase": "running"') if waits else ""
    script = (WAIT.format(name=waits[2], sign=sign) if waits else "") + step.command
    script = f"[ -e .shell ] && . ./.shell\nset -a\n{script}\n{KEEP.format(folder=folder)}"
    started = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{folder.parent}/bin:{Path(PYTHON).parent}:{os.environ['PATH']}",
            "COLUMNS": "200",
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    output = ""
    if "until Ctrl-C" in step.command:
        assert started.stdout is not None
        output = started.stdout.readline()
        os.killpg(started.pid, signal.SIGINT)
    output += started.communicate(timeout=120)[0]
    stated = re.search(r"# exit code (\d+)$", step.command)
    wanted = {int(stated[1])} if stated else {0}
    if "until Ctrl-C" in step.command:
        wanted |= {130, -signal.SIGINT}
    assert started.returncode in wanted, f"$ {step.command}\n{output}"
    check_shown(step, output)


@pytest.mark.parametrize("page", TOURS)
def test_the_tour_was_executed_as_written(page: str, tmp_path: Path) -> None:
    with home_at(tmp_path / "home"):
        follow_page(page, tmp_path / "tour")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("guides")
    (folder / "settings.toml").write_text(
        f'[server]\ntls_listen = "127.0.0.1:{free_port()}"\n[providers.join]\n'
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HOME", str(folder))
        with home_with_jobs(folder / "home"):
            yield folder


@pytest.mark.parametrize("page", GUIDES)
def test_the_guide_was_executed_as_written(page: str, shared: Path) -> None:
    follow_page(page, shared / Path(page).stem, GUIDES[page])
    with connect() as client:
        client.down()
        wait_until(lambda: not client.nodes())


def check_shown(step: Step, output: str) -> None:
    """Every line that the page shows is there, in this order."""
    rest = [words(line) for line in output.splitlines()]
    for line in filter(None, map(words, step.shown)):
        shape = ".*".join(map(re.escape, line.split("…")))
        at = next((n for n, found in enumerate(rest) if re.match(shape, found)), None)
        assert at is not None, f"$ {step.command}\nshows no line {line!r} but\n{output}"
        rest = rest[at + 1 :]


def test_a_page_waits_for_the_job_that_its_command_needs() -> None:
    """A command that has another name now would no longer be waited for."""
    pages = (*TOURS, HOSTS, CLUSTER, *GUIDES)
    commands = [each.command for page in pages for each in read_page(page)[1]]
    found = {match[1] for each in commands if (match := NEEDS_JOB.match(each))}
    drills = {"nodes drill preempt", "nodes drill lose-node"}
    assert found == {*drills, "resize", "exec", "ssh", "cp"}
    assert SIGNS.keys() < found


def test_what_a_page_shows_must_be_there() -> None:
    check_shown(
        Step("x", ["done after 2s", "bill  $0.12 here"]),
        "a\ndone after 13m05s, exit code 0\n bill $3.60 here\n",
    )
    check_shown(Step("x", ["a … c", "…"]), "a b c d\nb\n")
    with pytest.raises(AssertionError, match="shows no line 'gone'"):
        check_shown(Step("x", ["gone"]), "a\nb\n")
    with pytest.raises(AssertionError):
        check_shown(Step("x", ["second", "first"]), "first\nsecond\n")
