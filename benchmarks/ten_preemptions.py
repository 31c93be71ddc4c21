"""Preempts a real training of the digits example several times, and checks its result and its bill.

    python benchmarks/ten_preemptions.py    # ten: notices of 2-30 s, every third without one
    python benchmarks/ten_preemptions.py --preemptions 3 --epochs 12 -o json

The provider is `local` at 3.60 dollars an hour. A notice is made by a preemption drill, and reaches
the agent like the notice of a cloud. A preemption without notice kills every process of the gang at
once. The benchmark checks that the final weights equal those of an undisturbed run, bit for bit;
that after a notice at most one step is repeated; and that the bill is the sum of the nodes'
lifetimes, in whole micro-dollars, from the provider's records on disk. The times that agents report
must lie within the recorded lifetimes.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timedelta
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

from cavvy.client import ApiClient, connect
from cavvy.client.wire import JobDetail

ROOT = Path(__file__).resolve().parents[1]
RATE_MICROS = 3_600_000  # an hour
PATIENCE_S = 120.0
LATER = timedelta(
    seconds=2
)  # tolerance: an agent records its exit first, which ends the bill, and reports it afterwards
OBSERVED = '''"""The training as it is, with a line for every step that was done, on a disk that outlives the node."""
import os, sys
import torch
import train

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
steps = os.open(os.environ["STEPS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
run_epoch = train.Training.run_epoch

def observed(self, leaving):
    step = self.optimizer.step
    def count(*arguments, **named):
        result = step(*arguments, **named)
        os.write(steps, f"{os.environ.get('CAVVY_ATTEMPT', 0)} {self.epoch * self.steps + self.step}\\n".encode())
        return result
    self.optimizer.step = count
    try:
        return run_epoch(self, leaving)
    finally:
        del self.optimizer.step

train.Training.run_epoch = observed
sys.exit(train.main())
'''


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preemptions", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument(
        "--keep",
        action="store_true",
        help="for docs/measured/policies.md, which policies.py makes",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rm10-", dir="/tmp"))
    try:
        found = run(folder, arguments.preemptions, arguments.epochs, random.Random(arguments.seed))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if arguments.keep:
        from policies_page import keep

        same = {name: found[name] for name in ("weights_equal", "bill_micros", "lives_micros")}
        rows = [
            {"notice_s": each["notice_s"], "lost": each["lost"], **same}
            for each in found["preemptions"]
        ]
        keep("preemptions", rows)
    if arguments.output == "json":
        print(json.dumps(found, indent=1))
    else:
        show(found)
    good = found["weights_equal"] and found["bill_micros"] == found["lives_micros"]
    return (
        0
        if good and all(each["lost"] <= 1 for each in found["preemptions"] if each["notice_s"])
        else 1
    )


def run(folder: Path, count: int, epochs: int, chance: random.Random) -> dict[str, Any]:
    work = folder / "work"
    work.mkdir()
    shutil.copy(ROOT / "examples/digits/train.py", work)
    (work / "observed.py").write_text(OBSERVED)
    (folder / "settings.toml").write_text(
        f"[providers.local]\nprice_usd_hr = {RATE_MICROS / 1e6}\n"
    )
    home = folder / "home"
    here = {
        "CAVVY_HOME": str(home),
        "CAVVY_CONFIG": str(folder / "settings.toml"),
        "XDG_RUNTIME_DIR": str(folder),
    }
    os.environ.update(here)
    calm = train_undisturbed(folder, work, epochs)
    task = f"""
