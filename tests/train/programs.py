"""Training scripts for tests: one that uses cavvy.train, and the same loop written by hand."""

import gc
import hashlib
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from cavvy import train
from cavvy.train import seeds
from cavvy.train.parallel import reduce

Say = Callable[[Any], None]
SAMPLES, WIDTH, CLASSES = 120, 16, 6
NOTHING = 0.0


class Block(nn.Module):
    """A residual pair of layers, as tensor parallel splits them: by columns, then by rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class Averaged(Block):
    """A block with running means."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(super().forward(x))
        return out


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.norm(x))
        return out


STAGES: list[Callable[[], nn.Module]] = [Block, Block, Block, Head]


class Normed(nn.Module):
    """Has running means, which each forward pass changes, and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, 32)
        self.norm = nn.BatchNorm1d(32)
        self.two = nn.Linear(32, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.two(
            F.dropout(torch.relu(self.norm(self.one(x))), 0.2, self.training)
        )
        return out


def make_samples() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs (N, WIDTH), classes (N,), and each sample's own number (N,)."""
    source = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, WIDTH, generator=source)
    y = (x @ torch.randn(WIDTH, CLASSES, generator=source)).argmax(1)
    return x, y, torch.arange(SAMPLES)


def tensor_plan() -> dict[str, Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    split: dict[str, Any] = {}
    for number in range(3):
        split |= {f"{number}.up": ColwiseParallel(), f"{number}.down": RowwiseParallel()}
    return split


def learn(
    say: Say,
    plan: train.Plan,
    *,
    steps: int,
    batch: int = 24,
    folder: str = "checkpoints",
    normed: bool = False,
    clip: float | None = 0.5,
    save_every: float = 1e9,
    stop: int | None = None,
    each: Callable[[train.Run], None] | None = None,
) -> dict[str, Any]:
    """Train for so many steps in all; what was seen and lost in this attempt.

    At step `stop` the run is left without a word, after a save. `each` is called after every step.
    """
    run = train.Run(folder, plan=plan, device="cpu", save_every=save_every, seed=3)
    model = run.model(Normed) if normed else run.model(stages=STAGES, tensor_plan=tensor_plan())
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    x, y, numbers = make_samples()
    data = run.data(train.Tensors(x, y, numbers), global_batch=batch)
    losses, seen, norms = [], [], []
    epochs = steps * batch / SAMPLES
    for part in run.batches(data, epochs=epochs + 1e-9):
        value = run.pipeline(F.cross_entropy, (part[0], part[1]))
        norm = run.step(optimizer, clip=clip)
        norms.append(float(norm) if norm is not None else NOTHING)
        losses.append(share_mean(run, value, len(part[0])))
        seen.append(part[2].tolist())
        say((run.steps, losses[-1]))
        if each is not None:
            each(run)
        if run.steps == stop:
            run.save(wait=True)
            break
    state = {name: value.double().sum().item() for name, value in full_state(model).items()}
    found = {
        "name": run.name,
        "steps": run.steps,
        "losses": losses,
        "seen": seen,
        "norms": norms,
        "state": state,
        "micro": run.micro_batch,
    }
    run.close()
    return found


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    whole = {}
    for name, value in model.state_dict().items():
        whole[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return whole


def share_mean(run: train.Run, value: torch.Tensor, samples: int) -> float:
    """The mean loss over the global batch, from each rank's mean and number of samples."""
    said = run.world.gather((samples, float(value)))
    return sum(n * v for n, v in said) / sum(n for n, _ in said)


def by_hand(
    precision: str, *, steps: int, batch: int = 24, clip: float | None = 0.5, normed: bool = False
) -> tuple[list[float], list[float]]:
    """The same training as a plain loop in one process; losses and norms of gradients."""
    if normed:
        seeds.sow(seeds.mix(3, 0))
        model: nn.Module = Normed()
    else:
        made = []
        for number, make in enumerate(STAGES):
            seeds.sow(seeds.mix(3, number))
            made.append(make())
        model = nn.Sequential(*made)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y, _ = make_samples()
    order = train.Data(train.Tensors(x), global_batch=batch, seed=3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    losses, norms = [], []
    for step in range(steps):
        chosen = order.indices(range(step * batch, (step + 1) * batch))
        seeds.sow(seeds.mix(3, step + 1, 0))
        with torch.autocast("cpu", low, enabled=low is not None):
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip is not None:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, norms


def by_hand_on_ranks(say: Say, precision: str, sharded: bool, steps: int) -> list[float]:
    """The same with torch's own DistributedDataParallel, or its fully_shard, on equal shares of
    24 samples.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    made = []
    for number, make in enumerate(STAGES):
        seeds.sow(seeds.mix(3, number))
        made.append(make())
    model: nn.Module = nn.Sequential(*made)
    low = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    if sharded:
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for block in model.children():
            fully_shard(block, mp_policy=policy)
        whole = MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=policy.reduce_dtype, output_dtype=policy.reduce_dtype
        )
        fully_shard(model, mp_policy=whole)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x, y, _ = make_samples()
    order = train.Data(train.Tensors(x), global_batch=24, seed=3)
    scaler = torch.amp.GradScaler("cpu", enabled=precision == "fp16")
    losses = []
    for step in range(steps):
        low_end, share = step * 24 + rank * 24 // size, 24 // size
        chosen = order.indices(range(low_end, low_end + share))
        with torch.autocast("cpu", low, enabled=low is not None and not sharded):
            loss = F.cross_entropy(model(x[chosen]), y[chosen])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach().float() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
    # DistributedDataParallel keeps the group. If it were the last to release the group, Gloo's
    # destructor would wait, with the GIL, for a thread that needs the GIL:
    # https://github.com/pytorch/pytorch/issues/56297
    del model, optimizer, loss
    gc.collect()
    dist.destroy_process_group()
    return losses


def count_threads(say: Say) -> int:
    return torch.get_num_threads()


def parity(say: Say, plan: train.Plan, steps: int) -> dict[str, Any]:
    return learn(say, plan, steps=steps)


def compare_by_hand(
    say: Say, precision: str, steps: int, normed: bool
) -> tuple[list[float], list[float]]:
    return by_hand(precision, steps=steps, normed=normed)


def attempt(
    say: Say, plan: train.Plan, steps: int, stop: int | None, normed: bool, batch: int
) -> dict[str, Any]:
    return learn(say, plan, steps=steps, stop=stop, normed=normed, batch=batch)


def until_killed(say: Say, plan: train.Plan, steps: int, save_every: float) -> dict[str, Any]:
    return learn(
        say,
        plan,
        steps=steps,
        save_every=save_every,
        normed=True,
        each=lambda run: time.sleep(0.001),
    )


def saving_all_the_time(say: Say, steps: int, save_every: float) -> list[str]:
    """Says what it resumed, ("resumed", step, state), then what is safe, ("safe", step); returns
    each step's state.
    """
    run = train.Run(
        "checkpoints", plan=train.Plan(shards=0), device="cpu", save_every=save_every, seed=3
    )
    model = run.model(Normed)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    x, y, _ = make_samples()
    data = run.data(train.Tensors(x, y), global_batch=24)
    run.resume()
    say(("resumed", run.steps, digest(model)))
    states = [digest(model)]
    for part in run.batches(data, epochs=steps * 24 / SAMPLES + 1e-9):
        run.pipeline(F.cross_entropy, part)
        run.step(optimizer)
        states.append(digest(model))
        newest = run.keeper.store.safe_step
        if newest is not None:
            say(("safe", newest))
    run.close()
    return states


def digest(model: nn.Module) -> str:
    """Every bit of a model that is not split."""
    whole = full_state(model)
    bits = b"".join(whole[name].detach().numpy().tobytes() for name in sorted(whole))
    return hashlib.sha256(bits).hexdigest()


def slowly(say: Say, plan: train.Plan, steps: int) -> dict[str, Any]:
    """As long as it takes for a notice to arrive."""
    return learn(say, plan, steps=steps, each=lambda run: time.sleep(0.02))


def short_of_memory(
    say: Say, steps: int, rank: int, room: int, at: int, normed: bool
) -> dict[str, Any]:
    """One rank has no memory for more than `room` samples at once, from step `at` on."""
    plan = train.Plan(micro_batch=int(os.environ.get("MICRO", "0")))
    reduce.BUCKET_BYTES = 2000  # several buckets, though the model is small
    run = train.Run("checkpoints", plan=plan, device="cpu", save_every=1e9, seed=3)
    model = run.model(Normed) if normed else run.model(stages=STAGES)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    x, y, numbers = make_samples()
    data = run.data(train.Tensors(x, y, numbers), global_batch=24)
    losses, sizes = [], []

    def fail(grad: Any = None) -> None:
        raise torch.OutOfMemoryError("out of memory, planted")

    def loss(part: Any) -> torch.Tensor:
        if run.world.rank == rank and len(part[0]) > room and run.steps >= at:
            if "BACKWARD" in os.environ:
                halfway = model[1](model[0](part[0]))
                halfway.register_hook(
                    fail
                )  # gradients of the later layers are on their way by then
                return F.cross_entropy(model[3](model[2](halfway)), part[1])
            model(part[0])  # running means have changed by the time that it fails
            fail()
        return F.cross_entropy(model(part[0]), part[1])

    for part in run.batches(data, epochs=steps * 24 / SAMPLES + 1e-9):
        value = run.accumulate(loss, part)
        run.step(optimizer, clip=0.5)
        losses.append(share_mean(run, value, len(part[0])))
        sizes.append(run.micro_batch)
    state = {name: value.double().sum().item() for name, value in full_state(model).items()}
    run.close()
    return {"losses": losses, "sizes": sizes, "state": state, "pid": os.getpid()}


def split_and_short(
    say: Say,
    plan: train.Plan,
    steps: int,
    at: int,
    rank: int,
    room: int,
    batch: int = 24,
    stop: int | None = None,
) -> dict[str, Any]:
    """As `learn`; one rank of a split model, or with -1 each, has no memory for more than `room`
    samples at once at step `at`. With AVERAGED the first block has running means.
    """
    before = Block.forward
    if "AVERAGED" in os.environ:
        STAGES[0] = Averaged

    def forward(block: Block, x: torch.Tensor) -> torch.Tensor:
        if runs and rank in (-1, runs[0].world.rank) and runs[0].steps == at and len(x) > room:
            raise torch.OutOfMemoryError("out of memory, planted")
        return before(block, x)

    runs: list[train.Run] = []
    watch = runs.append
    train.observers.append(watch)
    Block.forward = forward  # type: ignore[method-assign]
    return learn(say, plan, steps=steps, batch=batch, stop=stop)


def mistaken(say: Say, plan: train.Plan) -> dict[str, Any]:
    """As `learn`; the user's loss has a mistake."""

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a mistake of the user's")

    F.cross_entropy = loss
    return learn(say, plan, steps=2)


def refused(say: Say, plan: train.Plan, device: str) -> str:
    """Why a plan or a device is not to be had."""
    try:
        train.Run("checkpoints", plan=plan, device=device).model(stages=STAGES)
    except ValueError as error:
        return str(error)
    return "nothing"


def learn_on_gpu(say: Say, precision: str, steps: int) -> list[float]:
    """Losses of a model with layers that are wide enough for fp8."""
    run = train.Run(
        "checkpoints", plan=train.Plan(precision=precision, compile=precision == "fp8"), seed=3
    )  # type: ignore[arg-type]
    model = run.model(lambda: nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    data = run.data(
        train.Tensors(torch.randn(512, 256, generator=torch.Generator().manual_seed(0))),
        global_batch=64,
    )
    losses = []
    for batch in run.batches(data, epochs=steps / 8):
        value = run.accumulate(lambda part: F.mse_loss(model(part[0]), part[0]), batch)
        run.step(optimizer)
        losses.append(float(value))
    run.close()
    return losses
