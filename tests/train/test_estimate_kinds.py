"""The work that no measured step has, by the traces of models."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cavvy.planner.estimate.errors import list_unmeasured
from cavvy.planner.estimate.profile import StepSettings, read_profile
from cavvy.tracer.fake_device import fake_device
from cavvy.tracer.trace import trace_step


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
