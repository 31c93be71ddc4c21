"""Tasks of ECS and jobs of AWS Batch on spot instances of EC2 read EC2's notices; others have no
metadata to read.
"""

from datetime import timedelta

import pytest
from tests.records import make_gang_spec

from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.providers.aws_batch import BatchService
from cavvy.providers.base import AgentEndpoint, GangSpec, NodeEndpoint
from cavvy.providers.contract.memory_cloud import make_node_endpoint
from cavvy.providers.ecs import EcsService
from cavvy.providers.managed.provider import make_container_script

URL = b"http://169.254.169.254/latest/meta-data/spot/instance-action"


def gang(zone: str, purchase: Purchase) -> GangSpec:
    return make_gang_spec(
        Offer(
            provider="ecs",
            region="us-east-1",
            zone=zone,
            instance_type="g5.xlarge",
            purchase=purchase,
            rate=HourlyRate(1),
        ),
        name="rm-0123abcd-one",
        installation="any",
        agent_endpoint=AgentEndpoint(address="unix:/nonexistent", token="t"),
        lease=timedelta(minutes=5),
    )


@pytest.mark.parametrize(
    ("zone", "purchase", "polls"),
    [
        ("gpu-spot", Purchase.SPOT, True),
        ("gpu", Purchase.ON_DEMAND, False),
        ("FARGATE_SPOT", Purchase.SPOT, False),
        ("FARGATE", Purchase.ON_DEMAND, False),
    ],
)
def test_agents_on_spot_instances_poll_the_metadata(
    zone: str, purchase: Purchase, polls: bool
) -> None:
    asked = gang(zone, purchase)
    published: list[bytes] = []
    endpoint = publish_to(published)
    make_container_script(asked, endpoint, EcsService.traits, "ECS", EcsService.list_notices(asked))
    assert (URL in b"".join(published)) is polls


@pytest.mark.parametrize("purchase", [Purchase.SPOT, Purchase.ON_DEMAND])
def test_agents_of_aws_batch_poll_on_spot_instances(purchase: Purchase) -> None:
    asked = gang("queue", purchase)
    published: list[bytes] = []
    endpoint = publish_to(published)
    make_container_script(
        asked, endpoint, BatchService.traits, "AWS", BatchService.list_notices(asked)
    )
    assert (URL in b"".join(published)) is (purchase is Purchase.SPOT)


def publish_to(published: list[bytes]) -> NodeEndpoint:
    """An endpoint that keeps what containers fetch."""

    def publish(content: bytes) -> str:
        published.append(content)
        return "0" * 64

    return replace(make_node_endpoint(), publish=publish)
