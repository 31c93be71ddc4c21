"""Images on a Slurm cluster: what the setting allows, and the step that Pyxis runs in the image."""

import subprocess

import pytest
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import ImageBuild, TaskSpec, Volume, VolumeKind
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.base import AgentEndpoint, GangSpec, Refused
from cavvy.providers.batch.system import ClusterQueue, JobFiles, JobOptions
from cavvy.providers.slurm import MANIFEST, with_containers
from cavvy.providers.slurm.script import (
    make_options,
    make_script,
    name_for_enroot,
    read_own_options,
)
from cavvy.spec.support import refusals

OFFER = Offer(
    provider="slurm", region="c", instance_type="cpu", vcpus=4, memory_mib=4096, rate=HourlyRate(0)
)


def gang(image: str | None) -> GangSpec:
    return make_gang_spec(
        OFFER,
        installation="1",
        nodes=2,
        agent_endpoint=AgentEndpoint(address="x", token="t"),
        image=image,
        volumes=(Volume(kind=VolumeKind.HOST, source="/scratch", path="/data", read_only=True),),
    )


@pytest.mark.parametrize(
    ("container", "refused"),
    [
        ("", {"image", "image.build", "image.login"}),
        ("apptainer", {"image.build"}),
        ("podman", set()),
        ("pyxis", {"image.build", "image.login"}),
    ],
)
def test_the_setting_says_what_can_be_honoured(container: str, refused: set[str]) -> None:
    unsupported = {
        str(feature): reason
        for feature, reason in with_containers(MANIFEST, container).unsupported.items()
    }
    named = TaskSpec(name="t", run="x", image="a:1", image_login="L")
    built = TaskSpec(name="t", run="x", image_build=ImageBuild(path="."))
    found = {
        objection.field for task in (named, built) for objection in refusals(task, unsupported)
    }
    assert found == refused


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(Refused, match="not one of apptainer"):
        with_containers(MANIFEST, "shifter")


def files(folder: str) -> JobFiles:
    return JobFiles(mark="cavvy:x", folder=folder, agent="/f/agent")


def test_pyxis_runs_the_step_in_the_image() -> None:
    text = make_script(
        gang("nvcr.io/nvidia/pytorch:24.01-py3"), files("/f/g 1"), "python3", pyxis=True
    )
    assert "CAVVY_BOXED=1 srun" in text
    assert " '--container-image=nvcr.io#nvidia/pytorch:24.01-py3'" in text
    assert " '--container-mounts=/f/agent:/f/agent,/f/g 1:/f/g 1,/scratch:/data:ro'" in text
    assert subprocess.run(["sh", "-n"], input=text, text=True, check=False).returncode == 0
    for plain in (
        make_script(gang(None), files("/f/g"), "python3", pyxis=True),
        make_script(gang("a:1"), files("/f/g"), "python3"),
    ):
        assert "container" not in plain
        assert "BOXED" not in plain


def test_names_for_enroot() -> None:
    assert name_for_enroot("python:3.12") == "python:3.12"
    assert name_for_enroot("team/image") == "team/image"
    assert name_for_enroot("localhost:5000/a/b") == "localhost:5000#a/b"


def test_options_of_a_task_are_those_of_sbatch() -> None:
    """Cavvy's own come last; those of the settings cannot be overridden."""
    asked = ["--constraint=ib", "--account=mine", "--ntasks-per-node=4", "--mem=3G", "--exclusive"]
    spec = replace(gang(None), options={"sbatch": asked})
    queue = ClusterQueue(name="main", nodes=(), longest=None, taken=False, reclaim_s=30)
    own = read_own_options(spec)
    found = make_options(spec, queue, files("/f"), JobOptions(account="lab"), "", own)
    assert [each for each in asked if each in found] == asked
    assert found.index("--account=lab") > found.index("--account=mine")
    assert not any(each.startswith(("--cpus-per-task", "--mem=4096")) for each in found)
    assert "--overlap" in make_script(spec, files("/f"), "python3")
    assert "--overlap" not in make_script(gang(None), files("/f"), "python3")


@pytest.mark.parametrize(
    "option",
    [
        "--output=/etc/passwd",
        "--uid=0",
        "--export-file=/x",
        "-M other",
        "--wrap=x",
        "--chdir=/",
        "account=x",
    ],
)
def test_a_task_cannot_name_files_or_users_to_sbatch(option: str) -> None:
    with pytest.raises(Refused, match="a task cannot set the option"):
        read_own_options(replace(gang(None), options={"sbatch": [option]}))


def test_a_partition_that_the_settings_do_not_allow_is_refused() -> None:
    spec = replace(gang(None), options={"sbatch": ["--partition=big"]})
    for allowed in ((), ["big", "small"]):
        assert read_own_options(spec, allowed) == {"partition": "--partition=big"}
    with pytest.raises(Refused, match="allows small"):
        read_own_options(spec, ["small"])
