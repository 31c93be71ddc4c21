"""Shows the webhooks, the cron lines and the queue of a service."""

from typing import TYPE_CHECKING

from cavvy.cli.view.formatting import show_time

if TYPE_CHECKING:
    from cavvy.client.service_wire import CronView, QueueView, ServedView, WebhookView


def list_events(found: "ServedView", there: str) -> list[tuple[str, str]]:
    """Return pairs of heading and text. `there` contains the command-line arguments that name the
    service.
    """
    pairs = [("webhook", f"{each.name}: {describe_webhook(each)}") for each in found.webhooks]
    pairs += [("cron", _describe_cron(each)) for each in found.crons]
    queue = _describe_queue(found.queue, there)
    return [*pairs, ("queue", queue)] if queue else pairs


def describe_webhook(hook: "WebhookView") -> str:
    text = f"POST {hook.url} (signature {hook.signature})"
    if hook.url.startswith("/"):
        text += "; other systems cannot reach the webhook until server.listen is set"
    return text


def _describe_cron(each: "CronView") -> str:
    text = f"{each.cron} ({each.time_zone}) calls {each.path}"
    return text if each.next_at is None else f"{text}; next at {show_time(each.next_at)}"


def _describe_queue(queue: "QueueView | None", there: str) -> str:
    """Return the counts of the queue, or "" if the queue has no calls."""
    if queue is None or not (queue.waiting or queue.done or queue.dead):
        return ""
    waiting = f"{queue.waiting} waiting"
    if queue.running:
        waiting += f" ({queue.running} of them running)"
    text = f"{waiting}, {queue.done} done, {queue.dead} dead"
    if queue.dead:
        text += f"; see `cavvy queue list {there} --state dead`"
    return text
