"""The manifest of the Vultr provider."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import text
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="vultr",
    variables=("VULTR_API_KEY",),
    files=("~/.vultr-cli.yaml",),
    names=("api-key",),
    made_at="https://my.vultr.com/settings/#settingsapi",
)

MANIFEST = make_manifest(
    "vultr",
    "Vultr",
    machine="an instance",
    rights="an API key of a user who may manage instances; a key has all rights of its user",
    unsupported={
        Feature.SPOT: "Cavvy starts Vultr's on-demand instances only",
        Feature.CAPACITY: "Vultr reports whether a region has a plan, but not how many instances "
        "are free",
        Feature.SELF_END: "Vultr bills an instance until its API deletes it, even if it is off "
        "(https://docs.vultr.com/support/platform/billing/how-am-i-billed-for-my-servers); the "
        "server deletes instances that are off",
        Feature.VOLUMES: "block storage cannot be attached yet; copy data from and to a bucket "
        "instead",
        Feature.NETWORK: "instances are not in a VPC, and their network cannot be selected",
        Feature.DISK: "the size of the disk depends on the plan",
        Feature.NOTICE: "Vultr's API describes no notice before an instance is reclaimed",
    },
    settings=(
        KEYS.setting(),
        text("regions", "The regions to use, separated by commas. The default is all regions."),
        text(
            "ssh_keys",
            "The ids of the account's SSH keys that instances accept, separated by commas. By "
            "default, instances accept none.",
        ),
        text(
            "os",
            "The name of the instances' operating system, as in Vultr's list. The system must "
            "support cloud-init.",
            "Ubuntu 24.04 LTS x64",
        ),
        reach_setting(),
    ),
    of_projects=True,
    endpoint="https://api.vultr.com/v2",
)
