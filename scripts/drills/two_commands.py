"""Test task files with two commands in the format of each tool: preempted work must resume, and
completed work must not run again.

Usage: .venv/bin/python scripts/drills/two_commands.py [ROUNDS]

Each round submits one job of each kind to this machine, in a new state folder, and preempts it with
`cavvy nodes drill`. The first command either handles SIGTERM and exits with 0, or is killed by
SIGTERM.
The second command must then wait for the next attempt, unless the first one has said that the work
is complete: what follows it, such as an export, must run then. The drill prints the faults, and
exits with 1 if there are any.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CAVVY = str(Path(sys.executable).with_name("cavvy"))
PATIENCE_S = 120
# Attempt 1 works until it is asked to stop; later attempts end soon. Each command writes a line to
# $LOG.
GRACEFUL = """
trap 'echo told >>"$LOG"; [ -z "$LAST" ] || echo "$LAST"; exit 0' TERM
echo "first $CAVVY_ATTEMPT" >>"$LOG"
[ "$CAVVY_ATTEMPT" != 1 ] || while :; do sleep 0.05; done
"""
KILLED = """
echo "first $CAVVY_ATTEMPT" >>"$LOG"
[ "$CAVVY_ATTEMPT" != 1 ] || exec sleep 600
"""
COMPLETE = 'CAVVY_PROGRESS {"complete": true}'
RESUMED, ONCE = ["preempted", "succeeded"], ["succeeded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A task file whose first command is `WORK`, and the expected result."""

    text: str
    first: str = GRACEFUL
    last: str = ""  # what the first command prints when it is asked to stop
    outcomes: tuple[str, ...] = tuple(RESUMED)
    act: tuple[str, ...] = ("drill", "preempt", "--notice", "20s")
    phase: str = "done"


SECOND = 'echo "second $CAVVY_ATTEMPT" >>"$LOG"'
OWN = "env: {{LOG: {log}, LAST: '{last}'}}\nworkdir: .\nrun: |\n  sh first.sh\n  " + SECOND + "\n"
SKYPILOT = "envs: {{LOG: {log}, LAST: '{last}'}}\nworkdir: .\n" + OWN.partition("workdir: .\n")[2]
DSTACK = (
    "type: task\nretry: {{on_events: [interruption]}}\nresources: {{disk: 1GB..}}\n"
    "env: {{LOG: {log}, LAST: '{last}'}}\nrepos: [.]\n"
    "commands:\n  - sh first.sh\n  - " + SECOND + "\n"
)
KINDS: Mapping[str, Kind] = {
    "own": Kind(text=OWN),
    "skypilot": Kind(text=SKYPILOT),
    "skypilot-killed": Kind(text=SKYPILOT, first=KILLED),
    "dstack": Kind(text=DSTACK),
    "gang": Kind(text="nodes: 2\nresources: {{cpu: 0.5}}\n" + OWN),
    "complete": Kind(text=OWN, last=COMPLETE, outcomes=tuple(ONCE)),
    "stopped": Kind(text=OWN, act=("stop",), outcomes=("stopped",), phase="stopped"),
}


def main(rounds: int) -> int:
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="cavvy-drill-") as folder:
        os.environ.update(CAVVY_HOME=folder + "/home", CAVVY_CONFIG=folder + "/settings.toml")
        Path(folder, "settings.toml").touch()
        try:
            for number in range(rounds):
                for name, kind in KINDS.items():
                    found = play(Path(folder), f"{name}-{number}", kind)
                    wrong += [f"round {number}, {name}: {each}" for each in found]
                print(f"round {number + 1} of {rounds}: {len(wrong)} wrong so far", flush=True)
        finally:
            cavvy("down", "--all", "--yes")
            cavvy("server", "stop")
    print("\n".join(wrong) or f"{rounds} rounds of {len(KINDS)} kinds: all as it should be")
    return 1 if wrong else 0


def play(folder: Path, name: str, kind: Kind) -> list[str]:
    """Run one job from its submission to its end. Returns its faults."""
    work, log = folder / name, folder / f"{name}.log"
    work.mkdir()
    log.touch()
    (work / "first.sh").write_text(kind.first)
    text = f"name: {name}\n" + kind.text.format(log=log, last=kind.last)
    (work / "task.yaml").write_text(text)
    cavvy("run", "-d", str(work / "task.yaml"))
    ranks = 2 if "nodes: 2" in text else 1
    wait(lambda: log.read_text().count("first 1") == ranks, f"{name} does not begin")
    command, *options = kind.act
    cavvy(command, *options[:1], name, *options[1:])
    wait(lambda: look(name)["phase"] in ("done", "failed", "stopped"), f"{name} does not end")
    job, said = look(name), log.read_text().splitlines()
    outcomes = [attempt["outcome"] for attempt in job["attempts"]]
    wrong = []
    if (outcomes, job["phase"]) != (list(kind.outcomes), kind.phase):
        wrong.append(f"{job['phase']} after {outcomes}: {job['reason']}")
    for attempt in range(1, len(kind.outcomes) + 1):
        asked = attempt == 1 and not kind.last
        for line, times in (
            (f"first {attempt}", ranks),
            (f"second {attempt}", ranks * (not asked)),
        ):
            if said.count(line) != times:
                wrong.append(f"{said.count(line)} times {line!r}, not {times}")
    return wrong


def look(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(cavvy("status", name, "-o", "json"))
    return found


def cavvy(*arguments: str) -> str:
    done = subprocess.run([CAVVY, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"cavvy {' '.join(arguments)}: {done.stdout}{done.stderr}")
    return done.stdout


def wait(true: Callable[[], bool], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > give_up:
            raise SystemExit(what)
        time.sleep(0.1)


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 50))
