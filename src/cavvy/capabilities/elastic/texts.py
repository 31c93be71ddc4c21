"""What people are told about changes of size. No I/O."""

from datetime import timedelta

from cavvy.domain.elastic import SizeChange
from cavvy.domain.units import format_count, format_duration
from cavvy.scheduler.elastic_sizes import SizeStep


def say_growth(before: int, step: SizeStep, resize_s: float) -> str:
    """Return why a job grows: what it is expected to win, and what the change costs."""
    text = f"grows from {before} to {format_count(step.nodes, 'node')}, which are free"
    price = f"the change costs about {_say(resize_s)} of work"
    if step.gain_s is None:
        return f"{text}; {price}"
    return f"{text}: it should end {_say(step.gain_s)} sooner, although {price}"


def say_return(before: int, step: SizeStep) -> str:
    """Return why a job goes back to fewer nodes."""
    return (
        f"goes back from {before} to {format_count(step.nodes, 'node')}, on which it was "
        f"{step.speedup:.2f} times as fast"
    )


def say_gift(before: int, step: SizeStep, name: str, resize_s: float) -> str:
    """Return for which job a job gives nodes back, and what this costs it."""
    text = f"keeps {step.nodes} of {format_count(before, 'node')}, because job {name} waits for the"
    price = f"{_say(resize_s)} for the change"
    if step.gain_s is not None and -step.gain_s > resize_s:
        return f"{text} others: it should end {_say(-step.gain_s)} later, {price} included"
    return f"{text} others; this costs it about {price}"


def say_move(before: int, step: SizeStep) -> str:
    """Return why a job gives nodes to another one that runs."""
    text = (
        f"keeps {step.nodes} of {format_count(before, 'node')}, because other jobs that run make "
    )
    if step.gain_s is None or step.gain_s >= 0:
        return f"{text}more of the others"
    return f"{text}more of the others: it should end {_say(-step.gain_s)} later"


def say_untaken(nodes: int, before: int, waited_s: float) -> str:
    """Return why a job goes back to its former size, on which it told its progress."""
    return (
        f"has told no progress for {_say(waited_s)} on {format_count(nodes, 'node')}, and goes "
        f"back to {before}, with which it worked"
    )


def say_outcome(change: SizeChange, nodes: int, took_s: float | None, rate: float | None) -> str:
    """Return what a change has cost, and what it has won as far as the program tells."""
    took = "" if took_s is None else f"; no work was done for {_say(took_s)}"
    if rate is None or not change.rate:
        return f"runs on {nodes} instead of {format_count(change.before, 'node')}{took}"
    ratio = rate / change.rate
    text = f"{ratio:.2f} times as fast on {nodes} as on {format_count(change.before, 'node')}{took}"
    if took_s is None or ratio <= 1:
        return text
    paid_s = took_s / (ratio - 1)
    return f"{text}, which pays off within {_say(paid_s)}"


def _say(seconds: float) -> str:
    return format_duration(timedelta(seconds=max(round(seconds), 0)))
