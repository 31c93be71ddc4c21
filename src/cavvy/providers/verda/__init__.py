"""Verda: each node is one instance that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_number, project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

CLIENT_ID = "VERDA_CLIENT_ID"  # an environment variable
KEYS = ApiKeySource(
    provider="verda",
    variables=("VERDA_CLIENT_SECRET",),
    names=("client_secret",),
    made_at="https://console.verda.com (API credentials)",
)
_API = "https://api.verda.com/v1/docs"
_ENDS = "https://docs.verda.com/cpu-and-gpu-instances/shutdown-hibernate-and-delete/"

MANIFEST = make_manifest(
    "verda",
    "Verda",
    cloud="cavvy.providers.verda.cloud:VerdaCloud",
    machine="an instance",
    deletion=_ENDS,
    rights="API credentials of the project; their tokens have the scope cloud-api-v1",
    unsupported={
        Feature.CAPACITY: _API,
        Feature.SELF_END: _ENDS,
        Feature.VOLUMES: "https://docs.verda.com/storage/block-volumes/attaching-a-block-volume/",
        Feature.NETWORK: _API,
        Feature.DISK: "all disks have the size of the setting `disk_gib`; a size for one task is "
        f"not supported yet ({_API})",
        Feature.NOTICE: _API,
    },
    settings=(
        project_text(
            "client_id",
            f"The id of the API credentials. The default is `{CLIENT_ID}` in the environment.",
        ),
        KEYS.setting(),
        regions_setting("locations"),
        project_text(
            "ssh_keys",
            "The ids of the project's SSH keys that instances accept, separated by commas. By "
            "default, instances accept no key.",
        ),
        project_text(
            "image",
            "The image of instances. The default is the newest Ubuntu image that Verda lists for "
            "the instance type, with CUDA for GPUs.",
        ),
        project_number(
            "disk_gib",
            "The size of the disk of an instance. Verda bills disks separately from instances.",
            unit="GiB",
            default=100,
            minimum=50,
            whole=True,
        ),
        reach_setting(),
    ),
    endpoint="https://api.verda.com/v1",
)
