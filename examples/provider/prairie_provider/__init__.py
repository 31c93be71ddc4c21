"""The Prairie (a made-up cloud): each node is one server that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="prairie",
    variables=("PRAIRIE_API_KEY",),
    files=("~/.prairie/key",),
    made_at="https://prairie.example/keys",
)

_API = "https://prairie.example/api"

MANIFEST = make_manifest(
    "prairie",
    "the Prairie",
    cloud="prairie_provider.cloud:PrairieCloud",
    machine="a server",
    deletion=f"{_API}#delete-server",
    rights="an API key that may read plans and manage servers",
    unsupported={
        Feature.SPOT: f"{_API}#plans",
        Feature.CAPACITY: f"{_API}#plans",
        Feature.SELF_END: f"{_API}#servers",
        Feature.VOLUMES: f"the Prairie has no volumes ({_API})",
        Feature.NETWORK: f"{_API}#servers",
        Feature.DISK: f"{_API}#plans",
        Feature.NOTICE: f"servers are never reclaimed ({_API})",
    },
    settings=(
        KEYS.setting(),
        regions_setting("regions"),
        project_text(
            "ranch", "The ranch to which the servers belong. The default is the key's own."
        ).for_setup(),
    ),
    docs="https://prairie.example/cavvy",
    endpoint="https://api.prairie.example/v1",
)
