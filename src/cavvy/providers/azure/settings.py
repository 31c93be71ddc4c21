"""The setting that every provider on Azure has in common."""

from cavvy.providers.base import ProviderSetting, SettingKind

KEY_FILE = ProviderSetting(
    name="key_file",
    kind=SettingKind.KEY_FILE,
    consequence="The JSON file of a service principal with a secret, as `az ad sp create-for-rbac` "
    "prints it. By default, azure-identity searches for credentials in its usual order: variables "
    "of the environment, the identity of the machine, and the login of `az`.",
)
