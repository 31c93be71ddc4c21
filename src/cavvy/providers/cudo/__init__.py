"""CUDO Compute: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_number, project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="cudo",
    variables=("CUDO_API_KEY",),
    made_at="https://compute.cudo.org (API keys)",
)
_REFERENCE = "https://www.cudocompute.com/docs/api/virtual-machines"
_TYPES = f"{_REFERENCE}/get-a-virtual-machine-type"

MANIFEST = make_manifest(
    "cudo",
    "CUDO Compute",
    cloud="cavvy.providers.cudo.cloud:CudoCloud",
    machine="a machine",
    deletion=_REFERENCE,
    rights="an API key of a user who may read the project and manage its virtual machines",
    unsupported={
        Feature.SPOT: f"CUDO sells on-demand and committed machines only ({_TYPES})",
        Feature.CAPACITY: "CUDO reports the free GPUs, vCPUs and memory, but not how many machines "
        f"fit ({_TYPES})",
        Feature.SELF_END: "a machine can be terminated only with an API key "
        f"({_REFERENCE}/create-a-virtual-machine); nodes get no key, because with a key, a node "
        "could terminate all machines of the project",
        Feature.VOLUMES: f"{_REFERENCE}/create-a-virtual-machine",
        Feature.NETWORK: f"CUDO's API does not report the speed of the network ({_TYPES})",
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all machines "
        f"({_REFERENCE}/create-a-virtual-machine)",
        Feature.NOTICE: f"{_REFERENCE}/get-a-virtual-machine",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "project", "The project of the machines. The default is the account's only project."
        ),
        regions_setting("data centers"),
        project_text(
            "image",
            "The public image of machines, by id. The default is the newest Ubuntu image with "
            "NVIDIA's driver.",
        ),
        project_number(
            "gpu_vcpus",
            "The number of vCPUs per GPU, unless the machine type requires more or fewer.",
            unit="vCPUs",
            default=8,
            minimum=1,
            whole=True,
        ),
        project_number(
            "gpu_memory_gib",
            "The memory per GPU, unless the machine type requires more or less.",
            unit="GiB",
            default=32,
            minimum=1,
            whole=True,
        ),
        project_number(
            "disk_gib",
            "The size of a machine's disk.",
            unit="GiB",
            default=100,
            minimum=10,
            whole=True,
        ),
        reach_setting(),
    ),
    endpoint="https://rest.compute.cudo.org/v1",
)
