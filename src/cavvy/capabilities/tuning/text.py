"""Formats diagnoses and tuning results for people, with seconds and dollars."""

from html import escape
from typing import Any

from cavvy.capabilities.tuning.findings import Diagnosis
from cavvy.capabilities.tuning.tune import PlanTrial, describe_levers, list_fixed


def describe(found: Diagnosis, price: float | None) -> str:
    """Describe a diagnosis in a few lines, with the most expensive cause first. `price` is dollars
    per hour for all devices together.
    """
    facts, ms = found.facts, found.step_s * 1e3
    batch = facts["global_batch"]
    lines = [
        f"{facts['name']} x {facts['ranks']}: {ms:.1f} ms a step, {batch / found.step_s:,.1f} "
        "samples/s"
    ]
    if price is not None:
        cost = found.dollars(found.step_s, price)
        thousand = found.step_s / batch * 1000 * price / 3600
        lines[0] += f", ${cost:.4g} an epoch, ${thousand:.3g} for 1000 samples"
    if not found.findings:
        lines.append(
            "no single cause costs more than 3 % of a step beyond the noise, measured in "
            f"{len(found.seconds)} modes"
        )
    for number, each in enumerate(found.findings, 1):
        money = f" = ${found.dollars(each.lost_s, price):.4g} an epoch" if price is not None else ""
        spread = f" (+- {each.half_s * 1e3:.1f})" if each.half_s else ""
        if each.pairs_s is not None:  # The confidence interval would include zero.
            low, high = (seconds * 1e3 for seconds in each.pairs_s)
            spread = f" ({low:.1f} to {high:.1f} in all pairs)"
        lines += [
            f"{number}. {each.cause}: {each.lost_s * 1e3:.1f}{spread} of {ms:.1f} ms{money}",
            f"   seen: {each.evidence}",
            f"   fix:  {each.fix}",
        ]
    return "\n".join(lines)


def describe_change(change: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in change.items())


def describe_trial(trial: PlanTrial, facts: dict[str, Any], price: float | None) -> str:
    name = describe_change(trial.change)
    if trial.gain is None:
        return f"reverted  {name}: {trial.error}"
    gain, half = trial.gain.mean * 1e3, trial.gain.half * 1e3
    same = (
        "same samples, but different random numbers in the data set"
        if facts.get("plain")
        else "same bits"
    )
    what = same if trial.exact else "changes numerics"
    text = f"{trial.before_s * 1e3:.1f} -> {trial.after_s * 1e3:.1f} ms a step, "
    text += f"{gain:+.1f} +- {half:.1f} ms saved ({what})"
    if price is not None:
        steps = facts["samples"] / facts["global_batch"]
        text += f", ${trial.gain.mean * steps * price / 3600:+.4g} an epoch"
    return f"{'kept     ' if trial.kept else 'reverted '} {name}: {text}"


def describe_script_changes(chosen: dict[str, Any], facts: dict[str, Any]) -> str:
    """Return the lines to change in a script with a plain loop, and the settings that were not
    tried.
    """
    changes, fixed = describe_levers(chosen, facts), list_fixed(facts)
    lines = ["change the script:", *(f"  {each}" for each in changes)] if changes else []
    lines += ["not tried:", *(f"  {each}" for each in fixed)] if fixed else []
    return "\n".join(lines) or "the script needs no change"


def make_page(
    script: str, trials: list[PlanTrial], facts: dict[str, Any], price: float | None
) -> str:
    """Build an HTML page of the changes that were tried."""
    rows = "\n".join(f"<li>{escape(describe_trial(each, facts, price))}</li>" for each in trials)
    return (
        f"<!doctype html><meta charset=utf-8><title>cavvy tune {escape(script)}</title>\n"
        "<style>body{font:16px system-ui;max-width:60em;margin:2em auto;padding:0 "
        "1em}li{margin:.4em 0}</style>\n"
        f"<h1>cavvy tune {escape(script)}</h1>\n<p>{escape(str(facts['name']))} x "
        f"{facts['ranks']}, "
        f"global batch {facts['global_batch']}. The plans were measured in alternating windows; +- "
        "is half of a 95 % confidence interval (Student's t).\n"
        f"<ol>\n{rows}\n</ol>\n"
    )
