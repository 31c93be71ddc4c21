"""What a plan and other programs are told: the `work` to do, and the `webhooks` to call."""

import re
from enum import StrEnum

from cavvy.domain.tasks import Delivery, Webhook, Workload
from cavvy.spec.fields.kinds import (
    EitherKind,
    FieldSpec,
    ListKind,
    MapKind,
    ScalarKind,
    SectionReader,
    SectionSpec,
    WrongValue,
    choice,
    number,
    text_kind,
)
from cavvy.spec.problems import shown

# work


class WorkPrecision(StrEnum):
    """Formats of numbers that accelerators have peak rates for."""

    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    FP4 = "fp4"


_PRECISION_SLIPS = {
    "float64": WorkPrecision.FP64,
    "double": WorkPrecision.FP64,
    "float32": WorkPrecision.FP32,
    "float": WorkPrecision.FP32,
    "float16": WorkPrecision.FP16,
    "half": WorkPrecision.FP16,
    "bfloat16": WorkPrecision.BF16,
    "float8": WorkPrecision.FP8,
}
FLOPS = FieldSpec(
    name="flops",
    kind=number("a number of operations such as 1.2e21", 0, 1e40, above=True),
    help="Floating-point operations of the whole job.",
    example="flops: 1.2e21",
)
PRECISION = FieldSpec(
    name="precision",
    kind=choice(WorkPrecision, _PRECISION_SLIPS),
    help="The format that most of them use.",
    example="precision: bf16",
    default="bf16",
)
EFFICIENCY = FieldSpec(
    name="efficiency",
    kind=number("a share of the peak from 0 to 1, such as 0.4", 0, 1, above=True),
    help="The share of the accelerators' peak that the program reaches.",
    example="efficiency: 0.4",
    default="0.4",
)
SAMPLES = FieldSpec(
    name="samples",
    kind=number("a number of samples such as 1e6", 0, 1e30, above=True),
    help="Samples to go through in the whole job, over all epochs.",
    example="samples: 5e6",
)


def _check_rate_name(name: str) -> None:
    """An accelerator's name or family, or cpu, alone or as NAME:COUNT: a rate under any other
    name never counts.
    """
    from cavvy.catalog.accelerators import find_accelerator, names_matching, suggest

    what, colon, count = name.partition(":")
    if colon and not re.fullmatch(r"[1-9][0-9]{0,4}", count):
        raise WrongValue(
            f"{shown(count)} is not a count", expected="a name such as H100 or H100:8, or cpu"
        )
    if what.lower() != "cpu" and find_accelerator(what) is None and names_matching(what) == {what}:
        close = "cpu" if what.lower() == "cpus" else suggest(what)
        raise WrongValue(
            f"{shown(what)} is no accelerator's name",
            expected="a name such as H100 or H100:8, or cpu",
            suggestion=f"did you mean {close}?" if close else "",
        )


RATES = FieldSpec(
    name="rates",
    kind=MapKind(
        check_key=_check_rate_name,
        value=number("samples per second on one node", 0, 1e18, above=True),
        words="accelerator names, or cpu, each with the samples per second of one node",
        key_schema={"type": "string"},
    ),
    help="Samples per second that you measured on one node: by accelerator, as NAME or NAME:COUNT, "
    "or cpu.",
    example="rates: {H100: 5200, cpu: 40}",
)

PROFILE = FieldSpec(
    name="profile",
    kind=text_kind("the path of a work profile, such as work.json", lambda path: path),
    help="A work profile, which says the rates that are not stated: `cavvy estimate TRAIN.PY "
    "--save WORK.JSON` writes "
    "it.",
    example="profile: work.json",
)


def _build_work(table: SectionReader) -> Workload | None:
    flops, samples, rates = table.get(FLOPS), table.get(SAMPLES), table.get(RATES, {})
    if table.has(FLOPS) and (table.has(SAMPLES) or table.has(RATES) or table.has(PROFILE)):
        table.wrong(
            FLOPS,
            "`flops` and `samples` are both there",
            expected="`flops`, or `samples` with `rates`",
        )
    elif not table.has(FLOPS) and not (
        table.has(SAMPLES) and (table.has(RATES) or table.has(PROFILE))
    ):
        message = "the work is not stated in full"
        table.notes.add(
            table.node.mark, message, expected="`flops`, or `samples` with `rates` or `profile`"
        )
    plain = Workload()
    return Workload(
        flops=flops,
        precision=table.get(PRECISION, WorkPrecision(plain.precision)).value,
        efficiency=table.get(EFFICIENCY, plain.efficiency),
        samples=samples,
        rates=rates,
        profile=table.get(PROFILE),
    )


WORK = SectionSpec(
    path="work",
    help="How much there is to do, so that a plan can say how long it takes and what it costs in "
    "all.",
    fields=(FLOPS, PRECISION, EFFICIENCY, SAMPLES, RATES, PROFILE),
    build=_build_work,
    hints={
        "mfu": "write `efficiency`",
        "steps": "write `samples`",
        "estimated_total_flops": "write `flops`",
    },
)

# webhooks


def _check_url(text: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#]+[^\s]*", text):
        raise WrongValue(f"{shown(text)} is not a web address")
    return text


_URL = text_kind("a web address such as https://example.org/hook", _check_url)
URL = FieldSpec(
    name="url",
    kind=_URL,
    help="Where the event is posted as JSON.",
    example="url: https://example.org/hook",
    required=True,
)
ON = FieldSpec(
    name="on",
    kind=ListKind(
        item=choice(
            Delivery,
            {"success": Delivery.FINISH, "done": Delivery.FINISH, "error": Delivery.FAILURE},
        ),
        single=True,
    ),
    help="When it is called: `finish`, `failure`, `budget`.",
    example="on: [failure, budget]",
    default="all three",
)


def _build_webhook(table: SectionReader) -> Webhook | None:
    url, on = table.get(URL), table.get(ON)
    if url is None:
        return None
    return Webhook(url=url, on=tuple(on)) if on else Webhook(url=url)


WEBHOOK_TABLE = SectionSpec(
    path="webhooks",
    help="One address and when it is called.",
    fields=(URL, ON),
    build=_build_webhook,
)
_WEBHOOK_TEXT: ScalarKind[Webhook | None] = ScalarKind(
    words=_URL.words, parse=lambda node: Webhook(url=_URL.parse(node)), schema=_URL.schema
)
WEBHOOKS = ListKind(item=EitherKind(kinds=(_WEBHOOK_TEXT, WEBHOOK_TABLE)), single=True)
