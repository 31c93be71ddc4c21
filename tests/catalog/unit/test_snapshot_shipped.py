"""What the shipped catalog promises: enough rows, real names, a source and a date on each, no
placeholder.
"""

import re
import sqlite3
from collections import Counter
from datetime import date

import pytest

from cavvy.catalog.accelerators import AcceleratorKind, find_accelerator
from cavvy.catalog.needs import parse_accelerator
from cavvy.catalog.networks import find_fabric, find_unpublished, list_unpublished
from cavvy.catalog.regions import is_region, locate
from cavvy.catalog.tables import find_retired, list_unlisted_reasons, read_table, successor
from cavvy.catalog.tpu_slices import list_slices, spread_slices
from cavvy.domain.offers import Offer, Purchase
from cavvy.domain.tasks import Fabric, NetworkNeed, ResourceSpec, SpotPolicy
from cavvy.domain.values import replace
from cavvy.store.snapshot import CatalogSnapshot
from cavvy.store.snapshot.choose import SHIPPED, check

BIG = {"aws", "azure", "gcp"}


@pytest.fixture(scope="module")
def offers() -> list[Offer]:
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        return list(snapshot.all_offers())


def test_it_is_sound_and_small() -> None:
    check(SHIPPED, SHIPPED)
    assert SHIPPED.stat().st_size < 8_000_000


def test_it_has_the_rows_promised_of_every_kind(offers: list[Offer]) -> None:
    assert len(offers) >= 60_000
    accelerated = [offer for offer in offers if offer.accelerator]
    assert len(accelerated) >= 1_500
    kinds = {
        known.accelerator.kind
        for offer in accelerated
        if (known := find_accelerator(offer.accelerator or ""))
    }
    assert kinds == set(AcceleratorKind)
    assert {offer.purchase for offer in offers} >= {Purchase.ON_DEMAND, Purchase.SPOT}
    assert any(offer.zone for offer in offers)
    assert len({offer.key for offer in offers}) == len(offers)


def test_every_row_can_be_asked_for_and_says_where_it_is_from(offers: list[Offer]) -> None:
    for offer in offers:
        assert offer.source
        assert offer.as_of is not None
        assert date(2024, 1, 1) < offer.as_of
        assert offer.rate.micros_per_hour > 0
        assert re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,62}", offer.region.lower()), offer.key
        assert " " not in offer.instance_type, offer.key
        if offer.accelerator:
            known = find_accelerator(offer.accelerator)
            assert known is not None
            assert known.accelerator.name == offer.accelerator
            assert offer.accelerator_count >= 1
            sizes = {memory.mib for memory in known.accelerator.memory}
            if offer.accelerator_part < 1:
                part = offer.accelerator_memory_mib / max(sizes)
                assert part == pytest.approx(offer.accelerator_part, rel=0.1), offer.key
            else:
                assert offer.accelerator_memory_mib in sizes, offer.key
        if offer.provider in BIG:
            assert locate(offer.provider, offer.region)[1], offer.key


def test_no_spot_price_is_a_placeholder_and_no_type_is_retired(offers: list[Offer]) -> None:
    usual = {
        (offer.provider, offer.region, offer.instance_type): offer.rate
        for offer in offers
        if offer.purchase is Purchase.ON_DEMAND
    }
    for offer in offers:
        if offer.purchase is Purchase.SPOT:
            on_demand = usual.get((offer.provider, offer.region, offer.instance_type))
            assert on_demand is None or offer.rate < on_demand, offer.key
        retired = find_retired(offer.instance_type)
        assert retired is None or retired.provider != offer.provider, offer.key


@pytest.mark.parametrize(
    ("instance_type", "vcpus", "gib", "accelerators"),
    [
        ("Standard_DS12_v2", 4, 28, None),
        ("Standard_E16-4s_v5", 4, 128, None),
        ("Standard_NC40ads_H100_v5", 40, 320, "1 H100-NVL"),
        ("Standard_ND96isr_H200_v5", 96, 1850, "8 H200"),
        ("n1-standard-4", 4, 15, None),
        ("m2-megamem-416", 416, 5888, None),
        ("g4-standard-48", 48, 180, "1 RTX-PRO-6000"),
        ("p5.48xlarge", 192, 2048, "8 H100"),
    ],
)
def test_machines_are_as_their_providers_document_them(
    offers: list[Offer], instance_type: str, vcpus: float, gib: float, accelerators: str | None
) -> None:
    found = [offer for offer in offers if offer.instance_type == instance_type]
    assert found
    for offer in found:
        assert (offer.vcpus, offer.memory_mib) == (vcpus, gib * 1024)
        has = f"{offer.accelerator_count} {offer.accelerator}" if offer.accelerator else None
        assert has == accelerators


