"""The manifest of the Hyperstack provider."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import text
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="hyperstack",
    variables=("HYPERSTACK_API_KEY",),
    made_at="https://console.hyperstack.cloud/api-keys",
)

MANIFEST = make_manifest(
    "hyperstack",
    "Hyperstack",
    machine="a machine",
    rights="an API key of a user who may manage virtual machines, and list environments, key "
    "pairs, flavors and images",
    unsupported={
        Feature.SPOT: "Cavvy starts Hyperstack's on-demand machines only",
        Feature.CAPACITY: "Hyperstack reports whether a region has a flavor, but not how many "
        "machines are free",
        Feature.SELF_END: "only Hyperstack's API can delete a machine, and nodes get no API key, "
        "because a key may delete all machines of the account",
        Feature.VOLUMES: "Hyperstack's volumes cannot be attached yet; copy data from and to a "
        "bucket instead",
        Feature.NETWORK: "machines are in the network of their environment, and their network "
        "cannot be selected",
        Feature.DISK: "the size of the disk depends on the flavor",
        Feature.NOTICE: "Hyperstack's API describes no notice before a machine is reclaimed",
    },
    settings=(
        KEYS.setting(),
        text(
            "environments",
            "The account's environments to use, separated by commas. The default is the first "
            "environment of each region that has an SSH key.",
        ),
        text(
            "image",
            "The image of machines, by name. The default is the newest Ubuntu image with CUDA of "
            "the region.",
        ),
    ),
    of_projects=True,
    endpoint="https://infrahub-api.nexgencloud.com/v1",
)
