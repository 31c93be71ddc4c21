"""The settings that all providers on AWS share."""

from cavvy.providers.base import ProviderSetting, SettingKind
from cavvy.providers.settings import project_text, text

REGIONS = project_text(
    "regions",
    "The regions to use, separated by commas. The default is the region of the AWS configuration.",
)
ACCOUNT = (
    ProviderSetting(
        name="key_file",
        kind=SettingKind.KEY_FILE,
        consequence="A file with lines as in `~/.aws/credentials`: `aws_access_key_id "
        "= …`, `aws_secret_access_key = …` and, for temporary keys, "
        "`aws_session_token = …`. Other lines of the file are not read. By default, "
        "`profile` applies.",
    ).for_projects(),
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
