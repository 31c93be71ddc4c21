"""Vast.ai: each node is one container, on which the server starts the agent by SSH."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_flag, project_number, project_text
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="vast",
    variables=("VAST_API_KEY",),
    files=("~/.config/vastai/vast_api_key", "~/.vast_api_key"),
    names=("vast_api_key",),
    made_at="https://cloud.vast.ai/manage-keys/",
)
_CONTAINER = (
    "an instance is a container, and Vast.ai supports no containers inside it "
    "(https://docs.vast.ai/guides/instances/manage-instances)"
)

MANIFEST = make_manifest(
    "vast",
    "Vast.ai",
    cloud="cavvy.providers.vast.cloud:VastCloud",
    machine="an instance",
    deletion="https://docs.vast.ai/guides/instances/manage-instances",
    rights="an API key with the permissions misc, instance_read and instance_write",
    unsupported={
        Feature.GANG: "instances share no network: each instance has a few ports of a public "
        "address that several instances share "
        "(https://docs.vast.ai/guides/instances/connect/networking)",
        Feature.IMAGE: f"{_CONTAINER}; the setting `image` selects the image of all instances",
        Feature.BUILD: _CONTAINER,
        Feature.LOGIN: f"{_CONTAINER}; the image of the setting `image` must be public",
        Feature.CAPACITY: "the offers of one computer overlap: a computer with 8 GPUs is also "
        "offered with 1, 2 and 4 GPUs (https://docs.vast.ai/api-reference/search/search-offers)",
        Feature.SELF_END: "the server deletes instances that have stopped, because Vast.ai bills "
        "the disk of an instance until the instance is deleted "
        "(https://docs.vast.ai/guides/instances/pricing)",
        Feature.VOLUMES: "Vast.ai's volumes belong to one computer "
        "(https://docs.vast.ai/guides/instances/storage/volumes); copy data from and to a bucket "
        "instead",
        Feature.MOUNTS: "an instance is a container without access to folders of its host or to "
        "NFS (https://docs.vast.ai/guides/reference/faq/security)",
        Feature.NETWORK: "instances share no network "
        "(https://docs.vast.ai/guides/instances/connect/networking)",
        Feature.DISK: "the setting `disk_gib` selects the size of the disk for all instances; a "
        "size for one task is not supported yet "
        "(https://docs.vast.ai/api-reference/instances/create-instance)",
        Feature.NOTICE: "Vast.ai describes no notice before an interruptible instance is paused "
        "(https://docs.vast.ai/guides/instances/choosing/instance-types)",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "regions",
            "The countries to use, as two-letter codes separated by commas, such as `US, SE`. The "
            "default is all countries.",
        ),
        project_flag(
            "community",
            "Also use computers outside of data centers. The owners of these computers can read "
            "and change everything that runs on them: data, code and secrets. By default, only "
            "computers that Vast.ai lists as being in data centers are used.",
        ),
        project_text(
            "image",
            "The public image of instances. Vast.ai starts an SSH server in the container instead "
            "of the image's own program.",
            "vastai/base-image:@vastai-automatic-tag",
        ),
        project_text(
            "cuda",
            'The lowest CUDA version that the driver of a computer must support, such as "12.8". '
            "If this is empty, any computer is used.",
        ),
        project_number(
            "disk_gib",
            "The size of an instance's disk.",
            unit="GB",
            default=50,
            minimum=8,
            whole=True,
        ),
        project_number(
            "gpu_vcpus",
            "Only computers with at least this number of vCPUs for each GPU are used.",
            unit="vCPUs",
            default=4,
            minimum=1,
            whole=True,
        ),
        project_number(
            "gpu_memory_gib",
            "Only computers with at least this memory for each GPU are used.",
            unit="GB",
            default=16,
            minimum=1,
            whole=True,
        ),
        project_number(
            "bid_percent",
            "The bid for an interruptible instance, in percent of the lowest bid that Vast.ai "
            "accepts at the start. Users who bid more get the GPUs, so an instance with a "
            "higher bid is interrupted less often and costs more.",
            unit="percent",
            default=110,
            minimum=100,
            whole=True,
        ),
    ),
    endpoint="https://console.vast.ai/api",
)
