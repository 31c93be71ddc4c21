"""Values that a traced script reads: known values are real, checks succeed, and loops end."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from tests.estimates.torch.test_trace_ranks import forward_flops

from cavvy.capabilities.estimates.tracer.script import trace_script

HEAD = """
import copy
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
"""
STEP = """
model = nn.Linear(8, 4, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = model(x).square().mean()
loss.backward()
optimizer.step()
"""


def trace(folder: Path, script: str) -> dict[str, Any]:
    (folder / "train.py").write_text(HEAD + script)
    return trace_script(str(folder / "train.py"), [])


@pytest.mark.parametrize(
    ("lines", "rows"),
    [
        # a window of tokens from each of several random positions, as in nanoGPT
        (
            "starts = torch.randint(100, (6,))\ntokens = torch.arange(200)\n"
            "x = torch.stack([tokens[i : i + 8] for i in starts]).float()",
            6,
        ),
        # sizes from the largest of several known numbers
        (
            "lengths = torch.tensor([len(each) for each in ('abc', 'abcde')]).cuda()\n"
            "x = torch.randn(int(lengths.max()) + 1, 8)",
            6,
        ),
        ("keep = torch.arange(10) >= 4\nx = torch.randn(10, 8)[keep]", 6),
        (
            "graph = torch.arange(3).repeat_interleave(torch.tensor([1, 2, 3]))\nx = torch.ones(len(graph), 8)",
            6,
        ),
        # widths of layers from a few real numbers, as in torchvision's regnet
        (
            "widths = (torch.log(torch.arange(4) * 0.8 + 1.0).round() * 8).int() - 2\nx = torch.randn(widths.tolist()[3], 8)",
            6,
        ),
        ("x = torch.randn(int(torch.linspace(2, 10, 3)[1].item()), 8)", 6),
        ("n = torch.arange(12)\nn = n[n > 5]\nx = torch.randn(len(n), 8)", 6),
        # known values are forgotten when unknown values are written
        (
            "n = torch.zeros(4, dtype=torch.long)\nn[1:3] = torch.randn(2, 9).argmax(-1)\nx = torch.randn(int(n.max()) + 5, 8)",
            6,
        ),
        ("n = torch.zeros(4, dtype=torch.long)\nn[1:3] += 5\nx = torch.randn(n.max() + 1, 8)", 6),
        # and so are real numbers
        (
            "n = torch.linspace(2, 10, 3)\nn[1:] = torch.randn(2)\nx = torch.randn(int(n.sum()) + 5, 8)",
            6,
        ),
        # a large result of known values is not computed
        (
            "big = torch.nn.functional.one_hot(torch.arange(9) * 10**8, 10**9)\nx = torch.randn(6, 8)",
            6,
        ),
    ],
    ids=[
        *("windows", "largest", "mask", "repeats", "real", "grid", "known-mask"),
        *("overwritten", "written", "real-overwritten", "large"),
    ],
)
def test_known_numbers_keep_their_values(tmp_path: Path, lines: str, rows: int) -> None:
    profile = trace(tmp_path, lines + STEP)
    assert (profile["batch"], profile["assumed"]) == (rows, [])
    assert forward_flops(profile) == 2 * rows * 8 * 4


def test_random_integers_are_the_same_in_each_trace(tmp_path: Path) -> None:
    script = "x = torch.randn(int(torch.randint(1, 2**20, (1,))), 8)" + STEP
    before = torch.get_rng_state()
    assert trace(tmp_path, script)["batch"] == trace(tmp_path, script)["batch"]
    assert torch.get_rng_state().equal(before)


@pytest.mark.parametrize(
    "check",
    [
        "if not torch.isfinite(loss): raise OSError",
        "if torch.isnan(loss).any() or torch.isinf(loss).all(): raise OSError",
        "assert (~torch.isnan(x)).all()",
        "assert (x[:, 1:] >= x[:, :1]).all()",
        "assert torch.equal(x, x + 0) and torch.allclose(x, x + 0) and not torch.equal(x, x[:2])",
        "assert not torch.equal(torch.tensor([1, 2]), torch.tensor([1, 3]))",
        "while loss > 0.5: loss = loss / 2",
        "done = loss > 1\nwhile not done: done = loss > 1",
        "assert f'{loss:.2f}' == '1.00' and f'{x.sum()}'",
        "assert torch.tensor([loss, loss]).shape == (2,)",
        "assert torch.tensor([[1, 2], [3, 4]]).tolist() == [[1, 2], [3, 4]] and len(x.tolist()) == 16",
        "assert torch.tensor(0.25).item() == 0.25",
        "assert copy.deepcopy(torch.tensor(2.0)).item() == 2 and copy.deepcopy(model)[0] is not model",
        "assert isinstance(copy.deepcopy(nn.Linear(2, 2)).weight, nn.Parameter)",
        "x.share_memory_()",
    ],
)
def test_checks_and_loops_take_the_common_branch(tmp_path: Path, check: str) -> None:
    script = f"x = torch.randn(16, 8)\nmodel = [0]\nloss = x.mean()\n{check}\n" + STEP
    assert trace(tmp_path, script)["batch"] == 16


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("n + 5", 6),
        ("5 + n.item()", 6),
        ("n.add_(5) - 2", 4),
        ("3 * x.mean() - n", 2),
        ("(n * torch.tensor(7)).view(1).float().numpy()[0]", 7),
        ("n - x.argmax()", 0),
        ("n / (n - 1)", 1),  # infinite
        ("(n + 5).random_(9)", 1),
        ("torch.stack([n, n]).sum() + 2", 3),
    ],
)
def test_numbers_are_computed_from_ones(tmp_path: Path, number: str, value: int) -> None:
    script = f"x = torch.randn(16, 8)\nn = x.argmax()\nassert float({number}) == {value}\n" + STEP
    assert trace(tmp_path, script)["batch"] == 16


def test_a_number_that_is_a_part_of_a_vector_is_traced(tmp_path: Path) -> None:
    """LBFGS takes the update of a single bias from one vector of all updates."""
    script = """
x, model = torch.randn(16, 8), nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters())

