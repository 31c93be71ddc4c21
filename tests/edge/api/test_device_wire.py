"""Devices and servers of other versions understand each other: what they send stays the same."""

import json
from typing import Any

import pytest
from tests.api.api_state import Api
from tests.edge.api.test_hostile_devices import EDGE, edge_of, enrol, rows_of

from cavvy.capabilities.edge.nouns import PROGRAM, Rollout
from cavvy.capabilities.models.nouns import ModelVersion

# recorded from programs of devices: one that tells little, and one with all that they tell
FIRST = '{"models": [{"name": "m", "serving": 1, "refused": 0, "problem": "", "sums": {"requests": 3, "errors": 1, "timed": 2, "logs": -5.25, "squares": 14.5}}], "free_mib": 901, "clock": 1893456000.5}'
WHOLE = '{"models": [{"name": "cavvy.edge", "serving": 0, "on_trial": false, "refused": 3, "refused_in": 2, "unfetched": 0, "problem": "x"}, {"name": "m", "serving": 1, "refused": 0, "refused_in": 0, "problem": "", "sums": {"requests": 3, "errors": 1, "timed": 2, "logs": -5.25, "squares": 14.5}, "on_trial": true, "unfetched": 2, "paths": {"device": {"3": 2}, "cloud": {}, "lost": 1}}, {"name": "other", "paths": {"device": {}, "cloud": {"80": 1}, "lost": 0}}], "free_mib": 901, "clock": 1893456000.5, "waiting": 4, "agent": "1", "share": "", "up_s": 12, "settings": "", "settings_problem": ""}'
# recorded from a server, with other numbers for the time and the key
ANSWER = '{"now":0,"every_s":60.0,"models":[{"name":"m","number":2,"rollout":1,"mib_per_s":1.5,"window":[2,3],"site_window":null,"collect_below":0.7,"wait":false}],"clouds":[],"program":{"name":"cavvy.edge","number":4,"rollout":1,"mib_per_s":null,"window":null,"site_window":null,"collect_below":null,"wait":false},"settings":"","peers":{"key":"","at":{"cavvy.edge":[],"m":[]}},"tasks":[{"id":"","command":[]}]}'


@pytest.mark.parametrize("sent", [FIRST, WHOLE])
async def test_a_server_answers_former_devices_as_it_did(api: Api, sent: str) -> None:
    name, headers = await enrol(api, "box")
    edge, now = edge_of(api.app_state), api.app_state.now()
    own = {"project": "default", "created_at": now}
    for model in ("m@2", f"{PROGRAM}@4"):
        version = ModelVersion(**own, name=model, snapshot="", files=(), main="")
        await rows_of(api.app_state.store).models.put(version)
    limits = {"mib_per_s": 1.5, "window": (2, 3), "collect_below": 0.7}
    wanted = {"wave_at": now, "waves": (1.0,)}
    await edge.deploy(Rollout(**own, name="m-1", model="m", to=2, **wanted, **limits))
    await edge.deploy(Rollout(**own, name=f"{PROGRAM}-1", model=PROGRAM, to=4, **wanted))
    await edge.reconcile("edge:default")
    await api.http.post(f"/v1/projects/default/edge/devices/{name}/tasks", json={})
    answer = await api.http.post(f"{EDGE}/check-in", content=sent, headers=headers)
    assert hide(answer.text) == ANSWER
    shown: dict[str, Any] = (await api.http.get(f"/v1/projects/default/edge/devices/{name}")).json()
    (told,) = [each for each in shown["models"] if each["name"] == "m"]
    assert (told["requests"], round(told["errors"], 3), shown["free_mib"]) == (3, 0.333, 901)


def hide(text: str) -> str:
    """Replace what differs in each run. The order of the fields stays."""
    answer = json.loads(text)
    answer["now"] = 0
    answer["peers"]["key"] = ""
    for each in answer["tasks"]:
        each["id"] = ""
    return json.dumps(answer, separators=(",", ":"))
