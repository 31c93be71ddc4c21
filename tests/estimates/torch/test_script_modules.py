"""Scripts that are modules of a package: `cavvy estimate`, `profile` and `tune` run the scripts as
`python -m` runs them.
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from threading import Event

import pytest

pytest.importorskip("torch")

from click.testing import CliRunner

from cavvy.capabilities.estimates import traced
from cavvy.cli.main import cli
from cavvy.cli.view.failure import CommandFailure

LAYER = "from torch import nn\ndef make():\n    return nn.Linear(8, 4, bias=False)\n"
TRAIN = """
import sys
import time
import torch
from .layers import make

assert sys.argv[1:] == ["--steps", "100"], sys.argv
assert __package__ == "trained" and sys.modules["__main__"].__file__ == __file__
model = make()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(100):
    time.sleep(0.001)
    model(torch.randn(16, 8)).sum().backward()
    optimizer.step()
"""
GIVEN = ["--steps", "100"]


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "trained"
    folder.mkdir()
    for name, text in (("__init__", ""), ("layers", LAYER), ("train", TRAIN), ("__main__", TRAIN)):
        (folder / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("trained", "trained.layers"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize("module", ["trained.train", "trained"])
def test_a_module_is_traced(module: str) -> None:
    done = CliRunner().invoke(
        cli, ["estimate", "--gpu", "H200", "-o", "json", "-m", module, "--", *GIVEN]
    )
    found = json.loads(done.stdout)
    assert (found["profile"], found["batch"]) == (module, 16)


def test_a_module_is_measured() -> None:
    done = CliRunner().invoke(cli, ["profile", "-m", "trained.train", *GIVEN])
    assert "cpu x 1: " in done.stdout
    assert "trained/train.py:12" in done.stdout


@pytest.mark.parametrize("command", ["estimate", "profile", "tune"])
def test_relative_imports_of_a_script_are_explained(command: str) -> None:
    done = CliRunner().invoke(cli, [command, "trained/train.py"])
    assert done.exit_code == 1
    assert "no known parent package" in done.stderr
    assert f"name the script as a module: `cavvy {command} -m package.train`" in done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["estimate", "-m"], "-m needs the name of a module, such as package.train"),
        (["estimate", "-m", "absent_package.train"], "there is no module 'absent_package'"),
        (["profile", "-m", "trained/train.py"], "there is no module 'trained/train'"),
        (["tune", "absent.py"], "file 'absent.py' does not exist"),
    ],
)
def test_a_wrong_name_is_refused(words: list[str], says: str) -> None:
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert says in done.stderr


def test_the_line_of_a_module_that_fails_is_named() -> None:
    Path("trained/train.py").write_text("import torch\n1 / 0\n")
    done = CliRunner().invoke(cli, ["estimate", "-m", "trained.train"])
    assert "-m trained.train could not be traced: ZeroDivisionError" in done.stderr
    assert "trained/train.py:2: 1 / 0" in done.stderr


def test_the_message_of_a_script_that_exits_is_shown() -> None:
    Path("exits.py").write_text("import sys\nsys.exit('set DATA to a folder')\n")
    done = CliRunner().invoke(cli, ["estimate", "exits.py"])
    assert "exits.py exited before its first optimizer step: set DATA to a folder" in done.stderr


def test_what_a_trace_cannot_know_is_said_with_what_to_do() -> None:
    Path("own.py").write_text("import torch\ntorch.nn.Linear(4, 4)(torch.ones(2, 4)).sum()\n")
    done = CliRunner().invoke(cli, ["estimate", "own.py"])
    assert "error: own.py ended without an optimizer step" in done.stderr
    assert "hint: a step is a call of `step()` of a torch optimizer" in done.stderr
    Path("lazy.py").write_text("import torch\nmodel = torch.nn.LazyLinear(10)\n")
    done = CliRunner().invoke(cli, ["estimate", "lazy.py"])
    assert "lazy.py makes a lazy module" in done.stderr
    assert "lazy.py:2: model" in done.stderr
    assert "nn.Linear(784, 10)" in done.stderr


def test_a_pass_that_tries_a_model_before_its_optimizer_is_not_a_part_of_the_step() -> None:
    """Many scripts run a model on one sample to learn the sizes of its results."""
    step = "optimizer.zero_grad(); model(torch.ones(32, 8)).sum().backward(); optimizer.step()\n"
    profiles_of = []
    for name, tried in (("tries.py", "model(torch.zeros(1, 8))\n"), ("plain.py", "")):
        Path(name).write_text(
            f"import torch\nmodel = torch.nn.Linear(8, 4)\n{tried}"
            f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{step}"
        )
        profiles_of.append(traced.trace(name, []) | {"name": ""})
    assert profiles_of[0]["batch"] == 32
    assert profiles_of[0] == profiles_of[1]


@pytest.mark.parametrize(
    "tried",
    [
        "print(model(torch.zeros(1, 8)).shape)\n",
        "(model(torch.zeros(1, 8)) ** 2).sum().item()\nmodel(torch.zeros(2, 8))\n",
        "optimizer.zero_grad()\nmodel(torch.zeros(64, 8))\n",
    ],
)
def test_passes_without_gradients_after_the_optimizer_are_no_part_of_the_step(tried: str) -> None:
    found = []
    for each in (tried, ""):
        Path("tries.py").write_text(
            "import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU())\n"
            f"optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n{each}"
            "for _ in range(4):\n"
            "    model(torch.ones(32, 8)).sum().backward()\n"
            "    optimizer.step(); optimizer.zero_grad()\n"
        )
        found.append(traced.trace("tries.py", []))
    assert found[0]["batch"] == 32
    assert found[0] == found[1]


def test_passes_that_one_loss_needs_all_belong_to_the_step() -> None:
    """The batch is that of the first pass whose results get gradients."""
    Path("pairs.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\nmodel(torch.ones(1, 8))\n"
        "one = model(torch.ones(32, 8))\noptimizer.zero_grad()\nmore = model(torch.ones(4, 8))\n"
        "(one.sum() - more.sum()).backward(); optimizer.step()\n"
    )
    made = traced.trace("pairs.py", [])
    assert made["batch"] == 32
    products = [each for each in made["ops"] if each["kind"] == "matmul" and not each["backward"]]
    assert sum(each["count"] for each in products) == 2


def test_the_pass_of_the_only_step_may_run_before_its_optimizer_is_made() -> None:
    Path("late.py").write_text(
        "import torch\nmodel = torch.nn.Linear(8, 4)\nout = model(torch.ones(32, 8))\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "other = torch.optim.SGD([torch.ones(1)], lr=0.1)\n"
        "out.sum().backward(); optimizer.step()\n"
    )
    assert traced.trace("late.py", [])["batch"] == 32


WATCHED = """
import builtins, sys, torch
from cavvy.capabilities.estimates.traced import trace
before, found = builtins.__import__, []
for name in ("plain.py", "compiles.py"):
    found.append(trace(name, []) | {"name": ""})
    print("torch._dynamo" in sys.modules)
    assert builtins.__import__ is before
