"""Compares measured and estimated step times and memory on this machine's GPU, for models that were
not used to fit constants. Takes a few minutes. Needs PyTorch, but no network, Grain or data.

    python benchmarks/gpu/estimate.py [--steps 20]
    python benchmarks/gpu/estimate.py --smoke    # tiny models, to try the script on a CPU
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cavvy.planner.device_rates import DeviceRates, device_of
from cavvy.planner.estimate.profile import StepSettings, read_profile
from cavvy.planner.estimate.roofline import estimate_step
from cavvy.planner.estimate.table import estimate_memory
from cavvy.tracer.fake_device import fake_device
from cavvy.tracer.trace import trace_step

WARM = 8  # number of steps before the measurement
PRETENDED = "H200"  # the accelerator to estimate for if there is no GPU


class Block(nn.Module):
    """A layer of a language model: causal attention and a gated feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.gate, self.down = (
            nn.Linear(*size) for size in ((width, 3 * width),) * 2 + ((3 * width, width),)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (x.shape[0], x.shape[1], self.heads, -1)
        q, k, v = (
            each.view(split).transpose(1, 2) for each in self.qkv(self.first(x)).chunk(3, -1)
        )
        seen = (
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )
        x = x + self.out(seen)
        y = self.second(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Words(nn.Module):
    """A small language model."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(32000, width), nn.Linear(width, 32000, bias=False)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(layers)))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embed(words)))


def pictures(width: int) -> nn.Module:
    """A plain convolutional network."""
    layers: list[nn.Module] = []
    sizes = (3, width, 2 * width, 4 * width, 8 * width)
    for low, high in pairwise(sizes):
        layers += [
            nn.Conv2d(low, high, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(high),
            nn.ReLU(),
        ]
        layers += [nn.Conv2d(high, high, 3, padding=1, bias=False), nn.BatchNorm2d(high), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sizes[-1], 1000))


@dataclass(frozen=True)
class Case:
    """One model with its precision and other options."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]  # the shape of one sample; for a language model, the number of tokens
    run: StepSettings

    def batch(self, device: str) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.run.batch or 1
        if len(self.shape) == 1:
            words = torch.randint(0, 32000, (size, *self.shape), device=device)
            return words, words.flatten()
        return torch.randn(size, *self.shape, device=device), torch.randint(
            0, 1000, (size,), device=device
        )


def cases(small: bool) -> list[Case]:
    """Two language models and two image networks, each without any optimization and with all of
    them.
    """
    found = []
    tiny: list[Any] = [
        ("words 64x1", lambda: Words(64, 1), (16,), 2),
        ("pictures 4", lambda: pictures(4), (3, 32, 32), 2),
    ]
    whole: list[Any] = [
        ("words 512x8", lambda: Words(512, 8), (1024,), 16),
        ("words 1536x12", lambda: Words(1536, 12), (1024,), 8),
        ("pictures 64", lambda: pictures(64), (3, 224, 224), 128),
        ("pictures 128", lambda: pictures(128), (3, 224, 224), 64),
    ]
    for name, make, shape, batch in tiny if small else whole:
        image = len(shape) == 3
        for precision, compiled in (("tf32", False), ("bf16", False), ("bf16", True)):
            run = StepSettings(
                batch=batch,
                precision=precision,
                compile=compiled,
                channels_last=image and precision == "bf16",
            )
            found.append(Case(name, make, shape, run))
    return found


def loss_of(model: Any, data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    out = model(data)
    return F.cross_entropy(out.flatten(0, -2), target)


def measure(case: Case, device: str, steps: int) -> tuple[float, float]:
    """The median seconds of a step, and the peak MiB of tensors, which is 0 on a CPU."""
    torch.set_float32_matmul_precision("high" if case.run.precision != "fp32" else "highest")
    torch.backends.cudnn.allow_tf32 = case.run.precision != "fp32"
    layout = torch.channels_last if case.run.channels_last else torch.contiguous_format
    model = case.make().to(device).to(memory_format=layout)  # type: ignore[call-overload]  # torch's stub lacks it
    optimizer = torch.optim.AdamW(model.parameters())
    used = torch.compile(model) if case.run.compile else model
    data, target = case.batch(device)
    data = data.contiguous(memory_format=layout) if data.dim() == 4 else data
    on_gpu, times = device == "cuda", []
    for step in range(steps + WARM):
        if on_gpu and step == WARM:
            torch.cuda.reset_peak_memory_stats()
        begin = mark(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=case.run.precision == "bf16"):
            loss = loss_of(used, data, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        end = mark(device)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 if on_gpu else end - begin)
    return statistics.median(
        times[WARM:]
    ), torch.cuda.max_memory_allocated() / 2**20 if on_gpu else 0.0


def mark(device: str) -> Any:
    """A mark of the current time, on the clock of the GPU if there is one."""
    if device != "cuda":
        return perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def estimate(case: Case, device: DeviceRates) -> tuple[float, float, float]:
    """The estimated seconds of a step, the estimated peak in MiB, and the needed memory with its
    margin in MiB.
    """
    with fake_device():
        model = case.make()
        data, target = case.batch("cpu")
        precision = "bf16" if case.run.precision == "bf16" else "fp32"
        traced = trace_step(
            model,
            lambda: loss_of(model, data, target),
            batch=case.run.batch or 1,
            precision=precision,
            name=case.name,
        )
    profile = read_profile(traced)
    memory = estimate_memory(profile, case.run)
    return estimate_step(profile, device, case.run).total, memory.peak, memory.needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--only-estimate", metavar="NAME", help="no GPU: what is expected of this accelerator"
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="tiny models, to try the script on a CPU",
    )
    given = parser.parse_args()
    here = "cuda" if torch.cuda.is_available() else "cpu"
    if here == "cpu" and not (given.smoke or given.only_estimate):
        raise SystemExit(
            "PyTorch sees no CUDA GPU here: give --only-estimate NAME, or --smoke to try the script"
        )
    name = given.only_estimate or (torch.cuda.get_device_name() if here == "cuda" else PRETENDED)
    device = device_of(name)
    if device is None:
        raise SystemExit(f"no figures are known for {name}")
    if here == "cpu" and not given.only_estimate:
        # two threads that wait for each other take longer than such a step
        torch.set_num_threads(1)
        print(
            f"Steps are this CPU's, estimates an {PRETENDED}'s: "
            "neither says anything of the other.\n"
        )
    print("| model | precision | step ms | estimated | off | peak GiB | estimated | off | need |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for case in cases(given.smoke):
        time, peak, need = estimate(case, device)
        real, held = (0.0, 0.0) if given.only_estimate else measure(case, here, given.steps)
        how = f"{case.run.precision}{' compiled' if case.run.compile else ''}"
        off = (f"{time / real - 1:+.0%}", f"{peak / held - 1:+.1%}") if held else ("-", "-")
        print(
            f"| {case.name} | {how} | {real * 1e3:.1f} | {time * 1e3:.1f} | {off[0]} | "
            f"{held / 1024:.2f} | "
            f"{peak / 1024:.2f} | {off[1]} | {need / 1024:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
