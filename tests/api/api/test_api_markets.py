"""What was seen of markets, and forecasts, over HTTP."""

from pathlib import Path

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


async def test_a_refusal_is_seen_and_the_rest_of_the_job_foretold(
    tmp_path: Path,
) -> None:
    async with open_api("sqlite", tmp_path, script=SCRIPT) as api:
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


async def test_a_check_ranks_the_offers_that_the_queue_would_try(tmp_path: Path) -> None:
    async with open_api("sqlite", tmp_path, script=SCRIPT) as api:
        where, ask = "/v1/projects/p/job-check", {"text": TASK, "path": "task.yaml"}
        plain = (await api.http.post(where, json=ask)).json()
        assert plain["placements"] == []
        answer = (await api.http.post(f"{where}?placements=5", json=ask)).json()
        assert "t costs" in answer["consent_needed"]
        found = answer["placements"]
        assert [each["placement"].rpartition("/")[2] for each in found] == ["spot", "on-demand"]
        assert found[0]["rate_micros_per_hour"] == 300_000
        assert found[0]["run_time_s"] == 36000.0
        assert 0 < found[0]["cost_micros"] < found[1]["cost_micros"]
        assert (
            len((await api.http.post(f"{where}?placements=1", json=ask)).json()["placements"]) == 1
        )
        assert (await api.http.post(f"{where}?placements=51", json=ask)).status_code == 422


async def test_offers_of_a_project_are_the_configured_ones_and_the_catalog(tmp_path: Path) -> None:
    async with open_api("sqlite", tmp_path, script=SCRIPT) as api:
        where = "/v1/projects/p/offers"
        ready = (await api.http.get(f"{where}?ready=true")).json()
        assert [each["rate_micros_per_hour"] for each in ready["offers"]] == [300_000, 1_000_000]
        assert all(each["ready"] for each in ready["offers"])
        spot = (await api.http.get(f"{where}?ready=true&spot=only")).json()
        assert [each["purchase"] for each in spot["offers"]] == ["spot"]
        listed = (await api.http.get(f"{where}?gpu=H100:8&limit=3")).json()
        assert listed["total"] >= len(listed["offers"]) == 3
        rates = [each["rate_micros_per_hour"] for each in listed["offers"]]
        assert rates == sorted(rates)
        assert {each["accelerators"] for each in listed["offers"]} == {8.0}
        for wrong in ("gpu=H100:x", "limit=0", "spot=no"):
            assert (await api.http.get(f"{where}?{wrong}")).status_code == 422


async def test_jobs_are_searched_over_http(tmp_path: Path) -> None:
    async with open_api("sqlite", tmp_path, script=SCRIPT) as api:
        await api.submit("{name: a, run: 'true', tags: {team: x}}", consent=True)
        await api.submit("{name: b, run: 'true'}", consent=True)
        found = (await api.http.get("/v1/job-search?sort=name&ascending=true&limit=1")).json()
        assert ([each["name"] for each in found["jobs"]], found["total"]) == (["a"], 2)
        for phases, names in (("phase=queued&phase=starting", ["a"]), ("phase=done", [])):
            found = (await api.http.get(f"/v1/job-search?tag=team%3Dx&{phases}")).json()
            assert [each["name"] for each in found["jobs"]] == names
        assert (await api.http.get("/v1/job-search?gpu=nvidia&user=%25")).json()["jobs"] == []
        for wrong in ("text=%00", "sort=no", "limit=501", "offset=-1", "since=x"):
            assert (await api.http.get(f"/v1/job-search?{wrong}")).status_code == 422
