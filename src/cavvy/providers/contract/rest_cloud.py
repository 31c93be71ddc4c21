"""The contract suite for clouds with a REST API. The test class of a cloud names the cloud's
package, traits and stand-in.

The suite uses the same faults, listing lag, page size and quota for all clouds. The suite ships
with Cavvy, so that providers in other Python packages can use it.
"""

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import pytest

from cavvy.domain.offers import Offer
from cavvy.domain.tasks import Scalar
from cavvy.domain.values import replace
from cavvy.providers.base import (
    Feature,
    GangSpec,
    GangState,
    Manifest,
    NoCapacity,
    Provider,
    ProviderContext,
    ProviderError,
    QuotaTooSmall,
    Refused,
    TryAgain,
)
from cavvy.providers.contract import ContractHarness
from cavvy.providers.contract.harness import OURS
from cavvy.providers.contract.memory_cloud import MemoryPlace, make_node_endpoint
from cavvy.providers.contract.rest_stand_in import (
    LONG_PAGE,
    ReplayedRest,
    RestRequest,
    RestServer,
    RestStandIn,
)
from cavvy.providers.contract.sold import compare, describe_extra, read_table
from cavvy.providers.contract.vm_contract import VmContract
from cavvy.providers.recording import FOLDER, TAG
from cavvy.providers.registry import check_settings, make_from
from cavvy.providers.vm.cloud import CloudFault, CloudTraits, MachineState, Reach
from cavvy.providers.vm.provider import VmProvider

_LIST_LAG = timedelta(seconds=20)
_MOST_COMPARED = 8  # offers whose requests are compared
_ENDED_LISTED = timedelta(minutes=2)  # for APIs with a state of ended machines


def no_prices(provider: str) -> Sequence[Offer]:
    return ()


def read_replies(text: str) -> Sequence[tuple[CloudFault, type[ProviderError]]]:
    """Parse `RestContract.launch_faults`. A line has the provider's error, and the status, the code
    ("-" for none) and the message of the cloud's reply, such as:

        NoCapacity  409  out_of_stock  No machine of this type is left.
    """
    meant = {each.__name__: each for each in (NoCapacity, QuotaTooSmall, Refused, TryAgain)}
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        error, status, code, message = line.split(maxsplit=3)
        found.append((CloudFault(int(status), "" if code == "-" else code, message), meant[error]))
    return found


class RestPackage(Protocol):
    """A provider's package. See `registry.make_from`."""

    MANIFEST: Manifest


class RestPlace(MemoryPlace):
    """One account of a cloud with a REST API, and a file with its key."""

    list_prices = staticmethod(no_prices)  # for clouds that report no prices

    def __init__(
        self,
        package: RestPackage,
        traits: CloudTraits,
        stand_in: type[RestStandIn],
        server: RestServer,
        home: Path,
    ) -> None:
        ended = _ENDED_LISTED if MachineState.ENDED in stand_in.states else timedelta(0)
        super().__init__(replace(traits, list_lag=_LIST_LAG, ended_listed=ended), home)
        self.api = stand_in(self.cloud, server)
        self.file = home / "key"
        self.file.write_text(self.api.make_key_file())
        self._package = package
        self._providers: list[VmProvider] = []

    @property
    def manifest(self) -> Manifest:
        return self._package.MANIFEST

    def make_context(self, installation: str, table: Mapping[str, Scalar]) -> ProviderContext:
        return ProviderContext(
            installation=installation,
            home=self.home,
            settings=check_settings(self.manifest, table),
            state=self.states[installation],
            node_endpoint=make_node_endpoint(),
            list_prices=self.list_prices,
            now=self.cloud.now,
        )

    def provider(self, installation: str, **table: Scalar) -> VmProvider:
        places = {"endpoint": self.api.url, "key_file": str(self.file)}
        context = self.make_context(installation, {**places, **self.api.settings, **table})
        made = make_from(self._package, context)
        assert isinstance(made, VmProvider)
        self._providers.append(made)
        return made

    def remains(self) -> Sequence[str] | None:
        return self.api.remains()

    def harness(self) -> ContractHarness:
        """Return a contract-suite harness for tests that concern only one cloud."""
        return ContractHarness(self, VmContract().lose_reply)

    def launch(self) -> None:
        """Launch a gang of one node, once."""

        async def scenario() -> None:
            harness = self.harness()
            await harness.ours.launch(await harness.spec("one"))

        asyncio.run(scenario())

    def close(self) -> None:
        """Close the connections. Fails if the stand-in failed or if machines still exist."""
        for each in self._providers:
            asyncio.run(each.close())
        assert self.api.bugs == [], "the stand-in itself failed"
        assert self.cloud.billed() == [], "these machines are still billed"


