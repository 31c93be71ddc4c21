"""Jobs whose nodes are close to each other, over HTTP: what is refused, and where gangs get."""

from pathlib import Path

from tests.api.api_state import open_api, until

OFFER = """[[offers]]
instance_type = "cpu"
region = "hall"
shared = true
price_usd_hr = 0
"""
HOSTS = "".join(
    f"""[[hosts]]
name = "n{number}"
group = "hall"
labels = {{block = "b1", rack = "r{number % 3}"}}
"""
    for number in range(8)
)


def task(name: str, nodes: int, topology: str, cpus: int = 8) -> str:
    return (
        f"{{name: {name}, run: work, nodes: {nodes}, topology: {topology}, "
        f"resources: {{cpu: {cpus}}}, env: {{FAKE_RUN_S: '1000'}}}}"
    )


async def test_gangs_get_racks_and_those_that_cannot_are_refused(tmp_path: Path) -> None:
    async with open_api("memory", tmp_path, script=OFFER + HOSTS) as api:
        for text, told in (
            (task("a", 2, "{same: rak}"), "no node has the label rak; the labels are block, rack"),
            (task("a", 2, "{prefer: rak}"), "no node has the label rak"),
            (task("a", 4, "{same: rack}"), "needs 4 nodes of one rack; the best rack (r0) has 3"),
            (task("a", 3, "{same: rack, slice: 2}"), "3 nodes cannot be divided into slices of 2"),
            (task("a", 1, "{same: rack}"), "has no meaning for a task of one node"),
        ):
            refused = await api.post_job(text)
            assert refused.status_code in (400, 409, 422), refused.text
            assert told in refused.text
        assert (await api.http.get("/v1/projects/default/jobs")).json()["jobs"] == []
        await api.submit(task("two", 2, "{same: rack}"))
        two = await api.attempt((await api.submit(task("four", 4, "{same: rack, slice: 2}")))["id"])
        held: dict[str, list[int]] = {}
        for each in sorted(await api.app_state.store.allocations(), key=lambda each: each.rank):
            racks = held.setdefault(each.gang, [])
            racks.append(int(each.host.removeprefix("fake/n")) % 3)
        assert held.pop(two.gang) in ([0, 0, 1, 1], [1, 1, 0, 0])
        assert list(held.values()) == [[2, 2]]  # the smallest rack
        await api.submit(task("three", 3, "{same: rack}"))

        async def told() -> str:
            job = (await api.http.get("/v1/projects/default/jobs/three")).json()
            return str(job["reason"]) if "needs" in job["reason"] else ""

        assert (await until(told)).endswith(
            "needs 3 nodes of one rack; the best rack (r0) has 1 free"
        )
