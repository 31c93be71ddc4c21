"""The harness of one scenario: the infrastructure under test, its provider, and the scenario's
gangs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from datetime import timedelta
from enum import StrEnum
from inspect import Signature, signature
from typing import Any, Protocol, TypeVar, runtime_checkable

import pytest

from cavvy.domain.allocations import Allocation
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.values import replace
from cavvy.providers.abilities import CLOSEABLE, SHARES_HOSTS, SIGNALS_CHANGES, ability
from cavvy.providers.base import (
    Ability,
    AgentEndpoint,
    Feature,
    GangSeen,
    GangSpec,
    GangState,
    NoCapacity,
    NodeSeen,
    Provider,
    ProviderError,
    Refused,
    TryAgain,
)

P = TypeVar("P")
# the control plane repeats a launch at least every 15 seconds, for 10 minutes
LAUNCH_PAUSE, LAUNCH_TRIES = timedelta(seconds=15), 40
OURS, FOREIGN = "contract-installation-ours", "contract-installation-foreign"


class ProviderUnderTest(Protocol):
    """The infrastructure under test, for one scenario. The suite accesses the infrastructure
    through providers and these hooks.
    """

    def provider(self, installation: str) -> Provider:
        """Return a new provider on this infrastructure, as if the installation's server had
        restarted.
        """

    async def settle(self) -> None:
        """Let time pass until all requested boots and removals have completed."""

    async def end(self, gang: str) -> None:
        """Make the gang's work finish normally, and then stop the gang's nodes."""

    async def wait(self, length: timedelta) -> None:
        """Advance a simulated clock by `length`. On a real clock, wait at most as long as a test
        may take.
        """


class LaunchFault(StrEnum):
    """The way in which one request for a node fails."""

    LOST = "lost"  # the request takes effect, but there is no reply
    DROPPED = "dropped"  # the request has no effect, and there is no reply
    BUSY = "429"
    BROKEN = "500"  # the request has no effect
    BROKEN_LATE = "500 after the effect"
    FULL = "no capacity"
    REFUSED = "refused"


@runtime_checkable
class FaultyPlace(Protocol):
    """Infrastructure that starts nodes one by one, and in which tests can trigger failures.
    `FaultTests` needs these methods in addition to the methods of `ProviderUnderTest`.
    """

    def fail(self, number: int, fault: LaunchFault) -> None:
        """Let the next `number` requests for nodes succeed, and let the request that follows fail
        with `fault`.
        """

    def failed(self) -> bool:
        """Return whether the request that `fail` selected has been sent."""

    def fail_deletions(self, fails: bool) -> None:
        """Let all deletions fail if `fails` is True; otherwise let deletions succeed again."""

    def billed(self) -> int:
        """Return the number of nodes that are billed now, whether they are listed or not."""

    def lose_records(self) -> None:
        """Delete all records that the provider has stored in `ProviderContext.state`."""

    def double(self) -> None:
        """Start another node with the name of the newest node."""

    def hide(self, hidden: bool) -> None:
        """If `hidden` is True, make the infrastructure's list of nodes empty; otherwise make the
        list complete. A hidden node can still be found by its id.
        """


Play = Callable[[Callable[["ContractHarness"], Awaitable[None]]], None]


def in_scenario(check: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Decorator: turn a coroutine that takes a `harness` into a test. pytest passes the coroutine's
    other arguments.
    """

    def test(self: object, play: Play, **given: object) -> None:
        play(lambda harness: check(self, harness, **given))

    names = signature(check).parameters.values()
    test.__signature__ = Signature(  # type: ignore[attr-defined]  # pytest reads it
        [each.replace(name="play") if each.name == "harness" else each for each in names]
    )
    test.__name__, test.__qualname__, test.__doc__ = (
        check.__name__,
        check.__qualname__,
        check.__doc__,
    )
    return test


