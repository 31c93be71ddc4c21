"""What was seen of markets, and forecasts, over HTTP."""

from pathlib import Path

import pytest
from tests.api.api_state import open_api, until

TASK = """
name: t
run: "true"
resources: {spot: auto}
checkpoint: {path: c, every: 10m}
work: {samples: 36000, rates: {cpu: 1}}
limits: {deadline: 20h}
"""
SCRIPT = """
[[offers]]
instance_type = "m"
price_usd_hr = 1.0
[[offers]]
instance_type = "m"
purchase = "spot"
price_usd_hr = 0.3
[[launches]]
reply = "no-capacity"
latency_s = 0.0
"""


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_a_refusal_is_seen_and_the_rest_of_the_job_foretold(
    kind: str, tmp_path: Path
) -> None:
    async with open_api(kind, tmp_path, script=SCRIPT) as api:
        assert (await api.http.get("/v1/markets")).json() == []
        made = await api.submit(TASK, consent=True)

        async def refused() -> bool:
            rows = (await api.http.get("/v1/markets")).json()
            return any(row["refused"] == 1 for row in rows)

        await until(refused)
        [row] = [row for row in (await api.http.get("/v1/markets")).json() if row["refused"]]
        assert row["market"] == "fake/somewhere/m:0/spot"
        assert "refused" in [seen["kind"] for seen in row["recent"]]
        found = (await api.http.get("/v1/projects/default/jobs/t/forecast")).json()
        assert found["runs"] > 10
        assert found["in_time"] == 1.0
        assert 3_000_000 < found["mean_micros"] < 11_000_000
        assert found["p10_micros"] <= found["mean_micros"] <= found["p90_micros"]
        job = (await api.http.get(f"/v1/projects/default/jobs/{made['id']}")).json()
        assert job["plan_state"]["mode"] in ("idle", "spot")
        assert list(job["avoid"]) == ["fake/somewhere/m:0/spot"]
        await api.http.post("/v1/projects/default/jobs/t/stop")


async def test_a_job_without_a_deadline_has_no_forecast(tmp_path: Path) -> None:
    async with open_api("memory", tmp_path, script=SCRIPT) as api:
        await api.submit("{name: t, run: 'true', resources: {spot: auto}}", consent=True)
        found = (await api.http.get("/v1/projects/default/jobs/t/forecast")).json()
        assert found["runs"] == 0
        assert "deadline" in found["reason"]
        assert (await api.http.get("/v1/projects/default/jobs/none/forecast")).status_code == 404
