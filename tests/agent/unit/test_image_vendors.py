"""Which packages and images run on whose accelerators, at plan time and on the node."""

from pathlib import Path

import pytest
from tests.planner.unit.test_planner_candidates import FREE

from cavvy.agent.images import compatibility
from cavvy.agent.images.devices import find_certain_vendor
from cavvy.agent.images.vendors import find_image_vendor, find_packages, find_required
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.planner.objections import explain_software

INDEX = "https://download.pytorch.org/whl"


def explain(accelerator: str, **task: str) -> str:
    offer = replace(FREE, accelerator=accelerator, accelerator_count=1)
    return str(explain_software(TaskSpec(name="a", run="true", **task), offer) or "")


@pytest.mark.parametrize(
    ("setup", "fits", "refused"),
    [
        (f"pip install torch --index-url {INDEX}/cu124", "H100", ("MI300X", "Gaudi3", "TPU-v5e")),
        ("pip install 'torch==2.6.0+cu124' numpy", "A10G", ("MI300X", "Trainium", "Inferentia2")),
        ("python3 -m pip install -U 'jax[cuda12]'", "T4", ("MI300X", "TPU-v6e")),
        ("uv pip install cupy-cuda12x", "L4", ("MI210",)),
        (f"pip3 install torch --index-url {INDEX}/rocm6.2.4", "MI300X", ("H100", "Trainium")),
        ("uv add torch==2.6.0+rocm6.2.4", "MI250X", ("A100",)),
        ("pip install tensorflow-rocm", "MI100", ("V100", "Gaudi2")),
        ("pip install 'jax[tpu]'", "TPU-v5e", ("H100", "MI300X")),
        ("pip install neuronx-cc torch-neuronx", "Trainium2", ("H100", "MI300X", "Inferentia")),
        ("pip install torch-neuronx", "Inferentia2", ("Inferentia",)),
        ("pip install torch-neuron neuron-cc[tensorflow]", "Inferentia", ("Trainium", "A100")),
        ("pip install habana-torch-plugin", "Gaudi3", ("H100", "MI300X")),
    ],
)
def test_packages_of_one_vendor_are_refused_elsewhere(
    setup: str, fits: str, refused: tuple[str, ...]
) -> None:
    assert explain(fits, setup=setup) == ""
    for accelerator in refused:
        assert explain(accelerator, setup=setup).startswith(f"setup: {accelerator}: ")


@pytest.mark.parametrize(
    "setup",
    [
        "pip install torch numpy",
        "pip install bitsandbytes flash-attn deepspeed vllm",
        "# pip install torch==2.6.0+cu124",
        "pip install numpy  # or torch==2.6.0+cu124",
        "echo torch==2.6.0+cu124",
        "pip install -e tensorrt_plugin",
        f"if [ -e /dev/nvidiactl ]; then pip install torch --index-url {INDEX}/cu124; fi",
        f"command -v nvidia-smi && pip install torch --index-url {INDEX}/cu124",
        f"pip install torch --index-url {INDEX}/cu124 || pip install torch",
        f"pip install torch --index-url {INDEX}/cpu",
        f"pip install torch==2.6.0+rocm6.2.4\npip install --extra-index-url {INDEX}/cu124 x",
        "pip install torch-neuron torch-neuronx cupy-cuda12x cupy-rocm-5-0 'jax[tpu]' optimum-habana",
    ],
)
def test_setups_that_fit_any_vendor_or_choose_one_are_not_refused(setup: str) -> None:
    assert explain("MI300X", setup=setup) == ""


def test_machines_without_accelerators_run_any_packages() -> None:
    task = TaskSpec(name="a", run="true", setup="pip install torch==2.6.0+cu124")
    assert explain_software(task, FREE) is None
    assert explain_software(task, replace(FREE, accelerator="VU47P", accelerator_count=1)) is None


@pytest.mark.parametrize(
    ("image", "vendor"),
    [
        ("docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04", "nvidia"),
        ("nvcr.io/nvidia/pytorch:25.01-py3", "nvidia"),
        ("pytorch/pytorch:2.6.0-cuda12.4-cudnn9-runtime", "nvidia"),
        ("763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.6-gpu-cu126", "nvidia"),
        ("rocm/pytorch:rocm6.4.1_ubuntu24.04_py3.12_pytorch_release_2.6.0", "amd"),
        ("ghcr.io/huggingface/text-generation-inference:3.2.3-rocm", "amd"),
        ("public.ecr.aws/neuron/pytorch-training-neuronx:2.7.0-neuronx-py310", "aws"),
        ("vllm/vllm-tpu:nightly", "google"),
        ("vault.habana.ai/gaudi-docker/1.20.0/ubuntu22.04/habanalabs/pytorch:latest", "intel"),
        ("docker.io/library/python:3.12-slim", None),
        ("pytorch/pytorch:latest", None),
        ("example.org/circuits:v1", None),
        ("example.org/accu:acu12-focus99", None),
    ],
)
def test_image_names_tell_the_vendor(image: str, vendor: str | None) -> None:
    assert find_image_vendor(image) == vendor


def test_an_image_of_another_vendor_is_refused() -> None:
    assert "built for NVIDIA accelerators" in explain("MI300X", image="nvidia/cuda:12.8.1-base")
    assert "built for AMD accelerators" in explain("H100", image="rocm/pytorch:latest")
    assert explain("MI300X", image="rocm/pytorch:latest") == ""
    assert explain("MI300X", image="python:3.12-slim") == ""


