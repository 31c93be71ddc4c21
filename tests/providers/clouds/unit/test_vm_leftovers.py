"""Tests that only objects with names of machines are deleted as leftovers."""

from collections.abc import Collection, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from cavvy.providers.vm.leftovers import LeftoverScripts
from cavvy.providers.vm.records import MachineNames, is_machine_name, make_record

NOW = datetime(2030, 1, 1, tzinfo=UTC)
NAMES = MachineNames("an installation", 63)


@pytest.mark.parametrize("gang", ["rm-1-job-1", "a" * 80])
def test_the_names_of_machines_are_recognized(gang: str) -> None:
    record = make_record(gang, 12, NOW)
    assert is_machine_name(NAMES.make(record, record.nodes[11]))


@pytest.mark.parametrize(
    "name", ["cv-images", "cv-train-0-1", "cv-imagenet-data-abcd-0-1", "cv-0123456789", "x", ""]
)
async def test_objects_of_users_are_left_alone(name: str) -> None:
    record = make_record("gone", 1, NOW)
    machine = NAMES.make(record, record.nodes[0])
    found = [{"id": "theirs", "name": name}, {"id": "nameless"}, {"id": "ours", "name": machine}]
    times, dropped = iter([NOW, NOW + timedelta(hours=2)]), list[str]()

    async def read() -> Sequence[Any]:
        return found

    async def drop(ids: Collection[str]) -> None:
        dropped.extend(ids)

    leftovers = LeftoverScripts(read, drop, lambda: next(times))
    await leftovers.sweep([])
    await leftovers.sweep([])
    assert dropped == ["ours"]
