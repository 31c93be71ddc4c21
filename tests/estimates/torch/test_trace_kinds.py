"""Traces of kinds of scripts: classifiers of texts, and several optimizers with several steps."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cavvy.capabilities.estimates.tracer.script import trace_script

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


def trace(folder: Path, script: str) -> dict[str, Any]:
    (folder / "train.py").write_text(HEAD + script)
    return trace_script(str(folder / "train.py"), [])


def products(profile: dict[str, Any]) -> float:
    """FLOPs of the matrix products and convolutions, forward and backward."""
    return float(sum(each["flops"] * each["count"] for each in profile["ops"]))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layer", ["nn.LSTM", "nn.GRU", "nn.RNN"])
def test_the_last_state_of_a_recurrent_layer_trains_it(
    tmp_path: Path, layer: str, packed: bool
) -> None:
    profile = trace(
        tmp_path,
        f"""
layer, head = {layer}(8, 16, 2, batch_first=True, bidirectional=True), nn.Linear(32, 2)
optimizer = torch.optim.SGD([*layer.parameters(), *head.parameters()], lr=0.1)
x = torch.randn(5, 7, 8)
if {packed}:
    lengths = torch.tensor([7, 5, 4, 3, 1])
    x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
state = layer(x)[1]
for each in state if isinstance(state, tuple) else [state]:
    assert each.shape == (4, 5, 16)
last = state[0] if isinstance(state, tuple) else state
head(torch.cat([last[-2], last[-1]], 1)).sum().backward()
optimizer.step()
""",
    )
    assert profile["memory"]["gradients"] == profile["memory"]["parameters"]


@pytest.mark.parametrize("count", [1, 5])
def test_a_round_has_all_steps_of_a_critic(tmp_path: Path, count: int) -> None:
    profile = trace(
        tmp_path,
        f"""
maker, critic = nn.Linear(8, 32, bias=False), nn.Linear(32, 1, bias=False)
first = torch.optim.RMSprop(critic.parameters())
second = torch.optim.Adam(maker.parameters())
while True:
    for _ in range({count}):
        critic.zero_grad()
        critic(torch.randn(16, 32)).mean().backward()
        first.step()
    maker.zero_grad()
    critic(maker(torch.randn(16, 8))).mean().backward()
    second.step()
""",
    )
    one, other = 2 * 16 * 32, 2 * 16 * 8 * 32  # of the critic and the maker
    assert products(profile) == count * 2 * one + 3 * one + 2 * other
    assert profile["parameters"] == 32 + 256
    assert 4 * 32 + 8 * 256 <= profile["memory"]["optimizer"] <= 4 * 32 + 8 * 256 + 8


@pytest.mark.parametrize(("every", "others"), [(1, 1), (5, 0), (5, 2), (5, 4)])
def test_a_round_has_all_steps_between_those_of_a_seldom_optimizer(
    tmp_path: Path, every: int, others: int
) -> None:
    profile = trace(
        tmp_path,
        f"""
maker, critic = nn.Linear(8, 32, bias=False), nn.Linear(32, 1, bias=False)
first = torch.optim.RMSprop(critic.parameters())
second = torch.optim.Adam(maker.parameters())
for number in range(1000):
    critic.zero_grad()
    critic(torch.randn(16, 32)).mean().backward()
    first.step()
    if number % {every} == {others} % {every}:
        maker.zero_grad()
        critic(maker(torch.randn(16, 8))).mean().backward()
        second.step()
""",
    )
    one, other = 2 * 16 * 32, 2 * 16 * 8 * 32
    assert products(profile) == every * 2 * one + 3 * one + 2 * other


def test_an_optimizer_that_steps_much_later_does_not_count(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
model, later = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
first, second = (torch.optim.Adam(each.parameters()) for each in (model, later))
for number in range(10**9):
    chosen, optimizer = (model, first) if number < 10**6 else (later, second)
    chosen(torch.randn(16, 8)).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
""",
    )
    assert products(profile) == 2 * 2 * 16 * 8 * 4
    assert 8 * 32 <= profile["memory"]["optimizer"] <= 8 * 32 + 4


