"""Plants hangs in real PyTorch jobs (gloo, on CPUs) beside slow healthy jobs, and checks that each
hang is found with its rank, and that no healthy job is ended.

    python benchmarks/hangs.py                 # 20 hangs and 20 healthy jobs, 6 jobs at a time
    python benchmarks/hangs.py --jobs 2        # one of each kind, 2 jobs at a time
    python benchmarks/hangs.py --kinds sleeps loads

Each job has three ranks on this machine. A hang counts as found if its attempt ends as `stuck`
within 3 minutes of the limit, counted from the last step that the job reported, and names the
planted rank. Healthy jobs run for at least two limits. They need `py-spy`, which the extra `stacks`
installs.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import CAVVY, judge, record, table

from cavvy.client import ApiClient, connect
from cavvy.client.wire import JobDetail

LIMIT_S, LATEST_S = 30, 180
RANKS = 3
TRAIN = '''"""One rank of a job whose step is an addition over ranks; MODE says what goes wrong."""
import json, os, signal, subprocess, sys, time
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

rank, mode, bad = int(os.environ["RANK"]), os.environ["MODE"], int(os.environ["BAD"])
until = time.monotonic() + float(os.environ["SECONDS"])


class Numbers(Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, at):
        if mode == "loads" and rank == bad and at > 12:
            time.sleep(10**6)
        return torch.tensor(float(at))


def sleep_for_ever():
    time.sleep(10**6)


def mismatch(value, group):
    dist.all_reduce(value, group=group)


def leave():
    # a child holds the connections of this rank open
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2:
            try:
                os.set_inheritable(fd, True)
            except OSError:
                pass
    subprocess.Popen(["sleep", "100000"], close_fds=False)
    os._exit(0)


def compute(seconds):
    """Work without any sign of progress but the lines that run."""
    end, number = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        number += 1
        if number % 3:
            number -= 3
        else:
            time.sleep(0.3)
            time.sleep(0.2)
        time.sleep(0.2)


torch.set_num_threads(1)
dist.init_process_group("gloo")
other = dist.new_group(list(range(dist.get_world_size())))
batches = iter(DataLoader(Numbers(), batch_size=2, num_workers=1))
step = 0
print("starts", flush=True)
over = False
while not over:
    if mode not in ("silent",):
        value = next(batches)
    value = torch.full((1000,), float(time.monotonic() > until))
    if step == 5 and rank == bad:
        if mode == "sleeps":
            sleep_for_ever()
        elif mode == "mismatch":
            mismatch(value, other)
        elif mode == "dead":
            leave()
        elif mode == "stops":
            os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "slow":
        time.sleep(6)
    elif mode == "silent":
        compute(3)
    elif mode == "straggles" and rank == bad:
        time.sleep(9)
    elif mode == "writes":
        with open(f"out{rank}", "wb") as file:
            for _ in range(8):
                file.write(os.urandom(1 << 20))
                file.flush()
                os.fsync(file.fileno())
                time.sleep(1)
    elif mode == "prints" and rank == 0:
        for part in range(8):
            print("evaluates", part, flush=True)
            time.sleep(1)
    else:
        time.sleep(0.2)
    dist.all_reduce(value)
    over = bool(value[0] > 0)  # so that all ranks end after the same step
    step += 1
    if rank == 0 and mode not in ("silent", "writes", "prints"):
        print("CAVVY_PROGRESS", json.dumps({"step": step, "at": time.time()}), flush=True)
dist.barrier()
print("ends", flush=True)
os._exit(0)
'''
HANGS = ("sleeps", "mismatch", "dead", "stops", "loads")
HEALTHY = ("slow", "silent", "straggles", "writes", "prints")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--each", type=int, default=4, help="jobs of each kind")
    parser.add_argument("--jobs", type=int, default=6, help="jobs at the same time")
    parser.add_argument("--kinds", nargs="*", choices=HANGS + HEALTHY, default=HANGS + HEALTHY)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="cavvy-hangs-"))
    try:
        rows = run(folder, arguments.kinds, arguments.each, arguments.jobs)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    table("hangs", ("job", "planted", "phase", "stuck", "ranks", "after s", "reason", ""), rows)
    hangs = [row for row in rows if row[0].split("-")[0] in HANGS]
    healthy = [row for row in rows if row not in hangs]
    found = sum(row[-1] == "ok" for row in hangs)
    false = sum(row[-1] != "ok" for row in healthy)
    print(
        f"{found} of {len(hangs)} hangs found with their rank; {false} of {len(healthy)} healthy "
        "jobs ended or delayed"
    )
    record("hangs found with their rank", found, len(hangs), "hangs", least=True)
    record("healthy jobs that count as hanging", false, 0, "jobs")
    return 0 if found == len(hangs) and not false else 1


def run(folder: Path, kinds: Sequence[str], each: int, most: int) -> list[tuple[Any, ...]]:
    (folder / "work").mkdir()
    (folder / "work/train.py").write_text(TRAIN)
    (folder / "settings.toml").write_text("[providers.local]\ncpus = 64\nmemory_gib = 64\n")
    os.environ |= {
        "CAVVY_HOME": str(folder / "home"),
        "CAVVY_CONFIG": str(folder / "settings.toml"),
        "XDG_RUNTIME_DIR": str(folder),
    }
    waiting = [(f"{kind}-{n}", kind, n % RANKS) for n in range(each) for kind in kinds]
    left, rows = dict[str, tuple[str, int]](), list[tuple[Any, ...]]()
    with connect() as client:
        try:
            while waiting or left:
                while waiting and len(left) < most:
                    name, kind, bad = waiting.pop(0)
                    submit(folder, name, kind, bad)
                    left[name] = kind, bad
                time.sleep(1)
                for name, (kind, bad) in list(left.items()):
                    job = client.job("default", name)
                    if job.ended_at is not None:
                        del left[name]
                        rows.append(judge_job(client, job, kind, bad))
                        print(rows[-1], file=sys.stderr, flush=True)
        finally:
            client.down()
            while client.nodes():
                time.sleep(1)
    subprocess.run([CAVVY, "server", "stop"], check=False, stdout=subprocess.DEVNULL)
    return sorted(rows)


def submit(folder: Path, name: str, kind: str, bad: int) -> None:
    seconds = 100000 if kind in HANGS else 2.5 * LIMIT_S
    file = folder / f"{name}.yaml"
    file.write_text(
        f"""