class ScenarioSuite:
    """The base class of the suite's test classes. It runs each scenario. `ProviderContract`
    documents the methods to override.
    """

    # True: the infrastructure changes times that it has reported, or reports them inexactly.
    revises = False
    forgets = False  # True: the infrastructure does not list gangs that have ended
    crowd = 200  # nodes of the largest gang; set it lower if nodes are processes of this machine
    # the nodes of a gang of three at which a launch fails; one is enough where other classes test
    # the code that decides what happens to the gang's other nodes
    failing_nodes: Sequence[int] = (0, 1, 2)

    @pytest.fixture
    def place(self) -> ProviderUnderTest:
        pytest.fail(
            "a provider's contract test overrides the fixture `place`, which returns its "
            "infrastructure"
        )

    def run_scenario(self, scenario: Coroutine[Any, Any, None]) -> None:
        """Run the coroutine of one test. Test classes whose infrastructure uses virtual time
        override this method to use their own event loop.
        """
        asyncio.run(scenario)

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        """Launch the gang so that the gang starts but the caller receives no reply. The default
        implementation discards the reply.
        """
        await provider.launch(gang)

    @pytest.fixture
    def play(self, place: ProviderUnderTest) -> Play:
        return self.make_play(place)

    def make_play(self, place: ProviderUnderTest) -> Play:
        """Return a function that runs a scenario in a new harness and then removes the scenario's
        gangs.
        """

        async def run(scenario: Callable[["ContractHarness"], Awaitable[None]]) -> None:
            harness = ContractHarness(
                place,
                self.lose_reply,
                revises=self.revises,
                forgets=self.forgets,
                crowd=self.crowd,
            )
            try:
                await scenario(harness)
            finally:
                await harness.clear()

        return lambda scenario: self.run_scenario(run(scenario))


