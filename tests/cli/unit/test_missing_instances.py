"""A MIG instance that no configured provider has: who has one, and what a whole GPU costs."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.cli.main import cli


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
