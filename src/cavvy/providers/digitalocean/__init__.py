"""DigitalOcean: each node is one Droplet that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="digitalocean",
    variables=("DIGITALOCEAN_ACCESS_TOKEN", "DIGITALOCEAN_TOKEN"),
    files=("~/.config/doctl/config.yaml",),
    names=("access-token",),
    made_at="https://cloud.digitalocean.com/account/api/tokens",
)

# The scopes of the endpoints that the provider calls, and the scopes that these require:
# https://docs.digitalocean.com/reference/api/scopes/droplet/create
SCOPES = (
    "droplet:create",
    "droplet:read",
    "droplet:delete",
    "actions:read",
    "image:read",
    "regions:read",
    "sizes:read",
)

_DOCS = "https://docs.digitalocean.com"
_API = f"{_DOCS}/reference/api"

MANIFEST = make_manifest(
    "digitalocean",
    "DigitalOcean",
    cloud="cavvy.providers.digitalocean.cloud:DigitalOceanCloud",
    machine="a Droplet",
    deletion=f"{_DOCS}/products/droplets/how-to/destroy/",
    rights=f"a token with the scopes {', '.join(SCOPES)}, and ssh_key:read if `ssh_keys` is set",
    unsupported={
        Feature.SPOT: _API,
        Feature.CAPACITY: _API,
        Feature.SELF_END: f"{_DOCS}/products/droplets/details/pricing",
        Feature.VOLUMES: f"{_DOCS}/products/volumes/",
        Feature.NETWORK: "Droplets are in the region's default VPC; another VPC cannot be "
        f"selected yet ({_DOCS}/products/networking/vpc/)",
        Feature.DISK: f"{_DOCS}/products/droplets/concepts/choosing-a-plan/",
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        regions_setting("regions"),
        project_text(
            "ssh_keys",
            "The ids or fingerprints of the account's SSH keys that Droplets accept, separated "
            "by commas. By default, Droplets accept no SSH key.",
        ),
        project_text(
            "image",
            "The image of Droplets, as a slug. The default is DigitalOcean's AI/ML-ready image for "
            "GPUs, and Ubuntu 24.04 for sizes without GPUs.",
        ),
        reach_setting(),
    ),
    endpoint="https://api.digitalocean.com/v2",
)