def test_egress_is_known_by_region_or_provider() -> None:
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        egress = snapshot.egress()
    assert egress["aws/us-east-1"].micros == 90_000
    assert egress["gcp"].micros == 120_000
    assert "runpod" not in egress, "a placeholder of 0 is no fact"


@pytest.mark.parametrize(
    ("asked", "provider", "region", "zone", "is_meant"),
    [
        ("eu", "aws", "eu-west-2", None, True),
        ("Europe", "azure", "uksouth", None, True),
        ("uk", "azure", "uksouth", None, True),
        ("de", "azure", "germanywestcentral", None, True),
        ("us", "vast", "us-texas", None, True),
        ("eu", "shadeform", "helsinki-finland-4", None, True),
        ("asia", "gcp", "asia-northeast1", None, True),
        ("asia", "gcp", "australia-southeast1", None, False),
        ("US-EAST-1", "aws", "us-east-1", "use1-az4", True),
        ("use1-az4", "aws", "us-east-1", "use1-az4", True),
        ("us-east", "aws", "us-east-1", None, False),
        ("us-central1-a", "gcp", "us-central1", None, True),
        ("us-central1-a", "gcp", "us-central1", "us-central1-a", True),
        ("us-central1-a", "gcp", "us-central1", "us-central1-b", False),
        ("us-central1-a", "gcp", "us-east1", None, False),
        ("fr", "nebius", "eu-west1", None, True),
        ("eu", "hyperbolic", "default", None, False),
    ],
)
def test_regions_are_found_by_name_country_and_area(
    asked: str, provider: str, region: str, zone: str | None, is_meant: bool
) -> None:
    assert is_region(asked, provider, region, zone) is is_meant


def test_a_retired_type_names_a_successor_that_is_sold(offers: list[Offer]) -> None:
    assert successor("STANDARD_NC6S_V3") == "Standard_NC24ads_A100_v4"
    assert successor("p5.48xlarge") is None
    sold = {(offer.provider, offer.instance_type) for offer in offers}
    for row in read_table("cavvy.catalog", "retired"):
        if row["provider"] in ("aws", "azure"):
            assert (row["provider"], row["successor"]) in sold, row["instance_type"]


def test_counts_kept_beside_the_rows_are_right() -> None:
    connection = sqlite3.connect(f"file:{SHIPPED}?mode=ro", uri=True)
    counted = dict(
        connection.execute("SELECT shape, COUNT(*) FROM offer GROUP BY shape").fetchall()
    )
    kept = dict(connection.execute("SELECT id, on_demand + reserved + spot FROM shape").fetchall())
    placed = dict(connection.execute("SELECT place, COUNT(*) FROM offer GROUP BY place").fetchall())
    spot = connection.execute(
        "SELECT (SELECT SUM(spot) FROM shape), COUNT(*) FROM offer WHERE purchase = 2"
    ).fetchone()
    assert counted == kept
    assert placed == dict(connection.execute("SELECT id, rows FROM place").fetchall())
    assert spot[0] == spot[1]
    connection.close()


def test_the_network_of_accelerated_machines_is_known_or_known_to_be_unpublished(
    offers: list[Offer],
) -> None:
    """A network counts as known if the catalog has its speed, or names the page on which the
    provider should state it and does not. `-rP` prints the shares.
    """
    known: Counter[str] = Counter()
    unpublished: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for offer in offers:
        if offer.accelerator:
            total[offer.provider] += 1
            known[offer.provider] += offer.network_mbps is not None
            unpublished[offer.provider] += (
                offer.network_mbps is None
                and find_unpublished(offer.provider, offer.instance_type) is not None
            )
    rows = [(name, known[name], unpublished[name], total[name]) for name in sorted(total)]
    rows.append(("all", known.total(), unpublished.total(), total.total()))
    print(f"{'provider':15} {'known':>6} {'unpublished':>12} {'offers':>7}")
    for name, speeds, silent, count in rows:
        print(f"{name:15} {speeds:6,} {silent:12,} {count:7,}  {(speeds + silent) / count:.1%}")
    assert known["aws"] >= 0.99 * total["aws"]
    assert known["azure"] == total["azure"]
    assert known["ibm"] == total["ibm"]
    assert known["gcp"] >= 0.95 * total["gcp"]
    assert known["oci"] >= 0.9 * total["oci"]
    assert known.total() >= 0.8 * total.total()
    assert known.total() + unpublished.total() >= 0.9 * total.total()


