"""A simulated cloud in memory, for tests, demos and the simulator. Only a settings table enables
it.
"""

from datetime import timedelta
from pathlib import Path

from cavvy.providers.abilities import CLOSEABLE, RUNS_AGENTS_HERE, SIGNALS_CHANGES
from cavvy.providers.base import (
    Feature,
    Manifest,
    Provider,
    ProviderContext,
)
from cavvy.providers.fake.account import FakeAccount
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, read_script
from cavvy.providers.settings import text

MANIFEST = Manifest(
    name="fake",
    title="A made-up cloud",
    test_double=True,
    docs="Lives in the server's memory, costs nothing real, and follows a script of prices, "
    "capacity and faults.",
    unsupported={
        Feature.IMAGE: "nothing really runs",
        Feature.BUILD: "nothing is really built",
        Feature.LOGIN: "there is no registry",
        Feature.VOLUMES: "nothing is really stored",
        Feature.MOUNTS: "its nodes have no file systems",
        Feature.NETWORK: "its nodes have no network",
        Feature.DISK: "its nodes have no disks",
    },
    abilities=(SIGNALS_CHANGES, RUNS_AGENTS_HERE, CLOSEABLE),
    settings=(
        text(
            "script",
            "The TOML file with its offers and faults; by default, the cloud has three offers and "
            "no faults.",
        ),
    ),
    visibility_delay=timedelta(minutes=2),
)


def make(context: ProviderContext) -> Provider:
    """The account on a new cloud that follows the script in the settings, or the default script."""
    path = context.settings.get("script")
    script = read_script(Path(str(path)).expanduser()) if path is not None else DEFAULT
    return FakeAccount(FakeCloud(MANIFEST, script, context.now), context.installation)