def close():
    loss = model(x).square().mean()
    loss.backward()
    return loss

optimizer.step(close)
"""
    assert trace(tmp_path, script)["batch"] == 16


def test_a_loop_that_generates_samples_ends_at_its_length(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
unfinished, length, is_done = torch.ones(4, dtype=torch.int64), 8, False
while not is_done:
    length += 1
    ended = torch.full((4,), False) | torch.full((4,), length >= 20) | (torch.randn(4) > 3)
    unfinished = unfinished & ~ended
    is_done = unfinished.max() == 0
assert is_done
x = torch.randn(length, 8)
"""
        + STEP,
    )
    assert forward_flops(profile) == 2 * 20 * 8 * 4
    line = f"{tmp_path / 'train.py'}:8"
    assert profile["assumed"] == [f"{line}: a condition is assumed to be false"]


@pytest.mark.parametrize(
    ("condition", "is_true"),
    [
        ("(torch.randn(4) > 3).any()", False),
        ("torch.randn(4).isfinite().all()", True),
        ("(torch.randn(4) > 3).logical_or_(torch.ones(4, dtype=torch.bool)).all()", None),
        ("(x[:, 0] > 3).logical_and(torch.zeros(16, dtype=torch.bool)).any()", None),
        ("x.argmax(1).mul(torch.zeros(1, dtype=torch.int64)).any()", None),
        ("(x > 3).any(1) & (torch.arange(16) > 4)", False),
    ],
)
def test_assumed_conditions_are_listed(
    tmp_path: Path, condition: str, is_true: bool | None
) -> None:
    """None: the condition is known."""
    script = f"x = torch.randn(16, 8)\nif ({condition}).any():\n    pass\n"
    line = f"{tmp_path / 'train.py'}:7: a condition is assumed to be {str(is_true).lower()}"
    assert trace(tmp_path, script + STEP)["assumed"] == ([] if is_true is None else [line])


def test_values_are_given_to_numpy(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    assert numpy.ones(1).sum() == 1
    script = """
import numpy as np
assert (torch.tensor([3, 4]).numpy() == [3, 4]).all() and np.asarray(torch.randn(2, 3)).shape == (2, 3)
assert np.stack([torch.randn(4), torch.randn(4)]).dtype == np.float32
actions = torch.randn(16, 8).argmax(-1).cpu().numpy()
x = torch.from_numpy(np.random.rand(16, 8).astype("float32")[: len(actions)])
"""
    assert trace(tmp_path, script + STEP)["batch"] == 16


@pytest.mark.parametrize(
    ("lengths", "rows"), [("torch.tensor([5, 2, 4])", 11), ("torch.randn(3, 9).argmax(-1)", 15)]
)
def test_packed_sequences_have_the_known_or_the_full_lengths(
    tmp_path: Path, lengths: str, rows: int
) -> None:
    script = f"""
class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(8, 16, batch_first=True)
    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, found = pad_packed_sequence(self.cell(packed)[0], batch_first=True)
        assert out.shape == (3, 5, 16) and found.shape == (3,)
        return out
model = Reader()
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(3, 5, 8), {lengths}).mean().backward()
optimizer.step()
"""
    profile = trace(tmp_path, script)
    assert forward_flops(profile) == 2 * rows * 3 * 16 * (8 + 16)


def test_the_ctc_loss_is_traced(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
model = nn.Linear(8, 20, bias=False)
optimizer = torch.optim.Adam(model.parameters())
scores = model(torch.randn(50, 4, 8)).log_softmax(-1)
lengths = torch.full((4,), 50), torch.full((4,), 10)
nn.CTCLoss()(scores, torch.randint(1, 20, (4, 10)), *lengths).backward()
optimizer.step()
""",
    )
    assert forward_flops(profile) == 2 * 200 * 8 * 20


def test_experts_that_skip_when_no_sample_chose_them_are_traced(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
gate, experts = nn.Linear(8, 4, bias=False), nn.ModuleList(
    nn.Linear(8, 8, bias=False) for _ in range(4))
optimizer = torch.optim.SGD([*gate.parameters(), *experts.parameters()], lr=0.1)
data = torch.randn(64, 8)
weights, chosen = gate(data).topk(1, -1)
out = torch.zeros(64, 8)
for number, expert in enumerate(experts):
    mask = chosen[:, 0] == number
    if not mask.any():
        continue
    out[mask] = expert(data[mask]) * weights[mask]
out.sum().backward()
optimizer.step()
""",
    )
    assert forward_flops(profile) == 2 * 64 * 8 * 4 + 2 * 64 * 8 * 8