name: digits
workdir: {work}
resources: {{cpu: 1, memory: 1GB}}
env: {{STEPS: {folder}/steps, OMP_NUM_THREADS: "1"}}
retry: {{node: unlimited}}
checkpoint: {{path: checkpoints, every: 5s}}
limits: {{budget: 5}}
run: exec {sys.executable} observed.py --epochs {epochs} --width 16
"""
    with connect() as client:
        submit(task, folder)
        try:
            disturbances = disturb(client, folder, home, count, chance)
            until(
                lambda: client.job("default", "digits").phase in ("done", "failed", "stopped"),
                "the end of the job",
            )
            until(lambda: not client.nodes(), "the end of all nodes")
            job = client.job("default", "digits")
            cost = client.cost("default", "digits")
            [state] = (home / "storage/default").glob("*/checkpoint/state.pt")
            equal = same_weights(calm, state)
            lives = sum_lives(home, job)
        finally:
            client.down()
            until(lambda: not client.nodes(), "the end of all nodes")
    cavvy("server", "stop")
    seen = Counter(int(line.split()[1]) for line in (folder / "steps").read_text().splitlines())
    return {
        "phase": job.phase,
        "attempts": job.attempt,
        "steps": len(seen),
        "steps_done": sum(seen.values()),
        "weights_equal": equal and job.phase == "done",
        "bill_micros": cost.total_micros,
        "lives_micros": lives,
        "preemptions": disturbances,
    }


def submit(task: str, folder: Path) -> None:
    """Submit the task as `cavvy run -d --yes FILE` does, which uploads the folder."""
    file = folder / "task.yaml"
    file.write_text(task)
    cavvy("run", "-d", "--yes", str(file))


def train_undisturbed(folder: Path, work: Path, epochs: int) -> Path:
    """Run the same program on this machine without Cavvy. Returns the path of its last state."""
    kept = folder / "calm"
    environ = {**os.environ, "CAVVY_CHECKPOINT_DIR": str(kept), "STEPS": str(folder / "calm-steps")}
    command = [sys.executable, "observed.py", "--epochs", str(epochs), "--width", "16"]
    environ["OMP_NUM_THREADS"] = "1"
    subprocess.run(
        command, cwd=work, env=environ, check=True, stdout=subprocess.DEVNULL, timeout=600
    )
    return kept / "state.pt"


def disturb(
    client: ApiClient, folder: Path, home: Path, count: int, chance: random.Random
) -> list[dict[str, Any]]:
    """Reclaim the node `count` times, each time after the attempt has made some steps. Returns the
    number of repeated steps and other facts for each time.
    """
    found = []
    for number in range(1, count + 1):
        before = steps_of(folder)
        goal = chance.randrange(20, 120)

        def works(number: int = number, before: int = len(before), goal: int = goal) -> bool:
            lines = steps_of(folder)
            return len(lines) >= before + goal and lines[-1][0] == number

        until(works, f"attempt {number} doing {goal} steps")
        notice = 0 if number % 3 == 2 else chance.randrange(2, 31)
        if notice:
            client.drill_preempt("default", "digits", notice_s=notice)
        else:
            kill_gang(home)
        until(partial(went_on, folder, number), f"attempt {number + 1} to go on")
        lines = steps_of(folder)
        last = max(step for attempt, step in lines if attempt == number)
        first = min(step for attempt, step in lines if attempt == number + 1)
        found.append(
            {"attempt": number, "notice_s": notice, "at_step": last, "lost": last - first + 1}
        )
    return found


def went_on(folder: Path, number: int) -> bool:
    return steps_of(folder)[-1][0] > number


def steps_of(folder: Path) -> list[tuple[int, int]]:
    """All steps that were done, as (attempt, step), in order."""
    try:
        lines = (folder / "steps").read_text().splitlines()
    except FileNotFoundError:
        return []
    return [(int(line.split()[0]), int(line.split()[1])) for line in lines if line.count(" ") == 1]


def kill_gang(home: Path) -> None:
    """Simulate a power cut: kill the agent and all its processes at once."""
    [path] = (home / "providers/local/agents").glob("*/0/agent.json")
    agent = json.loads(path.read_text())["pid"]
    for pid in find_processes(agent):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def find_processes(root: int) -> list[int]:
    """Return a process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError):
                parent = int(
                    Path(f"/proc/{entry}/stat").read_bytes().rpartition(b")")[2].split()[1]
                )
                children.setdefault(parent, []).append(int(entry))
    todo, tree = [root], [root]
    while todo:
        below = children.get(todo.pop(), [])
        todo += below
        tree += below
    return tree


def sum_lives(home: Path, job: JobDetail) -> int:
    """The nodes' lifetimes by the provider's own records, each rounded once, half up, to the
    micro-dollar.
    """
    total = 0
    for attempt in job.attempts:
        record = json.loads((home / f"providers/local/ended/{attempt.gang}.json").read_text())
        for rank in record["ranks"]:
            started, ended = (
                datetime.fromisoformat(rank[name]) for name in ("started_at", "ended_at")
            )
            life = Fraction((ended - started) // timedelta(microseconds=1), 3_600_000_000)
            total += int(life * RATE_MICROS + Fraction(1, 2))
            for node in attempt.nodes:  # the agents' reports lie within the provider's records
                said = [each for each in (node.claimed_at, node.exited_at) if each is not None]
                assert all(started <= each <= ended + LATER for each in said), (
                    attempt.gang,
                    said,
                    started,
                    ended,
                )
    return total


def same_weights(one: Path, other: Path) -> bool:
    import torch

    first, second = (torch.load(path, weights_only=True)["model"] for path in (one, other))
    return first.keys() == second.keys() and all(
        torch.equal(first[name], second[name]) for name in first
    )


def cavvy(*arguments: str) -> None:
    command = [sys.executable, "-c", "from cavvy.cli.main import main; main()", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=PATIENCE_S)


def until(true: Callable[[], object], what: str) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not true():
        if time.monotonic() > give_up:
            raise TimeoutError(f"waited {PATIENCE_S:.0f} s in vain for {what}")
        time.sleep(0.02)


def show(found: dict[str, Any]) -> None:
    print(f"{'try':>4} {'notice':>8} {'at step':>8} {'steps done twice':>17}")
    for each in found["preemptions"]:
        notice = f"{each['notice_s']} s" if each["notice_s"] else "none"
        print(f"{each['attempt']:>4} {notice:>8} {each['at_step']:>8} {each['lost']:>17}")
    print(
        f"\n{found['phase']} after {found['attempts']} attempts: {found['steps']} steps, "
        f"{found['steps_done']} done"
    )
    print(
        "final weights equal an undisturbed run's, bit for bit: "
        f"{'yes' if found['weights_equal'] else 'NO'}"
    )
    print(f"bill {found['bill_micros']} micro-dollars; the nodes' lives {found['lives_micros']}")


if __name__ == "__main__":
    sys.exit(main())
