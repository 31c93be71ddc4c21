"""How many GPUs were in use over time."""

from datetime import timedelta

import pytest
from tests.contract.store_suite import NOW, make_attempt, make_job, make_offer

from cavvy.costs.gpu_use import count_gpus
from cavvy.domain.jobs import Attempt
from cavvy.domain.values import replace

HOUR = timedelta(hours=1)


def attempt(
    kind: str, since: float, until: float | None, gpus: int = 1, nodes: int = 1, part: float = 1.0
) -> Attempt:
    offer = replace(make_offer(), accelerator=kind, accelerator_count=gpus, accelerator_part=part)
    ended = None if until is None else NOW + until * HOUR
    return make_attempt(
        make_job("j"), offer=offer, nodes=nodes, launched_at=NOW + since * HOUR, ended_at=ended
    )


def test_gpus_count_for_the_part_of_a_step_in_which_they_were_in_use() -> None:
    attempts = [
        attempt("H100", -5, 0.5, gpus=8, nodes=2),
        attempt("H100", 1.25, 3, gpus=4),
        attempt("A100", 0, 1, part=0.5),
        attempt("L4", -9, -1),
        make_attempt(make_job("cpu"), launched_at=NOW),
    ]
    found = count_gpus(attempts, NOW, HOUR, 3, NOW + 3 * HOUR)
    assert [*found] == ["H100", "A100"], "the most used kind is first"
    assert found["H100"] == pytest.approx([8, 3, 4])
    assert found["A100"] == pytest.approx([0.5, 0, 0])


def test_the_last_step_is_the_time_until_now() -> None:
    found = count_gpus([attempt("H100", 1, None, gpus=8)], NOW, HOUR, 2, NOW + 1.5 * HOUR)
    assert found == {"H100": [0, 8]}
    assert count_gpus([], NOW, HOUR, 2, NOW + HOUR) == {}
