"""Gangs on the stand-ins of all clouds on the shared layer, where every fifth request fails. The
long form is `scripts/drills/cloud_gangs.py`.
"""

from pathlib import Path

import pytest
from tests.sim.cloud_drill import run_drill
from tests.sim.drill_clouds import close_places, make_places

from cavvy.domain.jobs import JobPhase
from cavvy.providers.contract.rest_stand_in import RestServer
from cavvy.providers.registry import manifests
from cavvy.providers.vm.abilities import REST_LAYER


@pytest.mark.parametrize("seed", [3])
def test_twenty_gangs_with_faults(seed: int, tmp_path: Path) -> None:
    """No machine is left or started twice, and the recount of each gang's machines by the
    stand-ins' records is within the range of its bill.
    """
    drill = run_drill(seed, 20, tmp_path)
    found = drill.found.values()
    assert sum(each.gangs for each in found) >= 20
    assert sum(sum(each.faults.values()) for each in found) > 100
    assert drill.problems == []
    assert [(each.left, each.doubled) for each in found] == [(0, 0)] * len(drill.found)
    assert [each.inside for each in found] == [each.gangs for each in found]
    # others have no offer left after refusals and full zones
    assert drill.phases[JobPhase.DONE] > len(drill.jobs) / 2


def test_all_clouds_on_the_shared_layer_are_in_the_drill(tmp_path: Path) -> None:
    layers = (REST_LAYER, "cavvy.providers.vm.provider:make_provider")
    on_layer = {each.name for each in manifests() if each.layer in layers}
    server = RestServer()
    places = make_places(server, tmp_path)
    close_places(places)
    server.close()
    assert on_layer == set(places)
