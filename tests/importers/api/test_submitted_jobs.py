"""A job's script submits other jobs with `sbatch`: what its node asks the server."""

from typing import Any

import pytest
from tests.api.api_state import Api

from cavvy.capabilities.importers.slurm.submitted import number_of
from cavvy.domain.accounts import INSTALLATION, Account, Role, RoleBinding
from cavvy.domain.values import replace
from cavvy.store.base import AtomicWrite

PARENT = "#!/bin/bash\n#SBATCH -J parent -t 5\nsbatch child.sbatch\n"
CHILD = "#!/bin/bash\n#SBATCH -J child -t 10\n# a comment\necho $1\n"


async def begin(api: Api, text: str = PARENT, **ask: Any) -> tuple[dict[str, Any], str]:
    """A job that runs, and its gang."""
    job = await api.submit(text, **ask)
    gang = (await api.attempt(job["id"])).gang
    claim = {
        **{"gang": gang, "rank": 0, "nonce": "n1", "address": "127.0.0.1"},
        "host": {"hostname": "h", "python": "3", "platform": "p"},
    }
    await api.http.post("/agent/v1/claim", json=claim, headers=api.agent(gang))
    return job, gang


async def ask(api: Api, gang: str, what: str = "submit", **body: Any) -> Any:
    if what == "submit":
        body = {"id": "1", "script": CHILD, "name": "child.sbatch", "env": {}, **body}
    place = f"/agent/v1/asks/slurm/{what}?gang={gang}&rank=0"
    return await api.http.post(place, json=body, headers=api.agent(gang))


async def test_a_job_is_submitted_as_its_parent_was(api: Api) -> None:
    origin = {"overrides": '{"resources": {"providers": ["fake"], "cpu": 1}, "nodes": 1}'}
    parent, gang = await begin(api, text=PARENT, origin=origin, user="ann")
    options = [["time", "1:00:00"], ["job-name", "other"], ["dependency", "afterok:%s"]]
    options[2][1] = f"afterok:{number_of(parent['id'])}"
    answer = await ask(api, gang, options=options, arguments=["a b"], env={"LR": "0.1"})
    assert answer.status_code == 200, answer.text
    found = await api.app_state.store.find_job("default", answer.json()["name"])
    assert answer.json()["number"] == number_of(found.id)
    assert (found.name, found.user, found.task.env) == ("other", "ann", {"LR": "0.1"})
    assert found.task.limits.duration is not None
    assert found.task.limits.duration.total_seconds() == 3600
    assert found.task.resources.providers == ("fake",)
    assert found.task.resources.cpus_min is None  # the script says what it needs
    assert [(each.id, str(each.on)) for each in found.after] == [(parent["id"], "success")]
    assert "\n# a comment\n#SBATCH --time=1:00:00\n" in found.origin.task_text
    assert "\nset -- 'a b'\necho $1\n" in found.origin.task_text
    again = await ask(api, gang, options=options, arguments=["a b"], env={"LR": "0.1"})
    assert again.json() == answer.json()  # a try whose answer was lost
    state = await ask(api, gang, "state", number=answer.json()["number"])
    assert state.json() == {"state": "PENDING", "exit_code": None}


