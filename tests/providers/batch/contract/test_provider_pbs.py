"""The PBS provider keeps the contract, on a strict stand-in for PBS's commands that really runs
the jobs.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract import pbs_stand_in
from tests.contract.batch_provider import BatchPlace, lose_submission
from tests.proofs import Proof
from tests.waits import PATIENCE_S

from cavvy.domain.offers import Purchase
from cavvy.domain.values import replace
from cavvy.providers import pbs
from cavvy.providers.base import GangSpec, GangState, NoCapacity, Provider, Refused, TryAgain
from cavvy.providers.contract import ContractHarness, ProviderContract, ProviderUnderTest

PROOF = Proof("pbs", False, "a strict stand-in for PBS's commands that runs the jobs")

OURS = "contract-installation-ours"


class PbsPlace(BatchPlace):
    """A stand-in cluster."""

    package = pbs

    def __init__(self, folder: Path) -> None:
        super().__init__(
            folder, {"price_usd_gpu_hr": 1, "gpu_resource": "gpu_type", "kill_delay_s": 2}
        )

    def change(self, **facts: object) -> None:
        with pbs_stand_in.cluster(self.folder / "pbs") as state:
            state.update(facts)

    def jobs(self, *states: str) -> list[str]:
        with pbs_stand_in.cluster(self.folder / "pbs") as state:
            return [number for number, job in state["jobs"].items() if job["state"] in states]


class TestPbs(ProviderContract):
    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProviderUnderTest]:
        for name, value in pbs_stand_in.install(tmp_path / "pbs").items():
            monkeypatch.setenv(name, value)
        made = PbsPlace(tmp_path)
        yield made
        give_up = time.monotonic() + PATIENCE_S
        while made.jobs("Q", "R", "E"):
            assert time.monotonic() < give_up, f"jobs are left: {made.jobs('Q', 'R', 'E')}"
            time.sleep(0.05)

    async def lose_reply(
        self, place: ProviderUnderTest, provider: Provider, gang: GangSpec
    ) -> None:
        await lose_submission(provider, gang)

    def test_offers_are_the_queues_and_their_shapes(self, play, place: PbsPlace) -> None:  # type: ignore[no-untyped-def]
        place.settings["spot_queues"] = "short"

        async def scenario(harness: ContractHarness) -> None:
            offers = await harness.make(OURS).offers()
            whole = [offer for offer in offers if offer.accelerator_count == 4]
            assert {(o.zone, o.accelerator, o.purchase) for o in whole} == {
                ("workq", "H100", Purchase.ON_DEMAND),
                ("workq", "A100", Purchase.ON_DEMAND),
                ("short", "H100", Purchase.SPOT),
                ("short", "A100", Purchase.SPOT),
            }
            assert {(o.vcpus, o.memory_mib, o.rate.usd) for o in whole} == {(16, 65536, 4)}

        play(scenario)

    def test_what_waits_says_why_and_is_not_lost(self, play, place: PbsPlace) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("first")
            whole = next(
                o
                for o in await harness.ours.offers()
                if (o.accelerator, o.accelerator_count) == ("H100", 4)
            )
            names = ["first", "second", "third"]
            for name in names:
                spec = await harness.spec(name)
                await harness.ours.launch(replace(spec, offer=whole, nodes=1))
            waiting = await harness.one(harness.name("third"))
            assert waiting.state is GangState.QUEUED
            assert "Insufficient" in waiting.reason
            assert list(waiting.nodes) == []
            await harness.ours.remove(gang.name)
            await place.settle()
            assert (await harness.one(harness.name("third"))).state is GangState.RUNNING

        play(scenario)

    def test_a_server_that_is_away_is_passing(self, play, place: PbsPlace) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("away")
            await harness.ours.offers()
            place.change(away=True)
            with pytest.raises(TryAgain):
                await harness.ours.launch(gang)
            with pytest.raises(TryAgain):
                await harness.ours.gangs()
            place.change(away=False)
            await harness.ours.launch(gang)
            await place.settle()
            assert (await harness.one(gang.name)).state is GangState.RUNNING

        play(scenario)

    def test_a_server_without_history_still_gives_ends(self, play, place: PbsPlace) -> None:  # type: ignore[no-untyped-def]
        place.change(history=False)

        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("brief", nodes=2)
            await harness.ours.launch(gang)
            await place.settle()
            before = await harness.one(gang.name)
            await place.end(gang.name)
            seen = await harness.one(gang.name)
            assert (seen.state, seen.exit_code) == (GangState.ENDED, 0)
            assert [node.started_at for node in seen.nodes] == [
                node.started_at for node in before.nodes
            ]

        play(scenario)

    def test_complaints_are_told(self, play, place: PbsPlace) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("refused")
            place.settings["qsub_options"] = "-Q"
            with pytest.raises(Refused, match="invalid option"):
                await harness.make(OURS).launch(gang)
            place.settings["qsub_options"] = "-l walltime=nonsense"
            with pytest.raises(Refused, match="walltime"):
                await harness.make(OURS).launch(gang)
            place.settings["qsub_options"] = ""
            with pytest.raises(NoCapacity, match="fewer than 5"):
                await harness.make(OURS).launch(replace(gang, nodes=5))
            assert await harness.ours.gangs(gang.name) == []

        play(scenario)

    def test_the_token_is_in_no_script_and_no_argument(self, play, place: PbsPlace) -> None:  # type: ignore[no-untyped-def]
        async def scenario(harness: ContractHarness) -> None:
            gang = await harness.spec("secret")
            await harness.ours.launch(
                replace(gang, agent_endpoint=replace(gang.agent_endpoint, token="tell-nobody"))
            )
            await place.settle()
            assert gang.name in (place.folder / "pbs/state.json").read_text()
            assert "tell-nobody" not in (place.folder / "pbs/state.json").read_text()
            assert os.stat(place.gang_folder(gang.name) / "config.json").st_mode & 0o077 == 0

        play(scenario)
