"""What the console changes besides jobs: machines, budgets, secrets, policies; the whole
log; and the sign-in with an identity provider.
"""

import re
from datetime import timedelta
from typing import Any

import pytest
from msgspec import Raw
from tests.console.unit.test_console_submit import Recording, client
from tests.console_rig import (
    HOSTILE_TEXTS,
    NOW,
    Browser,
    CannedClient,
    attempt,
    detail,
    job_answers,
    node,
    sign_in,
)
from tests.waits import wait_until

from cavvy.client import ApiError, account_wire, wire
from cavvy.client.account_wire import AuditLogPage, AuditLogRow, SignInMade, SignInWay
from cavvy.client.policy_wire import BudgetView
from cavvy.client.pool_wire import PoolView
from cavvy.client.queue_wire import ShareReport, ShareView
from cavvy.client.transport import HttpAnswer
from cavvy.console import access as signing
from cavvy.console.access import EachUser

MACHINE = "/v1/projects/default/machines/dev"


def posted(browser: Browser, path: str, **data: Any) -> Any:
    return browser.post(path, data=data or {"do": "it"}, follow_redirects=False)


def test_a_machine_is_started_after_its_price_was_shown() -> None:
    asking = client()
    asking.answers[f"POST {MACHINE}/start"] = ApiError("consent-needed", "dev costs $9/h", "", 409)
    browser = sign_in(asking)
    page = posted(browser, "/machines/default/dev/start").text
    assert "dev costs $9/h" in page
    assert "data-live" not in page, "its address is not that of a page"
    made = wire.Submitted(id="i", project="default", name="dev", phase="queued")
    asking.answers[f"POST {MACHINE}/start"] = made
    answer = posted(browser, "/machines/default/dev/start", do="agree")
    assert answer.headers["location"] == "/machines#named-title"
    assert asking.bodies[f"POST {MACHINE}/start"]["consent"] is True


def test_a_machine_is_kept_for_a_length_of_time() -> None:
    asking = client()
    browser = sign_in(asking)
    assert posted(browser, "/machines/default/dev/keep", keep="soon").status_code == 400
    asking.answers[f"POST {MACHINE}/keep"] = ApiError("machine-not-found", "no machine", "", 404)
    assert posted(browser, "/machines/default/dev/keep", keep="2h").status_code == 404
    assert asking.bodies[f"POST {MACHINE}/keep"] == {"keep_s": 7200.0}


def budget(name: str, **fields: Any) -> BudgetView:
    usual = {
        "project": "",
        "user": "",
        "tag": "",
        "limit_micros": 1,
        "month_limit_micros": 1,
        "spent_micros": 0,
        "expected_micros": None,
        "low_micros": None,
        "high_micros": None,
        "alerts": [90],
        "soft_percent": 70,
        "hard_percent": None,
        "carry_over": False,
        "request": None,
    }
    return BudgetView(name=name, **usual | fields)


def test_a_budget_is_set_and_keeps_its_alerts() -> None:
    asking = client(
        **{"/v1/budgets": [budget("team")], "/v1/budgets/team": HttpAnswer(204, {}, b"")}
    )
    browser = sign_in(asking)
    answer = posted(browser, "/budgets", name="team", limit="$250", project="ml", hard="110")
    assert answer.headers["location"] == "/costs#budgets"
    body = asking.bodies["PUT /v1/budgets/team"]
    assert (body["limit_micros"], body["hard_percent"]) == (250_000_000, 110)
    assert (body["alerts"], body["soft_percent"]) == ([90], 70)
    for wrong in ({"limit": "much"}, {"limit": "5", "hard": "x"}, {"limit": "5", "hard": "1e9"}):
        assert posted(browser, "/budgets", name="team", **wrong).status_code == 400


