"""Calls the APIs of one Azure Machine Learning workspace: Azure Resource Manager
(https://learn.microsoft.com/rest/api/azureml/jobs, and the page online-endpoints) and the run
history. Only the run history contains a job's start time and the reason for its end.
"""

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from cavvy.domain.tasks import Scalar
from cavvy.providers.azure.account import AzureAccount, MakeCredential
from cavvy.providers.base import Refused
from cavvy.providers.vm.cloud import CloudFault
from cavvy.providers.vm.rest import Json, RestClient

NAME_TAG = "cavvy-name"  # the tag with the name from `providers.vm`
_KIND = "Microsoft.MachineLearningServices/workspaces"
_VERSION = "2024-04-01"
# No stable version has the field `idleTimeBeforeShutdown`:
# https://azure.github.io/PSRule.Rules.Azure/en/rules/Azure.ML.ComputeIdleShutdown
INSTANCE_VERSION = "2023-06-01-preview"
# https://learn.microsoft.com/azure/machine-learning/how-to-authenticate-batch-endpoint
_ML_SCOPE = "https://ml.azure.com/.default"
_ENVIRONMENT, _SERVING = "cavvy", "cavvy-endpoints"
_READ_ONLY = frozenset({"status", "parameters"})  # fields of a job that requests must not contain


