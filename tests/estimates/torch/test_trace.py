"""A traced step counts what the step does: FLOPs, bytes, and the memory that PyTorch itself
would hold.
"""

import gc
import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from cavvy.capabilities.estimates.tracer.fake_device import fake_device
from cavvy.capabilities.estimates.tracer.operations import (
    as_on_gpu,
    classify,
    count_flops,
    find_window,
)
from cavvy.capabilities.estimates.tracer.script import run_script, trace_script
from cavvy.capabilities.estimates.tracer.trace import trace_step
from cavvy.cli.main import cli
from cavvy.planner.device_rates import device_of
from cavvy.planner.estimate.profile import StepSettings, read_profile
from cavvy.planner.estimate.roofline import count_launches, estimate_step

MIB = 1 << 20


def linear_profile(batch: int = 64, precision: str = "fp32", layers: int = 3) -> dict[str, object]:
    with fake_device():
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(layers)))
        data = torch.randn(batch, 1024)
        return trace_step(
            model, lambda: model(data).float().sum(), batch=batch, precision=precision
        )


def total(profile: dict[str, object], name: str, **match: object) -> float:
    ops = profile["ops"]
    assert isinstance(ops, list)
    chosen = [op for op in ops if all(op[key] == value for key, value in match.items())]
    return sum((1 if name == "count" else op[name]) * op["count"] for op in chosen)


def test_flops_of_linear_layers_are_two_per_weight_and_pass() -> None:
    profile = linear_profile(batch=64)
    forward = 3 * 2 * 64 * 1024 * 1024
    assert total(profile, "flops", backward=False) == forward
    assert (
        total(profile, "flops", backward=True) == 2 * forward - forward / 3
    )  # the first layer's input needs none


def test_flops_of_a_convolution_are_those_of_its_definition() -> None:
    with fake_device():
        model = nn.Conv2d(8, 16, 3, padding=1, bias=False)
        data = torch.randn(2, 8, 32, 32)
        profile = trace_step(model, lambda: model(data).mean(), batch=2)
    assert total(profile, "flops", kind="conv", backward=False) == 2 * (2 * 32 * 32) * 16 * (8 * 9)
    assert total(profile, "flops", kind="conv", backward=True) == 2 * (2 * 32 * 32) * 16 * (
        8 * 9
    )  # of weights only


@pytest.mark.parametrize(("causal", "share"), [(False, 1.0), (True, 0.5)])
def test_attention_is_fused_and_counted(causal: bool, share: float) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = self.proj(x).view(2, 128, 4, 16).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(
                heads, heads, heads, dropout_p=0.1, is_causal=causal
            )

    with fake_device():
        model, data = Attention(), torch.randn(2, 128, 64)
        profile = trace_step(model, lambda: model(data).sum(), batch=2, precision="bf16")
    product = 2 * (2 * 4) * 128 * 128 * 16 * share
    assert total(profile, "flops", kind="attention", backward=False) == 2 * product
    assert total(profile, "flops", kind="attention", backward=True) == 5 * product
    assert total(profile, "count", dtype="bfloat16", kind="attention") == 2


def test_autocast_makes_matrix_products_narrow_and_keeps_norms_wide() -> None:
    with fake_device():
        model = nn.Sequential(nn.Linear(256, 256), nn.LayerNorm(256), nn.Linear(256, 256))
        data = torch.randn(8, 256)
        profile = trace_step(model, lambda: model(data).float().sum(), batch=8, precision="bf16")
    assert total(profile, "count", kind="matmul", dtype="float32") == 0
    assert total(profile, "count", kind="matmul", dtype="bfloat16") > 0
    assert total(profile, "count", kind="reduction", dtype="bfloat16", backward=False) == 0


