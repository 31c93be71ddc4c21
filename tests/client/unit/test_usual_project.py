"""The project of commands and clients that name none."""

from datetime import UTC, datetime
from typing import Any, cast

import pytest

from cavvy.client.account_wire import ProjectView, RoleView, WhoAmIView
from cavvy.client.client import ApiClient
from cavvy.client.contexts import Contexts, write_contexts
from cavvy.client.errors import ApiError
from cavvy.client.usual_project import find_chosen, find_own

NOW = datetime(2026, 1, 1, tzinfo=UTC)


class FakeServer:
    """Answers for an account with roles in `projects`, each with its parent."""

    def __init__(
        self,
        projects: dict[str, str | None],
        *,
        archived: tuple[str, ...] = (),
        within: list[str] | None = None,
        account: str | None = "mia",
        roles: tuple[str, ...] | None = None,
    ) -> None:
        names = roles if roles is not None else tuple(projects)
        listed = [RoleView(account="mia", project=each, role="member") for each in names]
        self.me = WhoAmIView(account=account, roles=listed, within=within)
        self.projects = [
            ProjectView(
                name=name,
                parent=parent,
                roles=["member"],
                archived_at=NOW if name in archived else None,
            )
            for name, parent in projects.items()
        ]

    def ask(self, target: str, kind: object) -> Any:
        return {"/v1/whoami": self.me, "/v1/projects": self.projects}[target]


def find(server: FakeServer) -> str:
    return find_own(cast(ApiClient, server))


def test_the_only_project_of_a_member_needs_no_name() -> None:
    assert find(FakeServer({"pm": None})) == "pm"
    assert find(FakeServer({"pm": None, "pm-below": "pm", "deep": "pm-below"})) == "pm"
    assert find(FakeServer({"pm": None, "old": None}, archived=("old",))) == "pm"


def test_default_stays_the_project_of_those_who_may_use_it() -> None:
    assert find(FakeServer({"pm": None, "default": None})) == "default"
    assert find(FakeServer({}, account=None)) == "default"
    assert find(FakeServer({}, roles=("",))) == "default"
    assert find(FakeServer({})) == "default"


def test_a_token_for_one_project_uses_this_project() -> None:
    assert find(FakeServer({}, roles=("",), within=["pm"])) == "pm"


def test_nothing_is_guessed_among_several_projects() -> None:
    with pytest.raises(ApiError, match=r"several projects: a, b$") as caught:
        find(FakeServer({"b": None, "a": None}))
    assert "cavvy project use NAME" in caught.value.hint


def test_a_choice_belongs_to_its_server(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CAVVY_PROJECT", raising=False)
    monkeypatch.delenv("CAVVY_CONTEXT", raising=False)
    home = str(tmp_path)
    assert find_chosen(home) == ""
    write_contexts(home, Contexts(current="office").with_project("office", "pm"))
    assert find_chosen(home) == "pm"
    monkeypatch.setenv("CAVVY_CONTEXT", "lab")
    assert find_chosen(home) == ""
    monkeypatch.setenv("CAVVY_PROJECT", "other")
    assert find_chosen(home) == "other"
    assert Contexts().with_project("office", "pm").without("office").projects == {}
