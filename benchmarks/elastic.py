"""Takes nodes of a real training on several nodes away, and compares what a loss costs if the other
nodes are kept, and if the gang is started again.

    python benchmarks/elastic.py                      # 8 nodes, 30 losses, with each policy
    python benchmarks/elastic.py --nodes 4 --losses 2 --launcher torchrun -o json

The provider is `local` at 3.60 dollars an hour; a node is an agent with its processes on this
machine, which are killed at once, at random, as by a power cut. The program is a small model under
`cavvy.train`, whose ranks are started by `cavvy.train` itself, by torchrun, or by a torchrun that
is not kept (`plain`). For each policy, the benchmark measures from the kill until all ranks have
repeated the step at which they were, counts the agents that were started and those that were
kept, and compares the final weights with those of a run without losses, bit for bit, and the bill
with the lifetimes that the provider has recorded.

All nodes are on one machine, so a new node has no machine to boot and finds its setup in the cache:
what is left of a loss is its discovery, the end of the other ranks, and the start of the programs,
which import PyTorch. The programs of kept nodes stay, so only the new one starts; with `plain`, all
start.
`--setup-s` adds a setup of so many seconds, which each node of a new gang repeats.
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from datetime import datetime, timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import ten_preemptions
from ten_preemptions import RATE_MICROS, cavvy, find_processes, until

from cavvy.client import ApiClient, connect
from cavvy.client.wire import JobDetail

ten_preemptions.PATIENCE_S = 900.0  # eight programs that import PyTorch share this machine
PROGRAM = '''"""A small model, trained on all nodes. Each rank notes when it has done which step."""
import os, sys, time
import torch
from torch import nn
from cavvy import train

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)
folder, steps = sys.argv[1], int(sys.argv[2])

def make():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))

run = train.Run("checkpoints", plan=train.Plan(), device="cpu", save_every=1.0)
model = run.model(make)
optimizer = run.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
samples = torch.sin(torch.arange(16.0 * 640).reshape(640, 16))
data = run.data(train.Tensors(samples), global_batch=32)
rank, attempt = os.environ["NODE_RANK"], os.environ.get("CAVVY_ATTEMPT", "0")
log = os.open(f"{folder}/steps-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
for batch in run.batches(data, epochs=steps * 32 / 640):
    run.accumulate(lambda part: model(part[0]).square().mean(), batch)
    run.step(optimizer)
    time.sleep(0.05)
    os.write(log, f"{attempt} {run.steps} {time.time()}\\n".encode())
if rank == "0":
    torch.save([each.detach() for each in model.parameters()], f"{folder}/weights.pt")
'''


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--losses", type=int, default=30)
    parser.add_argument("--gap", type=int, default=40, help="steps between two losses")
    parser.add_argument("--launcher", choices=("train", "torchrun", "plain"), default="train")
    parser.add_argument("--setup-s", type=float, default=0.0)
    parser.add_argument("--policies", nargs="+", default=["repair", "restart"])
    parser.add_argument("--seed", type=int, default=4)
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="rmel-", dir="/tmp"))
    try:
        found = compare(folder, asked)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if asked.output == "json":
        print(json.dumps(found, indent=1))
    else:
        show(found)
    good = all(each["weights_equal"] and each["bill"] == each["lives"] for each in found.values())
    return 0 if good else 1


def compare(folder: Path, asked: argparse.Namespace) -> dict[str, dict[str, Any]]:
    (folder / "work").mkdir()
    (folder / "work/program.py").write_text(PROGRAM)
    (folder / "settings.toml").write_text(
        f"[providers.local]\nprice_usd_hr = {RATE_MICROS / 1e6}\n[server]\nstart_timeout_s = 300\n"
    )
    os.environ.update(
        CAVVY_HOME=str(folder / "home"),
        CAVVY_CONFIG=str(folder / "settings.toml"),
        XDG_RUNTIME_DIR=str(folder),
    )
    found = {}
    with connect() as client:
        try:
            run(client, folder, "calm", "restart", 0, asked)
            for policy in asked.policies:
                found[policy] = run(client, folder, policy, policy, asked.losses, asked)
        finally:
            client.down()
            until(lambda: not client.nodes(), "the end of all nodes")
            cavvy("server", "stop")
    return found


def run(
    client: ApiClient,
    folder: Path,
    name: str,
    policy: str,
    losses: int,
    asked: argparse.Namespace,
) -> dict[str, Any]:
    out = folder / name
    out.mkdir()
    steps = (asked.losses + 1) * asked.gap
    program = f"program.py {out} {steps}"
    start = f"exec {sys.executable} {program}"
    address = "--master-addr $MASTER_ADDR --master-port $MASTER_PORT"
    if asked.launcher != "train":
        start = (
            f"exec {sys.executable} -m torch.distributed.run --nnodes $NNODES --nproc-per-node 1 "
            f"--node-rank $NODE_RANK {address} {program}"
        )
    keeps = ', CAVVY_FORK_RANKS: "1"' if asked.launcher == "torchrun" else ""
    setup = f"setup: sleep {asked.setup_s}\n" if asked.setup_s else ""
    file = folder / f"{name}.yaml"
    file.write_text(
        f"""
