import pytest

from cavvy.catalog.fit import Constraint, explain, first_failing, match_offers, near_miss
from cavvy.catalog.needs import parse_accelerator
from cavvy.catalog.networks import find_fabric, has_fabric
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Fabric, NetworkNeed, ResourceSpec, SpotPolicy
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace


def offer(**changes: object) -> Offer:
    plain: dict[str, object] = {
        "provider": "aws",
        "region": "us-east-1",
        "instance_type": "p4d.24xlarge",
        "accelerator": "A100",
        "accelerator_count": 8,
        "accelerator_memory_mib": 40 * 1024,
        "vcpus": 96,
        "memory_mib": 1152 * 1024,
        "rate": HourlyRate(21_957_640),
    }
    return Offer(**{**plain, **changes})  # type: ignore[arg-type] # keyword values of a test


EIGHT = parse_accelerator("A100:8")


@pytest.mark.parametrize(
    ("need", "failed"),
    [
        (ResourceSpec(), None),
        (ResourceSpec(accelerators=EIGHT), None),
        (
            ResourceSpec(spot=SpotPolicy.ONLY, accelerators=parse_accelerator("H100:1")),
            Constraint.PURCHASE,
        ),
        (ResourceSpec(accelerators=parse_accelerator("H100:8")), Constraint.ACCELERATOR),
        (ResourceSpec(accelerators=parse_accelerator("H100:8|A100:4")), Constraint.COUNT),
        (
            ResourceSpec(accelerators=parse_accelerator("A100:80GB:8|A100:4")),
            Constraint.ACCELERATOR_MEMORY,
        ),
        (
            ResourceSpec(accelerators=EIGHT, instance="p4de.24xlarge", cpus_min=500),
            Constraint.INSTANCE,
        ),
        (ResourceSpec(instance="P4D.24XLARGE"), None),
        (ResourceSpec(cpus_max=64), Constraint.CPUS),
        (ResourceSpec(memory_min_mib=2_000_000), Constraint.MEMORY),
        (ResourceSpec(memory_per_cpu_mib=12 * 1024), None),
        (ResourceSpec(memory_per_cpu_mib=12 * 1024 + 1), Constraint.MEMORY),
        (ResourceSpec(memory_per_cpu_mib=1, memory_min_mib=2_000_000), Constraint.MEMORY),
        (ResourceSpec(memory_per_cpu_mib=1, memory_max_mib=1024), Constraint.MEMORY),
        (ResourceSpec(disk_gib=100_000), None),
        (ResourceSpec(network=NetworkNeed(min_mbps=1)), Constraint.NETWORK),
        (ResourceSpec(network=NetworkNeed(fabric=Fabric.RDMA)), None),
        (ResourceSpec(network=NetworkNeed(fabric=Fabric.EFA)), None),
        (ResourceSpec(network=NetworkNeed(fabric=Fabric.INFINIBAND)), Constraint.NETWORK),
        (ResourceSpec(network=NetworkNeed(fabric=Fabric.EFA, min_mbps=1)), Constraint.NETWORK),
        (ResourceSpec(providers=("gcp",), regions=("eu",)), Constraint.PROVIDER),
        (ResourceSpec(regions=("eu",), max_rate=HourlyRate(1)), Constraint.REGION),
        (ResourceSpec(max_rate=HourlyRate(21_957_639)), Constraint.PRICE),
        (ResourceSpec(max_rate=HourlyRate(21_957_640)), None),
    ],
)
def test_the_first_constraint_that_fails_is_named(
    need: ResourceSpec, failed: Constraint | None
) -> None:
    assert first_failing(offer(), need) is failed


def test_a_fact_that_is_not_stated_meets_no_need_for_it() -> None:
    unknown = offer(vcpus=0, memory_mib=0)
    assert first_failing(unknown, ResourceSpec(cpus_min=1)) is Constraint.CPUS
    assert first_failing(unknown, ResourceSpec(memory_min_mib=1)) is Constraint.MEMORY
    assert explain(unknown, ResourceSpec(memory_min_mib=1024), Constraint.MEMORY).startswith(
        "does not state its memory"
    )
    assert first_failing(offer(disk_gib=100), ResourceSpec(disk_gib=101)) is Constraint.DISK
    each = ResourceSpec(memory_per_cpu_mib=1024)
    assert first_failing(offer(vcpus=0), each) is Constraint.MEMORY
    assert (
        explain(offer(vcpus=0), each, Constraint.MEMORY)
        == "does not state its CPUs, you asked for 1 GiB for each CPU"
    )


def test_a_job_takes_what_it_asks_for_of_a_shared_host() -> None:
    request = ResourceSpec(
        accelerators=parse_accelerator("A100:2"), cpus_max=8, memory_max_mib=1024
    )
    assert first_failing(offer(), request) is Constraint.COUNT
    assert first_failing(offer(shared=True), request) is None
    assert (
        first_failing(offer(shared=True), ResourceSpec(accelerators=parse_accelerator("A100:16")))
        is Constraint.COUNT
    )
    # Of CPUs only those that the job holds need their memory: one, unless it says more.
    each = ResourceSpec(memory_per_cpu_mib=100 * 1024)
    assert first_failing(offer(), each) is Constraint.MEMORY
    assert first_failing(offer(shared=True), each) is None
    assert first_failing(offer(shared=True), replace(each, cpus_min=12)) is Constraint.MEMORY


