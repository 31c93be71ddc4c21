"""The console's page about projects, roles, accounts, tokens and secrets."""

import html
import re
from datetime import timedelta
from typing import Any

import pytest
from tests.console_rig import HOSTILE_TEXTS, NOW, CannedClient, sign_in

from cavvy.client import ApiError, wire
from cavvy.client.account_wire import AccountView, ProjectView, RoleView, TokenView, WhoAmIView
from cavvy.client.policy_wire import ProjectPolicyView
from cavvy.console.pages.team import list_roots


def token(**fields: Any) -> TokenView:
    usual = {
        "id": "t1",
        "account": "ada",
        "label": "laptop",
        "scopes": ["view"],
        "project": None,
        "created_at": NOW - timedelta(days=9),
        "expires_at": NOW + timedelta(days=1),
        "revoked_at": None,
        "last_used_at": NOW - timedelta(minutes=5),
    }
    return TokenView(**usual | fields)


def project(name: str, parent: str | None = None, **fields: Any) -> ProjectView:
    return ProjectView(name=name, parent=parent, roles=["operator"], **fields)


def policy(name: str, **fields: Any) -> ProjectPolicyView:
    usual = {
        "project": name,
        "providers": [],
        "regions": [],
        "accelerators": [],
        "max_rate_micros_per_hour": None,
        "images": [],
        "image_digests": False,
    }
    return ProjectPolicyView(**usual | fields)


def answers(**more: Any) -> dict[str, Any]:
    role = RoleView(account="bob", project="ml", role="viewer")
    return {
        "/v1/whoami": WhoAmIView(account="ada", roles=[]),
        "/v1/projects": [project("ml"), project("vision", "ml"), project("old", archived_at=NOW)],
        "/v1/projects/ml/roles": [role],
        "/v1/projects/ml/secrets": wire.SecretList(
            secrets=[wire.SecretRow(name="HF_TOKEN", updated_at=NOW - timedelta(hours=2))]
        ),
        "/v1/projects/ml/policy": [policy("ml", providers=["aws"], share=2.0)],
        "/v1/roles": [],
        "/v1/accounts": [AccountView(name="ada", kind="user", created_at=NOW)],
        "/v1/tokens": [token(), token(id="t2", revoked_at=NOW), token(id="t3", expires_at=NOW)],
    } | more


def words(page: str) -> str:
    return html.unescape(" ".join(re.sub(r"<[^>]+>", " ", page).split()))


def test_the_team_is_shown_with_few_requests() -> None:
    client = CannedClient(answers())
    page = sign_in(client).get("/team").text
    text = words(page)
    for part in (
        "You are ada",
        "bob viewer a grant",
        "HF_TOKEN 2h00m ago",
        "ada user",
        "t1 ada laptop view all 9d",
        "5m00s ago in 1d",
        "2 tokens that were revoked or have expired are not listed.",
        "No account has such a role.",
        "archived",
    ):
        assert part in text, part
    assert "t2" not in text
    assert "<ul>" in page.split("vision")[0].split("ml</a>")[1], "a subproject is a list in a list"
    assert len(client.asked) == 8
    assert "data-live" not in page, "the page does not update itself"


def test_another_project_can_be_chosen() -> None:
    canned = answers(
        **{
            "/v1/projects/vision/policy": [],
            "/v1/projects/vision/roles": [],
            "/v1/projects/vision/secrets": wire.SecretList(secrets=[]),
        }
    )
    text = words(sign_in(CannedClient(canned)).get("/team?project=vision").text)
    assert "Project vision" in text
    assert "No account has a role of its own in this project." in text
    assert "This project has no secrets." in text


def test_each_part_is_shown_only_if_the_server_permits_it() -> None:
    refusal = ApiError("role-needed", "no role that manages", "", 403)
    parts = ("/v1/projects/ml/roles", "/v1/projects/ml/secrets", "/v1/roles", "/v1/accounts")
    page = sign_in(CannedClient(answers(**dict.fromkeys(parts, refusal)))).get("/team")
    assert page.status_code == 200
    for part in ("The roles", "The names of the secrets", "These roles", "The accounts"):
        assert f"{part} cannot be shown: no role that manages." in words(page.text)
    assert "laptop" in page.text


def test_the_owner_without_projects() -> None:
    canned = answers(**{"/v1/projects": [], "/v1/whoami": WhoAmIView(account=None, roles=[])})
    text = words(sign_in(CannedClient(canned)).get("/team").text)
    assert "You are the owner of the server's state folder" in text
    assert "You have no role in a project." in text


def test_projects_form_a_tree() -> None:
    roots = list_roots([project("c", "b"), project("b", "a"), project("a"), project("d", "a")])
    assert [each.project.name for each in roots] == ["a"]
    assert [each.project.name for each in roots[0].children] == ["b", "d"]
    assert [each.project.name for each in roots[0].children[0].children] == ["c"]


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_texts_of_accounts_are_shown_as_they_are(text: str) -> None:
    canned = answers(
        **{
            "/v1/whoami": WhoAmIView(account=text, roles=[]),
            "/v1/tokens": [token(label=text, account=text)],
            "/v1/accounts": [AccountView(name=text, kind=text, created_at=NOW)],
            "/v1/projects/ml/roles": [RoleView(account=text, project=text, role=text, trust=text)],
        }
    )
    page = sign_in(CannedClient(canned)).get("/team").text
    assert text not in page
    assert html.unescape(page).count(text) >= 8
