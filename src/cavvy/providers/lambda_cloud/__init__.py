"""Lambda Cloud: each node is one on-demand instance that starts the agent on boot.

The package is not named `lambda`, because that is a keyword of Python.
"""

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
_API = "https://docs.lambda.ai/api/cloud"
_DOCS = "https://docs.lambda.ai/public-cloud"

MANIFEST = make_manifest(
    "lambda",
    "Lambda Cloud",
    cloud="cavvy.providers.lambda_cloud.cloud:LambdaCloud",
    machine="an instance",
    deletion=f"{_DOCS}/on-demand/creating-managing-instances/",
    rights="an API key of the account; Lambda's API describes no narrower permissions",
    unsupported={
        Feature.SPOT: f"Lambda's API has no spot instances ({_API})",
        Feature.CAPACITY: "Lambda's API reports whether a region has an instance type, but not "
        f"how many instances are free ({_API})",
        Feature.SELF_END: "Lambda bills an instance until a request to the API terminates the "
        f"instance ({_DOCS}/billing). Cavvy gives nodes no API key for this request, because "
        "the key could terminate all instances of the account",
        Feature.VOLUMES: "Lambda's filesystems cannot be mounted yet; copy data from and to a "
        f"bucket instead ({_DOCS}/filesystems)",
        Feature.NETWORK: "Lambda's API neither reports nor selects the network of an instance "
        f"({_API})",
        Feature.DISK: f"the size of the disk depends on the instance type ({_API})",
        Feature.NOTICE: "Lambda's API describes no notice before an instance is reclaimed "
        f"({_API})",
    },
    settings=(
        KEYS.setting(),
        text(
            "ssh_key",
            "The name of the account's SSH key that instances accept; Lambda requires a key. The "
            "default is the account's first key.",
        ),
        text("regions", "The regions to use, separated by commas. The default is all regions."),
        reach_setting(),
    ),
    of_projects=("key_file", "ssh_key", "regions"),
    endpoint="https://cloud.lambda.ai/api/v1",
)
