"""Rules for a provider's descriptions: its manifest, offers, hosts, and objections to tasks."""

import re
from datetime import timedelta
from functools import partial

import pytest

from cavvy.catalog.accelerators import find_accelerator
from cavvy.domain.offers import NEW_LIMIT, Purchase
from cavvy.domain.tasks import (
    ImageBuild,
    NetworkNeed,
    ResourceSpec,
    SpotPolicy,
    TaskSpec,
    Volume,
    VolumeKind,
)
from cavvy.domain.values import replace
from cavvy.providers.abilities import (
    ABILITIES,
    REPLACES_NODES,
    SHARES_HOSTS,
    STATES_POLICY,
    TELLS_QUOTAS,
    WHO_AM_I,
    ability,
)
from cavvy.providers.base import Feature, SettingKind
from cavvy.providers.contract.harness import FOREIGN, ContractHarness, ScenarioSuite, in_scenario
from cavvy.providers.objections import list_objections, make_minimal_task

_task = partial(TaskSpec, name="t", run="true")
_VOLUME = Volume(kind=VolumeKind.NAMED, source="/tmp", path="/mnt/cavvy-contract")


class OfferTests(ScenarioSuite):
    """Tests of read-only calls, which start nothing."""

    @in_scenario
    async def test_manifest(self, harness: ContractHarness) -> None:
        manifest = harness.ours.manifest
        assert re.fullmatch(r"[a-z][a-z0-9-]*", manifest.name)
        assert manifest.title
        assert manifest.docs
        assert all(
            isinstance(feature, Feature) and reason
            for feature, reason in manifest.unsupported.items()
        )
        names = [setting.name for setting in manifest.settings]
        assert len(names) == len(set(names))
        assert all(setting.consequence for setting in manifest.settings)

    @in_scenario
    async def test_abilities_are_those_that_the_manifest_declares(
        self, harness: ContractHarness
    ) -> None:
        has = {
            each.name
            for each in ABILITIES
            if all(callable(getattr(harness.ours, name, None)) for name in each.methods)
        }
        assert {each.name for each in harness.ours.manifest.abilities} == has
        lacking = {Feature.GANG, Feature.REPAIR} & set(harness.ours.manifest.unsupported)
        assert (REPLACES_NODES.name in has) == (not lacking), "state why nodes are not replaced"

    @in_scenario
    async def test_offers_have_unique_keys_and_prices(self, harness: ContractHarness) -> None:
        offers = await harness.ours.offers()
        assert offers
        keys = [offer.key for offer in offers]
        assert len(keys) == len(set(keys))
        for offer in offers:
            assert offer.provider == harness.ours.manifest.name
            assert offer.rate.micros_per_hour >= 0
            assert offer.minimum_charge >= timedelta(0)
            assert offer.capacity is None or offer.capacity >= 0
            assert (offer.accelerator is None) == (offer.accelerator_count == 0)
            extras = [(extra.kind, extra.name, extra.up_to_gib) for extra in offer.extras]
            assert len(extras) == len(set(extras))
            for extra in offer.extras:
                assert extra.kind.is_extra
                assert extra.price.micros >= 0
                assert extra.source
                assert extra.as_of

    @in_scenario
    async def test_shared_offers_have_hosts(self, harness: ContractHarness) -> None:
        offers = [offer for offer in await harness.ours.offers() if offer.shared]
        shares = ability(harness.ours, SHARES_HOSTS)
        if shares is None:
            assert not offers
            return
        hosts = await shares.hosts()
        names = [host.name for host in hosts]
        assert len(names) == len(set(names))
        assert all(name.startswith(f"{harness.ours.manifest.name}/") for name in names)
        assert all(len(host.devices) == len(set(host.devices)) for host in hosts)
        most = max((len(host.devices) for host in hosts), default=0)
        assert all(offer.accelerator_count <= most for offer in offers)

    @in_scenario
    async def test_introduction(self, harness: ContractHarness) -> None:
        facts = await harness.require(WHO_AM_I).whoami()
        assert facts
        assert all(what and value for what, value in facts)

    @in_scenario
    async def test_settings_are_described(self, harness: ContractHarness) -> None:
        for setting in harness.ours.manifest.settings:
            assert re.fullmatch(r"[a-z][a-z0-9_]*", setting.name), setting.name
            if setting.kind in (SettingKind.TEXT, SettingKind.FLAG, SettingKind.KEY_FILE):
                assert setting.minimum is None
            if setting.kind is SettingKind.FLAG:
                assert setting.default in (True, False)

    @in_scenario
    async def test_offers_are_the_same_when_asked_again(self, harness: ContractHarness) -> None:
        first = {offer.key for offer in await harness.ours.offers()}
        assert {offer.key for offer in await harness.ours.offers()} == first
        harness.restart()
        assert {offer.key for offer in await harness.ours.offers()} == first

    @in_scenario
    async def test_offers_are_the_same_for_another_installation(
        self, harness: ContractHarness
    ) -> None:
        ours = {(offer.key, offer.rate) for offer in await harness.ours.offers()}
        assert {(offer.key, offer.rate) for offer in await harness.make(FOREIGN).offers()} == ours

    @in_scenario
    async def test_offers_name_known_accelerators(self, harness: ContractHarness) -> None:
        for offer in await harness.ours.offers():
            if offer.accelerator is not None:
                known = find_accelerator(offer.accelerator)
                assert known is not None, offer.accelerator
                assert known.accelerator.name == offer.accelerator

    @in_scenario
    async def test_offers_have_places_and_sizes(self, harness: ContractHarness) -> None:
        for offer in await harness.ours.offers():
            assert offer.region
            assert offer.instance_type
            assert not re.search(r"\s", offer.key), offer.key
            sizes = (offer.vcpus, offer.memory_mib, offer.accelerator_memory_mib)
            assert min(*sizes, offer.disk_gib or 0) >= 0

    @in_scenario
    async def test_spot_is_sold_only_where_the_manifest_says_so(
        self, harness: ContractHarness
    ) -> None:
        spot = [offer for offer in await harness.ours.offers() if offer.purchase is Purchase.SPOT]
        assert not (spot and Feature.SPOT in harness.ours.manifest.unsupported)

    @in_scenario
    async def test_quotas_have_limits_and_commands_that_request_more(
        self, harness: ContractHarness
    ) -> None:
        quotas = await harness.require(TELLS_QUOTAS).quotas()
        assert quotas
        keys = [(quota.region, quota.zone, quota.name, quota.purchase) for quota in quotas]
        assert len(keys) == len(set(keys))
        for quota in quotas:
            assert quota.provider == harness.ours.manifest.name
            assert quota.limit >= 0
            assert quota.used is None or quota.used >= 0
            assert quota.unit
            assert NEW_LIMIT in quota.request

    @in_scenario
    async def test_a_node_that_runs_uses_its_quota(self, harness: ContractHarness) -> None:
        telling = harness.require(TELLS_QUOTAS)
        before = sum(quota.used or 0 for quota in await telling.quotas())
        gang = await harness.running("used")
        harness.restart()
        now = sum(quota.used or 0 for quota in await harness.require(TELLS_QUOTAS).quotas())
        assert now > before or gang.offer.quota_nodes is None

    @in_scenario
    async def test_capacity_that_is_used_is_not_offered(self, harness: ContractHarness) -> None:
        gang = await harness.running("used")
        harness.restart()
        now = next(
            (offer for offer in await harness.ours.offers() if offer.key == gang.offer.key),
            None,
        )
        before = gang.offer.capacity
        assert before is None or gang.offer.shared or now is None or (now.capacity or 0) < before

    @in_scenario
    async def test_hosts_are_the_same_when_asked_again(self, harness: ContractHarness) -> None:
        found = []
        for _ in range(2):
            hosts = await harness.require(SHARES_HOSTS).hosts()
            found.append({(host.name, host.devices, host.kinds) for host in hosts})
            harness.restart()
        assert found[0] == found[1]

    @in_scenario
    async def test_nothing_is_refused_of_a_plain_task(self, harness: ContractHarness) -> None:
        plain = make_minimal_task(harness.ours.manifest)
        assert list_objections(plain, harness.ours) == []

    @pytest.mark.parametrize(
        ("feature", "task"),
        [
            (Feature.SPOT, _task(resources=ResourceSpec(spot=SpotPolicy.ONLY))),
            (Feature.IMAGE, _task(image="box:1")),
            (Feature.DISK, _task(resources=ResourceSpec(disk_type="gp3"))),
            (
                Feature.NETWORK,
                _task(resources=ResourceSpec(network=NetworkNeed(min_mbps=1))),
            ),
            (Feature.GANG, _task(nodes=2)),
            (Feature.TUNNEL, _task(nodes=2, encrypt=True)),
            (Feature.BUILD, _task(image_build=ImageBuild(path="."))),
            (Feature.LOGIN, _task(image="box:1", image_login="LOGIN")),
            (Feature.VOLUMES, _task(volumes=(_VOLUME,))),
            (
                Feature.MOUNTS,
                _task(volumes=(replace(_VOLUME, kind=VolumeKind.HOST),)),
            ),
        ],
        ids=[
            "spot",
            "image",
            "disk",
            "network",
            "gang",
            "tunnel",
            "build",
            "login",
            "volumes",
            "mounts",
        ],
    )
    @in_scenario
    async def test_what_is_lacking_is_refused_with_its_reason(
        self, harness: ContractHarness, feature: Feature, task: TaskSpec
    ) -> None:
        reason = harness.ours.manifest.unsupported.get(feature)
        objections = list_objections(task, harness.ours)
        if reason is not None:
            assert reason in [each.reason for each in objections]
        assert all(re.fullmatch(r"[a-z_.]+", each.field) for each in objections), objections

    @in_scenario
    async def test_the_rights_it_needs_are_stated(self, harness: ContractHarness) -> None:
        assert harness.require(STATES_POLICY).policy().strip()
