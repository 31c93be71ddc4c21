"""The sizes of a job over time, and what their changes have cost."""

from datetime import timedelta

from tests.unit.cli_client import at, make_attempt, make_job, make_node

from cavvy.client import wire
from cavvy.client.sizes import list_spans


def attempt(number: int, nodes: int, *times: int | None, **changes: object) -> wire.AttemptView:
    """An attempt that was requested, ran and ended at these seconds."""
    asked, ran, ended = (None if each is None else at(each) for each in times)
    return make_attempt(
        number,
        nodes=[make_node(rank=rank) for rank in range(nodes)],
        launched_at=asked,
        running_at=ran,
        finished_at=ended,
        **changes,
    )


def test_a_repair_is_cheaper_than_new_nodes_and_both_are_told() -> None:
    attempts = [
        attempt(1, 3, 0, 60, 120, gang="g@1"),
        attempt(2, 3, 120, 130, 200, gang="g", repairs=[1]),
        attempt(3, 3, 210, None, 215, gang="h"),  # its work never ran
        attempt(4, 2, 220, 260, None, gang="i"),
    ]
    first, second, third = list_spans(make_job("j", "running", attempts=attempts), at(300))
    assert [each.number for each in (first, second, third)] == [1, 2, 4]
    assert [each.change for each in (first, second, third)] == [
        "start",
        "1 of 3 replaced",
        "new nodes",
    ]
    assert (first.waited, second.waited) == (None, timedelta(seconds=10))
    assert third.waited == timedelta(seconds=60)
    assert [each.ran.total_seconds() for each in (first, second, third)] == [60, 70, 40]
    # a node costs 3.60 dollars an hour, so 1,000 micro-dollars a second
    assert [each.wait_micros for each in (first, second, third)] == [180_000, 30_000, 80_000]


def test_kept_nodes_are_paid_while_they_wait_for_the_request() -> None:
    attempts = [
        attempt(1, 2, 0, 1, 10, gang="g@1"),
        attempt(2, 2, 30, 40, 50, gang="g", repairs=[0]),
    ]
    spans = list_spans(make_job("j", "done", attempts=attempts), at(99))
    assert spans[1].wait_micros == 2 * 10_000 + 20_000


def test_a_job_of_one_node_or_attempt_has_no_sizes() -> None:
    one = [attempt(1, 1, 0, 1, 10), attempt(2, 1, 20, 21, 30)]
    assert not list_spans(make_job("j", "done", attempts=one), at(99))
    assert not list_spans(make_job("j", "done", attempts=[attempt(1, 4, 0, 1, 10)]), at(99))


def test_a_size_shows_how_fast_the_program_was_if_it_told() -> None:
    told = make_node(rank=0, progress={"samples_per_s": 40.0})
    other = make_node(rank=1, progress={"samples_per_s": 1.0})
    first = make_attempt(1, nodes=[other, told], running_at=at(1), finished_at=at(9))
    second = make_attempt(2, nodes=[make_node(rank=0)], running_at=at(10), finished_at=at(20))
    spans = list_spans(make_job("j", "done", attempts=[first, second]), at(99))
    assert [each.speed for each in spans] == [40.0, None]