assert found[0] == found[1]
assert torch._dynamo.config.suppress_errors is True
assert torch._dynamo.config.fake_tensor_cache_enabled is True
"""


def test_only_a_script_that_uses_the_compiler_imports_it() -> None:
    """The import is long, and PyTorch needs no more of it than three settings for a trace."""
    step = (
        "model = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "loss = checkpoint(model, torch.ones(32, 8), use_reentrant=False).div(2).mean()\n"
        "loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
    )
    uses = "torch._dynamo.config.suppress_errors = True\n@torch._dynamo.disable\ndef f(): ...\n"
    plain = "__import__('json', globals=globals(), level=0)\n"  # as programs may write it
    for name, more in (("plain.py", plain), ("compiles.py", uses)):
        start = "import torch\nfrom torch.utils.checkpoint import checkpoint\n"
        Path(name).write_text(start + more + step)
    run = [sys.executable, "-c", WATCHED]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=240)
    assert done.stdout.split() == ["False", "True"], done.stderr


TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, i):
        return {"input_ids": torch.randint(0, 99, (32,)), "labels": i % 2}
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(BertConfig(vocab_size=99, **sizes))
options = dict(bf16=True, gradient_accumulation_steps=2, report_to=[], num_train_epochs=1)
args = TrainingArguments("out", per_device_train_batch_size=16, **options)
Trainer(model=model, args=args, train_dataset=Data()).train()
"""
ACCELERATE = """
import torch
from accelerate import Accelerator
one = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader([torch.randn(8) for _ in range(64)], batch_size=8)
model, optimizer, data = one.prepare(model, optimizer, data)
for batch in data:
    with one.accumulate(model):
        one.backward(model(batch).mean())
        if one.sync_gradients:
            one.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
"""
PEFT = """
import torch, peft
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
sizes = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
model = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
lora = peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
ids = torch.randint(0, 99, (32,))
data = [{"input_ids": ids, "labels": ids} for _ in range(100)]
options = dict(gradient_checkpointing=True, optim="adamw_torch_fused", report_to="none")
args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=10, **options)
Trainer(model=peft.get_peft_model(model, lora), args=args, train_dataset=data).train()
"""


@pytest.mark.parametrize(
    ("needs", "text", "batch", "accumulate"),
    [
        (("transformers", "accelerate"), TRAINER, 16, 2),
        (("accelerate",), ACCELERATE, 8, 2),
        (("transformers", "accelerate", "peft"), PEFT, 4, 1),
    ],
)
def test_steps_of_libraries_have_the_batch_of_one_pass(
    needs: tuple[str, ...], text: str, batch: int, accumulate: int
) -> None:
    if missing := [each for each in needs if find_spec(each) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    Path("loop.py").write_text(text)
    run = [sys.executable, "-m", "cavvy", "estimate", "loop.py", "--save", "work.json"]
    done = subprocess.run(run, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    made = json.loads(Path("work.json").read_text())
    assert (made["batch"], made["run"]["accumulate"]) == (batch, accumulate)


class Told(StringIO):
    """Standard error that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.said = Event()

    def write(self, text: str) -> int:
        count = super().write(text)
        self.said.set()
        return count


def test_a_script_that_makes_no_step_is_told_while_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, told = tmp_path / "reads.py", Told()
    script.write_text("import sys\nassert sys.stderr.said.wait(60)\n")
    monkeypatch.setattr(traced, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(sys, "stderr", told)
    with pytest.raises(CommandFailure, match="ended without an optimizer step"):
        traced.trace(str(script), [])
    assert "without an optimizer step, after which its trace ends" in told.getvalue()
