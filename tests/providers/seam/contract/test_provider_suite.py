"""The contract suite finds the faults that it is there to find: each is put into the made-up
cloud.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta, timezone

import pytest
from test_provider_fake import FakeContract, FakePlace

from cavvy.domain.offers import Offer
from cavvy.domain.values import replace
from cavvy.providers.base import GangSeen, GangSpec, GangState, NodeSeen
from cavvy.providers.fake import FakeAccount
from cavvy.providers.fake.cloud import FakeCloud
from cavvy.providers.fake.script import FaultScript


class BuysTwice(FakeCloud):
    def find(self, name: str) -> list:  # type: ignore[type-arg]  # the cloud's own books
        return []

    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return [seen for seen in await super().gangs() if name in (None, seen.name)]


class ForgetsTheEnded(FakeCloud):
    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return [seen for seen in await super().gangs(name) if seen.state is not GangState.ENDED]


class MovesTheEnd(FakeCloud):
    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        def later(node: NodeSeen) -> NodeSeen:
            return replace(node, ended_at=node.ended_at and self._now())

        return [
            replace(s, nodes=[later(node) for node in s.nodes]) for s in await super().gangs(name)
        ]


class CallsAnEndPreemption(FakeCloud):
    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        return [
            replace(seen, preempted=seen.state is GangState.ENDED)
            for seen in await super().gangs(name)
        ]


class ReportsLocalTime(FakeCloud):
    async def gangs(self, name: str | None = None) -> Sequence[GangSeen]:
        def local(node: NodeSeen) -> NodeSeen:
            start = node.started_at and node.started_at.astimezone(timezone(timedelta(hours=1)))
            return replace(node, started_at=start)

        return [
            replace(seen, nodes=[local(node) for node in seen.nodes])
            for seen in await super().gangs(name)
        ]


class BuysAgainAfterAnEnd(FakeCloud):
    """Starts a removed or ended gang a second time."""

    async def launch(self, gang: GangSpec) -> None:
        if any(seen.state is GangState.ENDED for seen in await self.gangs(gang.name)):
            self.gang_list = [each for each in self.gang_list if each.spec.name != gang.name]
            self._by_name.pop(gang.name, None)
        await super().launch(gang)


class StartsHalf(FakeCloud):
    async def launch(self, gang: GangSpec) -> None:
        await super().launch(replace(gang, nodes=max(1, gang.nodes - 1)))


class SellsAnything(FakeCloud):
    async def launch(self, gang: GangSpec) -> None:
        await super().launch(replace(gang, offer=(await self.offers())[0]))


class OffersTwice(FakeCloud):
    async def offers(self) -> Sequence[Offer]:
        return [*await super().offers(), *await super().offers()]


class NeverRemoves(FakeCloud):
    async def remove(self, name: str) -> None:
        return


class SeesAll(FakeAccount):
    def _ours(self, name: str) -> bool:
        return True


class BrokenPlace(FakePlace):
    def __init__(self, cloud: type[FakeCloud], account: type[FakeAccount]) -> None:
        super().__init__(FaultScript(preempted_after_s=3600))
        self._kinds = cloud, account

    def provider(self, installation: str) -> FakeAccount:
        cloud, account = self._kinds
        if self._cloud is None:
            good = super().provider(installation)
            assert self._cloud is not None
            self._cloud = cloud(good.manifest, self._cloud.script, self._clock.now)
        return account(self._cloud, installation)


SUITE = FakeContract()


@pytest.mark.parametrize(
    ("cloud", "account", "test"),
    [
        (BuysTwice, FakeAccount, SUITE.test_the_first_launch_of_a_name_holds),
        (BuysTwice, FakeAccount, SUITE.test_launches_at_once_make_one_gang),
        (BuysTwice, FakeAccount, SUITE.test_launch_after_a_lost_reply_makes_one_gang),
        (ForgetsTheEnded, FakeAccount, SUITE.test_removed_is_ended_and_stays_so),
        (BuysAgainAfterAnEnd, FakeAccount, SUITE.test_removed_is_ended_and_stays_so),
        (BuysAgainAfterAnEnd, FakeAccount, SUITE.test_removal_during_boot),
        (
            BuysAgainAfterAnEnd,
            FakeAccount,
            lambda play: SUITE.test_an_end_is_remembered_and_never_changes(play, by_itself=True),
        ),
        (CallsAnEndPreemption, FakeAccount, SUITE.test_removed_is_ended_and_stays_so),
        (ReportsLocalTime, FakeAccount, SUITE.test_a_launched_gang_is_found_and_runs),
        (
            MovesTheEnd,
            FakeAccount,
            lambda play: SUITE.test_an_end_is_remembered_and_never_changes(play, by_itself=False),
        ),
        (StartsHalf, FakeAccount, SUITE.test_all_nodes_or_none),
        (SellsAnything, FakeAccount, SUITE.test_a_refused_launch_leaves_nothing),
        (OffersTwice, FakeAccount, SUITE.test_offers_have_unique_keys_and_prices),
        (NeverRemoves, FakeAccount, SUITE.test_removal_during_boot),
        (FakeCloud, SeesAll, SUITE.test_another_installations_gangs_are_neither_seen_nor_touched),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_fault_is_found(
    cloud: type[FakeCloud], account: type[FakeAccount], test: Callable[..., None]
) -> None:
    test(SUITE.make_play(FakePlace(FaultScript(preempted_after_s=3600))))
    with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
        test(SUITE.make_play(BrokenPlace(cloud, account)))