def test_requirement_lines_with_conditions_do_not_count() -> None:
    lines = "torch==2.6.0+cu124 ; platform_machine == 'x86_64'\n--extra-index-url " + INDEX
    assert find_required(lines) == {}
    assert find_required("numpy\ntorch==2.6.0+cu124  # pinned\n") == {
        "nvidia": ["torch==2.6.0+cu124"]
    }
    assert find_packages("pip install -r requirements.txt") == {}


@pytest.mark.parametrize(
    ("name", "driver", "told"),
    [
        ("torch==2.6.0+rocm6.2.4", "6.3.6", None),
        ("torch==2.6.0+rocm6.2.4", "6.2.4", "ROCm 6.2 needs AMD's driver amdgpu 6.3.6"),
        ("rocm/dev-ubuntu-24.04:6.4", "6.3.6", "ROCm 6.4 needs AMD's driver amdgpu 6.7.0"),
        ("rocm/pytorch:rocm7.0_ubuntu24.04", "6.7.0", "6.8.5 or newer; this node has 6.7.0"),
        ("rocm/pytorch:rocm7.2_ubuntu24.04", "6.14.14", None),
        ("torch==2.1.0+rocm5.6", "6.12.12", None),
        ("rocm/pytorch:latest", "6.3.6", None),
        ("torch==2.6.0+rocm6.2.4", None, None),
        ("torch==2.6.0+rocm6.2.4", "unknown", None),
    ],
)
def test_rocm_and_its_driver(name: str, driver: str | None, told: str | None) -> None:
    objection = compatibility.find_rocm_objection([name], driver)
    assert objection is None if told is None else told in str(objection)


@pytest.mark.parametrize(
    ("driver", "inf1", "refused"),
    [
        ("2.24.13.0", True, False),
        ("2.25.4.0", True, True),
        ("2.31.0.0", False, False),
        ("2.31.0.0", None, False),
        (None, True, False),
    ],
)
def test_neuron_drivers_that_dropped_inf1(
    driver: str | None, inf1: bool | None, refused: bool
) -> None:
    assert (compatibility.find_neuron_objection(driver, inf1=inf1) is not None) is refused
    assert compatibility.is_inf1("inf1.xlarge") is True
    assert compatibility.is_inf1("trn1.32xlarge") is compatibility.is_inf1("inf2.8xlarge") is False
    assert compatibility.is_inf1("ThinkPad") is None


class _Node:
    """The fields of the agent's configuration that the check reads."""

    def __init__(self, vendor: str = "", devices: list[str] | None = None) -> None:
        self.vendor, self.devices = vendor, devices


class _Work:
    def __init__(self, setup: str | None = None, image: str | None = None, count: int = 1) -> None:
        self.setup, self.image, self.build, self.accelerators_per_node = setup, image, None, count


def find(node: _Node, work: _Work, folder: Path) -> str | None:
    return compatibility.find_misfit(node, work, str(folder))  # type: ignore[arg-type]


def test_the_node_reads_requirement_files(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("numpy\ntorch==2.6.0+cu124\n")
    work = _Work("pip install -r ./requirements.txt")
    assert "torch==2.6.0+cu124 needs NVIDIA accelerators" in str(find(_Node("amd"), work, tmp_path))
    assert find(_Node("nvidia"), work, tmp_path) is None
    assert find(_Node("amd", []), work, tmp_path) is None
    assert find(_Node("amd"), _Work(work.setup, count=0), tmp_path) is None
    assert find(_Node("amd"), _Work("pip install -r none.txt -r /etc/passwd"), tmp_path) is None


def test_the_node_compares_rocm_and_neuron_with_its_drivers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name, text in (
        (compatibility, "AMD_DRIVER", "6.3.6"),
        (compatibility, "NEURON_DRIVER", "2.31.0.0"),
        (compatibility, "MACHINE", "inf1.2xlarge"),
    ):
        path = tmp_path / f"{module.__name__}.{name}"
        path.write_text(text + "\n")
        monkeypatch.setattr(module, name, str(path))
    image = _Work(image="rocm/pytorch:rocm6.4.1_ubuntu24.04")
    assert "needs AMD's driver amdgpu 6.7.0" in str(find(_Node("amd"), image, tmp_path))
    wheel = _Work("pip install torch==2.7.1+rocm6.3")
    assert "this node has 6.3.6" in str(find(_Node("amd"), wheel, tmp_path))
    assert "built for AMD accelerators" in str(find(_Node("nvidia"), image, tmp_path))
    assert "Neuron driver 2.31.0.0" in str(find(_Node("aws"), _Work(), tmp_path))
    second = _Work("pip install torch-neuronx")
    assert "torch-neuronx does not run on Inf1" in str(find(_Node("aws"), second, tmp_path))


def test_a_node_with_devices_of_two_vendors_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    assert find_certain_vendor(_Node(), str(tmp_path)) == "amd"  # type: ignore[arg-type]
    (tmp_path / "nvidiactl").touch()
    assert find_certain_vendor(_Node(), str(tmp_path)) == ""  # type: ignore[arg-type]
    assert find_certain_vendor(_Node("aws")) == "aws"  # type: ignore[arg-type]
