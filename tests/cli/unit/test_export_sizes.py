"""What an export says of a job that may have several sizes."""

from pathlib import Path

from click.testing import CliRunner

from cavvy.cli.main import cli


def test_an_exported_elastic_job_has_its_least_number_of_nodes(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("name: t\nnodes: 2..16\nresources: {cpu: 1}\nrun: echo\n")
    told = CliRunner().invoke(cli, ["export", "slurm", str(file), "--blind"])
    assert told.exit_code == 0, told.output
    assert "this job has 2, the least of 2..16" in told.stderr
    assert "--nodes=2\n" in told.stdout
