"""`cavvy compare --benchmark` runs one script as real jobs at two places: here and by SSH."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.system.hosts import Lab, lab_at
from tests.system.trust import User, user_at

pytestmark = pytest.mark.system

# It reports progress, and ends by itself if it has done all samples.
SCRIPT = """
import json, time
done, begin = 0, time.monotonic()
while done < 4000:
    time.sleep(0.05)
    done = int((time.monotonic() - begin) * 400.0)
    print("CAVVY_PROGRESS " + json.dumps({"done": done}), flush=True)
"""


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with lab_at(tmp_path_factory.mktemp("lab")) as lab:
        lab.add(gpus=0)
        with lab.entered():
            yield lab


@pytest.fixture
def user(lab: Lab, tmp_path: Path) -> Iterator[User]:
    with user_at(tmp_path / "user") as user:
        user.settings(
            "[providers.local]\nprice_usd_hr = 0.36\n"
            f'[providers.ssh]\nhosts = "h1"\nssh_config = "{lab.ssh_config}"\n'
        )
        (user.work / "train 1.py").write_text(SCRIPT)
        yield user
        user.cli("down", "--all", "--yes")


def test_one_script_is_compared_at_two_places(user: User) -> None:
    report = user.work / "report.html"
    asked = ["--provider", "local", "--provider", "ssh", "--seconds", "3", "--yes"]
    asked += ["--samples", "40000", "--report", str(report)]
    told = user.json("compare", "--benchmark", "train 1.py", *asked)
    rows = {row["place"]: row for row in told}
    assert set(rows) == {"local", "ssh"}
    for row in rows.values():
        assert row["samples_per_s"] == pytest.approx(400, rel=0.5)
        assert row["start_s"] > 0
        assert row["finish_s"] == pytest.approx(row["start_s"] + 40000 / row["samples_per_s"])
    assert rows["local"]["usd_hr"] == 0.36
    assert rows["local"]["finish_usd"] == pytest.approx(0.36 * rows["local"]["finish_s"] / 3600)
    page = report.read_text()
    for row in rows.values():
        assert f"job {row['job']}" in page  # the source of each figure


def test_a_run_that_ends_by_itself_has_its_own_bill(user: User) -> None:
    asked = ["--provider", "local", "--provider", "ssh", "--seconds", "60", "--yes"]
    rows = user.json("compare", "--benchmark", "train 1.py", *asked)
    for row in rows:
        assert row["outcome"] == "done"
        assert row["finish_s"] > 10
    # It was charged for its work, and not for the wait before it.
    bill = user.json("cost", user.ended(rows[0]["job"].rpartition("/")[2]).id)["charges"]
    assert {each["rate_micros_per_hour"] for each in bill} == {360_000}
    charged = sum(each["amount_micros"] for each in bill) / 1e6
    assert 0.36 * 5 / 3600 < rows[0]["finish_usd"] <= charged


def test_a_place_that_cannot_run_the_script_is_known_before_any_run(user: User) -> None:
    asked = ["--provider", "local", "--provider", "aws", "--seconds", "60", "--yes"]
    assert "aws: " in user.cli("compare", "--benchmark", "train 1.py", *asked, code=1)
    jobs = user.json("ps", "--all")
    newest = max(jobs, key=lambda job: job["submitted_at"])
    assert "another place cannot run the script" in user.cli("events", newest["name"])


def test_a_place_that_fails_does_not_drop_what_was_measured(user: User) -> None:
    (user.work / "fails.py").write_text(
        "import socket, sys\nif socket.gethostname() == 'h1':\n    sys.exit(3)\n" + SCRIPT
    )
    asked = ["--provider", "local", "--provider", "ssh", "--seconds", "3", "--yes"]
    told = user.json("compare", "--benchmark", "fails.py", *asked, code=1)
    rows = {row["place"]: row for row in told}
    assert rows["local"]["samples_per_s"] == pytest.approx(400, rel=0.5)
    assert rows["ssh"]["samples_per_s"] is None


def test_a_plan_takes_its_use_from_the_ledger_and_chromium_prints_the_report(user: User) -> None:
    user.cli("run", "--yes", "--name", "paid", "--", "sleep", "2")
    (user.work / "plan.yaml").write_text(
        "machines: 1\ngpu: H100:8\nuse: recorded\nowned: {price_usd: 300000}\n"
    )
    told = user.json("tco", "plan.yaml", "--runs", "10")
    use = next(each for each in told["assumptions"] if each["name"] == "use")
    assert 0 < use["value"] < 0.01
    assert "in the ledger" in use["source"]
    if not any(map(shutil.which, ("chromium", "google-chrome"))):
        pytest.skip("there is no Chromium: sudo apt-get install -y chromium")
    user.cli("tco", "plan.yaml", "--runs", "10", "--report", str(user.work / "r.pdf"))
    assert (user.work / "r.pdf").read_bytes().startswith(b"%PDF-")
    assert (user.work / "r.pdf").stat().st_size > 20_000