def test_passes_before_an_optimizer_that_calls_the_model_do_not_count(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
model = nn.Linear(8, 4, bias=False).requires_grad_(False)
wanted = model(torch.randn(50, 8)).mean()
image = torch.randn(16, 8, requires_grad=True)
optimizer = torch.optim.LBFGS([image], max_iter=1, history_size=3)
def closure():
    optimizer.zero_grad()
    loss = (model(image) - wanted).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
""",
    )
    assert (profile["batch"], products(profile)) == (16, 2 * 2 * 16 * 8 * 4)
    assert profile["memory"]["optimizer"] >= 2 * 3 * 4 * 16 * 8


def test_parameters_of_a_target_network_do_not_grow_with_the_batch(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
import copy
model = nn.Linear(256, 256, bias=False)
target = copy.deepcopy(model)
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(2, 256)
(model(x) - target(x).detach()).square().mean().backward()
optimizer.step()
""",
    )
    assert profile["memory"]["parameters"] == 2 * 4 * 256 * 256
    assert profile["parameters"] == 256 * 256


AVERAGE = """
import copy
model = nn.Linear(256, 256, bias=False)
{before}
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(2, 256, device="cuda", dtype=model.weight.dtype)).square().mean().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("before", "copies"),
    [
        ("model.cuda(); average = copy.deepcopy(model).eval().requires_grad_(False)", 1),
        ("model.to(0); average = torch.optim.swa_utils.AveragedModel(model)", 1),
        ("model.to(device='cuda').half(); average = copy.deepcopy(model.state_dict())", 1),
        ("average = {n: p.detach().clone() for n, p in model.named_parameters()}", 1),
        (
            "average = nn.Linear(256, 256, bias=False); average.load_state_dict(model.state_dict())",
            1,
        ),
        ("average = copy.deepcopy(model); model.cuda(); average.cuda()", 1),
        ("average = copy.deepcopy(model); model.cuda()", 0),
        ("model.cuda(); average = torch.optim.swa_utils.AveragedModel(model, device='cpu')", 0),
        ("model.cuda(); average = {n: p.cpu().clone() for n, p in model.state_dict().items()}", 0),
        ("copy.deepcopy(model)", 0),
        (
            "state = {'weight': torch.randn(256, 256)}; average = copy.deepcopy(model); "
            "average.load_state_dict(state)",
            1,
        ),
    ],
)
def test_kept_copies_of_parameters_on_the_gpu_need_memory(
    tmp_path: Path, before: str, copies: int
) -> None:
    profile = trace(tmp_path, AVERAGE.format(before=before))
    size = 2 if "half" in before else 4
    assert profile["memory"]["parameters"] == (1 + copies) * size * 256 * 256
    assert profile["parameters"] == 256 * 256


def test_parameters_that_a_step_compares_with_their_copy_do_not_grow_with_the_batch(
    tmp_path: Path,
) -> None:
    profile = trace(
        tmp_path,
        """
model = nn.Linear(256, 256, bias=False)
start = [each.detach().clone() for each in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(torch.randn(2, 256)).square().mean()
(loss + sum((a * b).sum() for a, b in zip(model.parameters(), start))).backward()
optimizer.step()
""",
    )
    assert profile["memory"]["parameters"] == 2 * 4 * 256 * 256


def test_a_model_in_channels_last_memory_has_no_conversions(tmp_path: Path) -> None:
    """The optimizer has the same parameters when the model is converted after it was created."""
    profile = trace(
        tmp_path,
        """
model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model = model.to(memory_format=torch.channels_last)
x = torch.randn(8, 16, 32, 32).to(memory_format=torch.channels_last)
model(x).square().mean().backward()
optimizer.step()
""",
    )
    # size[3] of a copy is 2 if it changes the innermost dimension.
    assert not [op for op in profile["ops"] if op["kind"] == "copy" and op["size"][3] == 2]
    assert {op["window"][4] for op in profile["ops"] if op["kind"] == "conv"} == {1}
    assert (profile["tensors"], profile["optimizer"]) == (4, "sgd")