class RestContract(VmContract):
    """Extends the contract suite with the rules that apply to all clouds with a REST API."""

    # `providers.vm` decides about the other nodes of a gang, for all clouds alike
    failing_nodes = (1,)
    crowd = LONG_PAGE + 10  # two long pages
    package: RestPackage
    stand_in: type[RestStandIn]
    # False if every launch takes another machine of a market, whose id is in the request
    compares_requests = True
    has_off = True  # the API has a state of machines that are off; such machines are deleted
    # the errors of this API's launches that differ from those of other APIs, by status
    errors: Mapping[int, type[ProviderError]] = {}
    replays = False  # False if a recording lacks calls, such as an earlier login
    # replies of the cloud to a launch, and the error that the provider raises for each of them; see
    # `read_replies`
    launch_faults: Sequence[tuple[CloudFault, type[ProviderError]]] = ()

    @pytest.fixture(scope="class")
    @classmethod
    def rest_server(cls) -> Iterator[RestServer]:
        server = RestServer()
        yield server
        server.close()

    def make_place(self, server: RestServer, home: Path) -> RestPlace:
        """Return the account of one test. A class of accounts may replace this method."""
        return RestPlace(self.package, self.traits, self.stand_in, server, home)

    @pytest.fixture
    def account(self, rest_server: RestServer, tmp_path: Path) -> Iterator[RestPlace]:
        account = self.make_place(rest_server, tmp_path)
        yield account
        account.close()

    @pytest.fixture
    def place(self, account: RestPlace) -> RestPlace:
        return account

    @pytest.fixture
    def harness(self, account: RestPlace) -> ContractHarness:
        return account.harness()

    def test_a_wrong_key_is_refused(self, account: RestPlace) -> None:
        account.file.write_text(self.stand_in.key_file.format(key="wrong"))
        with pytest.raises(Refused, match="check the API key"):
            asyncio.run(account.provider("ours").offers())

    def test_a_quota_is_reported_as_one(self, account: RestPlace) -> None:
        if not self.traits.quota_codes and "quota-exceeded" not in self.stand_in.faults:
            pytest.skip("the API describes no error for quotas")
        account.api.quota = 0
        with pytest.raises(QuotaTooSmall, match="request a higher quota"):
            account.launch()

    def test_offers_are_what_the_cloud_sells(self, account: RestPlace) -> None:
        """The stand-in's table `sells` states the machines, their sizes and prices in the words of
        the cloud's own pages."""
        assert self.stand_in.sells, f"state in {self.stand_in.__name__}.sells what the cloud sells"
        offers = asyncio.run(account.provider("ours").offers())
        differences = compare(read_table(self.stand_in.sells), offers)
        assert not differences, "\n" + "\n".join(differences)

    def test_machines_with_other_cpus_and_unknown_accelerators_are_reported(
        self, account: RestPlace
    ) -> None:
        provider = account.provider("ours")
        offers = asyncio.run(provider.offers())
        arm = {each.instance_type for each in offers if each.architecture == "arm64"}
        assert arm == set(self.stand_in.arm)
        if self.stand_in.unknown:
            facts = dict(asyncio.run(provider.whoami()))
            assert facts["unknown accelerators"] == self.stand_in.unknown

    def test_replies_to_a_launch_raise_the_errors_of_their_meaning(
        self, account: RestPlace
    ) -> None:
        for fault, error in self.launch_faults:
            account.api.faults = {**account.api.faults, "insufficient-capacity": fault}
            account.cloud.left = 0
            with pytest.raises(error) as caught:
                account.launch()
            assert type(caught.value) is error, fault

    def test_other_charges_are_those_of_the_cloud(self, account: RestPlace) -> None:
        """Disks, addresses and the shortest time that is billed cost what the stand-in states."""
        offers = asyncio.run(account.provider("ours").offers())
        extras = {each for offer in offers for each in offer.extras}
        assert {describe_extra(each) for each in extras} == set(self.stand_in.extras)
        least = self.stand_in.minimum_charges
        for offer in offers:
            starts = [each for each in least if offer.instance_type.startswith(each)]
            right = least[max(starts, key=len)] if starts else timedelta(0)
            assert offer.minimum_charge == right, offer.key

    @pytest.mark.parametrize("lost", [False, True])
    def test_a_zone_that_does_not_answer_has_not_lost_its_machines(
        self, account: RestPlace, lost: bool
    ) -> None:
        """While the zone does not answer reads, a machine in it neither ends nor, if the reply to
        its request was lost, is requested again.
        """

        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.spec("silent")
            if lost:
                with suppress(TryAgain):
                    await harness.lose_reply(gang)
            else:
                await harness.start(gang)
            made = len(account.cloud.machines)
            fault = CloudFault(503, "contract-fault", "the contract suite lets this call fail")
            account.api.fail = lambda request: (
                (fault, False) if request.method == "GET" and _names(request, gang.offer) else None
            )
            for _ in range(5):
                await account.wait(timedelta(minutes=1))
                with suppress(TryAgain):
                    await harness.ours.gangs()
                    await harness.ours.launch(gang)
            account.api.fail = lambda _: None
            await account.wait(timedelta(minutes=1))
            await harness.start(gang)
            await harness.expect(GangState.RUNNING, gang)
            assert len(account.cloud.machines) == made, "the machine was requested again"
            await harness.clear()

        asyncio.run(scenario())

    def test_a_machine_that_boots_is_not_running_yet(self, account: RestPlace) -> None:
        names = self.stand_in.states
        if len({names.get(MachineState.STARTING), names.get(MachineState.RUNNING), None}) < 3:
            pytest.skip("the API has no state of machines that boot")

        async def scenario() -> None:
            harness = account.harness()
            account.cloud.boot_time = timedelta(hours=1)
            gang = await harness.spec("boots")
            await harness.launch(gang)
            await account.wait(timedelta(minutes=2))
            await harness.expect(GangState.STARTING, gang)
            account.cloud.boot_time = timedelta(0)
            await harness.clear()

        asyncio.run(scenario())

    def test_a_machine_that_is_off_is_deleted(self, account: RestPlace) -> None:
        if MachineState.STOPPED not in self.stand_in.states or not self.has_off:
            pytest.skip("the API has no state of machines that are off")

        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.running("off")
            (machine,) = account.cloud.billed()
            account.cloud.change(machine.id, off=True)
            for _ in range(3):
                await account.wait(timedelta(minutes=1))
                await harness.ours.gangs()
            assert account.cloud.billed() == [], "a machine that is off may be billed"
            await account.settle()
            await harness.expect(GangState.ENDED, gang)
            await harness.clear()

        asyncio.run(scenario())

    def test_offers_are_only_in_the_regions_of_the_settings(self, account: RestPlace) -> None:
        if "regions" not in {each.name for each in self.package.MANIFEST.settings}:
            pytest.skip("the provider has no setting `regions`")
        everywhere = asyncio.run(account.provider("ours").offers())
        for region in sorted({offer.region for offer in everywhere})[:2]:
            offers = asyncio.run(account.provider("ours", regions=region).offers())
            wanted = {each.key for each in everywhere if each.region == region}
            assert {each.key for each in offers} == wanted

    def test_each_offer_is_requested_as_itself(self, account: RestPlace) -> None:
        """The requests for two offers differ, and not only in what differs between two requests for
        the same offer, such as names and tokens."""
        if not self.compares_requests:
            pytest.skip("every launch takes another machine of a market")
        asyncio.run(_compare_requests(account))

    @pytest.mark.parametrize("status", [400, 403, 404, 429, 500, 501, 503])
    def test_a_failed_request_raises_the_error_of_its_class(
        self, account: RestPlace, status: int
    ) -> None:
        """TryAgain is only for faults that pass by themselves, and NoCapacity only for missing
        capacity."""

        async def scenario() -> type[Exception]:
            harness = account.harness()
            gang = await harness.spec("failed")
            fault = CloudFault(status, "contract-fault", "the contract suite lets this call fail")
            account.api.fail = lambda request: (fault, False) if request.method != "GET" else None
            try:
                await harness.ours.launch(gang)
            except (NoCapacity, Refused, TryAgain) as error:
                found = type(error)
            else:
                pytest.fail(f"the launch succeeded although its requests failed with {status}")
            finally:
                account.api.fail = lambda _: None
            await harness.clear()
            return found

        usual = TryAgain if status in (429, 500, 503) else Refused
        assert asyncio.run(scenario()) is self.errors.get(status, usual)
        assert account.cloud.billed() == []

    @pytest.mark.parametrize(("status", "error"), [(403, Refused), (503, TryAgain)])
    def test_a_list_that_fails_is_not_an_empty_list(
        self, account: RestPlace, status: int, error: type[Exception]
    ) -> None:
        fault = CloudFault(status, "contract-fault", "the contract suite lets this call fail")
        account.api.fail = lambda _: (fault, False)
        for read in ("offers", "gangs"):
            with pytest.raises(error):
                asyncio.run(getattr(account.provider("ours"), read)())

    def test_other_machines_of_the_account_may_have_an_unusual_form(
        self, account: RestPlace
    ) -> None:
        account.api.others = [{"id": 7, "name": "web-1"}, {"id": 8}]
        assert asyncio.run(account.provider("ours").gangs()) == []

    def test_a_machine_that_the_server_reaches_tells_the_gang_its_address(
        self, account: RestPlace
    ) -> None:
        """A machine that the server connects to cannot determine its own address, so the provider
        must report the address.
        """
        manifest = self.package.MANIFEST
        table: dict[str, Scalar] = {}
        if "reach_by_ssh" in {each.name for each in manifest.settings}:
            table = {"reach_by_ssh": True}
        elif self.traits.reach is not Reach.SSH:
            pytest.skip("the server does not connect to the machines")
        if Feature.GANG in manifest.unsupported:
            pytest.skip("the provider starts no gangs")

        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.spec("reached", nodes=2)
            provider = account.provider(gang.installation, **table)
            for _ in range(10):
                with suppress(TryAgain):
                    await provider.launch(gang)
                await account.settle()
            (seen,) = await provider.gangs(gang.name)
            assert len(seen.nodes) == 2
            assert all(each.address for each in seen.nodes)
            await provider.remove(gang.name)

        asyncio.run(scenario())

    @pytest.mark.parametrize("status", [429, 503])
    def test_a_read_that_fails_is_repeated(self, account: RestPlace, status: int) -> None:
        async def scenario() -> None:
            provider = account.provider("ours")
            for read in (provider.offers, provider.gangs):
                account.api.read_faults = [CloudFault(status, "later", "try again")] * 2
                await read()
                assert account.api.read_faults == []

        asyncio.run(scenario())

    def test_a_gang_on_several_pages_is_found_by_the_list_alone(self, account: RestPlace) -> None:
        async def scenario() -> None:
            harness = account.harness()
            gang = await harness.spec("paged", nodes=5)
            await harness.start(gang)
            account.lose_records()
            harness.restart()
            assert len((await harness.one(gang.name)).nodes) == 5
            await harness.remove(gang.name)

        asyncio.run(scenario())

    def test_a_recorded_launch_has_no_secrets_and_can_be_replayed(
        self, account: RestPlace, rest_server: RestServer
    ) -> None:
        """Launch a gang with the label of `check --live`, so that the calls are recorded. When the
        recording is replayed, the provider must behave as it did in the recorded launch. The calls
        of this test go through the network, as those of users do.
        """
        path = "/subscriptions/s-1/resourceGroups/crew/providers/x/virtualMachines"
        account.api.others = [
            {field: "web-1", "id": f"{path}/web-{number}", "status": "active", "ip": "192.0.2.7"}
            for number, field in enumerate(("name", "label", "hostname"))
        ]
        gang = asyncio.run(account.harness().spec("recorded"))
        gang = replace(gang, labels={TAG: "now"}, longest=timedelta(minutes=5))
        provider = account.provider(gang.installation)
        with rest_server.networked():
            first = asyncio.run(_play(account, provider, gang))
        assert first[-1][0] is GangState.ENDED
        text = (account.home / FOLDER / f"{gang.name}.json").read_text()
        assert self.stand_in.key not in text
        assert f"claim-{gang.name}" not in text
        assert "END_OF_BOOT" not in text
        for other in ("web-", "192.0.2.7", "crew", "the-secret-of"):
            assert other not in text
        if not self.replays:
            return
        account.states.clear()
        account.api = replayed = ReplayedRest(account.cloud, rest_server, json.loads(text))
        assert asyncio.run(_play(account, account.provider(gang.installation), gang)) == first
        assert replayed.bugs == []
        assert replayed.calls.left() == []

    def test_facts_tell_where_the_key_was_found_and_not_the_key(self, account: RestPlace) -> None:
        facts = asyncio.run(account.provider("ours").whoami())
        assert ("API key", str(account.file)) in facts
        assert self.stand_in.key not in str(facts)


