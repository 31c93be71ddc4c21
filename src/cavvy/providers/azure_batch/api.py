"""Calls the API of one Azure Batch account: https://learn.microsoft.com/rest/api/batchservice"""

from collections.abc import Mapping, Sequence
from urllib.parse import quote, urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.azure.account import AzureAccount, MakeCredential
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

# The version of the API, from the package azure-batch 15.1. The tests check requests with this
# package.
VERSION = "2025-06-01"
# Tokens for this resource: https://learn.microsoft.com/rest/api/batchservice/authenticate-batch-api
_RESOURCE = "https://batch.core.windows.net"
_TYPE = {"Content-Type": "application/json; odata=minimalmetadata"}
_MOST_TASKS = 100  # maximum tasks in one request
# Codes of replies with the status 409:
# https://learn.microsoft.com/rest/api/batchservice/batch-status-and-error-codes
_EXISTS = frozenset({"JobExists", "TaskExists"})
_ENDING = frozenset({"JobBeingTerminated"})
_ENDED = frozenset({"JobCompleted", "JobBeingDeleted"})


class BatchApi:
    """Calls the API for one account. Calls raise CloudFault and Refused."""

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        make_credential: MakeCredential,
    ) -> None:
        self._settings = settings
        self._credentials = AzureAccount(
            {"endpoint": _RESOURCE, "key_file": str(settings.get("key_file") or "")},
            make_credential,
            provider="azure-batch",
        )
        self._client: RestClient | None = None

    def account(self) -> tuple[str, str]:
        """Return the name and the region of the account. Raises Refused."""
        text = str(self._settings.get("account") or "")
        name, _, region = text.partition(".")
        if not name.isalnum() or not region.isalnum():
            raise Refused(
                f"[providers.azure-batch] account: {text!r} is not the name and the region of a "
                "Batch account, such as train.westeurope; `az batch account list` shows the "
                "accounts with their endpoints"
            )
        return name, region

    def close(self) -> None:
        self._credentials.close()
        if self._client is not None:
            self._client.close()

    async def check(self) -> None:
        """Read one job. Raise an error if a permission is missing or the account does not exist."""
        await self._api().get(_path("/jobs", maxresults="1"))

    async def create_job(self, body: Mapping[str, Json]) -> Json | None:
        """Create a job and return None; if the job already exists, return the existing job."""
        try:
            await self._api().send("POST", _path("/jobs"), body, _TYPE)
        except CloudFault as fault:
            if fault.code not in _EXISTS:
                raise
            return await self.job(str(body["id"]))
        return None

    async def jobs(self, prefix: str) -> Sequence[Json]:
        """Return the jobs whose ids start with this text."""
        return await self._list("/jobs", **{"$filter": f"startswith(id,'{prefix}')"})

    async def job(self, job: str) -> Json | None:
        """Return one job, or None if it does not exist."""
        return await self._find(f"/jobs/{quote(job)}")

    async def terminate(self, job: str) -> None:
        """End a job and its tasks, and delete its pool. Raises CloudFault with the status 404 if
        the job has ended.
        """
        try:
            await self._api().send("POST", _path(f"/jobs/{quote(job)}/terminate"), {}, _TYPE)
        except CloudFault as fault:
            if fault.code in _ENDED:
                raise CloudFault(404, fault.code, fault.message) from fault
            if fault.code not in _ENDING:
                raise

    async def delete_job(self, job: str) -> None:
        """Delete a job that has ended. Does nothing if the job is being deleted or does not
        exist."""
        try:
            await self._api().send("DELETE", _path(f"/jobs/{quote(job)}"), None, _TYPE)
        except CloudFault as fault:
            if fault.status != 404 and fault.code not in _ENDED:
                raise

    async def add_tasks(self, job: str, body: Mapping[str, Sequence[Json]]) -> None:
        """Add tasks; existing tasks are unchanged."""
        tasks = body["value"]
        for start in range(0, len(tasks), _MOST_TASKS):
            part = {"value": tasks[start : start + _MOST_TASKS]}
            path = _path(f"/jobs/{quote(job)}/addtaskcollection")
            told = await self._api().send("POST", path, part, _TYPE)
            for each in told["value"]:
                code, message = _read_error(each["error"]) if each.get("error") else ("", "")
                if each["status"] != "success" and code not in _EXISTS:
                    status = 503 if each["status"] == "servererror" else 400
                    raise CloudFault(status, code, f"task {each['taskId']}: {message}")

    async def tasks(self, job: str) -> Sequence[Json] | None:
        """Return the tasks of a job, or None if the job does not exist."""
        try:
            return await self._list(f"/jobs/{quote(job)}/tasks")
        except CloudFault as fault:
            if fault.status == 404:
                return None
            raise

    async def nodes(self, pool: str) -> Sequence[Json]:
        """Return the machines of a pool, or an empty list if the pool does not exist."""
        try:
            return await self._list(f"/pools/{quote(pool)}/nodes")
        except CloudFault as fault:
            if fault.status == 404:
                return []
            raise

    async def pool(self, pool: str) -> Json | None:
        """Return one pool, or None if it does not exist."""
        return await self._find(f"/pools/{quote(pool)}")

    async def _find(self, path: str) -> Json | None:
        try:
            return await self._api().get(_path(path))
        except CloudFault as fault:
            if fault.status == 404:
                return None
            raise

    async def _list(self, path: str, **query: str) -> list[Json]:
        pages = await self._api().pages(_path(path, **query), lambda page: page.get(_NEXT) or None)
        return [each for page in pages for each in page["value"]]

    def _api(self) -> RestClient:
        if self._client is None:
            name, region = self.account()
            endpoint = str(self._settings["endpoint"])
            for field, value in (("{name}", name), ("{region}", region)):
                endpoint = endpoint.replace(field, value)
            self._client = RestClient(endpoint, self._credentials.token, _read_error)
        return self._client


_NEXT = "odata.nextLink"


def _path(path: str, **query: str) -> str:
    return f"{path}?{urlencode({'api-version': VERSION, **query})}"


def _read_error(told: Json) -> tuple[str, str]:
    """Return the code and the message of an error."""
    return str(told["code"]), str((told.get("message") or {}).get("value", ""))
