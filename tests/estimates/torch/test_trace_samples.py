"""The samples that a trace counts: those of data loaders, and those of mapped dimensions."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cavvy.capabilities.estimates.tracer.script import trace_script

HEAD = """
import torch
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.utils.data import DataLoader, TensorDataset
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randn(600, 8), torch.randn(600, 4))
loader = DataLoader(data, 12)
def step(*inputs):
    for x in inputs:
        model(x).square().mean().backward()
    optimizer.step()
"""


def trace(folder: Path, script: str) -> dict[str, Any]:
    (folder / "train.py").write_text(HEAD + script)
    return trace_script(str(folder / "train.py"), [])


@pytest.mark.parametrize("listed", ["pictures", "tuple(pictures), None", "[pictures[0]], None"])
def test_each_tensor_of_a_list_that_the_model_stacks_is_a_sample(
    tmp_path: Path, listed: str
) -> None:
    profile = trace(
        tmp_path,
        f"""
class Detector(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3)
    def forward(self, pictures, boxes=None):
        return self.backbone(torch.stack(list(pictures))).square().mean()
detector = Detector()
pictures = [torch.randn(3, 16, 16) for _ in range(5)]
detector({listed}).backward()
torch.optim.SGD(detector.parameters(), lr=0.1).step()
""",
    )
    assert profile["batch"] == (1 if "[0]" in listed else 5)


def test_the_inputs_of_a_model_may_be_a_list(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, inputs):
        return sum(self.layer(each).square().mean() for each in inputs)
pair = Pair()
pair([torch.randn(16, 8), torch.randn(16, 8)]).backward()
torch.optim.SGD(pair.parameters(), lr=0.1).step()
""",
    )
    assert profile["batch"] == 16


@pytest.mark.parametrize(
    ("script", "batch", "micro"),
    [
        ("x, _ = next(iter(loader))\nstep(x)", 12, 1),
        ("step(torch.randn(16, 8))", 16, 1),
        # two views of each sample
        ("x, _ = next(iter(loader))\nstep(torch.cat([x, x + 1]))", 12, 1),
        # a loader of graphs, each with five nodes
        (
            "graphs = [torch.randn(5, 8)] * 40\nstep(next(iter(DataLoader(graphs, 10, "
            "collate_fn=torch.cat))))",
            10,
            1,
        ),
        # parts of a loaded batch, and several loaded batches
        ("x, _ = next(iter(loader))\nstep(*x.split(4))", 4, 3),
        ("batches = iter(loader)\nstep(*(next(batches)[0] for _ in range(5)))", 12, 5),
        ("batches = iter(loader)\nstep(*(next(batches)[0].repeat(3, 1) for _ in range(5)))", 12, 5),
        # batches of two loaders, of which one was read before
        (
            "for x, _ in DataLoader(data, 100):\n    with torch.no_grad(): model(x)\n"
            "step(torch.cat([next(iter(loader))[0], next(iter(DataLoader(data, 20)))[0]]))",
            32,
            1,
        ),
        ("x = torch.cat([x for x, _ in loader])\nstep(x[:50])", 50, 1),
        (
            "class Stream(torch.utils.data.IterableDataset):\n"
            "    def __iter__(self): yield from torch.randn(100, 3, 8)\n"
            "step(next(iter(DataLoader(Stream(), 7))).flatten(0, 1))",
            7,
            1,
        ),
        ("step(next(iter(DataLoader(torch.randn(9, 32, 8), batch_size=None))))", 32, 1),
    ],
)
def test_a_sample_is_what_the_data_loader_counts(
    tmp_path: Path, script: str, batch: int, micro: int
) -> None:
    profile = trace(tmp_path, script)
    assert (profile["batch"], profile["run"]["accumulate"]) == (batch, micro)


ENSEMBLE = """
parameters, buffers = stack_module_state([nn.Linear(8, 4) for _ in range(5)])
optimizer = torch.optim.Adam(parameters.values())
def run(parameters, x):
    return functional_call(model, parameters, (x,))
"""


@pytest.mark.parametrize(
    ("script", "batch"),
    [
        # gradients of each sample, and derivatives by each input
        (
            "def loss(parameters, x): return functional_call(model, parameters, x[None]).sum()\n"
            "found = vmap(grad(loss), (None, 0))(dict(model.named_parameters()), torch.randn(64, 8))\n"
            "for name, each in model.named_parameters(): each.grad = found[name].mean(0)\n"
            "optimizer.step()",
            64,
        ),
        (
            "found = vmap(grad(lambda x: model(x).sum()))(torch.randn(64, 8))\n"
            "found.square().sum().backward()\noptimizer.step()",
            64,
        ),
        # several models with the same samples, and with their own samples
        (
            ENSEMBLE + "vmap(run, (0, None))(parameters, torch.randn(16, 8)).sum().backward()\n"
            "optimizer.step()",
            16,
        ),
        (
            ENSEMBLE + "vmap(run)(parameters, torch.randn(5, 16, 8)).sum().backward()\n"
            "optimizer.step()",
            80,
        ),
    ],
)
def test_mapped_dimensions_have_samples(tmp_path: Path, script: str, batch: int) -> None:
    assert trace(tmp_path, script)["batch"] == batch
