"""Paperspace: each node is one machine that starts the agent on its first boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_number, project_text
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="paperspace",
    variables=("PAPERSPACE_API_KEY",),
    made_at="https://console.paperspace.com/settings/apikeys",
)
_API = "https://docs.digitalocean.com/reference/paperspace/api-reference"

MANIFEST = make_manifest(
    "paperspace",
    "Paperspace",
    cloud="cavvy.providers.paperspace.cloud:PaperspaceCloud",
    layer="cavvy.providers.vm.provider:make_provider",
    machine="a machine",
    deletion="https://docs.digitalocean.com/products/paperspace/machines/how-to/deactivate/",
    rights="an API key of the team; Paperspace describes no narrower permissions",
    unsupported={
        Feature.SPOT: f"Paperspace sells machines on demand only ({_API}/machine)",
        Feature.CAPACITY: "Paperspace reports which templates run on a machine type, but not "
        f"whether machines are free ({_API}/os-templates)",
        Feature.SELF_END: "Paperspace bills the disk of a machine until the API deletes the disk "
        f"({_API}/machine), and nodes get no API key, because a key may delete all machines of "
        "the team; the server deletes machines that are off",
        Feature.VOLUMES: "https://docs.digitalocean.com/reference/paperspace/pspace/commands/"
        "shared-drive",
        Feature.NETWORK: f"the API does not report the speed of the network ({_API}/machine)",
        Feature.DISK: "all disks have the size of the setting `disk_gb`; a size for one task is "
        f"not supported yet ({_API}/machine)",
        Feature.NOTICE: f"{_API}/machine-events",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "template",
            "The id of the template of machines, such as tkni3aa4. By default, machines "
            "with GPUs boot ML-in-a-Box, and other machines boot the newest Ubuntu template that "
            "Paperspace lists for their type.",
        ),
        project_text(
            "network",
            "The id of the private network that machines join. The network must be in NY2. Jobs "
            "with several nodes need a private network, because machines outside a private network "
            "cannot reach each other. By default, machines are in no private network.",
        ),
        project_number(
            "disk_gb",
            "The size of the disk of a machine, rounded up to 50, 100, 250, 500, 1000 or 2000 "
            "GB. Paperspace bills disks separately from machines.",
            unit="GB",
            default=100,
            minimum=50,
            whole=True,
        ),
        reach_setting(),
    ),
    endpoint="https://api.paperspace.com/v1",
)
