"""The route of quotas: what providers report, and the reasons of those that report none."""

from collections.abc import Sequence

from tests.api.api_state import Api

from cavvy.domain.offers import Purchase, Quota
from cavvy.domain.values import replace
from cavvy.providers.abilities import TELLS_QUOTAS
from cavvy.providers.base import Provider, Refused

QUOTA = Quota(
    provider="cloud",
    name="P",
    family="P",
    unit="vCPUs",
    region="a",
    purchase=Purchase.SPOT,
    limit=96,
    used=32,
    request="ask NEW_LIMIT",
)


class QuotaProvider:
    """A provider that reports quotas, or refuses to."""

    def __init__(self, base: Provider, problem: str = "", untold: Sequence[str] = ()) -> None:
        self.manifest = replace(base.manifest, name="cloud", abilities=(TELLS_QUOTAS,))
        self._problem, self._untold = problem, untold

    async def quotas(self) -> Sequence[Quota]:
        if self._problem:
            raise Refused(self._problem)
        return [QUOTA]

    def untold_quotas(self) -> Sequence[str]:
        return self._untold


async def test_quotas_of_all_providers_and_of_one(api: Api) -> None:
    providers = api.app_state.control_plane.pool.providers
    base = providers["fake"]
    assert isinstance(providers, dict)
    providers |= {"cloud": QuotaProvider(base), "shut": QuotaProvider(base, "no right")}
    silent = QuotaProvider(base)
    silent.manifest = replace(silent.manifest, abilities=(), no_quotas="its API reports none")
    providers["silent"] = silent
    report = (await api.http.get("/v1/quotas")).json()
    (row,) = report["quotas"]
    assert row == {
        "provider": "cloud",
        "region": "a",
        "family": "P",
        "name": "P",
        "unit": "vCPUs",
        "purchase": "spot",
        "limit": 96.0,
        "used": 32.0,
        "left": 64.0,
        "request": "ask NEW_LIMIT",
        "zone": "",
    }
    reasons = {each["provider"]: each["reason"] for each in report["untold"]}
    assert reasons["shut"] == "no right"
    assert reasons["silent"] == "its API reports none"
    assert reasons["fake"] == "Cavvy does not read quotas of this provider"
    one = (await api.http.get("/v1/quotas?provider=cloud")).json()
    assert (len(one["quotas"]), one["untold"]) == (1, [])


async def test_a_region_whose_quotas_are_unknown_is_told_beside_the_others(api: Api) -> None:
    providers = api.app_state.control_plane.pool.providers
    assert isinstance(providers, dict)
    providers["cloud"] = QuotaProvider(providers["fake"], untold=["b: no answer"])
    report = (await api.http.get("/v1/quotas?provider=cloud")).json()
    assert [each["region"] for each in report["quotas"]] == ["a"]
    assert report["untold"] == [{"provider": "cloud", "reason": "b: no answer"}]


async def test_a_provider_that_is_not_enabled_is_named(api: Api) -> None:
    answer = await api.http.get("/v1/quotas?provider=nowhere")
    assert answer.status_code == 422
    assert "'nowhere' is not enabled; enabled: fake" in answer.json()["message"]
