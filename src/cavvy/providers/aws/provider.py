"""The Amazon EC2 provider, which finds gangs by their tags. Nodes fetch the agent when they boot,
and terminate themselves when the agent has exited.
"""

import asyncio
from collections.abc import Collection, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from cavvy.domain.allocations import VolumeLocation
from cavvy.domain.offers import Offer, Quota
from cavvy.domain.tasks import Fabric, Objection, TaskSpec, VolumeKind
from cavvy.domain.values import replace
from cavvy.domain.volumes import KeptVolume
from cavvy.providers.aws import NOTICES
from cavvy.providers.aws.account import AwsAccount
from cavvy.providers.aws.launch import AwsLauncher
from cavvy.providers.aws.launch_ledger import KEPT, AwsGangRecord, is_over
from cavvy.providers.aws.market import AwsMarket
from cavvy.providers.aws.network import GANG, GangNetworks, mark_of, read_tag
from cavvy.providers.aws.policy import (
    describe_rights,
    find_refused_launches,
    find_refused_reads,
    make_policy,
)
from cavvy.providers.aws.shapes import MachineImages
from cavvy.providers.aws.status import AwsStatus
from cavvy.providers.aws.volumes import MOST, GangVolumes, list_node_disks
from cavvy.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    Manifest,
    NoCapacity,
    NotFound,
    PartlyUnknown,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from cavvy.providers.hosts.userdata import KnownEnd, MetadataService, make_user_data
from cavvy.providers.ledger import LaunchLedger
from cavvy.providers.recording import CallRecorder

_METADATA = "http://169.254.169.254/latest/meta-data"
_VOLUMES_AGE = timedelta(minutes=1)
_LONELY = timedelta(
    minutes=10
)  # a launch has failed if EC2 lists none of its instances for this long
_CLOSING_S = 10
_TIDY_AGAIN = timedelta(
    seconds=5
)  # the pause between two attempts to remove objects that are still in use
_NO_WAY = (
    "nodes on EC2 must connect to the server, but `server.tls_listen` is not set; see "
    "docs/guides/aws.md"
)