def test_a_secret_is_stored_and_never_shown() -> None:
    path = "/v1/projects/ml/secrets/HF_TOKEN"
    asking = client(**{path: HttpAnswer(204, {}, b"")})
    browser = sign_in(asking)
    answer = posted(browser, "/team/ml/secrets", name="HF_TOKEN", value="a\r\nb")
    assert answer.headers["location"] == "/team?project=ml#project-title"
    assert asking.bodies[f"PUT {path}"] == {"value": "a\nb"}
    asking.answers[path] = ApiError("role-needed", "no role", "", 403)
    refused = posted(browser, "/team/ml/secrets", name="HF_TOKEN", value="s3cret")
    assert refused.status_code == 403
    assert "s3cret" not in refused.text
    assert posted(browser, "/team/ml/secrets", name="HF_TOKEN", value="").status_code == 400


def test_a_policy_keeps_what_the_form_does_not_have() -> None:
    asking = client(**{"/v1/projects/ml/policy": HttpAnswer(204, {}, b"")})
    browser = sign_in(asking)
    posted(browser, "/team/ml/policy", providers=" aws, gcp,", max_gpus="8", user_jobs="3")
    body = asking.bodies["PUT /v1/projects/ml/policy"]
    assert body["providers"] == ["aws", "gcp"]
    assert (body["max_gpus"], body["user_jobs"], body["share"]) == (8.0, 3, None)
    assert "images" not in body
    assert "signed_by" not in body
    for wrong in ({"max_gpus": "nan"}, {"user_jobs": "1.5"}, {"max_rate": "free"}, {"share": "-1"}):
        assert posted(browser, "/team/ml/policy", **wrong).status_code == 400


@pytest.mark.parametrize("text", HOSTILE_TEXTS)
def test_the_queue_and_the_audit_log_show_texts_as_they_are(text: str) -> None:
    share = ShareView(
        project=text,
        parent=None,
        weight=1,
        part=0.5,
        used_part=0.25,
        used_gpu_hours=3,
        gpus=2,
        jobs=1,
        waiting_gpus=0,
        waiting_jobs=0,
        quota_gpus=4,
        max_gpus=None,
    )
    pool = PoolView(
        name=text,
        project=text,
        user=text,
        state="ready",
        opens_at=None,
        min=0,
        max=2,
        nodes=1,
        idle=1,
        starting=0,
        leaving=0,
        running_jobs=0,
        waiting_jobs=0,
        idle_s=60,
        spot_share=0,
        hours=text,
        rate_micros_per_hour=1,
        spent_micros=0,
        problem=text,
        text="",
    )
    record = AuditLogRow(
        number=1, at=NOW, account=text, project=text, outcome="done", hash="h", text=text
    )
    asking = client(
        **{
            "/v1/shares": ShareReport(half_life_days=7, projects=[share]),
            "/v1/pools": [pool],
            "/v1/jobs": wire.JobPage(jobs=[], cursor=None),
            "/v1/audit-log": AuditLogPage(records=[record]),
        }
    )
    for page in ("/queue", "/audit"):
        shown = sign_in(asking).get(page)
        assert shown.status_code == 200
        assert "<script>alert" not in shown.text
        assert "<img src=x" not in shown.text


def log_of(text: bytes, piece: int = 100) -> Any:
    def answer(target: str) -> HttpAnswer:
        offset = int((re.findall(r"offset=(\d+)", target) or ["0"])[0])
        data = text[offset : offset + piece]
        headers = {
            "cavvy-log-attempt": "1",
            "cavvy-log-offset": str(offset + len(data)),
            "cavvy-log-over": "true" if offset + len(data) == len(text) else "false",
            "cavvy-log-times": f"{offset}:{NOW.timestamp()}",
        }
        return HttpAnswer(200, headers, data)

    return answer


