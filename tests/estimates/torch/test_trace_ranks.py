"""Scripts with process groups, worker processes and checked distributions are traced as one rank."""

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import distributed
from torch.distributions import Categorical, Distribution
from torch.utils.data import DataLoader

from cavvy.capabilities.estimates.tracer.script import trace_script

MODEL = "torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8))"
FLOPS = 2 * 16 * (64 * 32 + 32 * 8)
STEP = """
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(16, 64, device=device)).sum().backward()
optimizer.step()
"""

# DistributedDataParallel, with the variables of torchrun, a sampler and collective operations
DATA_PARALLEL = f"""
import os, torch
import torch.distributed as dist
from torch.distributed import init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
init_process_group(backend="nccl", device_id=torch.device("cuda:0"))
rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
assert (dist.get_rank(), dist.get_world_size(), size) == (0, 1, 1)
torch.cuda.set_device(rank % torch.cuda.device_count())
model = DDP({MODEL}.to(rank), device_ids=[rank])
assert model.module is not None
optimizer = torch.optim.AdamW(model.parameters())
data = TensorDataset(torch.randn(64, 64), torch.zeros(64))
sampler = DistributedSampler(data)
loader = DataLoader(data, 16, False, sampler, None, 4, prefetch_factor=2, persistent_workers=True)
for inputs, _ in loader:
    with model.no_sync():
        loss = model(inputs.to(rank)).sum()
    loss.backward()
    dist.all_reduce(loss.detach(), op=dist.ReduceOp.AVG)
    objects, first = [None] * size, [None]
    dist.all_gather_object(objects, {{"rank": rank}})
    dist.gather_object("own", first)
    assert objects == [{{"rank": 0}}] and first == ["own"]
    dist.barrier()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""

FULLY_SHARDED = f"""
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision
dist.init_process_group("nccl")
device = "cuda"
model = FSDP({MODEL}, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(16, 64, device=device)).float().sum().backward()
model.clip_grad_norm_(1.0)
optimizer.step()
"""

SHARDED_MODULES = f"""
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
device, policy = "cuda", MixedPrecisionPolicy(param_dtype=torch.bfloat16)
mesh = init_device_mesh("cuda", (1,))
model = {MODEL}
for layer in model:
    fully_shard(layer, mesh=mesh, mp_policy=policy)
fully_shard(model, mesh=mesh, mp_policy=policy)
model.set_requires_gradient_sync(True)
{STEP}
"""

SPAWNED = f"""
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
def work(rank, size):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    device = rank
    model = torch.nn.parallel.DistributedDataParallel({MODEL}.to(rank), device_ids=[rank])
    {STEP.strip().replace(chr(10), chr(10) + "    ")}
if __name__ == "__main__":
    mp.spawn(work, args=(torch.cuda.device_count(),), nprocs=torch.cuda.device_count(), join=True)
"""

# A process for each rank, and a process that is no rank although its first argument is 0
STARTED = f"""
import os
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
def note(number, main, messages):
    assert os.getpid() != main
    messages.put(b"noted")
def work(rank, size, messages):
    dist.init_process_group("gloo", rank=rank, world_size=size)
    assert messages.get(timeout=60) == b"noted"
    device = "cuda"
    model = torch.nn.parallel.DistributedDataParallel({MODEL}.to(rank), device_ids=[rank])
    {STEP.strip().replace(chr(10), chr(10) + "    ")}
if __name__ == "__main__":
    context = mp.get_context("fork")
    messages = context.Queue()
    notes = context.Process(target=note, args=(0, os.getpid(), messages))
    notes.start()
    second = context.Process(target=work, kwargs={{"rank": 1, "size": 2, "messages": messages}})
    first = context.Process(target=work, args=(0, 2, messages))
    for each in (second, first):
        each.start()
    for each in (second, first):
        each.join()
"""

# Ranks that end without a step, and a step in the process that started them
ENDED = f"""
from multiprocessing.connection import wait
import torch
import torch.multiprocessing as mp
device, model = "cpu", {MODEL}
ran = []
def note(size, local_rank, gpu):
    ran.append(local_rank)
    if size == 3:
        torch.ones(1).backward()
ranks = [mp.Process(target=note, args=(2, rank, f"cuda:{{rank}}")) for rank in range(2)]
for each in ranks:
    each.start()
    assert wait([each.sentinel]) == [each.sentinel]
    each.join()
    assert (each.exitcode, each.is_alive()) == (0, False)
    each.terminate()
    each.close()
