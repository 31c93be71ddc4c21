"""Simulated rollouts to devices at the edge."""

import pytest
from click.testing import CliRunner

from cavvy.capabilities.edge.nouns import RolloutPhase
from cavvy.capabilities.edge.simulation import EdgeScenario, simulate_rollout
from cavvy.cli.main import cli


def test_a_good_model_reaches_the_devices_that_are_there() -> None:
    found = simulate_rollout(EdgeScenario(devices=400, sites=4, cuts_per_day=50.0, offline=0.2))
    assert found.phase is RolloutPhase.DONE
    assert 240 < found.serving <= found.exposed < 400
    assert found.power_cuts > 0
    assert simulate_rollout(EdgeScenario(devices=50, offline=0.0, cuts_per_day=0.0)).serving == 50


def test_a_bad_model_is_halted_before_it_is_everywhere() -> None:
    for more in ({"worse": 0.3}, {"refuses": 1.0}):
        found = simulate_rollout(EdgeScenario(devices=400, **more))
        assert found.phase is RolloutPhase.HALTED
        assert found.exposed <= 4
        assert found.reason


def test_a_slow_link_holds_a_rollout_up() -> None:
    slow = EdgeScenario(devices=100, sites=1, site_mib_per_s=0.1, size_mib=20.0, offline=0.0)
    assert simulate_rollout(slow).minutes > 100 * 20 / 0.1 / 60 * 0.8
    ended = simulate_rollout(EdgeScenario(devices=10, site_mib_per_s=1e-9, days=0.01))
    assert (ended.phase, ended.serving) == (RolloutPhase.RUNNING, 0)


@pytest.mark.parametrize(
    ("words", "code"),
    [("--devices 20 --runs 2", 0), ("--devices 0", 2), ("--errors 0.6 --worse 0.6", 2)],
)
def test_the_command_checks_its_options(words: str, code: int) -> None:
    found = CliRunner().invoke(cli, ["simulate", "edge", *words.split()])
    assert found.exit_code == code, found.output
