"""Amazon EC2 as a provider: gangs are launches, found again by their tags; nodes fetch the agent and end themselves."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta

from remuda.domain.offers import Offer
from remuda.domain.tasks import Task
from remuda.providers.aws.account import Account
from remuda.providers.aws.books import Books
from remuda.providers.aws.launch import Launcher
from remuda.providers.aws.manifest import NOTICES
from remuda.providers.aws.market import Market
from remuda.providers.aws.network import GANG, Networks, mark_of
from remuda.providers.aws.policy import make_policy
from remuda.providers.aws.sight import Sight
from remuda.providers.base import (
    GangSeen,
    GangSpec,
    GangState,
    Manifest,
    NotFound,
    ProviderContext,
    ProviderError,
    Refused,
    TryAgain,
)
from remuda.providers.hosts.userdata import Metadata, make_user_data

_METADATA = "http://169.254.169.254/latest/meta-data"
_LONELY = timedelta(minutes=10)  # an intent so old, of which EC2 shows nothing, was never granted
_CLOSING_S = 10
_TIDY_AGAIN = timedelta(seconds=5)  # between two tries to remove what is still in use
_NO_WAY = "nodes on EC2 call the server, and `server.tls_listen` is not set; see docs/guides/aws.md"


class AwsProvider:
    """Implements Provider, ChecksTasks, Introduces, StatesPolicy and Closes."""

    def __init__(self, manifest: Manifest, context: ProviderContext, account: Account | None = None) -> None:
        self.manifest = manifest
        self._context = context
        self._mark = mark_of(context.installation)
        self._account = account or Account(context.settings)
        self._market = Market(self._account, context.settings, context.home, context.now)
        self._books = Books(context.home / self._mark, context.now)
        self._networks = Networks(self._account, self._mark)
        self._sight = Sight(self._account, self._books, self._mark, manifest.settle, context.now)
        self._tidy_after: dict[str, datetime] = {}
        self._launcher = Launcher(
            self._account, self._market, self._books, self._networks, context.settings,
            mark=self._mark, now=context.now,
        )  # fmt: skip

    async def offers(self) -> Sequence[Offer]:
        return await self._market.offers()

    async def launch(self, gang: GangSpec) -> None:
        async with self._books.lock(gang.name):
            await self._launcher.launch(gang, await self._user_data(gang))

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        regions = await self._regions(name)
        seen = await self._sight.look(regions, name)
        late = [each.name for each in seen if each.state is not GangState.ENDED and self._is_removed(each.name)]
        for each in late:  # EC2 did not show it yet when it was to go, or it was made after that
            await self._end(each)
        if late:
            seen = await self._sight.look(regions, name)
        if name is None:
            await self._tidy_all(regions)
        else:
            await self._tidy([each.name for each in self._books.records.values() if each.ended_at is not None])
        return seen

    async def remove(self, name: str) -> None:
        async with self._books.lock(name):
            record = self._books.get(name)
            if record is not None and not record.removed:
                self._books.put(replace(record, removed=True))
            await self._end(name)
        await self._tidy([name])

    async def close(self) -> None:
        """Tidies up once more: nobody may look here again for long."""
        if any(not each.tidy and (each.removed or each.ended_at) for each in self._books.records.values()):
            with suppress(ProviderError, TimeoutError):
                async with asyncio.timeout(_CLOSING_S):
                    await self.gangs()
        await self._market.close()

    def check(self, task: Task) -> Sequence[str]:
        need = task.resources.network
        reasons = [] if self._context.outside is not None else [f"providers: {_NO_WAY}"]
        if need is not None and need.subnet and need.vpc:
            reasons.append("resources.network: a subnet is in one VPC; name one of the two")
        return reasons

    async def introduce(self) -> Sequence[tuple[str, str]]:
        regions = await self._account.regions()
        who = await self._account.ask(regions[0], "sts", "get_caller_identity")
        offers = await self.offers()
        facts = [("account", str(who["Account"])), ("user", str(who["Arn"])), ("regions", ", ".join(regions))]
        for region in regions:
            mine = [offer for offer in offers if offer.region == region]
            kinds = len({offer.instance_type for offer in mine})
            facts.append((f"offers in {region}", f"{len(mine)}, of {kinds} instance types"))
            facts += await self._quotas(region)
        outside = self._context.outside
        facts.append(("nodes call", outside.address if outside is not None else f"nobody: {_NO_WAY}"))
        return facts

    def policy(self) -> str:
        return make_policy()

    async def _quotas(self, region: str) -> list[tuple[str, str]]:
        """The account's limits on vCPUs by family, where it may read them."""
        try:
            told = await self._account.pages(
                region, "service-quotas", "list_service_quotas", "Quotas", ServiceCode="ec2"
            )
        except ProviderError as error:
            return [(f"quotas in {region}", f"cannot be read: {error}")]
        ours = {
            str(each["QuotaName"]): float(each["Value"])
            for each in told
            if str(each["QuotaName"]).startswith("Running On-Demand") or "Spot Instance Requests" in each["QuotaName"]
        }
        return [(f"{name} in {region}", f"{value:g} vCPUs") for name, value in sorted(ours.items())]

    async def _user_data(self, gang: GangSpec) -> str:
        outside = self._context.outside
        if outside is None:
            raise Refused(_NO_WAY)
        metadata = Metadata(
            rank=f"{_METADATA}/ami-launch-index", address=f"{_METADATA}/local-ipv4", token=NOTICES[0].token
        )
        text: str = await self._account.run(lambda: make_user_data(gang, outside, metadata, NOTICES))
        return text

    async def _regions(self, name: str | None) -> Sequence[str]:
        """Where a gang is, or may be: its own region, also one that the settings do not name any more."""
        record = self._books.get(name) if name is not None else None
        if record is not None:
            return [record.region]
        old = {each.region for each in self._books.records.values() if not each.tidy}
        return list(dict.fromkeys([*await self._account.regions(), *sorted(old)]))

    def _is_removed(self, name: str) -> bool:
        record = self._books.get(name)
        return record is not None and record.removed

    async def _end(self, name: str) -> None:
        """Terminate every instance that EC2 shows of a gang, and those that the books know."""
        record = self._books.get(name)
        known = {each.id for each in record.instances if each.ended_at is None} if record else set()
        for region in await self._regions(name):
            shown = {str(told["InstanceId"]) for told in await self._sight.describe(region, name)}
            # Of ids that EC2 does not know yet none would be terminated, the others neither.
            for ids in sorted(shown | known), sorted(shown):
                if await self._terminate(region, ids):
                    break

    async def _terminate(self, region: str, ids: Sequence[str]) -> bool:
        """False where EC2 does not know one of them (yet, or any more), so that none was terminated."""
        if not ids:
            return True
        try:
            await self._account.ask(region, "ec2", "terminate_instances", InstanceIds=list(ids))
        except NotFound:
            return False
        return True

    async def _tidy(self, names: Sequence[str]) -> None:
        """Remove what was made for gangs that have ended; what is still in use goes the next time."""
        for name in names:
            record = self._books.get(name)
            if record is None or record.tidy or record.ended_at is None or self._books.lock(name).locked():
                continue
            now = self._context.now()
            if now < self._tidy_after.get(name, now):
                continue
            self._tidy_after[name] = now + _TIDY_AGAIN
            made = record.makes_group or record.makes_placement
            with suppress(TryAgain, Refused):
                if not made or await self._networks.remove_made(record):
                    self._books.put(replace(record, tidy=True))
                    self._tidy_after.pop(name, None)

    async def _tidy_all(self, regions: Sequence[str]) -> None:
        """As `_tidy`, and what no gang that lives or is being launched can need, whoever has forgotten it."""
        now = self._context.now()
        self._books.clear_old()
        for record in list(self._books.records.values()):
            if not record.launched and record.ended_at is None and now - record.intended_at >= _LONELY:
                self._books.put(replace(record, ended_at=now))
        await self._tidy(list(self._books.records))
        for region in regions:
            with suppress(TryAgain, Refused):
                groups, placements = await self._networks.left(region)
                for each in [*groups, *placements]:
                    name = next((str(tag["Value"]) for tag in each.get("Tags", []) if tag["Key"] == GANG), "")
                    if name and name not in self._books.records and not self._books.lock(name).locked():
                        await self._networks.remove(region, name)
