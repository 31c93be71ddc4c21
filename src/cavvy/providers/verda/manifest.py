"""The manifest of the Verda provider."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import number, text
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

CLIENT_ID = "VERDA_CLIENT_ID"  # an environment variable
KEYS = ApiKeySource(
    provider="verda",
    variables=("VERDA_CLIENT_SECRET",),
    names=("client_secret",),
    made_at="https://console.verda.com (API credentials)",
)

MANIFEST = make_manifest(
    "verda",
    "Verda",
    machine="an instance",
    rights="API credentials of the project; their tokens have the scope cloud-api-v1",
    unsupported={
        Feature.SPOT: "Cavvy starts Verda's on-demand instances only",
        Feature.CAPACITY: "Verda reports whether a location has an instance type, but not how many "
        "instances are free",
        Feature.SELF_END: "only Verda's API can delete an instance, and nodes get no credentials, "
        "because these may delete all instances of the project",
        Feature.VOLUMES: "Verda's volumes cannot be attached yet; copy data from and to a bucket "
        "instead",
        Feature.NETWORK: "Verda's API neither reports nor selects the network of an instance",
        Feature.DISK: "all disks have the size of the setting `disk_gib`",
        Feature.NOTICE: "Verda's API describes no notice before an instance is reclaimed",
    },
    settings=(
        text(
            "client_id",
            f"The id of the API credentials. The default is `{CLIENT_ID}` in the environment.",
        ),
        KEYS.setting(),
        text("regions", "The locations to use, separated by commas. The default is all locations."),
        text(
            "ssh_keys",
            "The ids of the project's SSH keys that instances accept, separated by commas. By "
            "default, instances accept none.",
        ),
        text(
            "image",
            "The image of instances. The default is the newest Ubuntu image that Verda lists for "
            "the instance type, with CUDA for GPUs.",
        ),
        number(
            "disk_gib",
            "The size of the disk of an instance. Verda bills disks apart from instances.",
            unit="GiB",
            default=100,
            minimum=50,
            whole=True,
        ),
        reach_setting(),
    ),
    of_projects=True,
    endpoint="https://api.verda.com/v1",
)
