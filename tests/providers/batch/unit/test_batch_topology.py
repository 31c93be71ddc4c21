"""How batch systems place the nodes of a job close to each other."""

from types import SimpleNamespace
from typing import Any

import pytest

from cavvy.domain.tasks import TaskSpec, TopologyNeed
from cavvy.providers.base import Refused
from cavvy.providers.batch.provider import BatchProvider
from cavvy.providers.batch.system import JobOptions, read_job_options
from cavvy.providers.pbs.script import make_export as export_pbs
from cavvy.providers.slurm import MANIFEST
from cavvy.providers.slurm.script import make_export as export_slurm
from cavvy.providers.slurm.script import object_to_topology, place_together

NAMES = {"rack": "r1|r2", "block": "block", "leaf": "switch"}


@pytest.mark.parametrize(
    ("need", "options"),
    [
        (TopologyNeed(same="rack"), ["--constraint=[r1|r2]"]),
        (TopologyNeed(prefer="rack"), []),
        (TopologyNeed(same="block"), ["--segment=8"]),
        (TopologyNeed(same="block", slice=4), ["--segment=4"]),
        (TopologyNeed(prefer="leaf"), ["--switches=1"]),
        (TopologyNeed(same="block", prefer="leaf"), ["--switches=1", "--segment=8"]),
        (None, []),
    ],
)
def test_slurm_places_nodes_by_its_own_options(
    need: TopologyNeed | None, options: list[str]
) -> None:
    assert place_together(need, 8, NAMES) == options


def test_exported_scripts_place_nodes_as_well() -> None:
    task = TaskSpec(name="t", run="x", nodes=8, topology=TopologyNeed(same="rack"))
    script = export_slurm(task, None, 8, JobOptions(topology=NAMES), "")
    assert "#SBATCH --constraint=[r1|r2]" in script
    script = export_pbs(task, None, 8, JobOptions(topology={"rack": "rack_id"}), "")
    assert "#PBS -l place=scatter:group=rack_id" in script


def test_what_slurm_cannot_keep_is_refused() -> None:
    given = read_job_options({"topology": "rack=r1|r2, block=block leaf=switch"}, "sbatch_options")
    assert given.topology == NAMES
    assert object_to_topology(TopologyNeed(same="rack"), given) == ""
    assert "write `prefer`" in object_to_topology(TopologyNeed(same="leaf"), given)
    assert "delete `slice`" in object_to_topology(TopologyNeed(same="rack", slice=2), given)
    more = {"topology": "rack=r1|r2", "sbatch_options": "--constraint=ib"}
    own = read_job_options(more, "sbatch_options")
    assert "already has a constraint" in object_to_topology(TopologyNeed(same="rack"), own)
    with pytest.raises(Refused, match="'rack' does not have the form name=value"):
        read_job_options({"topology": "rack"}, "sbatch_options")


def test_a_label_that_the_settings_do_not_name_is_refused() -> None:
    given = read_job_options({"topology": "rack=r1|r2"}, "sbatch_options")
    system: Any = SimpleNamespace(job_options=given, object_to_topology=lambda need: "")
    provider: Any = SimpleNamespace(manifest=MANIFEST, system=system)
    task = TaskSpec(name="t", run="x", nodes=2, topology=TopologyNeed(same="rak"))
    assert [str(each) for each in BatchProvider.check(provider, task)] == [
        "topology.same: no label rak: the setting `topology` of [providers.slurm] has rack"
    ]