class Biased(nn.Module):
    """Attention with a learned bias of positions."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.proj, self.bias = nn.Linear(64, 64), nn.Parameter(torch.randn(1, 4, 128, 128))
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.proj(x).view(len(x), 128, 4, 16).transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(
            heads, heads, heads, self.bias, self.dropout, scale=0.3
        )


@pytest.mark.parametrize(("dropout", "each"), [(0.0, 4), (0.1, 4 + 4 + 1)])
def test_attention_with_a_learned_bias_keeps_its_scores(dropout: float, each: int) -> None:
    """In float32, and also the mask and the result of dropout: bytes for each score."""
    with fake_device():
        model, data = Biased(dropout), torch.randn(8, 128, 64)
        profile = trace_step(model, lambda: model(data).float().sum(), batch=8, precision="bf16")
    memory, scores = profile["memory"], 8 * 4 * 128 * 128
    names = [each["name"] for each in profile["ops"]]
    most = max(row[0] for row in memory["activations"])
    assert scores * each < most < scores * (each + 12)  # some scores are on their way
    assert total(profile, "count", kind="attention") == 0
    assert ("native_dropout" in names) == bool(dropout)


def test_attention_with_a_learned_bias_computes_what_pytorch_does() -> None:
    model, data = Biased(1e-9), torch.randn(2, 128, 64)
    with torch.no_grad():
        expected = model(data)
    with as_on_gpu():
        found = model(data)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("mode", "dtype"), [("bilinear", "float32"), ("nearest", "float32"), ("area", "bfloat16")]
)
def test_autocast_interpolates_in_float32_as_on_cuda(mode: str, dtype: str) -> None:
    with fake_device():
        model, data = nn.Conv2d(3, 8, 1), torch.randn(2, 3, 16, 16)
        profile = trace_step(
            model,
            lambda: nn.functional.interpolate(model(data), scale_factor=2, mode=mode).sum(),
            batch=2,
            precision="bf16",
        )
    assert total(profile, "count", kind="index", dtype=dtype, backward=False) == 1


def test_autocast_computes_sums_and_norms_of_narrow_tensors_without_copies() -> None:
    with fake_device():
        model, data = nn.Linear(64, 64), torch.randn(32, 64)

        def step() -> torch.Tensor:
            x = model(data)
            return x.norm(dim=1).sum() + x.sum()

        profile = trace_step(model, step, batch=32, precision="bf16")
    assert total(profile, "count", kind="copy", dtype="float32", backward=False) == 0
    assert total(profile, "count", kind="reduction", dtype="bfloat16", backward=False) == 0
    assert total(profile, "count", kind="reduction", dtype="float32", backward=False) > 0


def test_a_script_that_allows_tf32_is_estimated_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the products that autocast leaves in float32, such as those of experts."""
    device = device_of("H200")
    assert device is not None
    found: dict[str, float] = {}
    for setting in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda setting=setting: setting)
        with fake_device():
            model, data = nn.Linear(2048, 2048), torch.randn(4096, 2048)

            def step(model: nn.Module = model, data: torch.Tensor = data) -> torch.Tensor:
                with torch.autocast("cpu", enabled=False):
                    return model(data).sum()

            profile = read_profile(trace_step(model, step, batch=4096, precision="bf16"))
        for precision in (None, "fp32"):
            run = StepSettings(precision=precision)
            found[f"{setting} {precision}"] = estimate_step(profile, device, run).device
    assert found["high None"] < found["highest None"] / 3
    assert found["high fp32"] == found["highest fp32"]  # as `--precision fp32` asks


def test_a_float32_script_that_allows_tf32_has_this_precision(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        """
import torch
torch.backends.cuda.matmul.allow_tf32 = True
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 8)).sum().backward()
optimizer.step()
"""
    )
    try:
        assert trace_script(str(script), [])["precision"] == "tf32"
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_memory_of_a_chain_is_what_autograd_keeps() -> None:
    """Each layer's input is kept for its weight's gradient; beside them are one or two that are
    on their way.
    """
    profile = linear_profile(batch=4096)
    memory = profile["memory"]
    assert isinstance(memory, dict)
    assert memory["parameters"] == memory["gradients"] == 3 * 4 * MIB
    most = max(row[0] + row[2] for row in memory["activations"])
    each = 4096 * 1024 * 4
    assert 4 * each <= most <= 5 * each + 12 * MIB


