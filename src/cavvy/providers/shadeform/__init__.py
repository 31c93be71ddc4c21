"""Shadeform: each node is an instance in one of Shadeform's clouds, and starts the agent on
boot."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="shadeform",
    variables=("SHADEFORM_API_KEY",),
    files=("~/.shadeform/api_key",),
    made_at="https://platform.shadeform.ai/settings/api",
)
_REFERENCE = "https://docs.shadeform.ai/api-reference/instances"

MANIFEST = make_manifest(
    "shadeform",
    "Shadeform",
    cloud="cavvy.providers.shadeform.cloud:ShadeformCloud",
    machine="an instance",
    deletion=f"{_REFERENCE}/instances-delete",
    rights=(
        "an API key of the account; Shadeform's documentation describes no narrower permissions"
    ),
    unsupported={
        Feature.CAPACITY: f"{_REFERENCE}/instances-types",
        Feature.SELF_END: f"{_REFERENCE}/instances-delete",
        Feature.VOLUMES: "https://docs.shadeform.ai/guides/attachvolume",
        Feature.NETWORK: "Shadeform's API does not report the speed of the network "
        f"({_REFERENCE}/instances-types)",
        Feature.DISK: f"{_REFERENCE}/instances-create",
        Feature.NOTICE: "Shadeform shows the deadline of a spot instance in its API only, not on "
        "the instance (https://docs.shadeform.ai/guides/spotinstances)",
    },
    settings=(
        KEYS.setting(),
        project_text(
            "clouds",
            "The clouds to use, by Shadeform's names, separated by commas, such as `hyperstack, "
            "lambdalabs`. The default is all clouds.",
        ),
        regions_setting("regions"),
        project_text(
            "os",
            "The operating system of instances, by Shadeform's name. By default, Shadeform "
            "chooses the system for the instance type.",
        ),
        reach_setting(),
    ),
    endpoint="https://api.shadeform.ai/v1",
)
