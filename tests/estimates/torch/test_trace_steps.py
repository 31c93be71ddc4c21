"""What a trace takes for the step of a script: with several optimizers, without an optimizer, and
on the GPU that a script finds.
"""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn
from torch.optim import Optimizer

from cavvy.capabilities.estimates.tracer.script import trace_script
from cavvy.planner.estimate.profile import StepSettings, read_profile
from cavvy.planner.estimate.table import estimate_memory, list_unmeasured

HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"


def trace(folder: Path, script: str) -> dict[str, Any]:
    (folder / "train.py").write_text(HEAD + script)
    return trace_script(str(folder / "train.py"), [])


def products(profile: dict[str, Any], *, backward: bool = False) -> float:
    """FLOPs of the matrix products."""
    flops: list[float] = [
        each["flops"] * each["count"]
        for each in profile["ops"]
        if each["kind"] in ("matmul", "recurrent") and each["backward"] == backward
    ]
    return sum(flops)


ADVERSARIAL = """
generator, critic = nn.Linear(8, 32, bias=False), nn.Linear(32, 1, bias=False)
first = torch.optim.Adam(critic.parameters())
second = torch.optim.SGD(generator.parameters(), lr=0.1)
while True:
    critic.zero_grad()
    critic(torch.randn(16, 32)).mean().backward()
    made = generator(torch.randn(16, 8))
    critic(made.detach()).mean().backward()
    first.step()
    generator.zero_grad()
    critic(made).mean().backward()
    second.step()
"""


def test_several_optimizers_are_traced_for_one_round(tmp_path: Path) -> None:
    profile = trace(tmp_path, ADVERSARIAL)
    generator, critic = 2 * 16 * 8 * 32, 2 * 16 * 32
    assert (profile["batch"], profile["run"], profile["optimizer"]) == (
        16,
        {"accumulate": 1},
        "adam",
    )
    assert products(profile) == generator + 3 * critic
    # The critic's weights get a gradient from each of its three losses, the generator's from one.
    assert products(profile, backward=True) == 3 * critic + critic + generator
    assert profile["parameters"] == 8 * 32 + 32


def test_an_optimizer_may_compute_the_last_accumulated_batch(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
model = nn.Linear(8, 4, bias=False)
optimizer = torch.optim.Adam(model.parameters())


def train():
    loss = model(torch.randn(16, 8)).sum()
    loss.backward()
    return loss


while True:
    train()
    train()
    optimizer.step(train)
    optimizer.zero_grad()
""",
    )
    assert (profile["batch"], profile["run"]) == (16, {"accumulate": 3})
    assert products(profile) == 2 * 16 * 8 * 4


def test_parameters_that_are_frozen_in_turns_are_trained(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
models = [nn.Linear(8, 8), nn.Linear(8, 8)]
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
while True:
    for number in range(2):
        models[number].requires_grad_(True)
        models[1 - number].requires_grad_(False)
        models[1](models[0](torch.randn(16, 8))).sum().backward()
        optimizers[number].step()
        optimizers[number].zero_grad()
""",
    )
    assert profile["parameters"] == 2 * (64 + 8)


def test_optimizers_that_step_together_are_one_step(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
model = nn.Sequential(nn.Linear(8, 32, bias=False), nn.Linear(32, 4, bias=False))
optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[1].parameters())]
while True:
    for _ in range(2):
        model(torch.randn(16, 8)).sum().backward()
    for each in optimizers:
        each.step()
        each.zero_grad()
""",
    )
    assert (profile["batch"], profile["run"]) == (16, {"accumulate": 2})
    assert products(profile) == 2 * 16 * (8 * 32 + 32 * 4)


def test_an_optimizer_that_never_steps_changes_nothing(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
model, other = nn.Linear(8, 4, bias=False), nn.Linear(3, 3)
optimizer, late = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(other.parameters())
for _ in range(2):
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
""",
    )
    assert products(profile) == 2 * 16 * 8 * 4
    assert (profile["optimizer"], profile["parameters"]) == ("sgd", 8 * 4)


