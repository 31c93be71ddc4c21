"""Hyperstack: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="hyperstack",
    variables=("HYPERSTACK_API_KEY",),
    made_at="https://console.hyperstack.cloud/api-keys",
)
_DOCS = "https://docs.hyperstack.cloud/docs"
_API = f"{_DOCS}/api-reference/virtual-machine"

MANIFEST = make_manifest(
    "hyperstack",
    "Hyperstack",
    cloud="cavvy.providers.hyperstack.cloud:HyperstackCloud",
    machine="a machine",
    deletion=_API,
    rights="an API key of a user who may manage virtual machines, and list environments, key "
    "pairs, flavors and images",
    unsupported={
        Feature.CAPACITY: "Hyperstack reports how many GPUs of a model are free in a region "
        f"({_DOCS}/api-reference/core-resources/stocks); Cavvy does not read this number yet, but "
        "only whether a flavor is in stock",
        Feature.SELF_END: _API,
        Feature.VOLUMES: f"{_DOCS}/storage/volumes/creating-a-volume/",
        Feature.NETWORK: "machines are in the network of their environment, and the type of the "
        f"network depends on the flavor and the region ({_DOCS}/network/network-types/)",
        Feature.DISK: f"{_DOCS}/hardware/flavors/",
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        project_text(
            "environments",
            "The account's environments to use, separated by commas. In each region, the "
            "default is the first environment that has an SSH key.",
        ),
        project_text(
            "image",
            "The image of machines, by name. The default is the region's newest Ubuntu image "
            "with CUDA.",
        ),
    ),
    endpoint="https://infrahub-api.nexgencloud.com/v1",
)
