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

ZONES = project_text("zones", "The zones to use, separated by commas. The default is all zones.")
# of endpoints and notebooks of Vertex AI
MACHINES = project_text(
    "machines",
    "Patterns of the machine types to offer, separated by commas, such as `g2-*, "
    "n1-*-t4x1`. The default is every type of the provider `vertex` that has a price in "
    "the catalog.",
    "*",
)


def project(owned: str) -> ProviderSetting:
    """Return the setting for the project of what a provider rents, such as "machines"."""
    default = "The default is the project of the credentials."
    return project_text("project", f"The project of the {owned}. {default}")
