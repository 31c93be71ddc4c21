"""Vultr: each node is one instance that starts the agent on boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="vultr",
    variables=("VULTR_API_KEY",),
    files=("~/.vultr-cli.yaml",),
    names=("api-key",),
    made_at="https://my.vultr.com/settings/#settingsapi",
)

_API = "https://www.vultr.com/api"
_DOCS = "https://docs.vultr.com"

MANIFEST = make_manifest(
    "vultr",
    "Vultr",
    cloud="cavvy.providers.vultr.cloud:VultrCloud",
    machine="an instance",
    deletion=f"{_API}/#operation/delete-instance",
    rights="an API key of a user who may manage instances; a key has all rights of its user",
    unsupported={
        Feature.SPOT: "Vultr lists prices of preemptible plans, but its API has no field with "
        f"which to request a preemptible instance ({_API}/#operation/create-instance)",
        Feature.CAPACITY: f"{_API}/#operation/list-plans",
        Feature.SELF_END: f"{_DOCS}/support/platform/billing/how-am-i-billed-for-my-servers",
        Feature.VOLUMES: f"{_DOCS}/reference/terraform/resources/block_storage",
        Feature.NETWORK: "instances are not in a VPC, because VPCs are not supported yet "
        f"({_DOCS}/products/network/vpc-networks)",
        Feature.DISK: f"{_API}/#operation/list-plans",
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        regions_setting("regions"),
        project_text(
            "ssh_keys",
            "The ids of the account's SSH keys that instances accept, separated by commas. By "
            "default, instances accept no key.",
        ),
        project_text(
            "os",
            "The name of the instances' operating system, as in Vultr's list. The system must "
            "support cloud-init.",
            "Ubuntu 24.04 LTS x64",
        ),
        reach_setting(),
    ),
    endpoint="https://api.vultr.com/v2",
)