assert ran == [0]
{STEP}
"""


# Subclasses of Process: ranks, whose code trains in other functions and classes, and data producers
# with a rank, which never end
SUBCLASSED = f"""
import random
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
def train(device):
    model = torch.nn.parallel.DistributedDataParallel({MODEL}.to(device))
    {STEP.strip().replace(chr(10), chr(10) + "    ")}
class Data:
    def __init__(self, train):
        self.train = train
    def sample(self):
        return random.random() if self.train else 0.0
class Producer(mp.Process):
    def __init__(self, rank, messages):
        super().__init__(daemon=True)
        self.rank, self.messages, self.data = rank, messages, Data(train=True)
    def run(self):
        while self.data.train:
            self.messages.put(Data(train=True).sample())
def produce(rank, messages):
    while True:
        messages.put(random.random())
class Rank(mp.Process):
    def __init__(self, rank, size, messages):
        super().__init__()
        self._rank, self.size, self.messages = rank, size, messages
    def run(self):
        self.begin()
    def begin(self):
        for _ in range(20):
            assert 0 <= self.messages.get(timeout=60) < 1
        Job(self._rank).execute()
class Job:
    def __init__(self, gpu):
        self.device = gpu
    def execute(self):
        train(self.device)
if __name__ == "__main__":
    messages = mp.get_context("fork").Queue(2)
    for each in (Producer(0, messages), mp.Process(target=produce, args=(0, messages), daemon=True)):
        each.start()
        assert each.is_alive()
    ranks = [Rank(rank, 2, messages) for rank in (1, 0)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
"""


def trace(folder: Path, script: str) -> dict[str, Any]:
    (folder / "train.py").write_text(script)
    return trace_script(str(folder / "train.py"), [])


def forward_flops(profile: dict[str, Any]) -> float:
    flops: list[float] = [
        each["flops"] * each["count"]
        for each in profile["ops"]
        if each["kind"] in ("matmul", "recurrent") and not each["backward"]
    ]
    return sum(flops)


@pytest.mark.parametrize(
    ("script", "precision"),
    [
        (DATA_PARALLEL, "fp32"),
        (FULLY_SHARDED, "bf16"),
        (SHARDED_MODULES, "bf16"),
        (SPAWNED, "fp32"),
        (STARTED, "fp32"),
        (ENDED, "fp32"),
        (SUBCLASSED, "fp32"),
    ],
    ids=[
        *("data-parallel", "fully-sharded", "sharded-modules", "spawned", "started", "ended"),
        "subclassed",
    ],
)
def test_a_script_of_several_ranks_is_traced_as_one(
    tmp_path: Path, script: str, precision: str
) -> None:
    handler = signal.signal(signal.SIGTERM, lambda *_: None)  # as scripts that save at the end
    try:
        profile = trace(tmp_path, script)
    finally:
        signal.signal(signal.SIGTERM, handler)
    assert not multiprocessing.active_children(), "producers of data never end by themselves"
    assert (profile["batch"], profile["precision"]) == (16, precision)
    assert profile["parameters"] == 64 * 32 + 32 + 32 * 8 + 8
    assert forward_flops(profile) == FLOPS


def test_ranks_may_import_their_training_when_they_start(tmp_path: Path) -> None:
    step = STEP.strip().replace("\n", "\n    ")
    (tmp_path / "rank_steps.py").write_text(
        f"import torch\ndef step(device):\n    model = {MODEL}\n    {step}\n"
    )
    (tmp_path / "rank_work.py").write_text(
        "import rank_steps\ndef run(device):\n    rank_steps.step(device)\n"
    )
    script = """
import torch.multiprocessing as mp
def work(rank):
    try:
        import no_such_package_here
    except ImportError:
        from rank_work import run
    run("cpu")
mp.Process(target=work, args=(0,)).start()
"""
    assert trace(tmp_path, script)["batch"] == 16


def test_a_trace_leaves_no_process_group_variable_or_patch(tmp_path: Path) -> None:
    before = dict(os.environ), DataLoader.__init__, vars(torch.multiprocessing)["spawn"]
    trace(tmp_path, DATA_PARALLEL)
    assert not distributed.is_initialized()
    assert (dict(os.environ), DataLoader.__init__, vars(torch.multiprocessing)["spawn"]) == before
    assert distributed.init_process_group.__module__.startswith("torch")


def test_a_script_that_asks_for_no_rank_has_no_rank(tmp_path: Path) -> None:
    """Libraries start process groups if they find the variables of torchrun."""
    profile = trace(
        tmp_path,
        f"import os, torch\ndevice, model = 'cpu', {MODEL}\nassert 'RANK' not in os.environ\n"
        f"assert int(os.environ.get('LOCAL_RANK', -1)) == -1\n{STEP}",
    )
    assert forward_flops(profile) == FLOPS


@pytest.mark.parametrize(
    "check",
    [
        "if 'LOCAL_RANK' not in os.environ: raise SystemExit('start this script with torchrun')",
        "if os.getenv('WORLD_SIZE') is None: exit(1)",
        "assert int(os.environ.get('RANK', -1)) >= 0",
        "rank = int(os.environ.get('LOCAL_RANK'))",
    ],
)
def test_a_script_that_stops_without_a_rank_is_traced_as_a_rank(tmp_path: Path, check: str) -> None:
    profile = trace(
        tmp_path, f"import os, sys, torch\n{check}\ndevice, model = 'cpu', {MODEL}\n{STEP}"
    )
    assert forward_flops(profile) == FLOPS


def test_a_script_that_stops_for_another_reason_runs_once(tmp_path: Path) -> None:
    count = f"import os\nwith open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('.')\n"
    for script in ("exit(3)", "os.environ.get('RANK')\nexit(2)", "os.environ.get('A')\nexit(1)"):
        with pytest.raises(SystemExit):
            trace(tmp_path, count + script)
    assert (tmp_path / "runs").read_text() == "..."


def test_programs_that_a_script_started_end_with_its_trace(tmp_path: Path) -> None:
    script = f"""
import multiprocessing
import os
import torch
multiprocessing.Queue()  # starts a process of Python itself
monitor = os.posix_spawnp("sleep", ["sleep", "1000"], os.environ)
with open({str(tmp_path / "started")!r}, "w") as file:
    file.write(str(monitor))
model = {MODEL}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 64)).sum().backward()
optimizer.step()
"""
    with subprocess.Popen(["sleep", "1000"]) as other:
        assert forward_flops(trace(tmp_path, script)) == FLOPS
        while is_running(int((tmp_path / "started").read_text())):
            time.sleep(0.01)
        assert other.poll() is None
        other.kill()


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def test_another_missing_variable_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="DATA_FOLDER"):
        trace(tmp_path, "import os\nos.environ['DATA_FOLDER']\n")


def test_distributions_do_not_check_values_that_a_trace_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Compilation with TorchDynamo turns these checks off for the rest of the process.
    monkeypatch.setattr(Distribution, "_validate_args", True)
    profile = trace(
        tmp_path,
        f"""
