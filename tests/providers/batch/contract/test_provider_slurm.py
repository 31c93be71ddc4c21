"""The Slurm provider keeps the contract, on a real cluster."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from tests.contract.batch_provider import BatchPlace, lose_submission
from tests.proofs import Proof
from tests.system.slurm import Cluster, cluster_at, why_not

from cavvy.domain.offers import Purchase
from cavvy.domain.tasks import TaskSpec
from cavvy.domain.values import replace
from cavvy.providers import slurm
from cavvy.providers.base import GangSpec, GangState, NoCapacity, Provider, Refused, TryAgain
from cavvy.providers.batch.commands import SubmissionUnsure
from cavvy.providers.batch.provider import BatchProvider
from cavvy.providers.contract import ContractHarness, ProviderContract, ProviderUnderTest
from cavvy.providers.objections import list_objections

PROOF = Proof("slurm", True, "Slurm with four nodes of eight simulated GPUs each")

pytestmark = pytest.mark.system


@contextmanager
def entered_cluster_at(folder: Path) -> Iterator[Cluster]:
    """A cluster that Slurm's commands speak to while the block runs."""
    if reason := why_not():
        pytest.skip(reason)
    with cluster_at(folder) as made, slurm_environment(made):
        yield made


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with entered_cluster_at(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@contextmanager
def slurm_environment(cluster: Cluster) -> Iterator[None]:
    """Slurm's commands speak to this cluster while the block runs."""
    wanted = {name: cluster.environ[name] for name in ("SLURM_CONF", "PATH")}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class SlurmPlace(BatchPlace):
    """A cluster with a stand-in for the agent."""

    package = slurm

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        super().__init__(folder, {"price_usd_gpu_hr": 2, "price_usd_node_hr": 6.4})
        self.cluster = cluster


class TestSlurm(ProviderContract):
    @pytest.fixture
    def place(self, cluster: Cluster, tmp_path: Path) -> Iterator[ProviderUnderTest]:
        yield SlurmPlace(cluster, tmp_path)
        cluster.until(lambda: not cluster.jobs("PD,R,CG"))

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        await lose_submission(provider, gang)

    def test_a_second_job_of_a_gang_does_nothing(self, play, place: SlurmPlace) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            provider = harness.ours
            assert isinstance(provider, BatchProvider)
            submit, jobs = provider.system.commands.submit, []

            async def twice(options: Sequence[str], script: str) -> str:
                jobs.extend([await submit(options, script), await submit(options, script)])
                return str(jobs[0])

            provider.system.commands.submit = twice  # type: ignore[method-assign]
            gang = await harness.spec("fenced")
            await provider.launch(gang)
            await harness.place.settle()
            place.cluster.until(lambda: "COMPLETED" in [place.cluster.job(job) for job in jobs])
            assert (await harness.one(gang.name)).state is GangState.RUNNING
            assert len(list(place.gang_folder(gang.name).glob("*/starts"))) == 1

        play(scenario)

    def test_a_submission_that_may_be_under_way_is_not_repeated(
        self, play, place: SlurmPlace
    ) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            provider = harness.ours
            assert isinstance(provider, BatchProvider)
            submit = provider.system.commands.submit

            async def hang(options: Sequence[str], script: str) -> str:
                raise SubmissionUnsure("no answer")

            gang = await harness.spec("unsure")
            provider.system.commands.submit = hang  # type: ignore[method-assign]
            with pytest.raises(TryAgain):
                await provider.launch(gang)
            provider.system.commands.submit = submit  # type: ignore[method-assign]
            with pytest.raises(TryAgain, match="in progress"):
                await provider.launch(gang)
            assert await provider.gangs(gang.name) == []
            await place.wait(timedelta(minutes=2))
            await provider.launch(gang)
            await place.settle()
            assert (await harness.one(gang.name)).state is GangState.RUNNING

        play(scenario)

    def test_offers_are_the_partitions_and_their_shapes(self, play) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            offers = await harness.ours.offers()
            whole = [offer for offer in offers if offer.accelerator_count == 8]
            assert {(o.zone, o.accelerator, o.purchase) for o in whole} == {
                ("main", "H100", Purchase.ON_DEMAND),
                ("main", "A100", Purchase.ON_DEMAND),
                ("spot", "H100", Purchase.SPOT),
                ("spot", "A100", Purchase.SPOT),
            }
            assert {(o.vcpus, o.memory_mib, o.rate.usd) for o in whole} == {(64, 512000, 16)}
            (one,) = [
                o
                for o in offers
                if (o.zone, o.accelerator, o.accelerator_count) == ("main", "H100", 1)
            ]
            assert (one.vcpus, one.memory_mib, one.rate.usd) == (8, 64000, 2)
            (four,) = [
                o for o in offers if (o.zone, o.vcpus, o.accelerator_count) == ("main", 4, 0)
            ]
            assert float(four.rate.usd) == pytest.approx(0.4)
            assert all(offer.capacity is None for offer in offers)

        play(scenario)

    def test_without_its_queue_capacity_is_what_is_idle(self, play, place: SlurmPlace) -> None:  # type: ignore[no-untyped-def]
        place.settings["queue"] = False

        async def scenario(harness: ContractHarness) -> None:
            provider = harness.make("contract-installation-ours")

            async def idle(count: int) -> int | None:
                offers = await provider.offers()
                (found,) = [
                    o
                    for o in offers
                    if (o.zone, o.accelerator, o.accelerator_count) == ("main", "H100", count)
                ]
                return found.capacity

            assert (await idle(8), await idle(1)) == (2, 2)
            gang = await harness.spec("one")
            offers = await provider.offers()
            offer = next(
                o
                for o in offers
                if (o.zone, o.accelerator, o.accelerator_count) == ("main", "H100", 1)
            )
            await harness.ours.launch(replace(gang, offer=offer))
            await harness.place.settle()
            assert (await idle(8), await idle(1)) == (1, 2)

        play(scenario)

    def test_what_sbatch_says_is_told(self, play, place: SlurmPlace) -> None:  # type: ignore[no-untyped-def]
        place.settings["sbatch_options"] = "--reservation=no-such"

        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("refused")
            with pytest.raises(Refused, match="reservation"):
                await harness.make("contract-installation-ours").launch(gang)
            assert await harness.ours.gangs(gang.name) == []
            place.settings.clear()
            whole = next(o for o in await harness.ours.offers() if o.accelerator_count == 8)
            with pytest.raises(NoCapacity):
                await harness.make("contract-installation-ours").launch(
                    replace(gang, name=harness.name("large"), offer=whole, nodes=9)
                )
            assert await harness.ours.gangs(harness.name("large")) == []

        play(scenario)

    def test_an_image_is_refused_with_its_reason(self, play) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            assert isinstance(harness.ours, BatchProvider)
            (found,) = list_objections(
                TaskSpec(name="boxed", run="true", image="box:1"), harness.ours
            )
            assert found.field == "image"

        play(scenario)

    def test_the_token_is_in_no_script_and_no_argument(self, play, place: SlurmPlace) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("secret")
            gang = replace(gang, agent_endpoint=replace(gang.agent_endpoint, token="tell-nobody"))
            await harness.ours.launch(gang)
            await harness.place.settle()
            seen = await harness.one(gang.name)
            told = place.cluster.run("scontrol", "show", "job", "-d", seen.engine_id)
            told += place.cluster.run("scontrol", "write", "batch_script", seen.engine_id, "-")
            assert gang.name in told
            assert "tell-nobody" not in told
            holders = [
                p
                for p in place.gang_folder(gang.name).rglob("*")
                if p.is_file() and _allocations(p)
            ]
            assert {path.name for path in holders} == {"config.json"}
            assert all(path.stat().st_mode & 0o077 == 0 for path in holders)
            assert (place.folder / "shared").stat().st_mode & 0o077 == 0

        play(scenario)


def _allocations(path: Path) -> bool:
    return b"tell-nobody" in path.read_bytes()
