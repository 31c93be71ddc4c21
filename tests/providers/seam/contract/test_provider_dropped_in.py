"""A provider that is installed as a package of its own works without an edit anywhere else."""

import sys
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner
from scripts.docs import providers
from tests.providers.seam.contract.test_provider_fake import FakeContract

from cavvy.cli.main import cli
from cavvy.control.clock import VirtualClock
from cavvy.providers import registry
from cavvy.providers.base import GangState, Provider, ProviderContext
from cavvy.providers.contract import ProviderUnderTest
from cavvy.providers.prices import PriceQuery, list_sources

FILES = {
    "__init__.py": '''
"""The prairie as a provider: the made-up cloud under another name."""

from cavvy.domain.values import replace

from cavvy.providers import fake
from cavvy.providers.fake import FakeAccount
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import DEFAULT, CloudScript, FaultScript

MANIFEST = replace(
    fake.MANIFEST, name="prairie", title="the prairie", prices="prairie_provider.price_list"
)
CLOUDS = {}


def make(context):
    if context.home not in CLOUDS:
        offers = [replace(each, provider="prairie", capacity=250) for each in DEFAULT.offers]
        launches = [FaultScript(preempted_after_s=3600)] * 20
        script = CloudScript(offers=tuple(offers), launches=tuple(launches))
        CLOUDS[context.home] = FakeCloud(MANIFEST, script, context.now)
    return FakeAccount(CLOUDS[context.home], context.installation)
''',
    "price_list.py": """
from cavvy.providers.prices import ProviderPrices


class PriceList:
    provider, title = "prairie", "the sheriff's board"

    def fetch(self, query):
        return ProviderPrices(offers=())


SOURCE = PriceList()
""",
}


@pytest.fixture
def prairie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[registry.KnownProvider]:
    """The installed package."""
    package, info = tmp_path / "prairie_provider", tmp_path / "prairie-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir()
    for name, text in FILES.items():
        (package / name).write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: prairie\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cavvy.providers]\nprairie = prairie_provider\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield registry.list_known()["prairie"]
    for name in [each for each in sys.modules if each.startswith("prairie_provider")]:
        del sys.modules[name]


class PrairiePlace:
    def __init__(self, known: registry.KnownProvider, home: Path) -> None:
        self._known, self._home = known, home
        self._clock = VirtualClock(datetime(2030, 1, 1, tzinfo=UTC))
        self._last: Provider | None = None

    def provider(self, installation: str) -> Provider:
        context = ProviderContext(installation=installation, home=self._home, now=self._clock.now)
        self._last = registry.make(self._known, {}, context)
        return self._last

    async def settle(self) -> None:
        await self.wait(timedelta(minutes=2))

    async def end(self, gang: str) -> None:
        provider = self.provider("contract-installation-ours")
        while any(seen.state is not GangState.ENDED for seen in await provider.gangs(gang)):
            await self.wait(timedelta(minutes=1))

    async def wait(self, length: timedelta) -> None:
        await self._clock.sleep_until(self._clock.now() + length)


class TestPrairie(FakeContract):
    @pytest.fixture
    def place(self, prairie: registry.KnownProvider, tmp_path: Path) -> ProviderUnderTest:
        return PrairiePlace(prairie, tmp_path / "providers")


def test_the_registry_the_check_and_the_reference_know_it(
    prairie: registry.KnownProvider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "settings.toml"
    settings.write_text("[providers.prairie]\n")
    monkeypatch.setenv("CAVVY_CONFIG", str(settings))
    monkeypatch.setenv("CAVVY_HOME", str(tmp_path / "home"))
    assert "prairie" in [each.name for each in registry.enabled({"prairie": {}})]
    shown = CliRunner().invoke(cli, ["check", "prairie"])
    assert shown.exit_code == 0, shown.output
    assert "the prairie" in shown.output
    page = providers.make_page(prairie, None, None)
    assert "the table `[providers.prairie]`" in page
    assert "[Abilities](../providers.md#abilities): signals changes, " in page


def test_its_price_list_is_found(prairie: registry.KnownProvider) -> None:
    source = list_sources()["prairie"]
    query = PriceQuery(
        machines={}, today=date(2030, 1, 1), progress=lambda text: None, pause=lambda seconds: None
    )
    assert source.title == "the sheriff's board"
    assert list(source.fetch(query).offers) == []


def test_a_provider_in_the_repository_adds_a_page_and_changes_none(
    prairie: registry.KnownProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, index = dict(providers.make_pages()), providers.make_index()
    own = {**providers.list_own(), "prairie": prairie}
    monkeypatch.setattr(providers, "list_own", lambda: own)
    more = dict(providers.make_pages())
    assert more.pop("prairie").startswith("# The prairie\n\nThe prairie as a provider")
    assert (more, providers.make_index()) == (pages, index)