class AwsProvider:
    """Implements `Provider`, and the abilities listed in the manifest."""

    def __init__(
        self, manifest: Manifest, context: ProviderContext, account: AwsAccount | None = None
    ) -> None:
        self.manifest = manifest
        self._context = context
        self._mark = mark_of(context.installation)
        self._account = account or AwsAccount(context.settings)
        self._recorder = CallRecorder(context.home, manifest.name, context.installation)
        self._account.recorder = self._recorder
        self._market = AwsMarket(self._account, context.settings, context.home, context.now)
        self._ledger = LaunchLedger(context.state, AwsGangRecord)
        self._networks = GangNetworks(self._account, self._mark)
        self._volumes = GangVolumes(self._account, self._ledger, self._mark)
        self._volumes_seen: tuple[datetime, Sequence[VolumeLocation]] | None = None
        self._status = AwsStatus(
            self._account, self._ledger, self._mark, manifest.visibility_delay, context.now
        )
        self._tidy_after: dict[str, datetime] = {}
        self._launcher = AwsLauncher(
            self._account,
            self._market,
            self._ledger,
            self._networks,
            self._volumes,
            context.settings,
            mark=self._mark,
            server=context.node_endpoint.address if context.node_endpoint else "",
            now=context.now,
        )

    async def offers(self) -> Sequence[Offer]:
        return await self._market.offers()

    def silent(self) -> Sequence[str]:
        return self._market.silent

    async def launch(self, gang: GangSpec) -> None:
        async with self._ledger.lock(gang.name):
            await self._ledger.refresh(gang.name)
            if self._recorder.begin(gang):
                await self._record_offers()
            try:
                await self._launcher.launch(gang, lambda record: self._user_data(gang, record))
            except (NoCapacity, Refused):
                await self._recorder.end(gang.name)
                raise
            finally:
                self._market.forget_use(gang.offer.region)

    async def _record_offers(self) -> None:
        """Read the offers without a cache, so that a recording contains every call that is needed
        to read offers.
        """
        with TemporaryDirectory() as folder:
            market = AwsMarket(
                self._account, self._context.settings, Path(folder), self._context.now
            )
            try:
                await market.offers()
            finally:
                await market.close()

    async def volumes(self) -> Sequence[VolumeLocation]:
        now, known = self._context.now(), self._volumes_seen
        if known is None or now - known[0] >= _VOLUMES_AGE:
            known = self._volumes_seen = (
                now,
                await self._volumes.places(await self._account.regions()),
            )
        return known[1]

    async def kept_volumes(self) -> Sequence[KeptVolume]:
        await self._ledger.refresh()
        found = await self._volumes.list_kept(await self._account.regions())
        return [
            replace(each, price=self._market.disk_price(each.region, each.type)) for each in found
        ]

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        await self._ledger.refresh(name)
        regions = await self._regions(name)
        seen, silent = await self._status.look(regions, name)
        late = [
            each.name
            for each in seen
            if each.state is not GangState.ENDED and self._is_removed(each.name)
        ]
        for each in late:  # EC2 listed or created an instance after the removal
            await self._end(each)
        if late:
            seen, silent = await self._status.look(regions, name)
        await self._attach([each.name for each in seen if each.state is GangState.RUNNING])
        if name is None:
            await self._tidy_all([each for each in regions if each not in silent])
        else:
            await self._tidy(
                [each.name for each in self._ledger.records.values() if each.ended_at is not None]
            )
        await self._recorder.end_finished(self._ledger, is_over)
        if silent and (name is None or not seen):  # gangs of these regions are missing
            problems = list(silent.values())
            raise PartlyUnknown("; ".join(map(str, problems)), seen) from problems[0]
        return seen

    async def remove(self, name: str) -> None:
        async with self._ledger.lock(name):
            await self._ledger.refresh(name)
            record = self._ledger.get(name)
            if record is not None and not record.removed:
                await self._ledger.put(replace(record, removed=True))
            await self._end(name)
        for region in await self._regions(name):
            self._market.forget_use(region)
        await self._tidy([name])
        await self._recorder.end_finished(self._ledger, is_over)

    async def close(self) -> None:
        """Close the provider. Before closing, retry the removal of ended gangs' objects, because
        the server may not start again for a long time.
        """
        if any(
            not each.tidy and (each.removed or each.ended_at)
            for each in self._ledger.records.values()
        ):
            self._tidy_after.clear()
            with suppress(ProviderError, TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self.gangs()
        await self._market.close()

    def check(self, task: TaskSpec) -> Sequence[Objection]:
        need = task.resources.network
        found = [] if self._context.node_endpoint is not None else [Objection("providers", _NO_WAY)]
        if need is not None and need.subnet and need.vpc:
            reason = "a subnet already determines its VPC; set only one of `subnet` and `vpc`"
            found.append(Objection("resources.network", reason))
        fabric = need.fabric if need is not None else None
        if fabric in (Fabric.EFA, Fabric.RDMA) and not self._context.settings.get("efa", True):
            reason = f"the setting `efa` in [providers.{self.manifest.name}] is off; set it to true"
            found.append(Objection("resources.network.fabric", reason))
        named = [each for each in task.volumes if each.kind is VolumeKind.NAMED]
        if named and task.nodes > 1:
            reason = (
                "only one node can attach an EBS volume; use NFS, or copy data through a bucket"
            )
            found.append(Objection("volumes", reason))
        if len(named) > MOST:
            found.append(Objection("volumes", f"a node can have at most {MOST} named volumes"))
        return found

    async def quotas(self) -> Sequence[Quota]:
        """Like `TellsQuotas.quotas`. Raises TryAgain if no region's quotas can be read."""
        await self.offers()
        told = [self._market.quotas(region) for region in await self._account.regions()]
        problems = [problem for _, problem in told if problem]
        if problems and not any(quotas for quotas, _ in told):
            raise TryAgain(problems[0])
        return [each for quotas, _ in told for each in quotas]

    def untold_quotas(self) -> Sequence[str]:
        told = [self._market.untold_quotas(region) for region in self._market.regions]
        return [each for each in told if each]

    async def whoami(self) -> Sequence[tuple[str, str]]:
        regions = await self._account.regions()
        who = await self._account.ask(regions[0], "get_caller_identity", service="sts")
        try:
            offers = await self.offers()
        except Refused as error:  # refused in all regions
            reads = await find_refused_reads(self._account, regions[0])
            raise Refused(f"{error}; rights in {regions[0]}: {describe_rights(reads)}") from error
        facts = [
            ("account", str(who["Account"])),
            ("user", str(who["Arn"])),
            ("regions", ", ".join(regions)),
        ]
        for region in regions:
            mine = [offer for offer in offers if offer.region == region]
            facts += await self._region_facts(region, mine)
        facts += [("silent", problem) for problem in self.silent()]
        node_endpoint = self._context.node_endpoint
        facts.append(
            (
                "nodes call",
                node_endpoint.address if node_endpoint is not None else f"nothing: {_NO_WAY}",
            )
        )
        return facts

    async def _region_facts(self, region: str, offers: Sequence[Offer]) -> list[tuple[str, str]]:
        """Return the facts of one region for `cavvy check`. Check the account's permissions only in
        a region with offers, because a region without offers may not answer.
        """
        kinds = len({offer.instance_type for offer in offers})
        facts = [(f"offers in {region}", f"{len(offers)}, of {kinds} instance types")]
        if offers:
            reads = await find_refused_reads(self._account, region)
            refused = [*reads, *await self._refused_launches(offers)]
            facts.append((f"rights in {region}", describe_rights(refused)))
        if unknown := self._market.unknown(region):
            facts.append((f"unknown accelerators in {region}", ", ".join(unknown)))
        return [
            *facts,
            *self._quotas(region),
            *(
                (f"reservation {name}", text)
                for name, text in sorted(self._market.reserved(region).items())
            ),
        ]

    async def _refused_launches(self, offers: Sequence[Offer]) -> Sequence[str]:
        """Check a launch of the region's cheapest offer, and return the necessary actions for which
        the account has no permission.
        """
        offers = [each for each in offers if each.requires is None]
        if not offers:
            return []
        offer = min(offers, key=lambda each: (each.rate.micros_per_hour, each.key))
        shape = await self._market.shape(offer.region, offer.instance_type)
        zones = sorted(self._market.zones(offer.region, offer.instance_type))
        if shape is None or not zones:
            return []
        settings = self._context.settings
        try:
            images = MachineImages(self._account, settings, self._context.now)
            image = await images.choose(offer.region, shape)
        except ProviderError as error:
            return [f"the image of {offer.instance_type} ({error})"]
        profile = str(settings.get("instance_profile") or "")
        return await find_refused_launches(self._account, offer, zones[0], image.id, profile)

    def policy(self) -> str:
        return make_policy(profile=str(self._context.settings.get("instance_profile") or ""))

    def _quotas(self, region: str) -> list[tuple[str, str]]:
        """Return the account's vCPU limit for each instance family, or why the limits cannot be
        read.
        """
        limits, problem = self._market.quotas(region)
        facts = [(f"{each.name} in {region}", f"{each.limit:g} vCPUs") for each in limits]
        return [
            *facts,
            *([(f"quotas in {region}", f"cannot be read: {problem}")] if problem else []),
        ]

    async def _user_data(self, gang: GangSpec, record: AwsGangRecord) -> str:
        node_endpoint = self._context.node_endpoint
        if node_endpoint is None:
            raise Refused(_NO_WAY)
        metadata = MetadataService(
            rank=f"{_METADATA}/ami-launch-index",
            address=f"{_METADATA}/local-ipv4",
            token=NOTICES[0].token,
        )
        disks = list_node_disks(record)
        end = (
            KnownEnd(at=record.ends_at, source=NOTICES[0].source)
            if record.ends_at is not None
            else None
        )
        text: str = await self._account.run(
            lambda: make_user_data(gang, node_endpoint, metadata, NOTICES, disks, end)
        )
        return text

    async def _regions(self, name: str | None) -> Sequence[str]:
        """Return the regions to query: the region in the gang's record, even if the settings no
        longer name this region, or all regions if the gang has no record.
        """
        record = self._ledger.get(name) if name is not None else None
        if record is not None:
            return [record.region]
        old = {each.region for each in self._ledger.records.values() if not each.tidy}
        return list(dict.fromkeys([*await self._account.regions(), *sorted(old)]))

    def _is_removed(self, name: str) -> bool:
        record = self._ledger.get(name)
        return record is not None and record.removed

    async def _attach(self, names: Sequence[str]) -> None:
        """Attach the disks for which running nodes are waiting."""
        for name in names:
            record = self._ledger.get(name)
            if record is None or record.removed or all(disk.attached for disk in record.disks):
                continue
            async with self._ledger.lock(name):
                with suppress(
                    ProviderError
                ):  # the next poll tries again; the node reports the missing disk
                    await self._volumes.attach(record)

    async def _end(self, name: str) -> None:
        """Terminate all instances of a gang that are listed by EC2 or recorded in the ledger."""
        record = self._ledger.get(name)
        known = {each.id for each in record.instances if each.ended_at is None} if record else set()
        # All regions are queried at the same time, since the instances may be in any region, and
        # one region may not answer.
        ends = [self._end_in(region, name, known) for region in await self._regions(name)]
        for result in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _end_in(self, region: str, name: str, known: Collection[str]) -> None:
        shown = {str(told["InstanceId"]) for told in await self._status.describe(region, name)}
        # If EC2 does not find one of the ids, the call terminates no instance at all.
        for ids in sorted({*shown, *known}), sorted(shown):
            if await self._terminate(region, ids):
                break

    async def _terminate(self, region: str, ids: Sequence[str]) -> bool:
        """Terminate instances. Return False if at least one id does not exist in EC2. If an id does
        not exist, EC2 terminates none of the instances.
        """
        if not ids:
            return True
        try:
            await self._account.ask(region, "terminate_instances", InstanceIds=list(ids))
        except NotFound:
            return False
        return True

    async def _tidy(self, names: Sequence[str]) -> None:
        """Remove the objects created for gangs that have ended. Objects that are still in use are
        removed by a later call.
        """
        for name in names:
            record = self._ledger.get(name)
            if (
                record is None
                or record.tidy
                or record.ended_at is None
                or self._ledger.lock(name).locked()
            ):
                continue
            now = self._context.now()
            if now < self._tidy_after.get(name, now):
                continue
            self._tidy_after[name] = now + _TIDY_AGAIN
            made = (
                record.makes_group
                or record.makes_placement
                or any(disk.made for disk in record.disks)
            )
            with suppress(TryAgain, Refused):
                if not made or await self._remove_made(record):
                    await self._ledger.put(replace(record, tidy=True))
                    self._tidy_after.pop(name, None)

    async def _remove_made(self, record: AwsGangRecord) -> bool:
        gone = await self._volumes.remove_made(record)
        return await self._networks.remove_made(record) and gone

    async def _tidy_all(self, regions: Sequence[str]) -> None:
        """Remove the objects created for all gangs that have ended, and for gangs that the ledger
        does not contain. `regions` are the regions that answer. If an old launch has no instances,
        it is recorded as ended, but only in these regions. In a region that does not answer, the
        launch may have succeeded.
        """
        now = self._context.now()
        for record in list(self._ledger.records.values()):
            if record.ended_at is not None and record.tidy and now - record.ended_at >= KEPT:
                await self._ledger.drop(record.name)
            elif (
                not record.launched
                and record.region in regions
                and record.ended_at is None
                and now - record.intended_at >= _LONELY
            ):
                await self._ledger.put(replace(record, ended_at=now))
        await self._tidy(list(self._ledger.records))
        for region in regions:
            with suppress(TryAgain, Refused):
                groups, placements = await self._networks.left(region)
                for each in [*groups, *placements]:
                    name = read_tag(each, GANG)
                    if (
                        name
                        and name not in self._ledger.records
                        and not self._ledger.lock(name).locked()
                    ):
                        await self._networks.remove(region, name)
