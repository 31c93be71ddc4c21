"""What stand-ins for Azure's services answer to everyone: the token service of machines with a
managed identity, and the public list of prices.
"""

from typing import Any

from cavvy.providers.contract.rest_stand_in import RestRequest
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
