"""The deadline policy on made-up markets that nobody tuned it on: it misses no deadline, and costs
hardly more than the best simple policy that knows the same.
"""

import pytest
from benchmarks.unseen import KINDS, SETTINGS, compare

# Each launch into flapping spot is a bet that the policy must lose before it learns. Before it
# asked whether spot pays for a launch, it cost up to 1.11 there.
FLAPPING = [f"flapping, spot at {ratio}" for ratio in (0.5, 0.8, 0.95)]


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if "," not in kind])
def test_no_deadline_is_missed_and_no_simple_policy_is_cheaper(kind: str, setting: str) -> None:
    ratio, missed = compare(kind, setting)
    assert (missed, ratio <= 1.005) == (0, True), ratio


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("kind", FLAPPING)
def test_flapping_spot_that_hardly_saves_is_left_alone(kind: str, setting: str) -> None:
    ratio, missed = compare(kind, setting)
    assert (missed, ratio <= 1.01) == (0, True), ratio
