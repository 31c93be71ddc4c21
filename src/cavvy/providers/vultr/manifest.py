"""The manifest of the Vultr provider."""

from datetime import timedelta

from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import text
from cavvy.providers.vm.abilities import ABILITIES, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="vultr",
    variables=("VULTR_API_KEY",),
    files=("~/.vultr-cli.yaml",),
    names=("api-key",),
    made_at="https://my.vultr.com/settings/#settingsapi",
)

MANIFEST = Manifest(
    name="vultr",
    title="Vultr",
    docs="docs/guides/vultr.md",
    abilities=ABILITIES,
    visibility_delay=timedelta(minutes=1),
    unsupported={
        Feature.SPOT: "Cavvy starts Vultr's on-demand instances only",
        Feature.CAPACITY: "Vultr reports whether a region has a plan, but not how many",
        Feature.SELF_END: "Vultr bills an instance until its API deletes it, even if it is off "
        "(https://docs.vultr.com/support/platform/billing/how-am-i-billed-for-my-servers); the "
        "server deletes instances that are off",
        Feature.VOLUMES: "block storage cannot be attached yet; copy from and to a bucket",
        Feature.NETWORK: "instances get no VPC, and their network cannot be selected",
        Feature.DISK: "the size of the disk depends on the plan",
        Feature.NOTICE: "Vultr's API describes no notice before an instance is reclaimed",
        Feature.RESULTS: "an instance ends with its disk. If the server is away when work has "
        "ended, the results go to the bucket of `checkpoint.storage` or `server.results_url`; with "
        "no bucket, the instance waits until its lease ends",
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
            "The operating system of instances, by the name in Vultr's list. It must run the user "
            "data with cloud-init.",
            "Ubuntu 24.04 LTS x64",
        ),
        reach_setting(),
        text("endpoint", "The address of the API.", "https://api.vultr.com/v2"),
    ),
)