def test_activations_grow_with_the_batch_and_casts_do_not() -> None:
    small, large = (linear_profile(batch=batch, precision="bf16") for batch in (512, 1024))
    low, high = (max(profile["memory"]["activations"]) for profile in (small, large))  # type: ignore[index]
    assert low[1] == high[1] == 3 * 2 * MIB
    assert (high[0] - high[1]) == pytest.approx(2 * (low[0] - low[1]), rel=0.01)


def test_a_fusing_compiler_moves_and_keeps_less() -> None:
    with fake_device():
        model = nn.Sequential(
            nn.Linear(256, 256), nn.GELU(), nn.Tanh(), nn.Sigmoid(), nn.Linear(256, 256)
        )
        data = torch.randn(4096, 256)
        profile = trace_step(model, lambda: model(data).sum(), batch=4096)
    assert total(profile, "fused_bytes", kind="pointwise") < 0.6 * total(
        profile, "bytes", kind="pointwise"
    )
    memory = profile["memory"]
    assert max(memory["activations_compiled"])[0] < max(memory["activations"])[0]


def test_checkpointing_keeps_less_and_computes_more() -> None:
    from torch.utils.checkpoint import checkpoint

    def trace(checkpointed: bool) -> dict[str, object]:
        with fake_device():
            blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
                for _ in range(4)
            )
            data = torch.randn(1024, 256)

            def step() -> torch.Tensor:
                x = data
                for block in blocks:
                    x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
                return x.sum()

            return trace_step(blocks, step, batch=1024, precision="bf16")

    plain, less = trace(False), trace(True)
    again = total(less, "flops", kind="matmul") - total(plain, "flops", kind="matmul")
    assert (
        again == 4 * 2 * 1024 * 256 * 1024
    )  # each block's first layer: what comes after is not needed
    assert max(less["memory"]["activations"])[0] < 0.6 * max(plain["memory"]["activations"])[0]  # type: ignore[index]


def test_real_tensors_are_traced_as_fake_ones_are() -> None:
    model = nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    data = torch.randn(32, 128)
    real = trace_step(model, lambda: model(data).sum(), batch=32)
    with fake_device():
        model, data = (
            nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
            torch.randn(32, 128),
        )
        fake = trace_step(model, lambda: model(data).sum(), batch=32)
    assert total(real, "flops") == total(fake, "flops")
    assert total(real, "bytes") == total(fake, "bytes")


SCRIPT = """
import sys
import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(), torch.nn.Linear(64, 2)).to(device)
model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(1000):
    x, y = torch.randn(int(sys.argv[1]), 64, device=device), torch.randint(0, 2, (int(sys.argv[1]),), device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    if loss.item() > 1e9:
        break
    optimizer.step()
    open("stepped", "w").close()
"""


def test_a_script_is_traced_up_to_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    profile = trace_script(str(tmp_path / "train.py"), ["48"])
    json.dumps(profile)
    assert (profile["batch"], profile["precision"], profile["optimizer"]) == (48, "bf16", "sgd")
    assert profile["parameters"] == 64 * 64 + 64 + 128 + 2
    assert total(profile, "flops", backward=False) == 2 * 48 * (64 * 64 + 64 * 2)
    assert not (tmp_path / "stepped").exists()
    assert torch.ones(1).item() == 1  # nothing is fake afterwards
    assert torch.compile.__module__ == "torch"


