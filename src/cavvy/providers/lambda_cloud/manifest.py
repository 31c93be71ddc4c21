"""The manifest of the Lambda Cloud provider."""

from cavvy.providers.base import Feature
from cavvy.providers.settings import text
from cavvy.providers.vm.abilities import make_manifest, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="lambda",
    variables=("LAMBDA_API_KEY",),
    files=("~/.lambda_cloud/lambda_keys",),
    made_at="https://cloud.lambda.ai/api-keys",
)

MANIFEST = make_manifest(
    "lambda",
    "Lambda Cloud",
    machine="an instance",
    rights="an API key of the account; Lambda's API describes no narrower rights",
    unsupported={
        Feature.SPOT: "Lambda rents on-demand instances only",
        Feature.CAPACITY: "Lambda reports whether a region has an instance type, but not how many "
        "instances are free",
        Feature.SELF_END: "Lambda bills an instance until its API terminates it, and nodes get no "
        "API key, because a key may terminate all instances of the account",
        Feature.VOLUMES: "Lambda's filesystems cannot be mounted yet; copy data from and to a "
        "bucket instead",
        Feature.NETWORK: "Lambda's API neither reports nor selects the network of an instance",
        Feature.DISK: "the size of the disk depends on the instance type",
        Feature.NOTICE: "Lambda's API describes no notice before an instance is reclaimed",
    },
    settings=(
        KEYS.setting(),
        text(
            "ssh_key",
            "The name of the account's SSH key that instances accept; Lambda requires one. The "
            "default is the account's first key.",
        ),
        text("regions", "The regions to use, separated by commas. The default is all regions."),
        reach_setting(),
    ),
    of_projects=True,
    endpoint="https://cloud.lambda.ai/api/v1",
)
