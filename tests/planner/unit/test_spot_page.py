"""docs/measured/policies.md says what the kept runs say, and the runs keep the bars."""

from pathlib import Path

import pytest
from benchmarks.policies_page import make_text, price_of_knowledge, read_results

ROOT = Path(__file__).resolve().parents[3]


def test_the_page_is_made_of_the_runs() -> None:
    page = (ROOT / "docs" / "measured" / "policies.md").read_text("utf-8")
    assert page == make_text(read_results()), "run: python benchmarks/policies.py --page"


def total(rows: list[dict[str, str]]) -> float:
    return sum(float(row["usd"]) for row in rows) / sum(float(row["optimum_usd"]) for row in rows)


def test_the_runs_keep_the_bars() -> None:
    results = read_results()
    rows = results["single"]
    assert not any(int(row["missed"]) for row in rows + results["several"])
    main = [row for row in rows if row["ratio"] == "0.3"]
    ours = [row for row in main if row["policy"] == "auto"]
    assert total(ours) <= 1.07
    for overhead, bar in (("0.02", 1.03), ("0.1", 1.06), ("0.4", 1.20)):
        for deadline in ("52.0", "60.0", "70.0", "92.0"):
            cell = [
                row
                for row in main
                if (row["overhead_hr"], row["deadline_hr"]) == (overhead, deadline)
            ]
            by_policy = {
                name: [row for row in cell if row["policy"] == name] for name in ("auto", "greedy")
            }
            assert total(by_policy["auto"]) <= bar, (overhead, deadline)
            assert total(by_policy["auto"]) <= total(by_policy["greedy"]), (overhead, deadline)
    windows = [
        row for row in results["several"] if row["kind"] == "skynomad" and row["policy"] == "auto"
    ]
    assert total(windows) <= 1.08


@pytest.mark.parametrize("table", ["single", "deadlines", "regions", "checkpoints"])
def test_in_other_months_what_a_job_cannot_know_costs_at_most_three_percent(table: str) -> None:
    rows = [row for row in read_results()["held-out"] if row["table"] == table]
    assert not any(int(row["missed"]) for row in rows)
    price, _ = price_of_knowledge(rows)
    assert price <= 1.03


def test_the_price_of_knowledge_is_a_ratio_of_totals_with_two_standard_errors() -> None:
    costs = [("auto", 1.0), ("auto", 3.0), ("auto-margins", 2.0), ("auto-margins", 4.0)]
    rows = [{"policy": name, "usd": str(usd)} for name, usd in costs]
    # the ratio is 6/4; its residuals are 2 - 1.5 and 4 - 4.5
    assert price_of_knowledge(rows) == pytest.approx((1.5, 2 * (0.5 * 2 / 1) ** 0.5 / 4))


@pytest.mark.parametrize(("trace", "bar"), [("AWS1", 48), ("AWS2", 52), ("AWS3", 42), ("GCP1", 42)])
def test_serving_costs_less_than_its_bar(trace: str, bar: float) -> None:
    costs = [
        float(row["cost"])
        for row in read_results()["serving"]
        if (row["trace"], row["policy"]) == (trace, "steady")
    ]
    assert sum(costs) / len(costs) < bar


@pytest.mark.parametrize("trace", ["AWS1", "AWS2", "AWS3", "GCP1"])
def test_serving_costs_less_than_spothedge_on_a_trace_that_did_not_tune_it(trace: str) -> None:
    rows = [row for row in read_results()["left-out"] if row["trace"] == trace]
    assert len(rows) == 10
    ours, theirs = (sum(float(row[name]) for row in rows) for name in ("cost", "hedge_cost"))
    assert ours < theirs
