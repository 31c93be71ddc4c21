"""`cavvy export sagemaker` writes a request that SageMaker's service model accepts, and a program
that runs the task in the container as Cavvy does.
"""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.exports.aws_model import check_request, service_model
from tests.exports.tasks import FULL, export

from cavvy.domain.tasks import ResourceSpec, TaskSpec
from cavvy.providers.formats import list_formats
from cavvy.providers.formats.program import split_program
from cavvy.providers.formats.services.sagemaker import is_training_type, make_export
from cavvy.store.snapshot import CatalogSnapshot

MINIMAL = "run: echo hello\nresources: {cpu: 2}"
NAMED = ResourceSpec(instance="ml.m5.large")


def read_request(text: str, folder: Path) -> dict[str, Any]:
    done = export("sagemaker", text, folder)
    assert done.exit_code == 0, done.output
    request: dict[str, Any] = yaml.safe_load(done.output)
    return request


def make_command(request: dict[str, Any], root: Path) -> list[str]:
    """The container's command, with `root` instead of the folder /opt/ml."""
    algorithm = request["AlgorithmSpecification"]
    command = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
    return [part.replace("/opt/ml", str(root)) for part in command]


def make_root(root: Path, host: str, hosts: list[str]) -> Path:
    """The folder that SageMaker shares with a container."""
    config = root / "input/config"
    config.mkdir(parents=True)
    group = {"instance_group_name": "g", "instance_type": "ml.x", "hosts": hosts}
    named = {"current_host": host, "current_group_name": "g", "hosts": hosts}
    (config / "resourceconfig.json").write_text(
        json.dumps({**named, "instance_groups": [group], "network_interface_name": "eth0"})
    )
    return root


@pytest.mark.parametrize("text", [MINIMAL, FULL])
def test_the_service_model_accepts_the_request(text: str, tmp_path: Path) -> None:
    check_request("sagemaker", "CreateTrainingJob", read_request(text, tmp_path))


def test_the_request_has_the_keys_of_the_task(tmp_path: Path) -> None:
    request = read_request(FULL, tmp_path)
    assert request["TrainingJobName"] == "train-1"
    assert request["ResourceConfig"]["InstanceType"] == "ml.p4d.24xlarge"
    assert request["ResourceConfig"]["InstanceCount"] == 2
    assert request["StoppingCondition"] == {
        "MaxRuntimeInSeconds": 7200,
        "MaxWaitTimeInSeconds": 18000,
    }
    assert request["EnableManagedSpotTraining"] is True
    assert request["HyperParameters"] == {"lr": "0.1", "flag": "true"}
    assert request["OutputDataConfig"] == {"S3OutputPath": "s3://models/run"}
    sources = {
        each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"]
        for each in request["InputDataConfig"]
    }
    assert sources == {"workdir": "s3://BUCKET/train-1/workdir/", "data": "s3://data/imagenet/"}
    assert request["CheckpointConfig"] == {"S3Uri": "s3://BUCKET/train-1/checkpoints"}
    assert request["RetryStrategy"] == {"MaximumRetryAttempts": 3}
    assert request["Tags"] == [{"Key": "team", "Value": "vision"}]


def test_checkpoints_are_kept_in_a_bucket_of_s3(tmp_path: Path) -> None:
    for storage, kept in (("s3://b/c", "s3://b/c"), ("gs://b/c", "s3://BUCKET/task/checkpoints")):
        text = f"{MINIMAL}\ncheckpoint: {{path: c, storage: '{storage}'}}"
        assert read_request(text, tmp_path)["CheckpointConfig"] == {"S3Uri": kept}


def test_comments_state_what_the_user_must_do(tmp_path: Path) -> None:
    comments = [
        line for line in export("sagemaker", FULL, tmp_path).output.splitlines() if line[0] == "#"
    ]
    for word in (
        "HF_TOKEN",
        "role/ROLE",
        "s3://BUCKET",
        "workdir",
        "limits.budget",
        "model.tar.gz",
    ):
        assert any(word in line for line in comments), word
    assert not any("limits.deadline" in line for line in comments)


