"""Random scenarios about deadlines and budgets; `make scenarios` plays a thousand."""

import logging

import pytest
from tests.sim.dice import play_number

SCENARIOS = 40
_CHUNK = 20


@pytest.mark.parametrize("first", range(0, SCENARIOS, _CHUNK))
def test_every_job_ends_in_time_where_it_can_within_its_budget_and_leaves_nothing(
    first: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.CRITICAL, "cavvy"):
        for number in range(first, first + _CHUNK):
            play_number(number)
