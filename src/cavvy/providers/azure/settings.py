"""The settings that several providers on Azure have in common."""

from cavvy.providers.base import ProviderSetting, SettingKind
from cavvy.providers.settings import project_text, text

KEY_FILE = ProviderSetting(
    name="key_file",
    kind=SettingKind.KEY_FILE,
    consequence="The JSON file of a service principal with a secret, as `az ad sp create-for-rbac` "
    "prints it. By default, azure-identity searches for credentials in its usual order: "
    "environment variables, the machine's managed identity, and the login of `az`.",
).for_projects()
SUBSCRIPTION = project_text(
    "subscription",
    "The id of the subscription. The default is `AZURE_SUBSCRIPTION_ID` in the environment, or "
    "else the account's only subscription.",
)
RESOURCE_MANAGER = text(
    "endpoint",
    "The address of Azure Resource Manager, which differs in national clouds.",
    "https://management.azure.com",
)
PRICES = text(
    "prices_endpoint",
    "The address of Azure's public list of prices, or of a mirror, for servers that "
    "cannot reach Azure's list.",
    "https://prices.azure.com",
)
# where a provider on Azure Machine Learning runs
WORKSPACE = (
    KEY_FILE,
    SUBSCRIPTION,
    project_text("resource_group", "The resource group of the workspace. Required."),
    project_text("workspace", "The name of the workspace. Required."),
)