def test_unpublished_networks_have_a_page_and_a_date_and_no_speed(offers: list[Offer]) -> None:
    used = set()
    for offer in offers:
        row = find_unpublished(offer.provider, offer.instance_type)
        if row is not None:
            used.add(row)
            assert offer.network_mbps is None, f"{offer.key} has a speed: the row is wrong"
    assert used == set(list_unpublished()), "a row without offers is stale"
    for row in list_unpublished():
        assert re.fullmatch(r"[a-z0-9.-]+/\S+", row.source), row
        assert date(2026, 1, 1) < date.fromisoformat(row.read), row
        assert row.reason


def test_prices_of_oci_hold_in_all_its_commercial_regions(offers: list[Offer]) -> None:
    """OCI has one price for all of them; SkyPilot's examples name two that are listed here."""
    prices: dict[tuple[str, str], Counter[int]] = {}
    for each in offers:
        if each.provider == "oci":
            key = each.instance_type, each.purchase
            prices.setdefault(key, Counter())[each.rate.micros_per_hour] += 1
    assert {(len(rates), rates.total()) for rates in prices.values()} == {(1, 46)}
    regions = {each.region for each in offers if each.provider == "oci"}
    assert locate("oci", "ap-seoul-1") == ("kr", "asia")
    assert locate("oci", "us-sanjose-1") == ("us", "us")
    assert {"ap-seoul-1", "us-sanjose-1"} <= regions
    assert all(locate("oci", region)[1] for region in regions)


def test_oci_has_preemptible_prices_of_exactly_its_preemptible_machines(
    offers: list[Offer],
) -> None:
    """https://docs.oracle.com/en-us/iaas/Content/Compute/Concepts/preemptible.htm lists the series,
    none of which is bare metal, and gives half the on-demand price. Read on 2026-11-23.
    """
    preemptible = ("VM.GPU2.", "VM.GPU3.", "VM.Standard.E5.Flex$")
    rates = {
        (each.instance_type, each.purchase): each.rate.micros_per_hour
        for each in offers
        if each.provider == "oci"
    }
    spot = {name for name, purchase in rates if purchase is Purchase.SPOT}
    assert spot == {name for name, _ in rates if name.startswith(preemptible)}
    for name in spot:
        assert 2 * rates[name, Purchase.SPOT] == rates[name, Purchase.ON_DEMAND], name


def test_flexible_shapes_of_oci_cost_the_same_for_each_vcpu(offers: list[Offer]) -> None:
    """vCPUs and memory have fixed prices, and all sizes have 4 GiB for each vCPU."""
    found: dict[Purchase, dict[float, float]] = {}
    for each in offers:
        if each.instance_type.startswith("VM.Standard.E5.Flex$"):
            assert each.memory_mib == each.vcpus * 4096
            assert each.instance_type.endswith(f"$_{each.vcpus:g}_{each.vcpus * 4:g}")
            prices = found.setdefault(each.purchase, {})
            prices[each.vcpus] = each.rate.micros_per_hour / each.vcpus
    assert found[Purchase.ON_DEMAND] == dict.fromkeys((2, 4, 8, 16, 32, 64), 23_000)
    assert found[Purchase.SPOT] == dict.fromkeys((2, 4, 8, 16, 32, 64), 11_500)


def test_a_fast_rdma_network_is_found_at_every_large_cloud() -> None:
    need = ResourceSpec(
        network=NetworkNeed(min_mbps=400_000, fabric=Fabric.RDMA),
        accelerators=parse_accelerator("gpu:8"),
        spot=SpotPolicy.AUTO,
    )
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        found = snapshot.match(need)
    assert {offer.provider for offer in found.offers} >= {"aws", "azure", "gcp", "oci", "nebius"}
    assert all((offer.network_mbps or 0) >= 400_000 for offer in found.offers)
    assert all(find_fabric(offer.provider, offer.instance_type) for offer in found.offers)