class ContractHarness:
    """The infrastructure and the provider of one scenario, and the scenario's gangs."""

    def __init__(
        self,
        place: ProviderUnderTest,
        lose_reply: Callable[[ProviderUnderTest, Provider, GangSpec], Awaitable[None]],
        *,
        revises: bool = False,
        forgets: bool = False,
        crowd: int = 200,
    ) -> None:
        self.place, self.crowd = place, crowd
        self._lose_reply = lose_reply
        self._revises, self._forgets = revises, forgets
        self._made: list[tuple[str, Provider]] = []
        self._names: list[tuple[str, str]] = []
        self.ours = self.make(OURS)

    def make(self, installation: str) -> Provider:
        provider = self.place.provider(installation)
        self._made.append((installation, provider))
        return provider

    def restart(self) -> None:
        """Simulate a server restart: continue with a new provider, which remembers nothing."""
        self.ours = self.make(OURS)

    def name(self, word: str) -> str:
        """Return a gang name in the form that the control plane creates: at most 63 characters of
        [a-z0-9-].
        """
        return f"rm-0123abcd-{word}"[:63]

    def needs(self, feature: Feature) -> None:
        """Skip the test, with the reason from the manifest, if the provider lacks this feature."""
        reason = self.ours.manifest.unsupported.get(feature)
        if reason is not None:
            pytest.skip(f"the provider lacks {feature}: {reason}")

    def require(self, wanted: Ability[P]) -> P:
        """Return the provider, typed as this ability; skip the test if the provider lacks the
        ability.
        """
        found = ability(self.ours, wanted)
        if found is None:
            pytest.skip(f"this provider does not have the ability {wanted.name!r}")
        return found

    def faulty(self) -> FaultyPlace:
        """Return the infrastructure as a `FaultyPlace`. Fail if the infrastructure does not support
        faults.
        """
        assert isinstance(self.place, FaultyPlace), "`FaultTests` need a `FaultyPlace`"
        return self.place

    async def offer(self, purchase: Purchase | None = None) -> Offer:
        """Return the available offer with the fewest accelerators; if several such offers exist,
        return the cheapest.
        """
        offers = [
            o
            for o in await self.ours.offers()
            if o.capacity != 0 and purchase in (None, o.purchase)
        ]
        return min(offers, key=lambda offer: (offer.accelerator_count, offer.rate, offer.key))

    async def spec(
        self,
        word: str,
        *,
        nodes: int = 1,
        installation: str = OURS,
        purchase: Purchase | None = None,
    ) -> GangSpec:
        """Return the spec of a gang that uses the offer from `offer`. The spec has allocations if
        the offer is on a shared host.
        """
        offer, name = await self.offer(purchase), self.name(word)
        self._names.append((installation, name))
        return GangSpec(
            name=name,
            installation=installation,
            offer=offer,
            nodes=nodes,
            agent_endpoint=AgentEndpoint(
                address="unix:/nonexistent/cavvy-contract.sock", token="contract"
            ),
            lease=timedelta(hours=1),
            allocations=await self._allocations(offer, name, nodes),
            labels={"project": "contract"},
            grace=timedelta(seconds=1),
        )

    async def launched(self, word: str, **options: Any) -> GangSpec:
        """Launch the gang that `spec` returns."""
        gang = await self.spec(word, **options)
        await self.launch(gang)
        return gang

    async def running(self, word: str, **options: Any) -> GangSpec:
        """Launch the gang that `spec` returns, and wait until its nodes have booted."""
        gang = await self.launched(word, **options)
        await self.place.settle()
        return gang

    async def launch(self, gang: GangSpec, provider: Provider | None = None) -> None:
        """Launch the gang as the control plane does: repeat the call while the provider raises
        TryAgain, for at most ten minutes.
        """
        for _ in range(LAUNCH_TRIES):
            try:
                return await (provider or self.ours).launch(gang)
            except TryAgain:
                await self.place.wait(LAUNCH_PAUSE)
        await (provider or self.ours).launch(gang)

    async def start(self, gang: GangSpec) -> None:
        """Launch the gang, and wait until its nodes have booted."""
        await self.launch(gang)
        await self.place.settle()

    async def launches(self, gang: GangSpec) -> bool:
        """Launch the gang and return True. If the launch is refused, check that the gang is not
        listed, and return False.
        """
        try:
            await self.launch(gang)
        except (NoCapacity, Refused):
            await self.place.settle()
            assert await self.ours.gangs(gang.name) == []
            return False
        return True

    async def launch_again(self, gang: GangSpec, again: GangSpec | None = None) -> None:
        """Launch a running gang a second time, with the same spec or with the spec `again`. Check
        that the launch neither replaces nor adds nodes.
        """
        first = await self.engine_ids(gang.name)
        await self.launch(again or gang)
        assert await self.engine_ids(gang.name) == first

    async def expect(self, state: GangState, gang: GangSpec) -> None:
        assert (await self.one(gang.name)).state is state

    async def remove(self, name: str) -> None:
        """Remove a gang and wait until its nodes no longer exist."""
        await self.ours.remove(name)
        await self.place.settle()

    async def _allocations(self, offer: Offer, gang: str, nodes: int) -> Sequence[Allocation]:
        shares = ability(self.ours, SHARES_HOSTS)
        if not offer.shared or shares is None:
            return ()
        host = (await shares.hosts())[0]
        need = offer.accelerator_count
        return [
            Allocation(
                host=host.name,
                gang=gang,
                rank=rank,
                project="contract",
                cpus=0.1,
                memory_mib=64,
                devices=host.devices[rank * need : (rank + 1) * need],
            )
            for rank in range(nodes)
        ]

    async def one(self, name: str) -> GangSeen:
        """Return the gang with this name; fail if no gang or several gangs have the name. A gang
        that the infrastructure has forgotten counts as ended.
        """
        found = await self.ours.gangs(name)
        if self._forgets and not found:
            return GangSeen(name=name, state=GangState.ENDED)
        (seen,) = found
        assert seen.name == name
        return seen

    def nodes(self, seen: GangSeen) -> Sequence[NodeSeen]:
        """Return the gang's nodes without the time of the poll, so that tests can compare them. If
        the infrastructure corrects reported times later, the start and end times of the nodes are
        left out as well.
        """
        nodes = [replace(node, seen_at=None) for node in seen.nodes]
        if not self._revises:
            return nodes
        return [replace(node, started_at=None, ended_at=None) for node in nodes]

    def listings(self, gang: GangSpec) -> Sequence[Sequence[str]]:
        """Return all results that `gangs` may have after this gang has ended, each as a list of
        names. No other gang exists.
        """
        return ([gang.name], []) if self._forgets else ([gang.name],)

    def needs_memory(self) -> None:
        """Skip the test if the infrastructure forgets gangs that have ended."""
        if self._forgets:
            pytest.skip("the infrastructure does not list gangs that have ended")

    async def engine_ids(self, name: str) -> Sequence[str]:
        """Return the ids of the gang and of its nodes once the nodes are up. The node ids must all
        differ.
        """
        await self.place.settle()
        seen = await self.one(name)
        ids = [seen.engine_id, *(node.engine_id for node in seen.nodes)]
        nodes = [node.engine_id for node in seen.nodes]
        assert len(nodes) == len(set(nodes))
        return ids

    async def lose_reply(self, gang: GangSpec) -> None:
        await self._lose_reply(self.place, self.ours, gang)

    async def a_moment(self, seconds: float = 0) -> None:
        """Let other asyncio tasks send their calls. Sleep for at least `seconds` seconds."""
        await asyncio.sleep(seconds)  # noqa: TID251 - of the test, not of a provider

    async def ended(self, name: str) -> None:
        """Wait for a signal that the gang has ended."""
        signals = self.require(SIGNALS_CHANGES)
        async with asyncio.timeout(60):
            while (
                await signals.changed() != name
                or (await self.one(name)).state is not GangState.ENDED
            ):
                pass

    async def clear(self) -> None:
        """Remove every gang of the scenario, each through the provider of the gang's
        installation."""
        providers = dict(self._made)
        for installation, name in self._names:
            provider = providers.get(installation)
            if provider is None:
                continue
            try:
                await provider.remove(name)
            except ProviderError as error:
                pytest.fail(f"{name} could not be removed after the scenario: {error}")
        await self.place.settle()
        for _, provider in self._made:
            if closeable := ability(provider, CLOSEABLE):
                await closeable.close()
