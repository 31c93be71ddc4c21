"""The estimates of models that nothing was fitted to, by their traces."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cavvy.capabilities.estimates.tracer.fake_device import fake_device
from cavvy.capabilities.estimates.tracer.trace import trace_step
from cavvy.cli.task.profiles import measured_devices
from cavvy.planner.device_rates import device_of, peak_of
from cavvy.planner.estimate.profile import StepSettings, WorkProfile, read_profile
from cavvy.planner.estimate.roofline import estimate_step
from cavvy.planner.estimate.table import list_devices, list_unmeasured


def layer(inputs: int, outputs: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = layer(3, 64), layer(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        out: Tensor = self.head((x + self.second(x)).mean((2, 3)))
        return out


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = layer(3, 64), layer(64, 128)
        self.up, self.out = nn.ConvTranspose2d(128, 64, 2, 2), nn.Conv2d(128, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        out: Tensor = self.out(torch.cat([x, self.up(self.deep(F.max_pool2d(x, 2)))], 1))
        return out


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.lstm = nn.LSTM(256, 256, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(self.words(x))[0]).flatten(0, 1)
        return out


class Graph(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(128, 256), nn.Linear(256, 16)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.zeros(2, 50_000, dtype=torch.long)
        x = self.first(x)
        out: Tensor = self.second(torch.zeros_like(x).index_add(0, ends[1], x[ends[0]]))
        return out


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(10_000, 64) for _ in range(8))
        self.head = nn.Linear(512, 2)

    def forward(self, x: Tensor) -> Tensor:
        found = [table(x[:, at]) for at, table in enumerate(self.tables)]
        out: Tensor = self.head(torch.cat(found, 1))
        return out


class ScoredAttention(nn.Module):
    """Attention with a position bias, as in T5."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.heads, self.bias = nn.Linear(256, 768), nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        q, k, v = self.heads(x).unflatten(-1, (3, 4, 64)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) + self.bias).softmax(-1)
        out: Tensor = self.head((scores @ v).transpose(1, 2).flatten(2)).flatten(0, 1)
        return out


def words(batch: int, length: int) -> tuple[Tensor, Tensor]:
    none = torch.zeros(batch, length, dtype=torch.long)
    return none, none.flatten()


CASES: list[tuple[Any, Callable[[], tuple[Tensor, Tensor]], str]] = [
    (Residual, lambda: (torch.ones(8, 3, 64, 64), words(8, 1)[1]), ""),
    (
        UNet,
        lambda: (torch.ones(8, 3, 64, 64), torch.zeros(8, 64, 64, dtype=torch.long)),
        "",
    ),
    (Recurrent, lambda: words(16, 64), ""),
    (
        Graph,
        lambda: (torch.ones(10_000, 128), words(10_000, 1)[1]),
        "scattered sums",
    ),
    (
        Recommender,
        lambda: (torch.zeros(2048, 8, 4, dtype=torch.long), words(2048, 1)[1]),
        "sums of embeddings",
    ),
    (ScoredAttention, lambda: words(16, 128), ""),
]


@pytest.mark.parametrize(("model", "data", "reason"), CASES)
def test_work_that_was_not_measured_is_named(
    model: Any, data: Callable[[], tuple[Tensor, Tensor]], reason: str
) -> None:
    with fake_device():
        made = model()
        x, y = data()
        traced = trace_step(
            made, lambda: F.cross_entropy(made(x), y), batch=len(x), precision="bf16"
        )
    found = list_unmeasured(read_profile(traced), StepSettings())
    assert bool(found) == bool(reason)
    assert reason in " and ".join(found)


