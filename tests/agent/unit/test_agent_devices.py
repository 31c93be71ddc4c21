"""A container gets the accelerators of its work, and the RDMA devices of its node."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from cavvy.agent.config import AgentConfig, ConfigFields
from cavvy.agent.images.devices import find_vendor, make_device_flags


def make_dev(folder: Path, files: Sequence[str]) -> str:
    """A stand-in for /dev with these files."""
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return str(folder)


def make_config(**fields: object) -> AgentConfig:
    base = {"gang": "g", "rank": 0, "address": "http://a", "token": "t", "home": "/h"}
    return AgentConfig(ConfigFields({**base, **fields}, "configuration"))


WHOLE = make_config()
NVIDIA = ["nvidiactl", "nvidia0"]


@pytest.mark.parametrize(
    ("engine", "files", "flags"),
    [
        ("/bin/docker", NVIDIA, ["--gpus", "all"]),
        ("/bin/podman", NVIDIA, ["--device", "nvidia.com/gpu=all"]),
        ("/bin/docker", ["neuron0", "neuron1"], ["--device", "@neuron0", "--device", "@neuron1"]),
        (
            "/bin/podman",
            ["kfd", "dri/card0"],
            ["--device", "@kfd", "--device", "@dri", "--group-add", "video"],
        ),
        ("/bin/docker", ["accel0", "accel1"], ["--device", "@accel0", "--device", "@accel1"]),
        (
            "/bin/docker",
            ["vfio/0", "vfio/vfio"],
            ["--device", "@vfio/0", "--device", "@vfio/vfio"],
        ),
        (
            "/bin/docker",
            ["accel/accel0", "dri/card0"],
            ["--device", "@accel/accel0", "--device", "@dri"],
        ),
        ("/bin/docker", ["vfio/vfio"], []),
        ("/bin/docker", [*NVIDIA, "vfio/3", "vfio/vfio"], ["--gpus", "all"]),
        ("/bin/docker", ["dri/card0", "null"], []),
        ("/bin/docker", ["infiniband/uverbs0"], ["--device", "@infiniband"]),
        (
            "/bin/docker",
            [*NVIDIA, "infiniband/uverbs0", "gdrdrv"],
            ["--gpus", "all", "--device", "@infiniband", "--device", "@gdrdrv"],
        ),
    ],
)
def test_work_on_a_whole_node_gets_all_of_its_devices(
    engine: str, files: Sequence[str], flags: Sequence[str], tmp_path: Path
) -> None:
    dev = make_dev(tmp_path, files)
    expected = [flag.replace("@", dev + "/") for flag in flags]
    assert make_device_flags(engine, WHOLE, dev) == expected


def test_work_on_part_of_a_node_gets_only_its_own_accelerators(tmp_path: Path) -> None:
    dev = make_dev(tmp_path, NVIDIA)
    some = make_config(devices=["GPU-a", "GPU-b"], vendor="nvidia")
    assert make_device_flags("docker", some, dev) == ["--gpus", '"device=GPU-a,GPU-b"']
    each = ["--device", "nvidia.com/gpu=GPU-a", "--device", "nvidia.com/gpu=GPU-b"]
    assert make_device_flags("podman", some, dev) == each
    assert make_device_flags("docker", make_config(devices=[]), dev) == []
    assert find_vendor(make_config(devices=[]), dev) == ""