def test_passes_that_act_or_evaluate_are_not_part_of_the_step(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
policy = nn.Linear(8, 4, bias=False)
optimizer = torch.optim.Adam(policy.parameters())
with torch.no_grad():
    for _ in range(5):
        policy(torch.randn(1, 8)).argmax().item()
policy(torch.randn(128, 8)).sum().backward()
optimizer.step()
""",
    )
    assert (profile["batch"], products(profile)) == (128, 2 * 128 * 8 * 4)


@pytest.mark.parametrize(
    "used", ["with torch.inference_mode():", "@torch.inference_mode\ndef f():"]
)
def test_inference_mode_is_traced_like_no_grad(tmp_path: Path, used: str) -> None:
    profile = trace(
        tmp_path,
        f"""
teacher, model = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
f = int
{used}
    if teacher(torch.randn(50, 8)).mean().item() > 3:
        raise SystemExit("the value is unknown")
    global made
    made = teacher(torch.randn(16, 8)) @ torch.randn(4, 4)
f()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.inference_mode(False):
    (model(torch.randn(16, 8)) - made).square().mean().backward()
optimizer.step()
""",
    )
    assert products(profile, backward=True) == 2 * 16 * 8 * 4
    assert products(profile) >= 2 * 2 * 16 * 8 * 4 + 2 * 16 * 4 * 4


def test_a_teacher_is_part_of_the_step(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
teacher, student = nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
optimizer = torch.optim.Adam(student.parameters())
data = torch.randn(16, 8)
with torch.no_grad():
    target = teacher(data)
F.mse_loss(student(data), target).backward()
optimizer.step()
""",
    )
    assert products(profile) == 2 * (2 * 16 * 8 * 4)
    assert (profile["batch"], profile["parameters"]) == (16, 8 * 4)


