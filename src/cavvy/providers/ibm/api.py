"""Calls IBM Cloud's VPC API (https://cloud.ibm.com/apidocs/vpc) in several regions."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from cavvy.domain.tasks import Scalar
from cavvy.providers.ibm.iam import IamTokens
from cavvy.providers.vm.rest import Json, RestClient

# the version in the Python package ibm-vpc 0.36.0
_VERSION = {"version": "2026-10-06", "generation": "2"}
_PAGE = "100"  # the longest page


class IbmApi:
    """Calls the API of each region. Calls raise CloudFault and Refused."""

    def __init__(self, settings: Mapping[str, Scalar], tokens: IamTokens) -> None:
        self._endpoint, self._tokens = str(settings["endpoint"]), tokens
        self._clients: dict[str, RestClient] = {}

    def close(self) -> None:
        for each in self._clients.values():
            each.close()

    async def get(self, region: str, path: str) -> Json:
        return await self._client(region).get(_add_version(path))

    async def send(
        self, region: str, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> Json:
        """Send a request that creates, changes or deletes a resource."""
        return await self._client(region).send(method, _add_version(path), body)

    async def list(self, region: str, path: str, field: str, **query: str) -> Sequence[Json]:
        """Return all items of a list. An underscore in the name of a parameter stands for a
        period."""
        names = {name.replace("_", "."): value for name, value in query.items()}
        first = _add_version(path, limit=_PAGE, **names)

        def read_next(page: Json) -> str | None:
            if not page.get("next"):
                return None
            # the address of the next page lacks the version
            start = parse_qs(urlsplit(page["next"]["href"]).query)["start"][0]
            return f"{first}&{urlencode({'start': start})}"

        pages = await self._client(region).pages(first, read_next)
        return [each for page in pages for each in page[field]]

    def _client(self, region: str) -> RestClient:
        if region not in self._clients:
            address = self._endpoint.replace("{region}", region)
            self._clients[region] = RestClient(address, self._tokens.read, _read_error)
        return self._clients[region]


def _add_version(path: str, **query: str) -> str:
    return f"{path}?{urlencode({**_VERSION, **query})}"


def _read_error(told: Json) -> tuple[str, str]:
    """Return the code and the message of an error
    (https://cloud.ibm.com/apidocs/vpc#error-handling)."""
    first = told["errors"][0]
    return first["code"], first["message"]