async def test_a_chain_knows_its_jobs_and_its_limit(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gang = await begin(api)
    first = (await ask(api, gang)).json()
    stranger = number_of((await api.submit("{name: stranger, run: 'true'}"))["id"])
    wrong = await ask(api, gang, id="2", options=[["dependency", f"afterany:{stranger}"]])
    assert wrong.json()["code"] == "invalid-task"
    assert f"{stranger} is neither" in wrong.json()["message"]
    gone = await ask(api, gang, "state", number=stranger)
    assert gone.json()["code"] == "job-not-found"
    whole = type(api.app_state.settings).whole
    monkeypatch.setattr(
        type(api.app_state.settings),
        "whole",
        lambda self, name: 2 if name == "importers.submitted_jobs" else whole(self, name),
    )
    options = [["dependency", f"afterany:{first['number']}"]]
    assert (await ask(api, gang, id="2", options=options)).status_code == 200
    full = await ask(api, gang, id="3")
    assert (full.status_code, full.json()["code"]) == (403, "policy-refused"), full.text
    assert "importers.submitted_jobs" in full.json()["hint"]


async def test_arrays_keep_the_number_that_sbatch_has_printed(api: Api) -> None:
    _, gang = await begin(api)
    made = (await ask(api, gang, options=[["array", "0-1"]])).json()
    array = await api.app_state.store.arrays.find("default", made["name"])
    assert made["number"] == number_of(array.id)
    [member, _] = await api.app_state.store.arrays.jobs(array.id)
    job = await api.app_state.store.job(member)
    assert job.task.env["SLURM_ARRAY_JOB_ID"] == str(made["number"])


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"script": "echo hi\n"}, "does not look like a batch script"),
        ({"options": [["time", "soon"]]}, "--time='soon'"),
        ({"options": [["time", "1\n#SBATCH -N 9"]]}, "several lines"),
        ({"options": [["dependency", "singleton"]]}, "--dependency=singleton is not supported"),
        ({"options": [["dependency", "afterok:1"]]}, "1 is neither"),
        ({"script": "#!/usr/bin/env python3\n1\n", "arguments": ["a"]}, "arguments of a script"),
        ({"script": "#!\necho\n", "arguments": ["a"]}, "arguments of a script"),
        ({"options": [["nope", "1"]]}, "sbatch has no option --nope"),
    ],
)
async def test_what_is_refused_leaves_nothing(api: Api, body: dict[str, Any], said: str) -> None:
    _, gang = await begin(api)
    answer = await ask(api, gang, **body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid-task"), answer.text
    assert said in answer.json()["message"]
    assert answer.json()["hint"]
    listed = await api.app_state.store.list_jobs("default", limit=10)
    assert [job.name for job in listed.jobs] == ["parent"]
    assert (await ask(api, gang)).status_code == 200  # the same id again, which was given back


@pytest.mark.parametrize(
    "text", ["{name: t, run: 'sbatch x'}", PARENT.replace("sbatch child.sbatch", "true # sbatch")]
)
async def test_other_jobs_may_not_submit(api: Api, text: str) -> None:
    _, gang = await begin(api, text=text)
    answer = await ask(api, gang)
    assert (answer.status_code, answer.json()["code"]) == (403, "policy-refused")


async def test_only_the_gang_may_ask(api: Api) -> None:
    _, gang = await begin(api)
    body = {"id": "1", "script": CHILD, "env": {}}
    place = f"/agent/v1/asks/slurm/submit?gang={gang}&rank=0"
    for headers in ({}, api.agent("another-gang")):
        assert (await api.http.post(place, json=body, headers=headers)).status_code in (401, 403)


async def test_what_a_job_may_spend_is_not_multiplied_by_what_it_submits(api: Api) -> None:
    paid = "#!/bin/bash\n#SBATCH -J big -c 32\ntrue\n"
    for number, (limit, status) in enumerate(
        (
            ({}, 200),
            ({"ceiling_micros": 5_000_000}, 402),
            ({"origin": {"overrides": '{"limits": {"budget": "5"}}'}}, 402),
        )
    ):
        _, gang = await begin(api, consent=True, **limit)
        answer = await ask(api, gang, id=f"a{number}", script=paid)
        assert answer.status_code == status, answer.text
        if status == 402:
            assert answer.json()["code"] == "consent-needed"
            assert "at most $5.00 for job parent" in answer.json()["message"]
        assert (await ask(api, gang, id=f"b{number}")).status_code == 200  # it costs nothing


async def test_a_person_who_may_run_jobs_no_longer_submits_none_by_a_job(api: Api) -> None:
    store = api.app_state.store
    await store.add_account(Account(name="ann", created_at=api.app_state.now()))
    role = RoleBinding(account="ann", project=INSTALLATION, role=Role.MEMBER)
    await store.grant_role(role)
    made, gang = await begin(api)
    job = await store.job(made["id"])
    await store.commit(AtomicWrite(jobs=[replace(job, account="ann")]))
    assert (await ask(api, gang)).status_code == 200
    await store.revoke_role(role)
    refused = await ask(api, gang, id="2")
    assert (refused.status_code, refused.json()["code"]) == (403, "role-needed")
    await store.grant_role(replace(role, project="default", role=Role.OPERATOR))
    assert (await ask(api, gang, id="2")).status_code == 200
    await store.disable_account("ann", api.app_state.now())
    assert (await ask(api, gang, id="3")).status_code == 403
