"""A trace of a small batch predicts the step of a large batch."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cavvy.capabilities.estimates.tracer.fake_device import fake_device
from cavvy.capabilities.estimates.tracer.trace import trace_step
from cavvy.planner.device_rates import device_of
from cavvy.planner.estimate.profile import StepSettings, WorkProfile, read_profile
from cavvy.planner.estimate.roofline import estimate_step
from cavvy.planner.estimate.table import estimate_memory

SMALL, LARGE, WORDS, LENGTH = 2, 64, 20_000, 32


class Text(nn.Module):
    """A language model whose parameters are larger than the activations of a small batch."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(512, 8, 2048, 0.0, batch_first=True)
        self.words, self.layers = nn.Embedding(WORDS, 512), nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(512, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.words(x))).flatten(0, 1)
        return out


class Images(nn.Module):
    """A convolutional network with a large head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3, 2), nn.BatchNorm2d(64)
        self.head = nn.Linear(64 * 49, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(F.relu(self.norm(self.conv(x))), 7)
        out: Tensor = self.head(x.flatten(1))
        return out


class Click(nn.Module):
    """A recommender with a large table."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(200_000, 64), nn.Linear(64 * LENGTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(x).flatten(1))
        return out


def text(batch: int) -> tuple[Tensor, Tensor]:
    words = torch.zeros(batch, LENGTH, dtype=torch.long)
    return words, words.flatten()


def images(batch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(batch, 3, 64, 64), torch.zeros(batch, dtype=torch.long)


def clicks(batch: int) -> tuple[Tensor, Tensor]:
    return text(batch)[0], torch.zeros(batch, dtype=torch.long)


def trace(model: Any, data: Any, batch: int, precision: str) -> WorkProfile:
    with fake_device():
        made = model()
        x, y = data(batch)
        return read_profile(
            trace_step(made, lambda: F.cross_entropy(made(x), y), batch=batch, precision=precision)
        )


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("model", "data"),
    [(lambda: Text(True), text), (lambda: Text(False), text), (Images, images), (Click, clicks)],
    ids=["tied", "untied", "images", "clicks"],
)
def test_a_small_batch_predicts_a_large_one(
    model: Callable[[], nn.Module], data: Callable[[int], Any], precision: str
) -> None:
    small, large = (trace(model, data, batch, precision) for batch in (SMALL, LARGE))
    device, run = device_of("H200"), StepSettings(batch=LARGE)
    assert device is not None
    predicted, expected = (estimate_step(each, device, run) for each in (small, large))
    assert predicted.device == pytest.approx(expected.device, rel=0.03)
    peaks = [estimate_memory(each, run).peak for each in (small, large)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.03)


class Block(nn.Module):
    """Two convolutions of a residual network."""

    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        step = outer // inner
        self.first = nn.Conv2d(inner, outer, 3, step, 1, bias=False)
        self.second = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outer) for _ in range(2))
        self.beside = nn.Sequential()
        if step > 1:
            self.beside = nn.Sequential(
                nn.Conv2d(inner, outer, 1, step, bias=False), nn.BatchNorm2d(outer)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norms[0](self.first(x)), inplace=True)
        out = self.norms[1](self.second(out))
        out += self.beside(x)
        return F.relu(out, inplace=True)


class Residual(nn.Sequential):
    """ResNet-18."""

    def __init__(self) -> None:
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
        blocks = [Block(*pair) for pair in pairwise(widths)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
        super().__init__(*stem, nn.MaxPool2d(3, 2, 1), *blocks, *head)


def photos(batch: int) -> tuple[Tensor, Tensor]:
    return torch.ones(batch, 3, 224, 224), torch.zeros(batch, dtype=torch.long)


def test_a_traced_step_needs_more_than_it_reserved() -> None:
    """Measured with PyTorch 2.11 on one H200. The excess is that of all measured steps."""
    profile = trace(Residual, photos, 256, "bf16")
    assert profile.parameters == 11_689_512
    for batch, reserved_gib in ((256, 5.186), (1024, 19.508)):
        needed = estimate_memory(profile, StepSettings(batch=batch)).needed / 1024
        assert 1.03 * reserved_gib < needed < 1.15 * reserved_gib
