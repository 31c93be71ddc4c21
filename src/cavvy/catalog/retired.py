"""Instance types that providers have withdrawn, and what replaces them; the spec module names it in
its errors.

From the providers' retirement announcements. A successor has the same kind of accelerator or a
newer one.
"""

from dataclasses import dataclass
from datetime import date
from functools import cache


@dataclass(frozen=True, slots=True, kw_only=True)
class RetiredType:
    """A withdrawn type. `since` is the last day it could be used, None where only the withdrawal
    is certain.
    """

    instance_type: str
    provider: str
    successor: str
    since: date | None = None


def find_retired(instance_type: str) -> RetiredType | None:
    """The entry of a withdrawn type, whatever its case; None for a type in use or unknown."""
    return _table().get(instance_type.strip().lower())


def successor(instance_type: str) -> str | None:
    """What to write instead of a withdrawn type; None for a type in use or unknown."""
    retired = find_retired(instance_type)
    return retired.successor if retired else None


def list_retired() -> tuple[RetiredType, ...]:
    """Every withdrawn type known."""
    return tuple(_table().values())


_NC_V1 = date(2023, 9, 6)
_NC_V3 = date(2025, 9, 30)
_NV_V3 = date(2026, 9, 30)
_ROWS: dict[tuple[str, date | None], tuple[str, ...]] = {
    ("aws", None): (
        "p2.xlarge g4dn.xlarge",
        "p2.8xlarge g5.48xlarge",
        "p2.16xlarge p4d.24xlarge",
        "g2.2xlarge g4dn.xlarge",
        "g2.8xlarge g4dn.12xlarge",
    ),
    ("aws", date(2025, 12, 20)): (
        "f1.2xlarge f2.6xlarge",
        "f1.4xlarge f2.12xlarge",
        "f1.16xlarge f2.48xlarge",
    ),
    ("azure", None): (
        "Standard_A8 Standard_E8s_v5",
        "Standard_A9 Standard_E16s_v5",
        "Standard_A10 Standard_E8s_v5",
        "Standard_A11 Standard_E16s_v5",
        "Standard_H8 Standard_HB120-16rs_v3",
        "Standard_H16 Standard_HB120-16rs_v3",
        "Standard_H16r Standard_HB120-16rs_v3",
        "Standard_H8m Standard_HB120-16rs_v3",
        "Standard_H16m Standard_HB120-16rs_v3",
        "Standard_H16mr Standard_HB120-16rs_v3",
        "Standard_HB60rs Standard_HB120rs_v3",
    ),
    ("azure", date(2024, 8, 31)): (
        "Standard_A0 Standard_A1_v2",
        "Standard_A1 Standard_A1_v2",
        "Standard_A2 Standard_A2_v2",
        "Standard_A3 Standard_A4_v2",
        "Standard_A4 Standard_A8_v2",
        "Standard_A5 Standard_A2m_v2",
        "Standard_A6 Standard_A4m_v2",
        "Standard_A7 Standard_A8m_v2",
    ),
    ("azure", _NC_V1): (
        "Standard_NC6 Standard_NC4as_T4_v3",
        "Standard_NC12 Standard_NC8as_T4_v3",
        "Standard_NC24 Standard_NC64as_T4_v3",
        "Standard_NC24r Standard_NC64as_T4_v3",
        "Standard_NC6_Promo Standard_NC4as_T4_v3",
        "Standard_NC12_Promo Standard_NC8as_T4_v3",
        "Standard_NC24_Promo Standard_NC64as_T4_v3",
        "Standard_NC24r_Promo Standard_NC64as_T4_v3",
        "Standard_NC6s_v2 Standard_NC24ads_A100_v4",
        "Standard_NC12s_v2 Standard_NC48ads_A100_v4",
        "Standard_NC24s_v2 Standard_NC96ads_A100_v4",
        "Standard_NC24rs_v2 Standard_NC96ads_A100_v4",
        "Standard_ND6s Standard_NC24ads_A100_v4",
        "Standard_ND12s Standard_NC48ads_A100_v4",
        "Standard_ND24s Standard_NC96ads_A100_v4",
        "Standard_ND24rs Standard_NC96ads_A100_v4",
        "Standard_NV6 Standard_NV36ads_A10_v5",
        "Standard_NV12 Standard_NV36ads_A10_v5",
        "Standard_NV24 Standard_NV72ads_A10_v5",
        "Standard_NV6_Promo Standard_NV36ads_A10_v5",
        "Standard_NV12_Promo Standard_NV36ads_A10_v5",
        "Standard_NV24_Promo Standard_NV72ads_A10_v5",
        "Standard_NV6s_v2 Standard_NV36ads_A10_v5",
        "Standard_NV12s_v2 Standard_NV36ads_A10_v5",
        "Standard_NV24s_v2 Standard_NV72ads_A10_v5",
    ),
    ("azure", _NC_V3): (
        "Standard_NC6s_v3 Standard_NC24ads_A100_v4",
        "Standard_NC12s_v3 Standard_NC48ads_A100_v4",
        "Standard_NC24s_v3 Standard_NC96ads_A100_v4",
        "Standard_NC24rs_v3 Standard_NC96ads_A100_v4",
        "Standard_ND40s_v2 Standard_ND96asr_v4",
        "Standard_ND40rs_v2 Standard_ND96asr_v4",
    ),
    ("azure", _NV_V3): (
        "Standard_NV12s_v3 Standard_NV36ads_A10_v5",
        "Standard_NV24s_v3 Standard_NV72ads_A10_v5",
        "Standard_NV48s_v3 Standard_NV72ads_A10_v5",
        "Standard_NV4as_v4 Standard_NC4as_T4_v3",
        "Standard_NV8as_v4 Standard_NC4as_T4_v3",
        "Standard_NV16as_v4 Standard_NC8as_T4_v3",
        "Standard_NV32as_v4 Standard_NC16as_T4_v3",
    ),
}


@cache
def _table() -> dict[str, RetiredType]:
    table = {}
    for (provider, since), pairs in _ROWS.items():
        for old, new in (pair.split() for pair in pairs):
            table[old.lower()] = RetiredType(
                instance_type=old, provider=provider, successor=new, since=since
            )
    return table
