"""Crusoe Cloud: each node is one virtual machine that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

_FILE, _MADE_AT = "~/.crusoe/config", "https://console.crusoecloud.com/security/tokens"
KEYS = ApiKeySource(
    provider="crusoe",
    variables=("CRUSOE_SECRET_KEY",),
    files=(_FILE,),
    names=("secret_key",),
    made_at=_MADE_AT,
)
KEY_IDS = ApiKeySource(  # the public part of a key, which is in the same file as the secret part
    provider="crusoe",
    variables=("CRUSOE_ACCESS_KEY_ID",),
    files=(_FILE,),
    names=("access_key_id",),
    made_at=_MADE_AT,
)
_API = "https://docs.crusoecloud.com/api"

MANIFEST = make_manifest(
    "crusoe",
    "Crusoe Cloud",
    cloud="cavvy.providers.crusoe.cloud:CrusoeCloud",
    machine="a machine",
    deletion=_API,
    rights="an API key of a user who may list the project's machines, create them and delete them",
    unsupported={
        Feature.SPOT: _API,
        Feature.VOLUMES: _API,
        Feature.NETWORK: "machines get no InfiniBand partition, and their network cannot be "
        f"selected ({_API})",
        Feature.DISK: _API,
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        project_text(
            "prices",
            "The price of one GPU in USD per hour, by name, such as `H100=3.90 A100=1.95`. "
            "Crusoe's API does not report prices: copy them from your agreement or from "
            "https://www.crusoe.ai/cloud/pricing. Machines with other GPUs are not offered.",
        ),
        project_text(
            "project", "The id of the project. The default is the account's only project."
        ),
        regions_setting("locations"),
        project_text(
            "ssh_key",
            "The public SSH key that machines accept, such as `ssh-ed25519 AAAA...`. Crusoe "
            "requires a key; with `reach_by_ssh`, the default is the server's own key.",
        ),
        project_text(
            "image",
            "The image of machines, as NAME:TAG. The default is Crusoe's newest Ubuntu image with "
            "drivers for the GPU.",
        ),
        reach_setting(),
    ),
    endpoint="https://api.crusoecloud.com/v1alpha5",
)
