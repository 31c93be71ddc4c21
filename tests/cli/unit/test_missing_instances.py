"""A MIG instance that no configured provider has: who has one, and what a whole GPU costs."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.catalog.needs import parse_accelerator
from cavvy.cli.main import cli
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.domain.units import HourlyRate
from cavvy.planner.explain import Explanation, OfferMiss, say_no_offer


def test_a_missing_instance_leads_to_who_has_one_and_to_a_whole_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    file = tmp_path / "task.yaml"
    file.write_text("name: t\nrun: nvidia-smi\nresources: {gpu: 'A100:1g.10gb'}\n")
    found = CliRunner().invoke(cli, ["validate", str(file)])
    said = f"{found.output} {found.exception}"
    assert found.exit_code
    assert "an instance A100:1g.10gb" in said
    assert "Slurm and Kubernetes clusters" in said
    assert "a whole GPU: A100 costs from $" in said
    assert "RTX" not in said


def test_a_plan_names_whole_gpus_instead_of_other_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    file = tmp_path / "task.yaml"
    file.write_text("name: t\nrun: nvidia-smi\nresources: {gpu: 'H100:1g.10gb'}\n")
    found = CliRunner(env={"COLUMNS": "300"}).invoke(cli, ["plan", str(file)])
    assert found.exit_code
    assert "an instance H100:1g.10gb" in found.output
    assert "a whole GPU: H100 costs from $" in found.output
    assert "is a whole H100" in found.output
    assert "request H100 in resources.gpu" in found.output
    assert not {"RTX", "V100", "A4000"} & set(found.output.replace("_", " ").split())


def test_a_server_without_the_instance_names_no_other_gpu() -> None:
    task = TaskSpec(
        name="t", run="x", resources=ResourceSpec(accelerators=parse_accelerator("A100:1g.10gb"))
    )
    miss = OfferMiss(
        offer=Offer(provider="vast", region="x", instance_type="rtx", rate=HourlyRate(1)),
        reason="accelerator",
        text="has 1 RTX4060Ti",
        change="accept RTX4060Ti:1",
    )
    said = say_no_offer(task, Explanation(considered=1, kept=0, rejections=(), misses=(miss,)))
    assert "Slurm and Kubernetes clusters have the MIG instances" in said
    assert "RTX" not in said