name: {name}
nodes: {asked.nodes}
on_loss: {policy}
workdir: {folder}/work
resources: {{cpu: 0.1, memory: 400MB}}
env: {{OMP_NUM_THREADS: "1"{keeps}}}
retry: {{node: unlimited, delay: 0s}}
checkpoint: checkpoints
grace: 30s
{setup}run: {start}
"""
    )
    cavvy("run", "-d", "--yes", str(file))
    chance, told = random.Random(asked.seed), []
    for number in range(1, losses + 1):
        told.append(lose(client, folder, out, name, number * asked.gap, chance, asked.nodes))
    ends = ("done", "failed", "stopped")
    until(lambda: client.job("default", name).phase in ends, f"the end of {name}")
    if not losses and client.job("default", name).phase != "done":
        raise SystemExit(f"the program failed: {client.job('default', name).reason}")
    until(lambda: not client.nodes(), "the end of all nodes")
    job = client.job("default", name)
    return {
        "phase": job.phase,
        "losses": losses,
        "launches": count_launches(folder / "home", job),
        "seconds": [each["seconds"] for each in told],
        "work_ended_s": [each["ended"] for each in told],
        "work_started_s": [each["runs"] for each in told],
        "repeated_steps": [each["repeated"] for each in told],
        "kept": [each["kept"] for each in told],
        "weights_equal": job.phase == "done" and same(folder / "calm", out),
        "bill": client.cost("default", name).total_micros,
        "lives": sum_lives(folder / "home", job),
        "load": os.getloadavg()[0],
    }


def lose(
    client: ApiClient,
    folder: Path,
    out: Path,
    name: str,
    goal: int,
    chance: random.Random,
    nodes: int,
) -> dict[str, Any]:
    """Kill a rank once all ranks have done the step `goal`, and wait until they do it again."""
    until(lambda: least_step(out, nodes) >= goal, f"step {goal} of {name}")
    attempt = client.job("default", name).attempts[-1]
    rank, agents = chance.randrange(nodes), list_agents(folder / "home")
    for pid in find_processes(agents[rank]):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed, reached = time.time(), max(most_step(out, each) for each in range(nodes))
    until(lambda: caught_up(out, nodes, attempt.number, reached) > 0, f"{name} to go on")
    later = [row for each in range(nodes) for row in rows(out, each) if row[0] > attempt.number]
    first = min(step for _, step, _ in later)
    now = list_agents(folder / "home")
    old, new = client.job("default", name).attempts[attempt.number - 1 : attempt.number + 1]
    return {
        "ended": seconds_after(old.finished_at, killed),
        "runs": seconds_after(new.running_at, killed),
        "seconds": round(caught_up(out, nodes, attempt.number, reached) - killed, 2),
        "repeated": reached - first + 1,
        "kept": sum(now.get(each) == pid for each, pid in agents.items()),
    }


def seconds_after(at: datetime | None, killed: float) -> float:
    return 0.0 if at is None else round(at.timestamp() - killed, 2)


def rows(out: Path, rank: int) -> list[tuple[int, int, float]]:
    """The steps of a rank: attempt, step and time."""
    with suppress(FileNotFoundError):
        lines = (out / f"steps-{rank}").read_text().splitlines()
        parts = [line.split() for line in lines]
        return [(int(x[0]), int(x[1]), float(x[2])) for x in parts if len(x) == 3]
    return []


def most_step(out: Path, rank: int) -> int:
    return max((step for _, step, _ in rows(out, rank)), default=0)


def least_step(out: Path, nodes: int) -> int:
    return min(most_step(out, rank) for rank in range(nodes))


def caught_up(out: Path, nodes: int, attempt: int, reached: int) -> float:
    """When the last rank of a later attempt had done the step that was reached before, or 0."""
    times = []
    for rank in range(nodes):
        later = [at for number, step, at in rows(out, rank) if number > attempt and step >= reached]
        times.append(min(later, default=0.0))
    return max(times) if all(times) else 0.0


def list_agents(home: Path) -> dict[int, int]:
    """The processes of the agents of the only gang, by rank."""
    found = {}
    for path in (home / "providers/local/agents").glob("*/*/started.json"):
        with suppress(ValueError, FileNotFoundError):
            found[int(path.parent.name)] = json.loads(path.read_text())["pid"]
    return found


def list_lives(home: Path, job: JobDetail) -> list[dict[str, Any]]:
    """The lives of all nodes of the job's gangs, from the provider's own records."""
    names = dict.fromkeys(attempt.gang.partition("@")[0] for attempt in job.attempts)
    records = [
        json.loads((home / f"providers/local/ended/{name}.json").read_text()) for name in names
    ]
    return [node for each in records for node in (*each["ranks"], *each.get("replaced", ()))]


def count_launches(home: Path, job: JobDetail) -> int:
    return len(list_lives(home, job))


def sum_lives(home: Path, job: JobDetail) -> int:
    """What the machine costs by the provider's records, in micro-dollars: the nodes of a gang pay
    for it together, from the first start to the last end. Each attempt that had the gang is billed
    for its part, and each rank's share of the part is rounded once, half up."""
    total = 0
    gangs: dict[str, list[Any]] = {}
    for attempt in job.attempts:
        gangs.setdefault(attempt.gang.partition("@")[0], []).append(attempt)
    for name, attempts in gangs.items():
        record = json.loads((home / f"providers/local/ended/{name}.json").read_text())
        nodes = [*record["ranks"], *record.get("replaced", ())]
        since = min(datetime.fromisoformat(each["started_at"]) for each in nodes)
        last = max(datetime.fromisoformat(each["ended_at"]) for each in record["ranks"])
        for attempt in attempts:
            end = last if attempt is attempts[-1] else attempt.ended_at
            life = Fraction((end - since) // timedelta(microseconds=1), 3_600_000_000)
            share = int(life * attempt.rate_micros_per_hour + Fraction(1, 2))
            total, since = total + share * len(record["ranks"]), end
    return total


def same(one: Path, other: Path) -> bool:
    import torch

    first, second = (torch.load(each / "weights.pt", weights_only=True) for each in (one, other))
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def show(found: dict[str, dict[str, Any]]) -> None:
    for policy, each in found.items():
        seconds = each["seconds"] or [0.0]
        print(
            f"{policy}: {each['losses']} losses, {each['launches']} agents started, "
            f"{each['kept']} kept at each loss; seconds lost per loss: median "
            f"{statistics.median(seconds):.1f}, most {max(seconds):.1f}; load {each['load']:.1f}"
        )
        print(
            f"  {each['phase']}; weights equal a run's without losses, bit for bit: "
            f"{'yes' if each['weights_equal'] else 'NO'}; bill {each['bill']}, lives "
            f"{each['lives']} micro-dollars"
        )


if __name__ == "__main__":
    sys.exit(main())
