"""Launches: all or none, once, whatever is lost and whoever else launches."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import pytest

from cavvy.domain.offers import Purchase
from cavvy.providers.base import (
    Feature,
    GangSpec,
    GangState,
    NoCapacity,
    Provider,
    Refused,
    SharesHosts,
    TryAgain,
)
from cavvy.providers.contract.stage import FOREIGN, Play, Stage, Stories


class Launches(Stories):
    """What is asked for once is there once."""

    def test_launched_is_found(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("found")
            await stage.ours.launch(gang)
            if stage.ours.manifest.settle == timedelta(0):
                assert (await stage.one(gang.name)).state in (
                    GangState.QUEUED,
                    GangState.STARTING,
                    GangState.RUNNING,
                )
            await stage.place.settle()
            seen = await stage.one(gang.name)
            assert seen.state is GangState.RUNNING
            assert [node.rank for node in seen.nodes] == list(range(gang.nodes))
            assert all(node.started_at is not None and node.ended_at is None for node in seen.nodes)
            assert gang.name in [each.name for each in await stage.ours.gangs()]

        play(story)

    def test_what_was_never_launched_is_not_found(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            assert await stage.ours.gangs(stage.name("never")) == []

        play(story)

    def test_all_nodes_or_none(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            if Feature.GANG in stage.ours.manifest.lacks:
                pytest.skip(f"no gangs here: {stage.ours.manifest.lacks[Feature.GANG]}")
            gang = await stage.spec("whole", nodes=3)
            try:
                await stage.ours.launch(gang)
            except (NoCapacity, Refused):
                assert await stage.ours.gangs(gang.name) == []
                return
            await stage.place.settle()
            assert len((await stage.one(gang.name)).nodes) == 3

        play(story)

    def test_a_refused_launch_leaves_nothing(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("nowhere")
            nowhere = replace(gang.offer, region="no-such-region", zone=None)
            with pytest.raises((NoCapacity, Refused)):
                await stage.ours.launch(replace(gang, offer=nowhere))
            await stage.place.settle()
            assert await stage.ours.gangs(gang.name) == []

        play(story)

    def test_the_same_name_again_is_no_second_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("twice")
            await stage.ours.launch(gang)
            first = await stage.engine_ids(gang.name)
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_launches_at_once_make_one_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("at-once")
            async with asyncio.TaskGroup() as group:
                for _ in range(4):
                    group.create_task(stage.ours.launch(gang))
            await stage.engine_ids(gang.name)

        play(story)

    def test_launch_after_a_lost_reply_makes_one_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("lost")
            with suppress(TryAgain):
                await stage.lose_reply(gang)
            first = await stage.engine_ids(gang.name)
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_launch_after_a_restart_makes_one_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("restart")
            await stage.ours.launch(gang)
            first = await stage.engine_ids(gang.name)
            stage.restart()
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_launch_after_a_lost_reply_and_a_restart_makes_one_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("lost-again")
            with suppress(TryAgain):
                await stage.lose_reply(gang)
            stage.restart()
            with suppress(TryAgain):  # it may be under way still
                await stage.ours.launch(gang)
            first = await stage.engine_ids(gang.name)
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_a_launch_whose_caller_went_away_makes_one_gang(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("left")
            call = asyncio.create_task(stage.ours.launch(gang))
            await stage.a_moment(0.005)
            call.cancel()
            with suppress(asyncio.CancelledError):
                await call
            await stage.place.settle()
            with suppress(TryAgain):
                await stage.ours.launch(gang)
            await stage.place.wait(timedelta(minutes=10))  # by then nothing is on the wire any more
            await stage.ours.launch(gang)
            first = await stage.engine_ids(gang.name)
            await stage.ours.launch(gang)
            assert await stage.engine_ids(gang.name) == first

        play(story)

    def test_two_servers_that_launch_the_same_make_one_gang(self, play: Play) -> None:
        """As when a server is replaced while its last call is on the wire."""

        async def story(stage: Stage) -> None:
            gang = await stage.spec("servers")
            former = stage.ours
            stage.restart()

            async def launch(provider: Provider) -> None:
                with suppress(TryAgain):
                    await provider.launch(gang)

            async with asyncio.TaskGroup() as group:
                group.create_task(launch(former))
                group.create_task(launch(stage.ours))
            await stage.engine_ids(gang.name)

        play(story)

    @pytest.mark.parametrize(
        "change",
        [
            lambda gang: replace(gang, nodes=2, holds=()),
            lambda gang: replace(gang, lease=timedelta(hours=2)),
            lambda gang: replace(gang, labels={"project": "other"}),
        ],
        ids=["nodes", "lease", "labels"],
    )
    def test_the_first_launch_of_a_name_holds(
        self, play: Play, change: Callable[[GangSpec], GangSpec]
    ) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("first")
            await stage.ours.launch(gang)
            ids = await stage.engine_ids(gang.name)
            await stage.ours.launch(change(gang))
            assert await stage.engine_ids(gang.name) == ids

        play(story)

    def test_an_unknown_type_never_runs(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("unknown")
            unknown = replace(
                gang.offer, instance_type="no-such-type", accelerator="H100", accelerator_count=999
            )
            try:
                await stage.ours.launch(replace(gang, offer=unknown, holds=()))
            except (NoCapacity, Refused):
                await stage.place.settle()
                assert await stage.ours.gangs(gang.name) == []
                return
            assert (
                await stage.one(gang.name)
            ).state is GangState.QUEUED  # by a place that takes any wish, for ever

        play(story)

    def test_a_refused_name_can_be_launched_elsewhere(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("second-try")
            nowhere = replace(gang.offer, region="no-such-region", zone=None)
            with pytest.raises((NoCapacity, Refused)):
                await stage.ours.launch(replace(gang, offer=nowhere))
            await stage.ours.launch(gang)
            await stage.engine_ids(gang.name)

        play(story)

    def test_several_launched_at_once_are_several(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gangs = [await stage.spec(f"many-{number}") for number in range(4)]
            started = []

            async def launch(gang: GangSpec) -> None:
                with suppress(NoCapacity, Refused):
                    await stage.ours.launch(gang)
                    started.append(gang.name)

            async with asyncio.TaskGroup() as group:
                for gang in gangs:
                    group.create_task(launch(gang))
            assert started
            await stage.place.settle()
            assert sorted(seen.name for seen in await stage.ours.gangs()) == sorted(started)

        play(story)

    @pytest.mark.parametrize(
        "words",
        [("a", "a-0"), ("y" * 50, "y" * 49 + "z"), ("0", "00")],
        ids=["longer", "last-letter", "digits"],
    )
    def test_names_that_are_alike_are_two(self, play: Play, words: tuple[str, str]) -> None:
        async def story(stage: Stage) -> None:
            first, second = [await stage.spec(word) for word in words]
            await stage.ours.launch(first)
            await stage.ours.launch(second)
            await stage.place.settle()
            await stage.ours.remove(first.name)
            await stage.place.settle()
            assert (await stage.one(first.name)).state is GangState.ENDED
            assert (await stage.one(second.name)).state is GangState.RUNNING

        play(story)

    @pytest.mark.parametrize(
        "labels",
        [
            {"project": "größe-模型", "user": "Zoë 🐎"},
            {"project": "p" * 300, "note": ""},
            {
                "project": "a b/c:d",
                "Name": "mine",
                "cavvy": "other",
                "cavvy-gang": "other",
                "app": "x",
            },
        ],
        ids=["unicode", "long", "signs"],
    )
    def test_any_label_is_taken(self, play: Play, labels: dict[str, str]) -> None:
        async def story(stage: Stage) -> None:
            gang = replace(await stage.spec("labels"), labels=labels)
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.RUNNING
            assert [seen.name for seen in await stage.ours.gangs()] == [gang.name]

        play(story)

    @pytest.mark.parametrize(
        ("lease", "longest", "grace"),
        [
            (timedelta(minutes=10), None, timedelta(0)),
            (timedelta(days=30), timedelta(days=20), timedelta(minutes=2)),
            (timedelta(hours=6), timedelta(minutes=10), timedelta(seconds=30)),
        ],
        ids=["short", "long", "bounded"],
    )
    def test_any_length_is_taken(
        self, play: Play, lease: timedelta, longest: timedelta | None, grace: timedelta
    ) -> None:
        async def story(stage: Stage) -> None:
            gang = replace(await stage.spec("lengths"), lease=lease, longest=longest, grace=grace)
            try:
                await stage.ours.launch(gang)
            except Refused:  # a place may bound how long a node lives, and says so
                assert await stage.ours.gangs(gang.name) == []
                return
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.RUNNING

        play(story)

    def test_two_hundred_nodes_or_none(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            stage.needs(Feature.GANG)
            gang = await stage.spec("crowd", nodes=200)
            try:
                await stage.ours.launch(gang)
            except (NoCapacity, Refused):
                await stage.place.settle()
                assert await stage.ours.gangs(gang.name) == []
                return
            waiting = [
                seen for seen in await stage.ours.gangs(gang.name) if seen.state is GangState.QUEUED
            ]
            if waiting and not isinstance(stage.ours, SharesHosts):
                assert waiting[0].reason  # the place has not so many free now
                return
            await stage.place.settle()
            seen = await stage.one(gang.name)
            assert sorted(node.rank for node in seen.nodes) == list(range(200))
            assert len({node.engine_id for node in seen.nodes}) == 200

        play(story)

    def test_spot_can_be_launched_where_it_is_sold(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            stage.needs(Feature.SPOT)
            if not any(offer.purchase is Purchase.SPOT for offer in await stage.ours.offers()):
                pytest.skip("nothing is sold as spot here, as this place is set up")
            gang = await stage.spec("spot", purchase=Purchase.SPOT)
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert (await stage.one(gang.name)).state is GangState.RUNNING

        play(story)

    def test_lives_begin_in_utc(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("lives")
            await stage.ours.launch(gang)
            await stage.place.settle()
            for node in (await stage.one(gang.name)).nodes:
                assert node.engine_id
                assert node.started_at is not None
                assert node.started_at.utcoffset() == timedelta(0)

        play(story)

    def test_no_token_is_shown(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("token")
            gang = replace(gang, carrier=replace(gang.carrier, token="tok-5f1d0f4c9b"))
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert "tok-5f1d0f4c9b" not in f"{await stage.ours.gangs()} {await stage.ours.offers()}"

        play(story)

    def test_another_installations_gangs_are_neither_seen_nor_touched(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            foreign = stage.make(FOREIGN)
            gang = await stage.spec("theirs", installation=FOREIGN)
            await foreign.launch(gang)
            await stage.place.settle()
            assert await stage.ours.gangs() == []
            assert await stage.ours.gangs(gang.name) == []
            await stage.ours.remove(gang.name)
            await stage.place.settle()
            (seen,) = await foreign.gangs(gang.name)
            assert seen.state is GangState.RUNNING

        play(story)

    def test_the_longest_name(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            gang = await stage.spec("x" * 63)
            await stage.ours.launch(gang)
            await stage.place.settle()
            assert (await stage.one(gang.name)).name == gang.name

        play(story)

    def test_two_gangs_are_two(self, play: Play) -> None:
        async def story(stage: Stage) -> None:
            first, second = await stage.spec("one"), await stage.spec("two")
            await stage.ours.launch(first)
            await stage.ours.launch(second)
            await stage.place.settle()
            await stage.ours.remove(first.name)
            await stage.place.settle()
            assert (await stage.one(first.name)).state is GangState.ENDED
            assert (await stage.one(second.name)).state is GangState.RUNNING

        play(story)