def _names(request: RestRequest, offer: Offer) -> bool:
    """Return whether the request names the zone or the region of the offer."""
    return not {str(offer.zone), offer.region}.isdisjoint(re.split(r"[/?&=]", request.target))


async def _compare_requests(account: RestPlace) -> None:
    """Launch several offers, and the first offer twice. Fail if two different offers are requested
    alike."""
    offers = [each for each in await account.provider(OURS).offers() if each.capacity != 0]
    offers.sort(key=lambda each: (each.instance_type, each.region, each.zone or "", each.purchase))
    chosen = offers[:: max(1, len(offers) // _MOST_COMPARED)]
    # the first launch of all may create things that later launches find, such as a key
    words = ("warm-up", "first", "again")
    _, first, again = [await _record(account, chosen[0], word) for word in words]
    noise = {part for part, _ in first ^ again}  # the parts of requests that always differ
    seen: dict[frozenset[tuple[str, str]], Offer] = {}
    for number, offer in enumerate(chosen):
        found = await _record(account, offer, f"number-{number}")
        key = frozenset(each for each in found if each[0] not in noise)
        same = seen.setdefault(key, offer) if found else offer
        assert same == offer, f"{offer.key} is requested in the same way as {same.key}"


async def _record(account: RestPlace, offer: Offer, word: str) -> set[tuple[str, str]]:
    """Launch an offer, remove the gang, and return the parts of all requests that write, or nothing
    if the offer cannot be launched."""
    harness, before = account.harness(), len(account.api.writes)
    gang = replace(await harness.spec(word), offer=offer)
    try:
        await harness.launch(gang)
        requests = account.api.writes[before:]
        await account.settle()
        account.lose_records()
        harness.restart()
        listed = [seen.name for seen in await harness.ours.gangs(gang.name)]
        assert listed == [gang.name], f"a machine of {offer.key} is missing from the list"
    except (NoCapacity, Refused):
        requests = []
    finally:
        await harness.clear()
    return {
        part
        for number, each in enumerate(requests)
        for what in (each.target.split("?")[0].split("/")[2:], each.query, each.body)
        for part in _flatten(f"{number}", what)
    }


def _flatten(path: str, value: object) -> Iterator[tuple[str, str]]:
    """Return the texts and numbers in a parsed JSON value, each with its place in the value."""
    match value:
        case Mapping():
            items: Iterable[tuple[object, object]] = value.items()
        case list():
            items = enumerate(value)
        case _:
            yield path, str(value)
            return
    for name, each in items:
        yield from _flatten(f"{path}.{name}", each)


async def _play(
    account: RestPlace, provider: Provider, gang: GangSpec
) -> list[tuple[GangState, int]]:
    """Launch and remove the gang. Returns pairs: an observed state of the gang, and the number of
    nodes that the report contains.
    """
    await provider.offers()
    for _ in range(20):  # some clouds need several calls, as the control plane makes them
        try:
            await provider.launch(gang)
        except TryAgain:
            await account.settle()
        else:
            break
    states = []
    for _ in range(4):
        await account.settle()
        seen = await provider.gangs(gang.name)
        states += [(each.state, len(each.nodes)) for each in seen]
    await provider.remove(gang.name)
    for _ in range(3):
        await account.settle()
        seen = await provider.gangs(gang.name)
    return [*states, *((each.state, len(each.nodes)) for each in seen)]
