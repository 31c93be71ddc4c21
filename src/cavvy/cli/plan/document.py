"""What `cavvy plan -o json` writes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cavvy.cli.plan.tables import COLUMNS, list_rows

if TYPE_CHECKING:
    from cavvy.cli.plan.answer import PlanAnswer
    from cavvy.planner.deadline.forecast import Forecast
    from cavvy.planner.placements import Placement


def make_document(answer: "PlanAnswer") -> dict[str, object]:
    from msgspec import to_builtins

    return {
        "task": answer.task.name,
        "nodes": answer.task.nodes,
        "by": answer.by,
        "considered": answer.found.considered,
        "kept": answer.found.kept,
        "placements": [
            _placement_document(row, placement)
            for row, placement in zip(list_rows(answer), answer.made.placements, strict=True)
        ],
        "rejected": to_builtins(answer.found.rejections),
        "misses": [
            {
                "offer": miss.offer.key,
                "rate_micros_per_hour": miss.offer.rate.micros_per_hour,
                "readiness": answer.offered.readiness(miss.offer),
                "reason": miss.reason,
                "text": miss.text,
                "change": miss.change,
            }
            for miss in answer.found.misses
        ],
        "message": answer.message or None,
        "warnings": list(answer.warnings),
        "advice": list(answer.advice),
        "forecast": [_forecast_document(each) for each in answer.forecast],
    }


def _placement_document(row: Sequence[object], placement: "Placement") -> dict[str, object]:
    loss = placement.spot_loss
    names = [column.name for column in COLUMNS]
    return {
        **dict(zip(names, row, strict=True)),
        "offer": placement.offer.key,
        "finish": placement.finish,
        "checkpoint_every_s": None if loss is None else loss.checkpoint_every,
        "preemptions_per_hour": None if loss is None else loss.per_hour,
        "notes": placement.notes,
    }


def _forecast_document(forecast: "Forecast") -> dict[str, object]:
    from cavvy.domain.values import asdict

    fields = asdict(forecast)
    return {"spot": fields.pop("kind"), **fields}
