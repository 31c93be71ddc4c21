"""A plan says what the model in the task's command needs, if the offers have less."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.catalog.needs import parse_accelerator
from cavvy.cli.main import cli
from cavvy.cli.task.model_needs import find_names, find_need, say_need
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate


def make_task(run: str, gpu: str = "A100:8", **more: object) -> TaskSpec:
    need = ResourceSpec(accelerators=parse_accelerator(gpu))
    return TaskSpec(name="x", run=run, resources=need, **more)  # type: ignore[arg-type]  # any field


def make_offer(gib: int) -> Offer:
    return Offer(
        provider="p",
        region="r",
        instance_type="t",
        accelerator="A100",
        accelerator_count=8,
        accelerator_memory_mib=gib * 1024,
        rate=HourlyRate(1),
    )


@pytest.mark.parametrize(
    ("run", "env", "names"),
    [
        ("python t.py --model meta-llama/Llama-2-7b", {}, ["meta-llama/Llama-2-7b"]),
        ("python t.py --model_name_or_path='a/b-7b' -x", {}, ["a/b-7b"]),
        ("tune run model.path=b-7b", {}, ["b-7b"]),
        ("python t.py --base-model $NAME", {"NAME": "b-7b"}, ["b-7b"]),
        ("python t.py", {"MODEL_ID": "b-7b"}, ["b-7b"]),
        ("python t.py --model-dir b-7b --remodel c-7b", {"MODELS": "d-7b"}, []),
    ],
)
def test_the_names_of_models_in_a_task(run: str, env: dict[str, str], names: list[str]) -> None:
    assert list(find_names(make_task(run, env=env))) == names


@pytest.mark.parametrize(
    "run",
    [
        "python t.py --model llama-7b --use_lora",
        "python generate.py --model llama-7b",
        "python t.py --model ./here",
        "python t.py --model llama-0b",
        f"python t.py --model {'9' * 400}b",
        "python t.py",
    ],
)
def test_no_need_is_claimed_that_is_not_known(run: str) -> None:
    assert find_need(make_task(run), 8) is None


def test_offers_with_less_memory_than_the_model_needs_are_named() -> None:
    task = make_task("python train.py --model meta-llama/Llama-2-7b")
    said = say_need(task, [make_offer(40), make_offer(80)])
    assert "training all weights of meta-llama/Llama-2-7b" in said
    assert "some of these offers have 40 GiB;" in said
    assert "`gpu: A100:80GB:8` asks for enough" in said
    assert "`cavvy estimate --model llama-8b --gpu A100:8 --fsdp` makes sure" in said
    assert say_need(task, [make_offer(80)]) == ""


def test_a_model_of_another_size_needs_memory_in_proportion() -> None:
    small, large = (find_need(make_task(f"x --model a/b-{n}b"), 8) for n in (8, 16))
    assert small is not None
    assert large is not None
    assert large.like == "llama-8b"
    assert large.sharded == pytest.approx(2 * small.sharded)
    assert small.lean < small.sharded < small.whole


def test_the_plan_shows_the_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    (tmp_path / "empty.toml").touch()
    monkeypatch.setenv("CAVVY_CONFIG", str(tmp_path / "empty.toml"))
    file = tmp_path / "task.yaml"
    file.write_text("run: python train.py --model llama-7b\nresources: {gpu: A100:8}\n")
    shown = CliRunner().invoke(cli, ["plan", str(file)], prog_name="cavvy")
    assert "hint: training all weights of llama-7b" in shown.stderr
    file.write_text("run: python train.py --model llama-7b\nresources: {gpu: A100:80GB:8}\n")
    assert "training all weights" not in CliRunner().invoke(cli, ["plan", str(file)]).stderr
