"""When the queue's next pass is, if several servers share the work."""

from datetime import timedelta

import pytest

from cavvy.control.share import QUEUE_RECHECK, bound_wait


@pytest.mark.parametrize(
    ("again", "waits"),
    [
        (None, QUEUE_RECHECK),
        (timedelta(0), timedelta(0)),  # more jobs can be placed at once
        (timedelta(seconds=1), timedelta(seconds=1)),
        (timedelta(hours=1), QUEUE_RECHECK),
    ],
)
def test_a_queue_that_has_more_to_do_does_not_wait(
    again: timedelta | None, waits: timedelta
) -> None:
    assert bound_wait(again) == waits