@pytest.mark.parametrize(
    ("need", "missed", "text"),
    [
        (
            ResourceSpec(max_rate=HourlyRate(15_000_000)),
            Constraint.PRICE,
            "costs $21.96/h, your limit is $15.00/h",
        ),
        (
            ResourceSpec(accelerators=parse_accelerator("A100:16")),
            Constraint.COUNT,
            "has 8 A100 of 40 GiB, you asked for A100:16",
        ),
        (ResourceSpec(regions=("eu",)), Constraint.REGION, "is in us-east-1, you asked for eu"),
        (
            ResourceSpec(spot=SpotPolicy.ONLY),
            Constraint.PURCHASE,
            "is on-demand, you asked for spot (spot: only)",
        ),
        (
            ResourceSpec(cpus_min=100, cpus_max=200),
            Constraint.CPUS,
            "has 96 CPUs, you asked for 100 to 200",
        ),
        (
            ResourceSpec(memory_per_cpu_mib=16 * 1024),
            Constraint.MEMORY,
            "has 1152 GiB memory for 96 CPUs, you asked for 16 GiB for each CPU",
        ),
        (
            ResourceSpec(memory_per_cpu_mib=16 * 1024, memory_min_mib=2048),
            Constraint.MEMORY,
            "has 1152 GiB memory for 96 CPUs, you asked for at least 2 GiB and 16 GiB for each CPU",
        ),
        (
            ResourceSpec(network=NetworkNeed(min_mbps=400_000)),
            Constraint.NETWORK,
            "does not state its network, you asked for at least 400 Gbit/s",
        ),
        (
            ResourceSpec(network=NetworkNeed(fabric=Fabric.ROCE, min_mbps=400_000)),
            Constraint.NETWORK,
            "has efa network, you asked for at least 400 Gbit/s roce",
        ),
    ],
)
def test_a_near_miss_says_both_figures(need: ResourceSpec, missed: Constraint, text: str) -> None:
    near = near_miss(offer(), need)
    assert near is not None
    assert near[0] is missed
    assert explain(offer(), need, missed) == text


def test_an_unpublished_speed_is_named_as_such() -> None:
    """Marketplaces and some small clouds publish no speed: nothing that a user could look up."""
    need = ResourceSpec(network=NetworkNeed(min_mbps=100_000))
    card = offer(provider="lambda", instance_type="gpu_8x_a100")
    assert explain(card, need, Constraint.NETWORK) == (
        "has a network whose speed lambda does not publish, but you asked for at least 100 Gbit/s"
    )
    measured = offer(provider="lambda", instance_type="gpu_8x_a100", network_mbps=50_000)
    assert "does not publish" not in explain(measured, need, Constraint.NETWORK)


def test_failing_two_things_is_no_near_miss_nor_is_another_type_or_a_machine_without_accelerators() -> (
    None
):
    assert near_miss(offer(), ResourceSpec(regions=("eu",), max_rate=HourlyRate(1))) is None
    assert near_miss(offer(), ResourceSpec(instance="p5.48xlarge")) is None
    bare = offer(accelerator=None, accelerator_count=0)
    assert near_miss(bare, ResourceSpec(accelerators=EIGHT)) is None
    assert near_miss(offer(purchase=Purchase.RESERVED), ResourceSpec(spot=SpotPolicy.ONLY)) is None


def test_matches_account_for_every_offer_once() -> None:
    offers = [
        offer(zone=f"use1-az{number}", rate=HourlyRate(rate), purchase=purchase)
        for number, rate in enumerate((30_000_000, 10_000_000, 20_000_000))
        for purchase in Purchase
    ]
    answer = match_offers(
        offers, ResourceSpec(accelerators=EIGHT, max_rate=HourlyRate(25_000_000)), limit=1
    )
    assert [found.rate.micros_per_hour for found in answer.offers] == [10_000_000]
    assert (answer.matched, answer.total) == (2, 9)
    assert dict(answer.rejected) == {Constraint.PURCHASE: 6, Constraint.PRICE: 1}
    assert [miss.constraint for miss in answer.misses] == [Constraint.PRICE, Constraint.PURCHASE]


@pytest.mark.parametrize(
    ("provider", "instance_type", "fabric"),
    [
        ("aws", "p5.48xlarge", Fabric.EFA),
        ("aws", "P4DE.24XLARGE", Fabric.EFA),
        ("aws", "g5.xlarge", None),
        ("azure", "Standard_ND96isr_H100_v5", Fabric.INFINIBAND),
        ("azure", "Standard_ND96is_MI300X_v5", None),
        ("azure", "Standard_HB120-96rs_v3", Fabric.INFINIBAND),
        ("azure", "Standard_NC24ads_A100_v4", None),
        ("gcp", "a3-megagpu-8g", Fabric.TCPX),
        ("gcp", "a3-highgpu-1g", None),
        ("oci", "BM.GPU.H100.8", Fabric.ROCE),
        ("oci", "BM.GPU.A10.4", None),
        ("lambda", "gpu_8x_h100_sxm5", None),
    ],
)
def test_the_table_names_the_fabric_of_a_machine(
    provider: str, instance_type: str, fabric: Fabric | None
) -> None:
    assert find_fabric(provider, instance_type) is fabric
    assert has_fabric(provider, instance_type, Fabric.RDMA) is (fabric is not None)


def test_a_machine_without_a_known_fabric_says_so() -> None:
    plain = offer(instance_type="g5.xlarge", network_mbps=2500)
    need = ResourceSpec(network=NetworkNeed(min_mbps=1000, fabric=Fabric.RDMA))
    near = near_miss(plain, need)
    assert near is not None
    assert near[0] is Constraint.NETWORK
    assert explain(plain, need, near[0]) == "has no known RDMA network, you asked for rdma"
