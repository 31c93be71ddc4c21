"""The settings that all providers on Google Cloud share."""

from cavvy.providers.base import ProviderSetting, SettingKind
from cavvy.providers.settings import project_text

KEY_FILE = ProviderSetting(
    name="key_file",
    kind=SettingKind.KEY_FILE,
    consequence="The JSON file with the key of a service account. By default, Google's "
    "library searches for Application Default Credentials: the file in "
    "`$GOOGLE_APPLICATION_CREDENTIALS`, the login of `gcloud auth application-default "
    "login`, then the service account of the machine on which the server runs.",
).for_projects()


def project(owned: str) -> ProviderSetting:
    """Return the setting for the project of what a provider rents, such as "machines"."""
    default = "The default is the project of the credentials."
    return project_text("project", f"The project of the {owned}. {default}")
