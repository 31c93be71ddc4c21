"""The settings that every provider on AWS has in common."""

from cavvy.providers.settings import text

REGIONS = text(
    "regions",
    "The regions to use, separated by commas. The default is the region of the AWS configuration.",
)
ACCOUNT = (
    text(
        "profile",
        "The profile of `~/.aws` to use. By default, boto3 searches for credentials in its usual "
        "order.",
    ),
    text(
        "endpoint",
        "The address for all AWS calls, such as a private endpoint. The default is AWS's own "
        "address.",
    ),
)