class WorkspaceApi:
    """Calls raise CloudFault and Refused."""

    def __init__(
        self,
        settings: Mapping[str, Scalar],
        make_credential: MakeCredential,
        provider: str,
    ) -> None:
        """`provider` is the name of the provider that has the settings; error messages contain the
        name."""
        self._settings = settings
        self._account = AzureAccount(
            settings, make_credential, provider=provider, namespaces=(_KIND.partition("/")[0],)
        )
        self._table = f"[providers.{provider}]"
        self._workspace = str(settings.get("workspace") or "")
        self._region = ""
        self._history: RestClient | None = None
        # (name of the environment, image) -> the id of the environment's version
        self._environments: dict[tuple[str, str], str] = {}

    def close(self) -> None:
        self._account.close()
        if self._history is not None:
            self._history.close()

    async def region(self) -> str:
        """Return the region of the workspace."""
        if not self._region:
            self._check_settings()
            told = await self._account.find(_KIND, self._workspace)
            if told is None:
                raise Refused(
                    f"{self._table} workspace: the workspace {self._workspace} does not exist in "
                    f"the resource group {self._account.group}; create it: az ml workspace create "
                    f"--name {self._workspace} --resource-group {self._account.group}"
                )
            self._region = str(told["location"]).lower().replace(" ", "")
        return self._region

    async def check_region(self, region: str) -> None:
        """Raise Refused if the workspace is not in the region."""
        if region != await self.region():
            raise Refused(f"the workspace is in {self._region}, not in {region}")

    async def clusters(self) -> Sequence[Json]:
        """Return the compute targets of the workspace."""
        return await self._list("computes", {})

    async def cluster(self, name: str) -> Json | None:
        """Return one compute target, or None if it does not exist."""
        return await self._account.find(_KIND, f"{self._workspace}/computes/{name}")

    async def sizes(self) -> Sequence[Json]:
        """Return the sizes of machines in the region of the workspace:
        https://learn.microsoft.com/rest/api/azureml/virtual-machine-sizes/list
        """
        path = f"providers/{_KIND.partition('/')[0]}/locations/{await self.region()}/vmSizes"
        return await self._account.all(path, f"api-version={_VERSION}")

    async def create_compute(
        self, name: str, body: Mapping[str, Any], *, version: str = ""
    ) -> None:
        """Request a compute target. `version` overrides the API version."""
        path = f"{self._workspace}/computes/{name}"
        await self._account.put(_KIND, path, body, version=version)

    async def delete_compute(self, name: str) -> None:
        """Request the deletion of a compute target and its machine."""
        path = f"{self._workspace}/computes/{name}"
        await self._account.delete(_KIND, path, "&underlyingResourceAction=Delete")

    async def path(self, below: str) -> str:
        """Return the id of a resource in the workspace."""
        return await self._account.path(_KIND, f"{self._workspace}/{below}")

    async def environment(self, image: str, inference: Mapping[str, Any] | None = None) -> str:
        """Return the id of the environment version for an image. Create the version if it does not
        exist. `inference` contains the HTTP routes that an endpoint's image serves, which are the
        same for all images.
        """
        kept = _SERVING if inference else _ENVIRONMENT, image
        if kept not in self._environments:
            version = hashlib.sha256(image.encode()).hexdigest()[:16]
            name = f"{self._workspace}/environments/{kept[0]}/versions/{version}"
            if await self._account.find(_KIND, name) is None:
                properties: dict[str, Any] = {"image": image, "osType": "Linux"}
                properties |= {"isAnonymous": False}
                properties |= {"inferenceConfig": inference} if inference else {}
                await self._account.put(_KIND, name, {"properties": properties})
            self._environments[kept] = await self._account.path(_KIND, name)
        return self._environments[kept]

    async def endpoints(self) -> Sequence[Json]:
        """Return the online endpoints of the workspace."""
        return await self._list("onlineEndpoints", {})

    async def endpoint(self, name: str, deployment: str = "") -> Json | None:
        """Return an online endpoint or one of its deployments, or None if it does not exist."""
        return await self._account.find(_KIND, self._endpoint(name, deployment))

    async def create_endpoint(
        self, name: str, body: Mapping[str, Any], deployment: str = ""
    ) -> None:
        """Request the creation of an online endpoint or of one of its deployments."""
        await self._account.put(_KIND, self._endpoint(name, deployment), body)

    async def delete_endpoint(self, name: str) -> None:
        """Request the deletion of an online endpoint with its deployments."""
        await self._account.delete(_KIND, self._endpoint(name))

    async def operation(self, url: str) -> Json:
        """Return an Azure operation. A failed operation contains the reason for the failure."""
        return await self._account.follow(url)

    def ml_token(self) -> str:
        """Return a token for the run history and for online endpoints. Blocks."""
        return self._account.token(_ML_SCOPE)

    async def jobs(self, tag: str) -> Sequence[Json]:
        """Return the command jobs that have a tag and are not archived."""
        query = {"jobType": "Command", "tag": tag, "listViewType": "ActiveOnly"}
        return await self._list("jobs", query)

    async def job(self, name: str) -> Json | None:
        """Return one job, or None if it does not exist."""
        return await self._account.find(_KIND, f"{self._workspace}/jobs/{name}")

    async def create(self, name: str, job: Mapping[str, Any]) -> None:
        """Request a job. A repeated call does not create a second job."""
        await self._account.put(_KIND, f"{self._workspace}/jobs/{name}", job)

    async def cancel(self, name: str) -> None:
        """Request the cancellation of a job; the job ends later."""
        await self._account.post(_KIND, f"{self._workspace}/jobs/{name}/cancel")

    async def archive(self, name: str) -> None:
        """Archive an ended job, so that lists omit it. The run history is not deleted."""
        told = await self.job(name)
        if told is None:
            return
        fields = told["properties"].items()
        kept = {field: value for field, value in fields if field not in _READ_ONLY}
        body = {"properties": {**kept, "isArchived": True}}
        await self._account.put(_KIND, f"{self._workspace}/jobs/{name}", body)

    async def history(self, name: str) -> Json:
        """Return the details of a job's run, or {} if the run history does not contain the run
        yet."""
        region = await self.region()
        if self._history is None:
            self._history = RestClient(
                str(self._settings["history_endpoint"]).replace("{region}", region),
                self.ml_token,
                lambda told: (told["error"]["code"], told["error"]["message"]),
            )
        workspace = await self._account.path(_KIND, self._workspace)
        try:
            return await self._history.get(f"/history/v1.0{workspace}/runs/{name}/details")
        except CloudFault as fault:
            if fault.status == 404:
                return {}
            raise

    def _endpoint(self, name: str, deployment: str = "") -> str:
        below = f"/deployments/{deployment}" if deployment else ""
        return f"{self._workspace}/onlineEndpoints/{name}{below}"

    async def _list(self, what: str, query: Mapping[str, str]) -> Sequence[Json]:
        await self.region()  # raises Refused if there is no such workspace
        below = await self.path(what)
        path = below.removeprefix(f"{await self._account.subscription()}/")
        return await self._account.all(path, urlencode({"api-version": _VERSION, **query}))

    def _check_settings(self) -> None:
        for name in ("resource_group", "workspace"):
            if not self._settings.get(name):
                raise Refused(
                    f"{self._table} {name}: not set; name the {name.replace('_', ' ')} to use"
                )


def read_time(text: str | None) -> datetime | None:
    """Parse a time in a reply; times without a zone are in UTC."""
    if not text:
        return None
    time = datetime.fromisoformat(text)
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def make_short_name(name: str) -> str:
    """Return a short resource name, unique in a region, for a name from `providers.vm`: Azure
    allows at most 24 characters for compute instances, and 32 for online endpoints.
    """
    return f"cv{hashlib.sha256(name.encode()).hexdigest()[:20]}"