@pytest.mark.parametrize("zero", ["model.zero_grad()", "[each.grad.zero_() for each in own]"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_a_script_may_update_parameters_by_itself(tmp_path: Path, zero: str, rounds: int) -> None:
    """All parameters of a recurrent network get a gradient, as on a GPU."""
    profile = trace(
        tmp_path,
        f"""
model = nn.LSTM(8, 8, 2)
own = list(model.parameters())
for _ in range({rounds}):
    model(torch.randn(5, 16, 8))[0].sum().backward()
    for each in own:
        each.data.add_(each.grad, alpha=-0.1)
    {zero}
""",
    )
    assert (profile["batch"], profile["optimizer"]) == (16, "sgd")
    # Each layer multiplies inputs by one matrix, and states by another, for four gates.
    assert products(profile) == 2 * (2 * (2 * 5 * 16 * 8 * 4 * 8))


LBFGS = """
model = nn.Linear(8, 4, bias=False)
optimizer = torch.optim.LBFGS(model.parameters(), max_iter={iterations})
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    return loss
optimizer.step(closure)
"""


def test_an_optimizer_may_call_the_model_itself(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        LBFGS.format(iterations=1) + 'raise SystemExit("a second step")\n',
    )
    assert (profile["batch"], profile["optimizer"]) == (16, "lbfgs")
    assert products(profile) == 2 * 16 * 8 * 4


GPU = """
assert torch.cuda.is_available() and torch.cuda.device_count() == 1, "this script needs a GPU"
assert torch.accelerator.current_accelerator().type == "cuda"
kind = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
assert torch.cuda.get_device_capability()[0] >= 8
print(torch.cuda.get_device_properties(0).total_memory, torch.cuda.get_device_name())
torch.cuda.manual_seed_all(0)
torch.cuda.reset_peak_memory_stats()
start, end, stream = torch.cuda.Event(enable_timing=True), torch.cuda.Event(), torch.cuda.Stream()
model = nn.Linear(8, 4, bias=False).to(0)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
data = torch.utils.data.TensorDataset(torch.randn(64, 8))
for (inputs,) in torch.utils.data.DataLoader(data, 16, pin_memory=True):
    start.record()
    with torch.cuda.stream(stream), torch.autocast("cuda", kind):
        loss = model(inputs.pin_memory().cuda(non_blocking=True)).sum()
    loss.backward()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    print(start.elapsed_time(end), torch.cuda.max_memory_allocated())
    optimizer.step()
"""


def test_a_script_finds_a_gpu(tmp_path: Path) -> None:
    profile = trace(tmp_path, GPU)
    assert (profile["batch"], profile["precision"]) == (16, "bf16")
    assert not torch.cuda.is_available()
    assert not torch.accelerator.is_available()


PLAIN = """
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(16, 8)).sum().backward()
optimizer.step()
"""


def test_a_script_that_fails_with_a_gpu_is_traced_without(tmp_path: Path) -> None:
    profile = trace(
        tmp_path, "if torch.cuda.is_available():\n    raise OSError('no driver')\n" + PLAIN
    )
    assert profile["batch"] == 16


def test_a_script_that_fails_in_both_ways_is_told_of_the_first(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="with a GPU: True"):
        trace(tmp_path, "raise OSError(f'with a GPU: {torch.cuda.is_available()}')\n")
    begin = Optimizer.__init__
    assert begin.__module__.startswith("torch")


@pytest.mark.parametrize(
    ("model", "inside", "precision"),
    [
        ("Wrapped()", "torch.autocast('cuda', torch.bfloat16)", "bf16"),
        ("Wrapped()", "torch.autocast('cuda', torch.float16)", "fp16"),
        ("Wrapped().to(torch.bfloat16)", "nullcontext()", "bf16"),
        ("Wrapped().half()", "nullcontext()", "fp16"),
        ("Wrapped()", "nullcontext()", "fp32"),
    ],
)
def test_the_precision_is_that_of_the_products(
    tmp_path: Path, model: str, inside: str, precision: str
) -> None:
    """Wrappers such as those of accelerate start autocast inside the model's call."""
    profile = trace(
        tmp_path,
        f"""
from contextlib import nullcontext
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 4)
    def forward(self, x):
        with {inside}:
            return self.layer(x)
model = {model}.cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randn(16, 8, dtype=model.layer.weight.dtype)).float().sum().backward()
optimizer.step()
""",
    )
    assert profile["precision"] == precision


def test_a_step_of_many_iterations_ends(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        LBFGS.format(iterations=50_000),
    )
    assert products(profile) == 20 * 2 * 16 * 8 * 4
    (note,) = profile["assumed"]
    told = ":12: the optimizer permits 50,000 iterations of a step; "
    assert note.endswith(told + "the trace assumes that a step ends after 20 iterations")
    assert list_unmeasured(read_profile(profile), StepSettings()) == ["steps with assumptions"]


@pytest.mark.parametrize(
    ("script", "runs"),
    [
        ("raise ValueError", 1),
        ("model = nn.Linear(2, 2).to('cuda')", 1),
        ("open('absent' if torch.cuda.is_available() else 'absent too')", 1),
        ("torch.manual_seed(1)\nimport asks_for_a_gpu\nraise ValueError", 1),
        ("raise ValueError(torch.cuda.device_count())", 2),
        ("torch.cuda.is_available()", 2),
    ],
)
def test_a_script_runs_again_only_if_it_asked_for_a_gpu(
    tmp_path: Path, script: str, runs: int
) -> None:
    (tmp_path / "asks_for_a_gpu.py").write_text("import torch\ntorch.cuda.is_available()\n")
    count = f"with open({str(tmp_path / 'runs')!r}, 'a') as file: file.write('.')\n"
    with pytest.raises((ValueError, RuntimeError, FileNotFoundError)):
        trace(tmp_path, count + script)
    assert (tmp_path / "runs").read_text() == "." * runs


def test_generators_and_types_of_a_gpu_are_those_of_the_fake_device(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
generator = torch.Generator(device="cuda").manual_seed(1)
x = torch.randn(16, 8, device="cuda", generator=generator).type("torch.cuda.FloatTensor")
assert torch.cuda.LongTensor([3, 4]).dtype is x.type(torch.cuda.LongTensor).dtype is torch.int64
model = nn.Linear(8, 4, bias=False).cuda()
optimizer = torch.optim.AdamW(model.parameters())
model(x).sum().backward()
optimizer.step()
""",
    )
    assert profile["batch"] == 16


def test_transforms_of_single_samples_do_not_tell_the_batch(tmp_path: Path) -> None:
    profile = trace(
        tmp_path,
        """
class Normalize(nn.Module):
    def forward(self, image):
        return (image - 0.5) / 0.5
change = nn.Sequential(Normalize(), nn.Dropout(0.1))
images = torch.stack([change(torch.randn(3, 8, 8)) for _ in range(16)])
model = nn.Sequential(nn.Flatten(), nn.Linear(192, 4))
optimizer = torch.optim.AdamW(model.parameters())
model(images).sum().backward()
optimizer.step()
""",
    )
    assert profile["batch"] == 16


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        ("nn.GRU(8, 8)", (20, 16)),
        ("nn.GRU(8, 8, batch_first=True)", (16, 20)),
        ("nn.TransformerEncoderLayer(8, 2, 16)", (20, 16)),
        ("nn.MultiheadAttention(8, 2)", (20, 16)),
        ("nn.Sequential(nn.Flatten(), nn.Linear(160, 8))", (16, 20)),
    ],
)
def test_the_batch_is_the_dimension_that_layers_take_for_it(
    tmp_path: Path, layer: str, shape: tuple[int, int]
) -> None:
    profile = trace(
        tmp_path,
        f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(100, 8), {layer}
    def forward(self, ids):
        x = self.table(ids)
        is_attention = isinstance(self.layer, nn.MultiheadAttention)
        out = self.layer(x, x, x) if is_attention else self.layer(x)
        return out[0] if isinstance(out, tuple) else out
model = Model()
optimizer = torch.optim.AdamW(model.parameters())
model(torch.randint(100, {shape})).sum().backward()
optimizer.step()
""",
    )
    assert profile["batch"] == 16


@pytest.mark.parametrize("options", ["", ", map_location='cuda'", ", 'cpu', weights_only=True"])
def test_saved_tensors_can_be_loaded(tmp_path: Path, options: str) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    kept = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 5}
    torch.save({**kept, "rows": torch.tensor([3, 13])}, tmp_path / "last.pt")
    profile = trace(
        tmp_path,
        f"""
kept = torch.load({str(tmp_path / "last.pt")!r}{options})
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
model.load_state_dict(kept["model"])
optimizer.load_state_dict(kept["optimizer"])
assert kept["step"] == 5
model(torch.randn(int(kept["rows"].sum()), 8, device="cuda")).sum().backward()
optimizer.step()
""",
    )
    assert (profile["batch"], profile["parameters"]) == (16, 36)


@pytest.mark.parametrize(
    "device", ["torch.set_default_device('cuda')", "torch.device('cuda').__enter__()"]
)
def test_a_script_may_set_the_device_of_new_tensors(tmp_path: Path, device: str) -> None:
    profile = trace(
        tmp_path,
        f"""
{device}
model = nn.Linear(8, 4)
optimizer = torch.optim.Adam(model.parameters())
model(torch.randn(16, 8)).sum().backward()
optimizer.step()
""",
    )
    assert profile["batch"] == 16
    assert torch.ones(1).device.type == torch.get_default_device().type == "cpu"


def test_saved_tensors_are_not_written(tmp_path: Path) -> None:
    path = tmp_path / "initial.pt"
    assert (
        trace(tmp_path, f"torch.save({{'x': torch.ones(2)}}, {str(path)!r})\n" + PLAIN)["batch"]
        == 16
    )
    assert not path.exists()


@pytest.mark.parametrize(
    ("optimizer", "elements"),
    [
        ("SGD(model.parameters(), lr=0.1)", 0),
        ("Adam(model.parameters(), amsgrad=True)", 3 * 32),
        ("RMSprop(model.parameters(), centered=True, momentum=0.9)", 3 * 32),
        ("Adadelta(model.parameters())", 2 * 32),
        ("AdamW([model.weight], fused=True)", 2 * 24),
        ("SGD([{'params': [model.weight], 'momentum': 0.9}, {'params': [model.bias]}])", 24),
        ("LBFGS(model.parameters(), history_size=7)", 2 * 7 * 32),
    ],
)
def test_the_state_of_an_optimizer_has_its_real_size(
    tmp_path: Path, optimizer: str, elements: int
) -> None:
    profile = trace(
        tmp_path,
        f"""
model = nn.Linear(3, 8)
optimizer = torch.optim.{optimizer}
def closure():
    optimizer.zero_grad()
    loss = model(torch.randn(16, 3)).square().mean()
    loss.backward()
    return loss
if isinstance(optimizer, torch.optim.LBFGS):
    optimizer.step(closure)
else:
    closure()
    optimizer.step()
""",
    )
    small = 4 * 4 * 32  # counters, and the vectors of LBFGS that are not in its history
    assert 4 * elements <= profile["memory"]["optimizer"] <= 4 * elements + small
    memory = [
        estimate_memory(read_profile(profile), StepSettings(optimizer=each)).optimizer * 2**20
        for each in (None, "adamw")
    ]
    assert memory == pytest.approx([profile["memory"]["optimizer"], 8 * 32])


def test_an_optimizer_that_cannot_step_without_a_gpu_is_charged_by_its_name(
    tmp_path: Path,
) -> None:
    profile = trace(
        tmp_path,
        """
model = nn.Linear(3, 8)
optimizer = torch.optim.Adam(model.parameters(), capturable=True)
model(torch.randn(16, 3)).square().mean().backward()
optimizer.step()
""",
    )
    assert "optimizer" not in profile["memory"]
    memory = estimate_memory(read_profile(profile), StepSettings())
    assert memory.optimizer * 2**20 == pytest.approx(8 * 32)


def test_the_states_of_several_optimizers_add_up(tmp_path: Path) -> None:
    profile = trace(tmp_path, ADVERSARIAL)  # Adam for 32 parameters, and SGD for 256
    assert 8 * 32 <= profile["memory"]["optimizer"] <= 8 * 32 + 8
