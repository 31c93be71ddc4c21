"""A compiled plan makes the same graphs as `torch.compile(model)`."""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.ranks import run as run_ranks
from tests.train.ways import sharded_and_compiled
from torch import nn
from torch.nn import functional as F

from cavvy import train
from cavvy.train.device import TrainDevice

BATCH, KINDS, WIDTHS = 8, 4, (4, 4, 6, 6, 8, 8, 10, 10, 12, 12)


class Graphs:
    """A backend that runs graphs uncompiled, and keeps the number of operations of each."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.sizes.append(sum(node.op.startswith("call_") for node in graph.graph.nodes))
        return graph.forward


class Residual(nn.Module):
    def __init__(self, given: int, out: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(given, out, 3, padding=1), nn.BatchNorm2d(out)
        self.skip = nn.Conv2d(given, out, 1) if given != out else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.conv(x)) + self.skip(x))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = x + self.mlp(x)
        return out


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.blocks = nn.ModuleList(Attention(8) for _ in range(3))
        self.head = nn.Linear(8, KINDS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x).mean(1)
        return out


class Broken(Transformer):
    """Has two graphs for any compiler."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        torch._dynamo.graph_break()
        out: torch.Tensor = self.head(x).mean(1)
        return out


def residual_net() -> nn.Module:
    blocks = [Residual(*pair) for pair in zip((3, *WIDTHS), WIDTHS, strict=False)]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, KINDS))


MODELS: list[tuple[Callable[[], nn.Module], torch.Tensor]] = [
    (residual_net, torch.randn(BATCH, 3, 6, 6, generator=torch.Generator().manual_seed(0))),
    (Transformer, torch.arange(BATCH * 5).reshape(BATCH, 5) % 7),
    (Broken, torch.arange(BATCH * 5).reshape(BATCH, 5) % 7),
]
IDS = ["residual", "transformer", "broken"]


class Card(TrainDevice):
    """A device with memory for any batch: the micro-batch is found by two small passes."""

    @property
    def memory_bytes(self) -> int | None:
        return 10**9

    def peak_bytes(self) -> int:
        return 1000


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    torch._dynamo.reset()
    made = Graphs()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=made))
    yield made
    torch._dynamo.reset()


def train_compiled(
    folder: Path, build: Callable[[], nn.Module], x: torch.Tensor, **options: Any
) -> Any:
    run = train.Run(folder, plan=train.Plan(compile=True, **options), device="cpu", save_every=1e9)
    run.world.device = Card(torch.device("cpu"), "cpu", "card")
    model = run.model(build)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.01)
    data = run.data(train.Tensors(x, torch.arange(len(x)) % KINDS), global_batch=len(x))
    for batch in run.batches(data, epochs=3):
        run.accumulate(lambda part: F.cross_entropy(model(part[0]), part[1]), batch)
        run.step(optimizer)
    run.close()
    return model


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it after a graph break
@pytest.mark.parametrize("micro", [0, BATCH // 2], ids=["found", "half"])
@pytest.mark.parametrize(("build", "x"), MODELS, ids=IDS)
def test_a_plan_makes_the_graphs_of_torch(
    build: Callable[[], nn.Module], x: torch.Tensor, micro: int, graphs: Graphs, tmp_path: Path
) -> None:
    F.cross_entropy(torch.compile(build())(x), torch.arange(len(x)) % KINDS).backward()
    plain, graphs.sizes = graphs.sizes, []
    torch._dynamo.reset()
    train_compiled(tmp_path, build, x, micro_batch=micro)
    assert graphs.sizes == plain
    assert len(plain) == (2 if build is Broken else 1)


def test_a_copy_of_a_compiled_model_has_its_own_parameters(graphs: Graphs, tmp_path: Path) -> None:
    build, x = MODELS[0]
    model = train_compiled(tmp_path, build, x).eval()
    copied = copy.deepcopy(model)
    before = copied(x)
    with torch.no_grad():
        model[-1].bias += 1
    assert torch.equal(copied(x), before)
    assert torch.allclose(model(x), before + 1)


def test_each_part_of_a_sharded_model_is_compiled(tmp_path: Path) -> None:
    for sizes, interpreted in run_ranks(2, sharded_and_compiled, folder=tmp_path):
        assert interpreted == 0
        assert len(sizes) == len(WIDTHS)
