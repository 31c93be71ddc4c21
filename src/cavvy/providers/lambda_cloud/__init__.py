"""Lambda Cloud: each node is one on-demand instance that starts the agent on boot.

The package is not named `lambda`, because that is a keyword of Python.
"""

from cavvy.providers.base import Feature
from cavvy.providers.settings import project_text, regions_setting
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
        Feature.SPOT: _API,
        Feature.CAPACITY: _API,
        Feature.SELF_END: f"{_DOCS}/billing",
        Feature.VOLUMES: f"{_DOCS}/filesystems",
        Feature.NETWORK: _API,
        Feature.DISK: _API,
        Feature.NOTICE: _API,
    },
    settings=(
        KEYS.setting(),
        project_text(
            "ssh_key",
            "The name of the account's SSH key that instances accept; Lambda requires a key. The "
            "default is the account's first key.",
        ),
        regions_setting("regions"),
        reach_setting(),
    ),
    endpoint="https://cloud.lambda.ai/api/v1",
)
