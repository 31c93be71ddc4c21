"""Diagnoses and tunings for people: dollars beside seconds."""

from remuda.tuning.diagnose import Diagnosis


def describe(found: Diagnosis, price: float | None) -> str:
    """A few lines, the most expensive cause first; `price` is dollars an hour of all devices together."""
    facts, ms = found.facts, found.step_s * 1e3
    batch = facts["global_batch"]
    lines = [f"{facts['name']} x {facts['ranks']}: {ms:.1f} ms a step, {batch / found.step_s:,.1f} samples/s"]
    if price is not None:
        cost = found.dollars(found.step_s, price)
        thousand = found.step_s / batch * 1000 * price / 3600
        lines[0] += f", ${cost:.4g} an epoch, ${thousand:.3g} for 1000 samples"
    if not found.findings:
        lines.append(f"nothing costs more than 3 % of a step beyond noise, of what {len(found.seconds)} modes can show")
    for number, each in enumerate(found.findings, 1):
        money = f" = ${found.dollars(each.lost_s, price):.4g} an epoch" if price is not None else ""
        spread = f" (+- {each.half_s * 1e3:.1f})" if each.half_s else ""
        lines += [f"{number}. {each.cause}: {each.lost_s * 1e3:.1f}{spread} of {ms:.1f} ms{money}",
                  f"   seen: {each.evidence}", f"   fix:  {each.fix}"]  # fmt: skip
    return "\n".join(lines)