name: {name}
workdir: work
resources: {{cpu: 0.5, memory: 3GB}}
retry: {{node: 0}}
grace: 5s
limits: {{stuck: {LIMIT_S}s}}
env: {{MODE: {kind}, BAD: "{bad}", SECONDS: "{seconds}", WORLD_SIZE: "{RANKS}"}}
run: |
  for rank in {" ".join(map(str, range(RANKS)))}; do
    RANK=$rank {sys.executable} train.py &
  done
  wait
"""
    )
    subprocess.run([CAVVY, "run", "-d", "--yes", str(file)], check=True, stdout=subprocess.DEVNULL)


def judge_job(client: ApiClient, job: JobDetail, kind: str, bad: int) -> tuple[Any, ...]:
    """Return the row of an ended job."""
    events = [*list_events(client, job)]
    stuck = [each for each in events if each.kind == "stuck"]
    ranks = job.attempts[-1].stuck_ranks
    planted = bad if kind in HANGS else None
    after = ""
    if kind in HANGS:
        last = job.attempts[-1].nodes[0].progress["at"]
        late = stuck[0].at.timestamp() - float(last) if stuck else float("inf")
        after = f"{late:.0f}"
        good = bool(stuck) and ranks == [bad] and late - LIMIT_S <= LATEST_S
    else:
        good = not stuck and job.phase == "done"
    reason = job.reason[:110]
    verdict = judge(0 if good else 1, 0)
    return (job.name, planted, job.phase, bool(stuck), str(ranks), after, reason, verdict)


def list_events(client: ApiClient, job: JobDetail) -> Iterator[Any]:
    after = 0
    while page := client.events(job.project, job.id, after=after).events:
        yield from page
        after = page[-1].id


if __name__ == "__main__":
    sys.exit(main())