class Depthwise(nn.Module):
    """Inverted bottlenecks with gates, as in MobileNet and EfficientNet."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = layer(3, 24), nn.Linear(24, 10)
        self.wide, self.narrow = nn.Conv2d(24, 144, 1, bias=False), nn.Conv2d(144, 24, 1)
        self.deep = nn.Conv2d(144, 144, 5, padding=2, groups=144)
        self.norm, self.gate = nn.BatchNorm2d(144), nn.Conv2d(144, 144, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.silu(self.norm(self.deep(self.wide(x))))
        y = y * torch.sigmoid(self.gate(y.mean((2, 3), keepdim=True)))
        out: Tensor = self.head((x + self.narrow(y)).mean((2, 3)))
        return out


class ConvNext(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 96, 4, 4), nn.LayerNorm(96)
        self.deep, self.head = nn.Conv2d(96, 96, 7, padding=3, groups=96), nn.Linear(96, 10)
        self.mix = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.mix(self.norm(self.deep(x).permute(0, 2, 3, 1)))
        out: Tensor = self.head((x + y.permute(0, 3, 1, 2)).mean((2, 3)))
        return out


class Transformer(nn.Module):
    """An encoder or decoder of words, or of the patches of images."""

    def __init__(self, width: int, depth: int, causal: bool, patch: int = 0) -> None:
        super().__init__()
        self.first: nn.Module = nn.Embedding(1000, width)
        if patch:
            self.first = nn.Conv2d(3, width, patch, patch)
        self.causal, self.heads = causal, width // 64
        self.mixes = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(depth))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.head = nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        for mix, norm, wide, back in zip(self.mixes, self.norms, self.wide, self.back, strict=True):
            q, k, v = mix(norm(x)).unflatten(-1, (3, self.heads, 64)).permute(2, 0, 3, 1, 4)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
            x = x + found.transpose(1, 2).flatten(2)
            x = x + back(F.gelu(wide(x)))
        out: Tensor = self.head(x.mean(1))
        return out


class Scan(nn.Module):
    """A linear recurrence as sums over time, as in Mamba."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 128), nn.Linear(128, 1000)
        self.gates, self.states = nn.Linear(128, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        decay = -F.softplus(self.gates(x)).cumsum(1)
        state = (x.unsqueeze(-1) * self.states(x).unsqueeze(-2)).cumsum(1)
        out: Tensor = self.head((decay.exp() * state.mean(-1)).mean(1))
        return out


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(1000, 256), nn.Linear(256, 1000)
        self.gru = nn.GRU(256, 256, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.gru(self.words(x))[0].mean(1))
        return out


def images(batch: int) -> Tensor:
    return torch.ones(batch, 3, 64, 64)


def text(batch: int) -> Tensor:
    return torch.zeros(batch, 128, dtype=torch.long)


def trace(model: Any, data: Callable[[int], Tensor], batch: int) -> WorkProfile:
    with fake_device():
        made, x = model(), data(batch)
        rows = made(x).shape[0] if model is not UNet else 0
        y = torch.zeros(rows, dtype=torch.long)
        if model is UNet:
            y = torch.zeros(batch, 64, 64, dtype=torch.long)
        traced = trace_step(
            made, lambda: F.cross_entropy(made(x), y), batch=batch, precision="bf16"
        )
    return read_profile(traced)


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (Depthwise, images),
        (ConvNext, images),
        (UNet, images),
        (lambda: Transformer(768, 2, causal=False), text),
        (lambda: Transformer(320, 3, causal=True), text),
        (lambda: Transformer(192, 2, causal=False, patch=16), images),
        (Scan, text),
        (Gated, text),
        (Recommender, lambda batch: torch.zeros(64 * batch, 8, 4, dtype=torch.long)),
    ],
)
def test_estimates_of_any_model_are_plausible(model: Any, data: Callable[[int], Tensor]) -> None:
    """No step is faster than the peaks of its device, or than its host launches it; more work takes
    longer, but less for each sample; and a trace predicts other batches as their own traces do.
    """
    low, high = trace(model, data, 8), trace(model, data, 32)
    known = measured_devices(own=False)
    for device in list_devices():
        for last in (False, True):
            steps = [
                estimate_step(low, device, StepSettings(batch=batch, channels_last=last), known)
                for batch in (8, 16, 32, 256, 4096)
            ]
            for less, more in pairwise(steps):
                assert less.total <= more.total * 1.001
                assert more.samples_per_s >= less.samples_per_s * 0.98
            for step in steps:
                assert step.total >= 0.999 * max(step.device, step.host) > 0
                assert 0 <= step.distance <= 3
                assert 0 < step.mfu < max(1.0, device.achieved)
            again = estimate_step(high, device, StepSettings(channels_last=last), known)
            assert steps[2].device == pytest.approx(again.device, rel=0.1)
    best, least = (device_of(name) for name in ("B200", "T4"))
    assert best is not None
    assert least is not None
    slow, fast = (estimate_step(low, each, StepSettings(batch=4096)) for each in (least, best))
    assert fast.device < slow.device
    assert fast.device > low.flops * 512 / peak_of(best, "bf16")
