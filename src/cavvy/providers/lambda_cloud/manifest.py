"""The manifest of the Lambda Cloud provider."""

from datetime import timedelta

from cavvy.providers.base import Feature, Manifest
from cavvy.providers.settings import text
from cavvy.providers.vm.abilities import ABILITIES, reach_setting
from cavvy.providers.vm.keys import ApiKeySource

KEYS = ApiKeySource(
    provider="lambda",
    variables=("LAMBDA_API_KEY",),
    files=("~/.lambda_cloud/lambda_keys",),
    made_at="https://cloud.lambda.ai/api-keys",
)

MANIFEST = Manifest(
    name="lambda",
    title="Lambda Cloud",
    docs="docs/guides/lambda.md",
    abilities=ABILITIES,
    visibility_delay=timedelta(minutes=1),
    rights="an API key of the account; Lambda's API describes no narrower rights",
    unsupported={
        Feature.SPOT: "Lambda rents on-demand instances only",
        Feature.CAPACITY: "Lambda reports whether a region has an instance type, but not how many",
        Feature.SELF_END: "Lambda bills an instance until its API terminates it, and an API key "
        "that could do so may terminate all instances of the account, so nodes get none",
        Feature.VOLUMES: "Lambda's filesystems cannot be mounted yet; copy from and to a bucket",
        Feature.NETWORK: "Lambda's API neither reports nor selects the network of an instance",
        Feature.DISK: "the size of the disk depends on the instance type",
        Feature.NOTICE: "Lambda's API describes no notice before an instance is reclaimed",
        Feature.RESULTS: "an instance ends with its disk. If the server is away when work has "
        "ended, the results go to the bucket of `checkpoint.storage` or `server.results_url`; with "
        "no bucket, the instance waits until its lease ends",
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
        text("endpoint", "The address of the API.", "https://cloud.lambda.ai/api/v1"),
    ),
)
