"""The counts of a canary's requests in the gateway."""

from math import exp

import pytest

from cavvy.capabilities.serving.gateway.balancing import CanarySplit
from cavvy.capabilities.serving.gateway.config import CanaryShare


def test_a_group_has_ten_successive_requests_without_an_error() -> None:
    split = CanarySplit(CanaryShare(revision=2, percent=50))
    split.set_replicas([False, True])
    for value in range(25):
        split.record(True, False, exp(value / 10))
        split.record(True, True, 60.0)
    new = split.describe().new
    assert (new.requests, new.timed, new.groups) == (50, 25, 2)
    assert new.means == pytest.approx(0.45 + 1.45)
    assert new.mean_squares == pytest.approx(0.45**2 + 1.45**2)
