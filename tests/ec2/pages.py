"""Long lists in pages, as AWS gives them: a token says where the next page begins."""

import json
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree

from tests.ec2.rules import Answer

_NS = "http://ec2.amazonaws.com/doc/2016-11-15/"
_LISTS = (
    "reservationSet",
    "instanceTypeSet",
    "instanceTypeOfferingSet",
    "spotPriceHistorySet",
    "volumeSet",
    "subnetSet",
    "securityGroupInfo",
    "capacityReservationSet",
    "routeTableSet",
)
_FIELDS = ("Quotas", "PriceList")


def cut_xml(content: bytes, most: int, token: str) -> bytes:
    """One page of an answer of EC2; one that fits is left as it is."""
    if not token and content.count(b"<item>") <= most:
        return content
    ElementTree.register_namespace("", _NS)
    root = ElementTree.fromstring(content)
    found = next((each for each in root if each.tag.rpartition("}")[2] in _LISTS), None)
    if found is None:
        return content
    start, items = _start(token), list(found)
    for each in [*items[:start], *items[start + most :]]:
        found.remove(each)
    after = ElementTree.SubElement(
        root, f"{{{_NS}}}nextToken"
    )  # EC2 leaves it empty where there is no more
    after.text = f"page-{start + most}" if start + most < len(items) else None
    return bytes(ElementTree.tostring(root))


def cut_json(told: Mapping[str, Any], most: int, token: str) -> bytes:
    """One page of an answer of another service."""
    answer, start = dict(told), _start(token)
    for field in _FIELDS:
        if len(answer.get(field, ())) > most:
            more = start + most < len(answer[field])
            answer |= {field: answer[field][start : start + most]} | (
                {"NextToken": f"page-{start + most}"} if more else {}
            )
    return json.dumps(answer).encode()


def _start(token: str) -> int:
    if token and not token.startswith("page-"):
        raise Answer("InvalidParameterValue", f"Unable to parse pagination token {token}")
    return int(token.removeprefix("page-") or 0)