def test_the_command_traces_a_script_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text("import torch\nlayer = lambda: torch.nn.Linear(8, 2)\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\nfrom parts import layer\nprint('loading')\nmodel = layer()\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "if sys.argv[1:] == ['stop']: sys.exit(3)\nif sys.argv[1:] == ['fail']: raise OSError('no "
        "data')\n"
        "model(torch.randn(4, 8)).sum().backward()\noptimizer.step()\n"
    )
    places = list(sys.path)
    done = CliRunner().invoke(cli, ["estimate", str(script), "--gpu", "H200", "-o", "json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["batch"] == 4
    assert done.stderr == "loading\n"
    assert sys.path == places
    stopped = CliRunner().invoke(cli, ["estimate", str(script), "--", "stop"])
    assert stopped.exit_code == 1
    assert "exited (exit code 3)" in stopped.stderr
    failed = CliRunner().invoke(cli, ["estimate", str(script), "--", "fail"])
    assert "OSError: no data" in failed.stderr
    assert "train.py:7: if sys.argv" in failed.stderr


LATE = """
try:
    import absent_package.layers
except ModuleNotFoundError as error:
    raise ModuleNotFoundError("Could not import module 'Layer'") from error
"""


@pytest.mark.parametrize("text", ["import absent_package.layers\n", LATE])
def test_a_missing_package_of_a_script_is_named(text: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    failed = CliRunner().invoke(cli, ["estimate", str(script)])
    assert failed.exit_code == 1
    assert f"{script} imports absent_package, which is not installed" in failed.stderr.replace(
        "\n", " "
    )
    assert "pip install absent_package" in failed.stderr


def test_a_script_may_say_itself_what_is_missing(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ModuleNotFoundError('install the layers first')\n")
    failed = CliRunner().invoke(cli, ["estimate", str(script)])
    assert "ModuleNotFoundError: install the layers first" in failed.stderr.replace("\n", " ")
    assert "pip install" not in failed.stderr


def test_a_missing_package_of_the_tracer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [
        each
        for each in sys.modules
        if each.startswith(("cavvy.train", "cavvy.capabilities.estimates.tracer"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    failed = CliRunner().invoke(cli, ["estimate", __file__])
    assert failed.exit_code == 1
    assert "torch is not installed for the Python that runs cavvy" in failed.stderr


def test_a_script_finds_what_lies_beside_it_and_leaves_no_trace(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real/beside_the_script.py").write_text("WORD = 'found'\n")
    (tmp_path / "real/train.py").write_text(
        "import sys, beside_the_script as b\nsys.exit(f'{b.WORD} {sys.argv[1:]}')\n"
    )
    (tmp_path / "train.py").symlink_to(tmp_path / "real/train.py")
    before = list(sys.path), list(sys.argv)
    with pytest.raises(SystemExit, match=r"found \['7'\]"):
        run_script(str(tmp_path / "train.py"), ["7"])
    assert (sys.path, sys.argv) == before
    del sys.modules["beside_the_script"]


def test_a_script_without_a_step_is_told(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch\nprint(torch.ones(2).shape)\n")
    with pytest.raises(RuntimeError, match="without an optimizer step"):
        trace_script(str(tmp_path / "train.py"), [])


RUN = """
import torch
from cavvy import train

run = train.Run("checkpoints")
model = run.model(lambda: torch.nn.Linear(32, 4))
optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
data = run.data(train.Tensors(torch.randn(256, 32), torch.randint(0, 4, (256,))), global_batch=64)
for batch in run.batches(data, epochs=2):
    run.accumulate(lambda part: torch.nn.functional.cross_entropy(model(part[0]), part[1]), batch)
    run.step(optimizer)
"""


def test_a_script_of_the_toolkit_is_traced_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(RUN)
    profile = trace_script("train.py", [])
    gc.collect()
    assert (profile["batch"], profile["optimizer"], profile["parameters"]) == (
        64,
        "adamw",
        32 * 4 + 4,
    )
    assert total(profile, "flops", kind="matmul", backward=False) == 2 * 64 * 32 * 4
    assert not list(tmp_path.rglob("*.metadata"))


@pytest.mark.parametrize(
    ("packet", "kind"),
    [
        ("aten.addmm", "matmul"),
        ("aten.convolution_backward", "conv"),
        ("aten.view", "pointwise"),
        ("aten.empty", ""),
        ("aten._softmax", "reduction"),
        ("aten._to_copy", "copy"),
        ("aten.embedding", "index"),
        ("aten._scaled_dot_product_flash_attention", "attention"),
    ],
)
def test_kinds(packet: str, kind: str) -> None:
    assert classify(packet) == kind


@pytest.mark.parametrize("dtype", ["torch.float32", "torch.bfloat16"])
def test_products_of_groups_count_the_rows_of_each_group(dtype: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import torch
class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 32, 64, dtype={dtype}))
    def forward(self, x):
        return torch._grouped_mm(x, self.weight, offs=torch.tensor([8, 16, 24, 32]).int())
model = Experts()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(32, 32, dtype={dtype}, requires_grad=True)).sum().backward()
optimizer.step()
"""
    )
    profile = trace_script(str(script), [])
    once = 2 * 32 * 32 * 64
    found = [each for each in profile["ops"] if each["kind"] == "matmul"]
    forward = sum(each["flops"] * each["count"] for each in found if not each["backward"])
    backward = sum(each["flops"] * each["count"] for each in found if each["backward"])
    assert (forward, backward) == (once, 2 * once)
    launched = count_launches(read_profile(profile), StepSettings())
    # In float32, each of the four groups is a product of its own.
    assert launched["matmul"] == (4 if dtype == "torch.float32" else 1)


def test_the_gradient_of_a_look_up_is_many_launches() -> None:
    with fake_device():
        model, places = nn.Linear(16, 64), torch.zeros(32, dtype=torch.long)
        data = torch.randn(8, 16)
        plain = trace_step(model, lambda: model(data).sum(), batch=8)
        looked_up = trace_step(model, lambda: model(data)[:, places].sum(), batch=8)
    before, now = (
        count_launches(read_profile(each), StepSettings()) for each in (plain, looked_up)
    )
    assert now["other backward"] > before["other backward"] + 10


def test_the_dilation_of_a_convolution_is_recorded() -> None:
    given, weight = torch.empty(1, 8, 9, 9), torch.empty(4, 8, 3, 3)
    grad = torch.empty(1, 4, 5, 5)
    options: list[object] = [[1, 1], [0, 0], [2, 2], False, [0, 0], 1]
    forward = find_window("conv", "convolution", (given, weight, None, *options), [grad])
    args = (grad, given, weight, None, *options)
    assert forward == (8, 9, 25, 1, 0, 2)
    assert find_window("conv", "convolution_backward", args, [given]) == forward


def test_grouped_convolutions_count_their_own_channels_only() -> None:
    given, weight = torch.empty(1, 8, 4, 4), torch.empty(8, 1, 3, 3)
    flops, size = count_flops(
        "conv",
        "aten.convolution",
        (given, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 8),
        [given, weight],
        [torch.empty(1, 8, 4, 4)],
    )
    assert flops == 2 * 16 * 8 * 9
    assert size == (8, 16, 1, 9)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("directions", [1, 2])
@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3)])
def test_recurrent_layers_are_a_few_kernels(
    kind: type[nn.Module], gates: int, directions: int, packed: bool
) -> None:
    from torch.nn.utils.rnn import PackedSequence

    batch, steps, size, width = 8, 20, 32, 64
    with fake_device():
        model = kind(size, width, batch_first=True, bidirectional=directions == 2)
        given = torch.randn(batch * steps, size) if packed else torch.randn(batch, steps, size)
        data = PackedSequence(given, torch.full((steps,), batch)) if packed else given

        def step() -> torch.Tensor:
            out = model(data)[0]
            return (out.data if packed else out).sum()

        profile = trace_step(model, step, batch=batch)
    once = 2 * batch * steps * gates * width * directions
    assert total(profile, "flops", kind="matmul", backward=False) == once * size
    assert total(profile, "flops", kind="recurrent", backward=False) == once * width
    assert total(profile, "flops", kind="recurrent", backward=True) == once * width
    found = [op for op in profile["ops"] if op["kind"] == "recurrent"]  # type: ignore[attr-defined]
    assert {op["size"][:2] for op in found} == {(steps, batch)}
    assert sum(op["count"] for op in profile["ops"]) < 60  # type: ignore[attr-defined]


def test_layers_that_are_copied_and_threads_stay_in_one_fake_world() -> None:
    with fake_device():
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 3)
        data = torch.randn(4, 32, 64)
        profile = trace_step(model, lambda: model(data).sum(), batch=4, precision="bf16")
    dense = 3 * 2 * 4 * 32 * (4 * 64 * 64 + 2 * 64 * 128)
    assert total(profile, "flops", kind="matmul", backward=False) == dense
    assert total(profile, "count", kind="attention") == 6


HARD = """
import torch

model = torch.nn.Linear(64, 8).to("cuda")
head = torch.nn.Linear(8, 2, device="cuda")
optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
for step in range(1000):
    for part in range(4):
        x = torch.randn(16, 64, device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = head(model(x)).mean()
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    raise SystemExit("a second step")
"""


def test_hard_coded_devices_scalers_heads_and_accumulation(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HARD)
    profile = trace_script(str(tmp_path / "train.py"), [])
    assert (profile["batch"], profile["precision"], profile["optimizer"]) == (
        16,
        "fp16",
        "momentum",
    )
    assert profile["run"] == {"accumulate": 4}
    assert profile["parameters"] == 64 * 8 + 8 + 8 * 2 + 2
    assert total(profile, "flops", backward=False) == 2 * 16 * (64 * 8 + 8 * 2)


def test_experts_get_an_even_share_of_what_is_routed_and_masks_choose_all() -> None:
    with fake_device():
        gate, experts = (
            nn.Linear(16, 4, bias=False),
            nn.ModuleList(nn.Linear(16, 32, bias=False) for _ in range(4)),
        )
        data, mask = torch.randn(64, 16), torch.ones(64, dtype=torch.bool)

        def step() -> torch.Tensor:
            weights, chosen = gate(data).topk(2)
            out = torch.zeros(64, 32)
            for number, expert in enumerate(experts):
                rows, place = torch.where(chosen == number)
                out = out.index_add(0, rows, expert(data[rows]) * weights[rows, place, None])
            return out[mask].mean()

        profile = trace_step(nn.ModuleList([gate, experts]), step, batch=64)
    assert (
        total(profile, "flops", kind="matmul", backward=False)
        == 2 * 64 * 16 * 4 + 2 * (2 * 64) * 16 * 32
    )


@pytest.mark.parametrize("masked", [False, True])
def test_a_mask_that_routes_nothing_chooses_all_though_it_is_as_large_as_what_top_1_routed(
    masked: bool,
) -> None:
    """Experts find their samples by `where` or by a mask; labels choose what the head is given."""
    with fake_device():
        gate, head = nn.Linear(16, 4, bias=False), nn.Linear(16, 8, bias=False)
        experts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(4))
        data, labels = torch.randn(4, 16, 16), torch.zeros(4, 16, dtype=torch.int64)

        def step() -> torch.Tensor:
            flat = data.flatten(0, 1)
            weights, chosen = gate(flat).topk(1)
            out = torch.zeros(64, 16)
            for number, expert in enumerate(experts):
                rows = (
                    (nn.functional.one_hot(chosen[:, 0], 4)[:, number] > 0)
                    if masked
                    else chosen == number
                )
                place = rows if masked else torch.where(rows)[0]
                out[place] = expert(flat[place]) * weights[place]
            hidden = out.view(4, 16, 16)
            return head(hidden[labels != -100]).sum() + head(out[labels.flatten() != -100]).sum()

        profile = trace_step(nn.ModuleList([gate, experts, head]), step, batch=4)
    routed = 2 * 64 * 16 * 4 + 2 * 64 * 16 * 16
    assert total(profile, "flops", kind="matmul", backward=False) == routed + 2 * (2 * 64 * 16 * 8)


OPEN = """
import torch
model = torch.nn.Linear(8, 8, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, ids, mask = torch.randn(16, 8), torch.randn(16, 8).argmax(-1), torch.rand(16, 8) > 0.5
rows = {rows}
model(rows).sum().backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("rows", "count", "note"),
    [
        (
            "x.masked_select(mask).view(-1, 8)",
            16,
            "masked_select of 128 values is assumed to return 128",
        ),
        (
            "x.masked_select(mask[:, :1]).view(-1, 8)",
            16,
            "masked_select of 128 values is assumed to return 128",
        ),
        ("x[mask[:, 0]]", 16, "nonzero of 16 values is assumed to return 16"),
        ("x[torch.argwhere(mask)[:, 0]]", 128, "nonzero of 128 values is assumed to return 128"),
        ("x[ids.unique()]", 16, "_unique2 of 16 values is assumed to return 16"),
        (
            "x[ids.unique(return_inverse=True, return_counts=True)[1]]",
            16,
            "_unique2 of 16 values is assumed to return 16",
        ),
        ("torch.unique(x, dim=0)", 16, "unique_dim of 128 values is assumed to return 16"),
        (
            "torch.unique_consecutive(x, dim=0)",
            16,
            "unique_consecutive of 128 values is assumed to return 16",
        ),
        (
            "x * torch.unique_consecutive(ids)[:, None]",
            16,
            "unique_consecutive of 16 values is assumed to return 16",
        ),
        ("torch.bincount(ids)[:, None] * x", 16, "bincount of 16 values is assumed to return 16"),
        (
            "torch.bincount(ids, minlength=4)[:, None] * x[:4]",
            4,
            "bincount of 16 values is assumed to return 4",
        ),
        (
            "torch.bincount(ids, x[:, 0], 4)[:, None] * x[:4]",
            4,
            "bincount of 16 values is assumed to return 4",
        ),
        ("x.repeat_interleave(ids, 0, output_size=40)", 40, ""),
    ],
)
def test_what_is_as_large_as_values_say_is_taken_as_large_as_it_can_be(
    rows: str, count: int, note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(OPEN.format(rows=rows))
    profile = trace_script("train.py", [])
    assert total(profile, "flops", kind="matmul", backward=False) == 2 * count * 8 * 8
    assert profile["assumed"] == ([f"train.py:6: {note}"] if note else [])


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            "x.repeat_interleave(ids, 0)",
            "the size of the result of repeat_interleave depends on values, .* pass `output_size`, or",
        ),
    ],
)
def test_what_nobody_can_bound_is_told_with_its_line_and_what_to_do(
    rows: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a module beside the script, too, where the script's own line would not say which."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_of_it.py").write_text(f"import torch\ndef rows(x, ids):\n    return {rows}\n")
    (tmp_path / "train.py").write_text(
        "import rows_of_it\n" + OPEN.format(rows="rows_of_it.rows(x, ids)")
    )
    with pytest.raises(RuntimeError, match=rf"/rows_of_it\.py:3: {says}.*`cavvy bench`$"):
        trace_script("train.py", [])
    del sys.modules["rows_of_it"]


def test_what_topk_routed_is_counted_and_repeated_by_experts() -> None:
    with fake_device():
        _, chosen = torch.randn(64, 4).topk(2)
        counts = torch.bincount(chosen.flatten())
        assert counts.shape == chosen.unique().shape == (4,)
        assert torch.arange(4).repeat_interleave(counts).shape == (128,)


def test_the_command_says_what_a_trace_took_for_granted(tmp_path: Path) -> None:
    script, work = tmp_path / "train.py", tmp_path / "work.json"
    more = "\n".join(f"more = x[mask[:, {n}]]" for n in range(7))
    script.write_text(OPEN.format(rows=f"x.masked_select(mask).view(-1, 8)\n{more}"))
    line = ["estimate", str(script), "--gpu", "H200", "--save", str(work)]
    said = CliRunner().invoke(cli, line).stderr
    assert (
        "train.py:6: masked_select of 128 values is assumed to return 128, because a trace contains no "
        "data values" in said
    )
    assert "3 more assumptions; -o json lists all" in said
    found = CliRunner().invoke(
        cli, ["estimate", "--profile", str(work), "--gpu", "H200", "-o", "json"]
    )
    assert len(json.loads(found.stdout)["assumed"]) == 8
