"""What a node must show at its boot: shares of its kind's data sheet and of the network that the
task asks for.
"""

from dataclasses import asdict
from datetime import UTC, datetime

from tests.records import make_attempt_record, make_job_record, make_offer

from cavvy.control.agents.work import make_assignment
from cavvy.domain.jobs import Node
from cavvy.domain.offers import Offer
from cavvy.domain.tasks import NetworkNeed, NodeCheck, ResourceSpec, TaskSpec
from cavvy.domain.values import replace

T0 = datetime(2030, 1, 1, tzinfo=UTC)
OFFER = make_offer("p/r/t", 1, accelerator="A100", accelerator_memory_mib=81920)


def wanted(offer: Offer, resources: ResourceSpec) -> dict[str, str | float] | None:
    """Without the fields that are not known."""
    job = make_job_record(T0, task=TaskSpec(name="n", run="x", resources=resources))
    attempt = make_attempt_record(T0, offer)
    node = Node(attempt_id="j-1", project="p", rank=0)
    check = make_assignment(job, attempt, [node], accelerators=1, secrets={}).check
    if check is None:
        return None
    return {name: value for name, value in asdict(check).items() if value or name == "link_mbps"}


def test_the_figures_are_the_data_sheets_and_the_share_is_of_the_network_too() -> None:
    assert wanted(OFFER, ResourceSpec()) is None
    kind = {"kind": "A100", "memory_mib": 81920, "bandwidth_gbs": 2039.0}
    assert wanted(OFFER, ResourceSpec(check=NodeCheck())) == {
        "share": 0.6,
        "link_mbps": 0.0,
        **kind,
    }
    network = ResourceSpec(check=NodeCheck(share=0.5), network=NetworkNeed(min_mbps=10_000))
    assert wanted(OFFER, network) == {"share": 0.5, "link_mbps": 5000, **kind}
    assert wanted(OFFER, ResourceSpec(check=NodeCheck(link_mbps=700))) == {
        "share": 0.6,
        "link_mbps": 700,
        **kind,
    }


def test_of_an_accelerator_that_is_not_known_only_its_presence_and_memory_are_checked() -> None:
    found = wanted(replace(OFFER, accelerator="Nobody-9000"), ResourceSpec(check=NodeCheck()))
    assert found == {"share": 0.6, "link_mbps": 0.0}
