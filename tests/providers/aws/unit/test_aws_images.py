"""Each EC2 type boots an image that has drivers for its accelerators, or is refused."""

import pytest

from cavvy.providers.aws.shapes import InstanceShape, find_default, list_unknown, read_shape
from cavvy.providers.base import Refused


def make_shape(accelerator: str | None, name: str = "a.large") -> InstanceShape:
    return InstanceShape(type=name, vcpus=4, memory_mib=1024, accelerator=accelerator)


@pytest.mark.parametrize(
    ("accelerator", "image"),
    [
        (None, "al2023-ami-kernel-default-x86_64"),
        ("T4", "base-oss-nvidia-driver-gpu-ubuntu-22.04"),
        ("V100", "base-proprietary-nvidia-driver-amazon-linux-2"),
        ("M60", "base-proprietary-nvidia-driver-amazon-linux-2"),
        ("H100", "base-oss-nvidia-driver-gpu-ubuntu-22.04"),
        ("Trainium2", "neuron/dlami/base/ubuntu-24.04"),
        ("Inferentia2", "neuron/dlami/base/ubuntu-24.04"),
        ("VU47P", "al2023-ami-kernel-default-x86_64"),  # F2
    ],
)
def test_the_default_image_has_the_driver(accelerator: str | None, image: str) -> None:
    assert image in find_default(make_shape(accelerator))


@pytest.mark.parametrize("accelerator", ["Inferentia", "V520", "Gaudi", "U30", "VU9P"])
def test_types_without_an_image_with_drivers_are_refused(accelerator: str) -> None:
    with pytest.raises(Refused, match=f"no machine image with a driver for {accelerator} "):
        find_default(make_shape(accelerator))


def test_a_type_that_the_older_image_does_not_support_is_refused() -> None:
    with pytest.raises(Refused, match=r"no machine image with a driver for M60 \(g3.16xlarge\)"):
        find_default(make_shape("M60", "g3.16xlarge"))


@pytest.mark.parametrize(("name", "known"), [("Virtex UltraScale (VU47P)", True), ("VX9", False)])
def test_types_with_fpgas_are_offered_if_the_catalog_has_the_fpga(name: str, known: bool) -> None:
    """EC2 reports FPGAs as botocore's `FpgaInfo` describes; the names are Cavvy's assumption."""
    device = {
        "Name": name,
        "Manufacturer": "Xilinx",
        "Count": 2,
        "MemoryInfo": {"SizeInMiB": 81920},
    }
    told = {
        "InstanceType": "f2.12xlarge",
        "VCpuInfo": {"DefaultVCpus": 48},
        "MemoryInfo": {"SizeInMiB": 524288},
        "FpgaInfo": {"Fpgas": [device], "TotalFpgaMemoryInMiB": 163840},
    }
    shape = read_shape(told)
    assert list_unknown(told) == ([] if known else [name])
    assert (shape is not None) is known
    if shape is not None:
        assert (shape.accelerator, shape.accelerator_count) == ("VU47P", 2)
