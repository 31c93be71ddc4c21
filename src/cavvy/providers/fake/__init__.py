"""A simulated cloud in memory, for tests, demos and the simulator. The provider is enabled only by
its table in the settings.
"""

from datetime import timedelta
from pathlib import Path

from cavvy.providers.abilities import CLOSEABLE, RUNS_AGENTS_HERE, SIGNALS_CHANGES
from cavvy.providers.base import (
    Feature,
    Manifest,
    Provider,
    ProviderContext,
    ProviderSetting,
    Refused,
    SettingKind,
)
from cavvy.providers.fake.account import FakeAccount, FakeHostAccount
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, read_script
from cavvy.providers.settings import project_text, text

MANIFEST = Manifest(
    name="fake",
    title="A made-up cloud",
    test_double=True,
    docs="A simulated cloud in the server's memory. The simulated cloud costs nothing, and "
    "follows a script of prices, capacity and faults.",
    unsupported={
        Feature.IMAGE: "the nodes are simulated and run no containers",
        Feature.BUILD: "the nodes are simulated and build no images",
        Feature.LOGIN: "the nodes are simulated and pull no images",
        Feature.VOLUMES: "the cloud is simulated and stores no data",
        Feature.MOUNTS: "the nodes are simulated and have no file systems",
        Feature.NETWORK: "the nodes are simulated and have no network",
        Feature.DISK: "the nodes are simulated and have no disks",
    },
    abilities=(SIGNALS_CHANGES, RUNS_AGENTS_HERE, CLOSEABLE),
    settings=(
        text(
            "script",
            "The TOML file with the cloud's offers and faults. By default, the cloud has three "
            "offers and no faults.",
        ),
        ProviderSetting(
            name="key_file",
            kind=SettingKind.KEY_FILE,
            consequence="A file with a key. The cloud accepts every key except `wrong`.",
        ).for_projects(),
        project_text("regions", "Has no effect."),
    ),
    visibility_delay=timedelta(minutes=2),
)


def make(context: ProviderContext) -> Provider:
    """Return an account on a new fake cloud, which follows the script in the settings or, without
    one, the default script.
    """
    key_file = context.settings.get("key_file")
    if key_file is not None and Path(str(key_file)).read_text("utf-8").strip() == "wrong":
        raise Refused("[providers.fake]: the cloud does not accept the key")
    path = context.settings.get("script")
    script = read_script(Path(str(path)).expanduser()) if path is not None else DEFAULT
    account = FakeHostAccount if script.hosts else FakeAccount
    return account(FakeCloud(MANIFEST, script, context.now), context.installation)