import torch
from torch.distributions import Categorical, Normal
device, model = "cpu", {MODEL}
optimizer = torch.optim.Adam(model.parameters())
choice = Categorical(logits=model(torch.randn(16, 64)))
action = choice.sample()
width = Normal(torch.zeros(16), torch.ones(16)).rsample()
(choice.log_prob(action) * width).sum().backward()
optimizer.step()
""",
    )
    assert forward_flops(profile) == FLOPS
    with pytest.raises(ValueError, match="satisfy the constraint"):
        Categorical(probs=torch.tensor([-1.0, 2.0]))


def test_experts_that_choose_their_samples_with_any_get_an_equal_share(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
import torch
gate, experts = torch.nn.Linear(8, 4, bias=False), torch.nn.ModuleList(
    torch.nn.Linear(8, 8, bias=False) for _ in range(4))
model = torch.nn.ModuleList([gate, experts])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(64, 8)
weights, chosen = gate(data).topk(2, -1)
out = torch.zeros(64, 8)
for number, expert in enumerate(experts):
    rows = (chosen == number).any(-1).nonzero(as_tuple=True)[0]
    out[rows] = out[rows] + expert(data[rows]) * weights[rows].sum(-1, keepdim=True)
out.sum().backward()
optimizer.step()
""",
    )
    assert forward_flops(profile) == 2 * 64 * 8 * 4 + 2 * (2 * 64) * 8 * 8
