"""Recipes: task files that the members of a project share."""

from tests.api.api_state import Api


async def test_a_recipe_is_shared_within_its_project(api: Api) -> None:
    at, text = "/v1/projects/p/recipes", "name: small\nrun: echo small\n"
    assert (await api.http.put(f"{at}/small", json={"text": text})).is_success
    assert (await api.http.put(f"{at}/small", json={"text": text + "# 2\n"})).is_success
    found = (await api.http.get(at)).json()
    assert [(each["name"], each["text"]) for each in found] == [("small", text + "# 2\n")]
    assert (await api.http.get("/v1/projects/q/recipes")).json() == []
    wrong = await api.http.put(f"{at}/bad", json={"text": "runn: x"})
    assert (wrong.status_code, wrong.json()["code"]) == (422, "invalid-task")
    huge = await api.http.put(f"{at}/huge", json={"text": "#" * 300_000})
    assert huge.json()["code"] == "too-large"
    for name in ("A", "a_b", "-a", "x" * 64):
        assert (await api.http.put(f"{at}/{name}", json={"text": text})).status_code == 422
    assert (await api.http.delete(f"{at}/small")).is_success
    gone = await api.http.delete(f"{at}/small")
    assert (gone.status_code, gone.json()["code"]) == (404, "recipe-not-found")