@pytest.mark.parametrize(
    ("fabric", "providers"),
    [
        (Fabric.EFA, {"aws"}),
        (Fabric.INFINIBAND, {"azure", "nebius", "coreweave"}),
        (Fabric.ROCE, {"oci", "gcp"}),
        (Fabric.TCPX, {"gcp"}),
    ],
)
def test_each_kind_of_fast_network_is_found_where_it_is_sold(
    fabric: Fabric, providers: set[str], offers: list[Offer]
) -> None:
    need = ResourceSpec(
        network=NetworkNeed(min_mbps=400_000, fabric=fabric),
        accelerators=parse_accelerator("gpu:4|gpu:8"),
        spot=SpotPolicy.AUTO,
    )
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        found = snapshot.match(need).offers
    sold = {
        each.provider for each in offers if find_fabric(each.provider, each.instance_type) is fabric
    }
    assert {each.provider for each in found} == providers & sold
    assert found
    assert {find_fabric(each.provider, each.instance_type) for each in found} == {fabric}


def test_every_bare_metal_shape_of_oci_with_a_cluster_network_meets_rdma(
    offers: list[Offer],
) -> None:
    shapes = {each.instance_type for each in offers if each.provider == "oci" and each.accelerator}
    without = {each for each in shapes if find_fabric("oci", each) is None}
    assert {each for each in without if each.startswith("BM.")} == {
        "BM.GPU2.2",
        "BM.GPU3.8",
        "BM.GPU.A10.4",
    }


def test_parts_of_gpus_are_listed_and_never_taken_for_whole_ones(offers: list[Offer]) -> None:
    parts = {
        (each.instance_type, each.accelerators_text) for each in offers if each.accelerator_part < 1
    }
    assert parts == {
        ("Standard_NV6ads_A10_v5", "1/6"),
        ("Standard_NV12ads_A10_v5", "1/3"),
        ("Standard_NV18ads_A10_v5", "1/2"),
        ("g6f.large", "1/8"),
        ("g6f.xlarge", "1/8"),
        ("g6f.2xlarge", "1/4"),
        ("g6f.4xlarge", "1/2"),
        ("gr6f.4xlarge", "1/2"),
    }
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        for text, fractions in (("A10:1", 0), ("gpu:1", 0), ("A10:0.5", 1), ("A10:0.167", 3)):
            need = ResourceSpec(accelerators=parse_accelerator(text), spot=SpotPolicy.AUTO)
            found = snapshot.match(need).offers
            assert found
            assert (
                len({each.instance_type for each in found if each.accelerator_part < 1})
                == fractions
            )


def test_the_slices_of_tpus_are_found_by_name_and_by_topology() -> None:
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        for text in ("TPU-v5e:8", "tpu-v5litepod-8", "TPU-v5e:2x4"):
            need = ResourceSpec(accelerators=parse_accelerator(text), spot=SpotPolicy.AUTO)
            found = snapshot.match(need).offers
            assert {each.instance_type for each in found} == {"tpu-v5litepod-8"}
            assert len({each.region for each in found}) == 16
            at_least = replace(need, cpus_min=200, memory_min_mib=300 * 1024)
            assert len(snapshot.match(at_least).offers) == len(found)


