"""The prices of Google's TPU chips, and of the GPUs that are attached to N1 machines, by region, in
US dollars per device and hour. A row contains the on-demand price and then the spot price, which is
None if the list has only a placeholder.

From skypilot-org/skypilot-catalog, catalogs/v8/gcp/vms.csv, commit 8427bbf, which reads Google's
Cloud Billing Catalog. Zones of one region have one price.
"""

from collections.abc import Mapping
from decimal import Decimal

GCP_SOURCE = "skypilot-org/skypilot-catalog v8, gcp, commit 8427bbf"

Prices = Mapping[str, tuple[Decimal, Decimal | None]]


def _prices(table: str) -> Prices:
    """Read "REGION ON-DEMAND SPOT" rows; the spot price "-" is None."""
    return {
        region: (Decimal(on_demand), None if spot == "-" else Decimal(spot))
        for region, on_demand, spot in map(str.split, table.strip().splitlines())
    }


# In v2 and v3, a chip of a slice with several hosts ("pod") has a different price.
TPU_PRICES: Mapping[str, Prices] = {
    "TPU-v2": _prices(
        """
        asia-east1 1.305 0.3915
        europe-west4 1.2375 0.3155625
        us-central1 1.125 0.3375
        """
    ),
    "TPU-v2 pod": _prices(
        """
        europe-west4 1.5 0.3825
        us-central1 1.5 0.3825
        """
    ),
    "TPU-v3": _prices(
        """
        europe-west4 2.2 0.561
        us-central1 2 0.51
        us-east1 2 -
        """
    ),
    "TPU-v3 pod": _prices(
        """
        europe-west4 2 0.66
        us-east1 2 0.6
        """
    ),
    "TPU-v4": _prices("us-central2 3.22 0.9215"),
    "TPU-v5p": _prices(
        """
        europe-west1 4.459455 1.783782
        europe-west4 4.2525 1.3485
        us-central1 4.2 0.928552
        us-east1 4.2 0.928552
        us-east5 4.2 1.68
        us-south1 4.779 1.462374
        """
    ),
    "TPU-v5e": _prices(
        """
        asia-east1 1.38948 0.55579
        asia-northeast1 1.54104 0.47156
        asia-southeast1 1.56 0.78
        europe-north1 1.32132 0.66066
        europe-west1 1.32132 0.52853
        europe-west3 1.416 0.4333
        europe-west4 1.56 0.40453
        northamerica-northeast1 1.32132 0.40432
        southamerica-west1 1.716 0.5251
        us-central1 1.2 0.24493
        us-east1 1.2 0.24493
        us-east4 1.2 0.6
        us-east5 1.2 0.6
        us-south1 1.416 0.5664
        us-west1 1.2 0.24493
        us-west4 1.2 0.48
        """
    ),
    "TPU-v6e": _prices(
        """
        asia-northeast1 3.24 0.85774
        asia-south1 3.24 2.27
        asia-southeast1 2.97 0.40325
        europe-west4 2.97 1.03748
        southamerica-west1 2.7 -
        us-central1 2.7 0.57285
        us-east1 2.7 0.57285
        us-east4 2.7 0.64185
        us-east5 2.7 1.35
        us-south1 2.7 1.35
        us-west1 2.7 0.57285
        """
    ),
}

GPU_PRICES: Mapping[str, Mapping[str, tuple[Decimal, Decimal]]] = {
    gpu: {
        region: (on_demand, spot)
        for region, (on_demand, spot) in _prices(table).items()
        if spot is not None
    }
    for gpu, table in {
        "T4": """
        asia-east1 0.35 0.1257
        asia-east2 0.44 0.1822
        asia-northeast1 0.37 0.1192
        asia-northeast3 0.37 0.1399
        asia-south1 0.41 0.189
        asia-southeast1 0.37 0.1828
        asia-southeast2 0.4033 0.1766
        australia-southeast1 0.44 0.194
        europe-central2 0.41 0.164
        europe-west1 0.35 0.14
        europe-west2 0.399 0.1074
        europe-west3 0.41 0.164
        europe-west4 0.3675 0.175
        me-west1 0.385 0.0994
        northamerica-northeast1 0.38538 0.1698
        southamerica-east1 0.48 0.2117
        us-central1 0.35 0.175
        us-east1 0.35 0.175
        us-east4 0.37 0.1566
        us-west1 0.35 0.175
        us-west2 0.42074 0.164
        us-west3 0.42074 0.1328
        us-west4 0.37 0.1258
        """,
        "V100": """
        asia-east1 2.48 0.7062
        europe-west4 2.604 0.9494
        us-central1 2.48 1.1458
        us-east1 2.48 1.1458
        us-west1 2.48 1.1458
        """,
    }.items()
}

# (GPU, number of GPUs, N1 machine type): a common machine type that Google allows for this number
# (cloud.google.com/compute/docs/gpus: up to 24 vCPUs for one T4, 12 for one V100).
N1_MACHINES = (
    ("T4", 1, "n1-standard-4"),
    ("T4", 1, "n1-standard-8"),
    ("T4", 2, "n1-standard-16"),
    ("T4", 4, "n1-standard-32"),
    ("V100", 1, "n1-standard-8"),
    ("V100", 2, "n1-standard-16"),
    ("V100", 4, "n1-standard-32"),
    ("V100", 8, "n1-standard-64"),
)
