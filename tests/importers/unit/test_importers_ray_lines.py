"""Lines of `ray job submit` as jobs."""

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from cavvy.capabilities.importers.ray_lines import read_ray_line
from cavvy.cli.main import cli

START = ("ray", "job", "submit")


def test_other_commands_are_left_as_they_are() -> None:
    assert read_ray_line(["ray", "start", "--head"]) is None
    assert read_ray_line(["python", "ray", "job", "submit"]) is None
    # a cluster of Ray somewhere else gets its job
    for address in (
        ["--address", "http://head:8265"],
        ["--address=ray://head:10001"],
        ["--address=http://localhost-gw.example.org"],
    ):
        assert read_ray_line([*START, *address, "--", "python", "x.py"]) is None
    assert read_ray_line([*START, "--", "python", "x.py", "--address", "head"]) is not None
    for address in ("localhost:8265", "http://[::1]:8265"):
        assert read_ray_line([*START, "--address", address, "--", "python", "x.py"]) is not None


def test_what_a_line_says_of_its_job() -> None:
    environment = json.dumps({"env_vars": {"A": 1}, "pip": ["six>1"], "working_dir": "./src"})
    found = read_ray_line(
        (
            *(*START, "--address", "http://127.0.0.1:8265", "--no-wait", "--submission-id=Run_1"),
            *("--entrypoint-num-gpus", "2", "--entrypoint-num-cpus=4"),
            *("--entrypoint-memory", str(3 << 30), "--runtime-env-json", environment),
            *("--", "python", "x.py", "--lr", "0 1"),
        )
    )
    assert found is not None
    assert found.command == ("python", "x.py", "--lr", "0 1")
    assert found.keys == {
        "name": "run-1",
        "resources": {"gpu": "any:2", "cpu": "4", "memory": "3072MB"},
        "workdir": "./src",
        "env": {"A": "1"},
        "setup": {"run": "python3 -m pip install 'six>1'", "uses": []},
    }
    assert found.notes == ("--address is of a cluster of Ray",)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--", *()], "no command"),
        (["--entrypoint-num-gpus", "0.5", "--", "x"], "--entrypoint-num-gpus 0.5"),
        (["--entrypoint-num-gpus", "few", "--", "x"], "--entrypoint-num-gpus few"),
        (["--entrypoint-num-gpus", "nan", "--", "x"], "--entrypoint-num-gpus nan"),
        (["--entrypoint-num-gpus", "inf", "--", "x"], "--entrypoint-num-gpus inf"),
        (["--working-dir", "s3://b/x.zip", "--", "x"], "--working-dir s3://b/x.zip"),
        (["--runtime-env-json", '{"env_vars": ["A=1"]}', "--", "x"], "env_vars of --runtime"),
        (["--runtime-env-json", '{"working_dir": 1}', "--", "x"], "working_dir 1"),
        (["--entrypoint-resources", "{}", "--", "x"], "--entrypoint-resources is not read"),
        (["--runtime-env-json", "[", "--", "x"], "no table of JSON"),
        (["--runtime-env-json", '{"conda": "a"}', "--", "x"], "conda of --runtime-env-json"),
    ],
)
def test_what_a_job_lacks_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_ray_line([*START, *words])


def test_the_command_runs_as_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text("print(1)\n")
    line = [*START, "--working-dir", ".", "--entrypoint-num-gpus", "1", "--", "python", "x.py"]
    done = CliRunner().invoke(cli, ["convert", "--", *line])
    assert done.exit_code == 0, done.output
    task = yaml.safe_load(done.output)
    assert (task["name"], task["run"], task["workdir"]) == ("python", "python x.py", ".")
    assert task["resources"]["gpu"] == "any:1"


def test_an_image_and_several_nodes_go_with_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line = [*START, "--runtime-env-json", '{"pip": ["six"]}', "--", "torchrun", "x.py"]
    done = CliRunner().invoke(
        cli, ["convert", "--image", "python:3.12", "--nodes", "2", "--", *line]
    )
    assert done.exit_code == 0, done.output
    task = yaml.safe_load(done.stdout)
    assert task["setup"] == "python3 -m pip install six"
    assert "--node-rank" in task["run"]