@pytest.mark.parametrize(
    ("limits", "run_s", "told"),
    [
        ("", 432_000, "SageMaker stops the job after 5 days"),
        ("limits: {deadline: 5h}\n", 18_000, "SageMaker stops the job after 5 hours"),
        ("limits: {duration: 6d}\n", 518_400, "more than 5 days need a higher quota"),
        ("limits: {duration: 40d}\n", 2_419_200, "reduced to 28 days"),
    ],
)
def test_the_time_after_which_sagemaker_stops_a_job_is_stated(
    limits: str, run_s: int, told: str, tmp_path: Path
) -> None:
    """SageMaker's own limit is one day; an account may run jobs for five."""
    output = export("sagemaker", f"{limits}{MINIMAL}", tmp_path).output
    assert yaml.safe_load(output)["StoppingCondition"]["MaxRuntimeInSeconds"] == run_s
    assert told in " ".join(output.replace("#", "").split())


def test_every_host_runs_the_task_with_its_rank(tmp_path: Path) -> None:
    request = read_request(FULL, tmp_path)
    hosts = ["algo-1", "algo-2"]
    for rank, host in enumerate(hosts):
        root = make_root(tmp_path / host, host, hosts)
        (root / "input/data/workdir/model").mkdir(parents=True)
        (root / "input/data/workdir/model/weights").write_text("w")
        environment = {**os.environ, **request["Environment"]}
        done = subprocess.run(
            make_command(request, root), env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [
            f"rank {rank} of 2",
            "at algo-1:29500",
            "algo-1,algo-2",
            "lr 0.1 0.1",
            "8 GPUs",
            'a\\b "c" $d',
            "hello 'you'",
            "set up",
        ]
        assert (root / "model/model/weights").read_text() == "w"
        assert (root / "code/data").resolve() == root / "input/data/data"
        assert (root / "code/checkpoints").resolve() == root / "checkpoints"


def test_an_input_of_one_object_is_a_file(tmp_path: Path) -> None:
    text = MINIMAL.replace("echo hello", "cat points.csv; exit 3") + (
        "\ninputs: [{source: 's3://b/points.csv', target: points.csv}]"
    )
    request = read_request(text, tmp_path)
    root = make_root(tmp_path / "ml", "algo-1", ["algo-1"])
    folder = root / "input/data" / request["InputDataConfig"][0]["ChannelName"]
    folder.mkdir(parents=True)
    (folder / "points.csv").write_text("1,2\n")
    done = subprocess.run(make_command(request, root), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "1,2\n")


def test_an_input_in_the_folder_of_a_channel_is_that_channel(tmp_path: Path) -> None:
    text = MINIMAL + (
        "\ninputs:\n- {source: 's3://b/t/', target: /opt/ml/input/data/training}"
        "\n- {source: 's3://b/d/', target: data}"
        "\n- {source: 's3://b/x/', target: /opt/ml/input/data/x/}"
        "\n- {source: 's3://b/e/', target: data/1}"
        "\n- {source: 's3://b/f/', target: data-1}"
    )
    request = read_request(text, tmp_path)
    names = [each["ChannelName"] for each in request["InputDataConfig"]]
    assert names == ["training", "data", "x", "data-1", "data-1-4"]


def test_an_input_that_sagemaker_puts_in_place_is_not_linked_to_itself(tmp_path: Path) -> None:
    text = MINIMAL.replace("echo hello", "cat /opt/ml/input/data/training/a") + (
        "\ninputs: [{source: 's3://b/t/', target: /opt/ml/input/data/training}]"
    )
    request = read_request(text, tmp_path)
    root = make_root(tmp_path / "ml", "algo-1", ["algo-1"])
    folder = root / "input/data/training"
    folder.mkdir(parents=True)
    (folder / "a").write_text("here\n")
    done = subprocess.run(make_command(request, root), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "here\n")


def test_a_stop_reaches_the_work(tmp_path: Path) -> None:
    """SageMaker sends SIGTERM to the container's first process."""
    # The pause lets the container's shell set its trap, which it does after it has started the work.
    work = "trap 'echo saved; exit 5' TERM; sleep 1; echo ready; while :; do sleep 0.05; done"
    text = f'run: "{work}"\nresources: {{cpu: 2}}'
    request = read_request(text, tmp_path)
    root = make_root(tmp_path / "ml", "algo-1", ["algo-1"])
    with subprocess.Popen(
        make_command(request, root), stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "saved\n"


@settings(deadline=None, max_examples=50)
@given(st.text(st.characters(exclude_characters="\x00", codec="utf-8"), min_size=1, max_size=300))
def test_the_shell_joins_the_arguments_to_the_program(text: str) -> None:
    program = text + "\nend"
    parts = split_program(program, 40, 100)
    assert parts is not None
    check_request(
        "sagemaker",
        "CreateTrainingJob",
        yaml.safe_load(make_export(TaskSpec(name="t", run=text, resources=NAMED), lambda *_: ())),
    )
    done = subprocess.run(["sh", "-c", 'printf %b "$@"', "sh", *parts], capture_output=True)
    assert done.stdout.decode() == program


def test_a_program_that_is_too_long_is_refused(tmp_path: Path) -> None:
    done = export("sagemaker", "run: |\n" + "  echo 1234567890\n" * 2000, tmp_path)
    assert done.exit_code == 2
    assert "at most 25600 characters" in done.output


def test_many_short_lines_share_arguments(tmp_path: Path) -> None:
    text = "run: |\n" + "  echo a\n" * 300 + "resources: {cpu: 2}"
    request = read_request(text, tmp_path)
    check_request("sagemaker", "CreateTrainingJob", request)
    root = make_root(tmp_path / "ml", "algo-1", ["algo-1"])
    done = subprocess.run(make_command(request, root), capture_output=True, text=True)
    assert done.stdout == "a\n" * 300


def test_resources_that_no_type_has_are_refused(tmp_path: Path) -> None:
    done = export("sagemaker", "run: x\nresources: {gpu: 'MI300X:8'}", tmp_path)
    assert done.exit_code == 2
    assert "no instance type of SageMaker training fits" in done.output
    named = read_request("run: x\nresources: {instance: ml.g5.xlarge}", tmp_path)
    assert named["ResourceConfig"]["InstanceType"] == "ml.g5.xlarge"


def test_training_types_are_those_of_the_service_model() -> None:
    job = service_model("sagemaker").operation_model("CreateTrainingJob").input_shape
    types = {
        each.removeprefix("ml.")
        for each in job.members["ResourceConfig"].members["InstanceType"].enum
    }
    with CatalogSnapshot.open() as snapshot:
        offers = snapshot.match(ResourceSpec(providers=("aws",)), misses=0).offers
    sold = {each.instance_type for each in offers}
    assert {each for each in sold if is_training_type(each)} == sold & types


def test_an_unknown_format_suggests_a_known_one(tmp_path: Path) -> None:
    assert "sagemaker" in list_formats()
    done = export("sagemakr", MINIMAL, tmp_path)
    assert done.exit_code == 2
    assert "sagemaker" in done.output


@pytest.mark.parametrize("name", ["zzz", "local"])
def test_an_error_lists_only_what_has_a_job_format(name: str, tmp_path: Path) -> None:
    done = export(name, MINIMAL, tmp_path)
    assert done.exit_code == 2
    listed = done.output.partition("expected one of ")[2].strip().split(", ")
    assert {"slurm", "sagemaker", "dockerfile"} <= set(listed)
    assert not {"aws", "local"} & set(listed)