def test_every_slice_of_tpus_that_google_sells_is_found_as_its_hosts() -> None:
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        for kind in list_slices():
            asked = ResourceSpec(accelerators=parse_accelerator(kind.type), spot=SpotPolicy.AUTO)
            spread = spread_slices(asked)
            assert spread.hosts == kind.hosts
            found = [
                each for each in snapshot.match(spread.needs).offers if each.hosts == kind.hosts
            ]
            assert {each.instance_type for each in found} == {kind.instance_type}
            assert {each.accelerator_count for each in found} == {kind.chips // kind.hosts}


def test_google_s_n1_machines_have_their_gpus(offers: list[Offer]) -> None:
    found = {
        (each.accelerator, each.accelerator_count)
        for each in offers
        if each.provider == "gcp" and each.instance_type.startswith("n1-") and each.accelerator
    }
    assert found == {("T4", 1), ("T4", 2), ("T4", 4)} | {("V100", each) for each in (1, 2, 4, 8)}


# The names of machines that always have an accelerator.
ACCELERATED = re.compile(
    r"aws/(dl|f|g|inf|p|trn|vt)\d.*|azure/Standard_N.*|coreweave/.*-\d+-gpu|do/gpu-.*|"
    r"gcp/(a|ct|g|tpu-v)\d.*|gcp/n1-.*x\d|ibm/g.*|lambda/gpu_.*|nebius/gpu-.*|oci/.*GPU.*|tpu/.*|"
    r"verda/\d+[A-Z].*"
)


def test_no_machine_is_listed_without_its_accelerator(offers: list[Offer]) -> None:
    has: dict[str, set[tuple[str | None, int, float]]] = {}
    for each in offers:
        machine = f"{each.provider}/{each.instance_type}"
        has.setdefault(machine, set()).add(
            (each.accelerator, each.accelerator_count, each.accelerator_part)
        )
    assert [name for name, found in has.items() if len(found) > 1] == []
    assert [
        name
        for name, found in has.items()
        if ACCELERATED.fullmatch(name) and {accelerator for accelerator, _, _ in found} == {None}
    ] == []


def test_machines_for_video_and_with_fpgas_are_not_taken_for_gpus(offers: list[Offer]) -> None:
    other = {"Standard_NP10s", "f2.6xlarge", "vt1.3xlarge", "inf2.xlarge", "trn2.48xlarge"}
    assert other <= {each.instance_type for each in offers}
    with CatalogSnapshot.open(SHIPPED) as snapshot:
        for text in ("gpu:1..64", "nvidia:1..64"):
            need = ResourceSpec(accelerators=parse_accelerator(text), spot=SpotPolicy.AUTO)
            found = snapshot.match(need, misses=0, purchases=tuple(Purchase)).offers
            assert other.isdisjoint(each.instance_type for each in found)
        plain = snapshot.match(ResourceSpec(spot=SpotPolicy.AUTO), misses=0).offers
    assert {each.accelerator for each in plain if each.instance_type == "f2.6xlarge"} == {"VU47P"}


def test_trainium_of_both_generations_and_gpus_of_ibm_are_listed(offers: list[Offer]) -> None:
    found = {
        (each.instance_type, each.accelerator, each.accelerator_count)
        for each in offers
        if each.instance_type.startswith("trn") or (each.provider == "ibm" and each.accelerator)
    }
    assert found == {
        ("trn1.2xlarge", "Trainium", 1),
        ("trn1.32xlarge", "Trainium", 16),
        ("trn1n.32xlarge", "Trainium", 16),
        ("trn2.3xlarge", "Trainium2", 1),
        ("trn2.48xlarge", "Trainium2", 16),
        ("gx2-8x64x1v100", "V100", 1),
        ("gx3d-160x1792x8h100", "H100", 8),
    }


def test_prices_with_a_commitment_are_lower_than_without(offers: list[Offer]) -> None:
    usual: dict[tuple[str, str, str], dict[int, int]] = {}
    for each in offers:
        if each.purchase is not Purchase.SPOT:
            key = each.provider, each.region, each.instance_type
            usual.setdefault(key, {})[each.term_months] = each.rate.micros_per_hour
            assert (each.purchase is Purchase.RESERVED) == (each.term_months > 0), each.key
    terms = {(key[0], months) for key, found in usual.items() for months in found}
    assert {("aws", 12), ("gcp", 12), ("gcp", 36)} <= terms
    for key, found in usual.items():
        rates = [rate for _, rate in sorted(found.items())]
        assert rates == sorted(rates, reverse=True), (key, found)
        assert rates[-1] > rates[0] / 4, (key, found)


def test_spot_prices_of_azure_are_listed(offers: list[Offer]) -> None:
    found = {
        each.accelerator
        for each in offers
        if (each.provider, each.purchase) == ("azure", Purchase.SPOT)
    }
    assert found == {"A10", "A100", "H100", "H100-NVL"}


@pytest.mark.parametrize("provider", ["aws", "azure", "gcp", "ibm", "oci"])
def test_every_accelerated_machine_of_a_large_cloud_has_each_price_or_a_reason(
    provider: str, offers: list[Offer]
) -> None:
    """On demand, spot, and reserved for one and three years. `-rP` prints the counts."""
    prices: dict[str, set[tuple[Purchase, int]]] = {}
    for each in offers:
        if each.provider == provider and each.accelerator:
            prices.setdefault(each.instance_type, set()).add((each.purchase, each.term_months))
    wanted = (
        (Purchase.ON_DEMAND, 0),
        (Purchase.SPOT, 0),
        (Purchase.RESERVED, 12),
        (Purchase.RESERVED, 36),
    )
    reasons = list_unlisted_reasons()
    assert prices
    for purchase, months in wanted:
        without = sorted(name for name, found in prices.items() if (purchase, months) not in found)
        priced = len(prices) - len(without)
        print(f"{provider:6} {purchase} {months or ''}: {priced} of {len(prices)} priced")
        assert not without or (provider, purchase) in reasons, (purchase, months, without)


# Read again in the sources, on 2026-11-27: tsaol/aws-gpu, data/p4d_instances.js (18aebd1),
# gr6_instances.js (18aebd1), trn1_, g4dn_, g6_ and inf2_instances.js (299375b), per hour;
# Cyclenerd/google-cloud-pricing-cost-calculator, pricing.yml (0166a59), per month of 730 hours.
READ_AGAIN = """
    aws/us-east-1/p4d.24xlarge:8/reserved-12m 13.921094
    aws/us-east-2/p4d.24xlarge:8/reserved-12m 13.921092
    aws/eu-west-1/p4d.24xlarge:8/reserved-12m 15.08188
    aws/eu-central-1/p4d.24xlarge:8/reserved-12m 17.392445
    aws/ca-central-1/p4d.24xlarge:8/reserved-12m 16.009544
    aws/ap-northeast-1/p4d.24xlarge:8/reserved-12m 19.579678
    aws/ap-south-1/p4d.24xlarge:8/reserved-12m 17.02575
    aws/sa-east-1/p4d.24xlarge:8/reserved-12m 22.684095
    aws/us-gov-west-1/p4d.24xlarge:8/reserved-12m 16.706536
    aws/us-east-1/trn1.2xlarge:1/reserved-12m 0.82681
    aws/us-west-2/trn1.32xlarge:16/reserved-12m 13.22895
    aws/eu-west-1/g4dn.12xlarge:4/reserved-12m 2.977
    aws/us-east-1/g6.xlarge:1/reserved-12m 0.52392
    aws/eu-west-2/g6.16xlarge:1/reserved-12m 2.80701
    aws/ap-south-1/g6.48xlarge:8/reserved-12m 10.43624
    aws/sa-east-1/gr6.8xlarge:1/reserved-12m 2.70718
    aws/eu-north-1/inf2.48xlarge:12/reserved-12m 8.99602
    gcp/us-central1/a2-highgpu-1g:1/reserved-12m 1689.3711392/730
    gcp/us-central1/a2-highgpu-1g:1/reserved-36m 938.56707798/730
    gcp/us-west3/a2-highgpu-1g:1/reserved-12m 2003.09573261/730
    gcp/europe-west4/a2-highgpu-1g:1/reserved-36m 957.62681807/730
    gcp/me-west1/a2-highgpu-1g:1/reserved-12m 1858.308075/730
    gcp/asia-northeast1/a2-highgpu-1g:1/reserved-36m 1038.71536699/730
    gcp/asia-southeast1/a2-highgpu-1g:1/reserved-12m 1830.13370383/730
    gcp/us-central1/a2-highgpu-2g:2/reserved-12m 3378.7422784/730
    gcp/us-central1/a2-highgpu-2g:2/reserved-36m 1877.13415596/730
    gcp/us-central1/a2-megagpu-16g:16/reserved-12m 25634.2950272/730
    gcp/asia-southeast1/a2-megagpu-16g:16/reserved-36m 15516.34624736/730
    gcp/europe-west4/g2-standard-24:2/reserved-12m 967.1583266/730
    gcp/us-east4/g2-standard-32:1/reserved-36m 567.87708568/730
"""


def test_reserved_prices_are_those_of_their_sources(offers: list[Offer]) -> None:
    shipped = {each.key: float(each.rate.usd) for each in offers}
    for key, text in (line.split() for line in READ_AGAIN.strip().splitlines()):
        price, _, hours = text.partition("/")
        assert shipped[key] == pytest.approx(float(price) / float(hours or 1), abs=1e-6), key
