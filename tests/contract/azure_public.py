"""What stand-ins for Azure's services answer to everyone: the token service of machines with a
managed identity, and the public list of prices.
"""

import re
from collections.abc import Sequence
from typing import Any

from cavvy.providers.contract.rest_stand_in import RestRequest, RestStandIn
from cavvy.providers.vm.cloud import CloudFault

_IDENTITY = "the-identity"
_PATHS = ("/api/retail/", "/identity")


def is_public(request: RestRequest) -> bool:
    """Whether a request needs no token."""
    return request.path.startswith(_PATHS)


def make_token(request: RestRequest, token: str) -> dict[str, Any]:
    """The reply of the token service. Raises CloudFault."""
    if request.headers.get("x-identity-header") != _IDENTITY:
        raise CloudFault(401, "Unauthorized", "the header X-IDENTITY-HEADER is wrong")
    told = {"access_token": token, "expires_on": "4102444800", "token_type": "Bearer"}
    return {**told, "resource": request.query["resource"]}


def identity_variables(url: str) -> dict[str, str]:
    """The environment of a machine whose token service is part of the stand-in at this address."""
    return {"IDENTITY_ENDPOINT": f"{url}/identity", "IDENTITY_HEADER": _IDENTITY}


def cut_page(
    stand_in: RestStandIn, items: Sequence[dict[str, Any]], request: RestRequest
) -> dict[str, Any]:
    """A page of a list of Azure Resource Manager, with the address of the next one."""
    number = int(request.query.get("$skip", 1))
    shown, more = stand_in.cut(items, number, 50)
    found: dict[str, Any] = {"value": list(shown)}
    if more:
        start = re.sub(r"&\$skip=\d+", "", request.target)
        origin = stand_in.url.removesuffix("/" + request.target.split("/")[1])
        found["nextLink"] = f"{origin}{start}&$skip={number + 1}"
    return found


def make_price(size: str, region: str, usd: float, *, kind: str = "", windows: bool = False) -> Any:
    """One item of the list of prices. `kind` is such as " Spot"."""
    return {
        "currencyCode": "USD",
        "unitOfMeasure": "1 Hour",
        "type": "Consumption",
        "productName": f"Virtual Machines Series{' Windows' if windows else ''}",
        "skuName": f"{size}{kind}",
        "meterName": f"{size}{kind}",
        "armSkuName": size,
        "armRegionName": region,
        "retailPrice": usd,
    }