def test_the_whole_log_is_searched_shown_with_times_and_sent() -> None:
    lines = b"".join(b"line %d \x1b[32mgreen\x1b[0m\n" % number for number in range(500))
    job = detail(attempts=[attempt(nodes=[node()])])
    answers = job_answers(job)
    for name in (job.name, job.id):
        answers[f"/v1/projects/default/jobs/{name}/logs"] = log_of(lines)
    browser = sign_in(CannedClient(answers))
    path = "/jobs/default/train/whole-log"
    page = browser.get(path).text
    assert "line 0 green\n" in page
    assert "line 499 green" in page
    assert "\x1b" not in page
    found = browser.get(f"{path}?text=LINE%20431&times=1").text
    assert "line 431 green" in found
    assert "line 43 " not in found
    assert "2026-03-04 12:00:00 UTC" in found
    at = re.findall(r"attempt=1&amp;offset=(\d+)", found)[0]
    assert lines[int(at) :].startswith(b"line 431")
    assert browser.get("/jobs/default/train/log.txt").content == lines
    stamped = browser.get("/jobs/default/train/log.txt?times=1").text.splitlines()
    assert stamped[499].startswith("2026-03-04T12:00:00Z  line 499")
    assert browser.get(f"{path}?offset=x").status_code == 400
    assert "No line contains" in browser.get(f"{path}?text=nothing").text


def test_people_sign_in_with_an_identity_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {"go": False}

    def device(issuer: str, client_id: str, show: Any, wait: Any) -> str:
        show("https://id.example/device", "ABCD-EFGH")
        wait_until(lambda: shown["go"])
        return "id-token"

    monkeypatch.setattr(signing, "sign_in_by_device", device)
    way = SignInWay(name="corp", issuer="https://id.example", client_id="cavvy")
    made = SignInMade(token="t0ken", account="ada", expires_at=NOW + timedelta(hours=1))
    who = account_wire.WhoAmIView(account="ada", roles=[])
    answers = {
        "GET /v1/sign-in": [way],
        "POST /v1/sign-in": made,
        "/v1/whoami": who,
        **{f"/v1/{each}": [] for each in ("nodes", "machines", "hosts", "joined")},
    }
    used: list[str] = []

    def connect(token: str) -> CannedClient:
        used.append(token)
        return CannedClient(answers)

    access = EachUser(connect)
    browser, other = Browser(access), Browser(access)
    assert "Sign in with corp" in browser.get("/sign-in").text
    assert posted(browser, "/sign-in/with?next=/machines", way="no").status_code == 409
    answer = posted(browser, "/sign-in/with?next=/machines", way="corp")
    assert answer.headers["location"] == "/sign-in/wait?next=/machines"
    wait = "/sign-in/wait?next=/machines"
    wait_until(lambda: "ABCD-EFGH" in browser.get(wait).text)
    assert "t0ken" not in browser.get(wait).text
    foreign = other.get(wait, follow_redirects=False)
    assert foreign.headers["location"] == "/sign-in", "the code belongs to one browser"
    shown["go"] = True
    wait_until(lambda: browser.get(wait, follow_redirects=False).status_code == 303)
    assert browser.get("/machines").status_code == 200
    assert "t0ken" in used
    crossed = browser.post(
        "/sign-in/with", data={"way": "corp"}, headers={"origin": "https://evil.example"}
    )
    assert crossed.status_code == 403


def test_a_sign_in_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def device(*given: Any) -> str:
        raise ApiError("sign-in-failed", "the sign-in was refused at the provider", "", 403)

    monkeypatch.setattr(signing, "sign_in_by_device", device)
    way = SignInWay(name="corp", issuer="https://id.example", client_id="cavvy")
    browser = Browser(EachUser(lambda token: CannedClient({"/v1/sign-in": [way]})))
    posted(browser, "/sign-in/with", way="corp")
    wait_until(lambda: "refused at the provider" in browser.get("/sign-in/wait").text)


def test_runs_are_compared_only_with_runs() -> None:
    first, second = (detail(name, origin=Raw(b"{}")) for name in ("a", "b"))
    asking = client(**job_answers(first) | job_answers(second))
    browser = sign_in(asking)
    page = browser.get("/compare?a=default/a&b=default/b").text
    assert "Nothing differs" in page
    assert browser.get("/compare?a=default/a").status_code == 400
    assert browser.get("/compare?a=x&b=y").status_code == 400
    assert isinstance(asking, Recording)
