"""The sections `work` (the amount of work, for plans) and `webhooks` (web addresses that the server
calls).
"""

import re
from enum import StrEnum

from cavvy.domain.targets import is_web_address
from cavvy.domain.tasks import Delivery, WebhookTarget, Workload
from cavvy.domain.values import replace
from cavvy.spec.fields.accelerators import read_device
from cavvy.spec.fields.kinds import (
    FieldSpec,
    ListKind,
    MapKind,
    SectionReader,
    WrongValue,
    choice,
    either,
    number,
    section,
    text_kind,
)
from cavvy.spec.fields.times import length_kind
from cavvy.spec.problems import shown


class WorkPrecision(StrEnum):
    """The number formats for which the catalog has the peak rates of accelerators."""

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


_MACHINE = re.compile(r"[a-z0-9][a-z0-9-]*/[^\s/]+")


def _check_rate_name(name: str) -> None:
    """Check a key of `rates`. A key is the name or family of an accelerator, or cpu, or a machine
    as PROVIDER/INSTANCE-TYPE. A key may end with :COUNT, the number of accelerators or vCPUs. A
    rate with an invalid key would have no effect. Raises WrongValue.
    """
    from cavvy.catalog.accelerators import find_accelerator, names_matching, suggest

    if _MACHINE.fullmatch(name):
        return
    expected = "an accelerator such as H100 or H100:8, cpu, or a machine such as aws/p5.48xlarge"
    what, colon, count = name.partition(":")
    if colon and not re.fullmatch(r"[1-9][0-9]{0,4}", count):
        raise WrongValue(f"{shown(count)} is not a count", expected=expected)
    if what.lower() != "cpu" and find_accelerator(what) is None and names_matching(what) == {what}:
        close = "cpu" if what.lower() == "cpus" else suggest(what)
        raise WrongValue(
            f"{shown(what)} is not an accelerator",
            expected=expected,
            suggestion=f"did you mean {close}?" if close else "",
        )


_WAYS = "`duration`, `flops`, or `samples` with `rates` or `profile`"


def _build_work(table: SectionReader) -> Workload | None:
    keys = ("duration", "flops", "samples", "rates", "profile")
    given = [key for key in keys if table.has(key)]
    if len(given) > 1 and given[0] in ("duration", "flops"):
        message = f"`{given[0]}` and `{given[1]}` cannot be used together"
        table.wrong(given[0], message, expected=_WAYS)
    elif given in ([], ["samples"], ["rates"], ["profile"], ["rates", "profile"]):
        message = "the amount of work is not fully described"
        table.notes.add(table.node.mark, message, expected=_WAYS)
    if table.has("measured_on") and "duration" not in given:
        table.wrong("measured_on", "`measured_on` has no effect without `duration`")
    work = table.make(Workload)
    return work and replace(work, precision=str(work.precision))


WORK = section(
    "work",
    _build_work,
    flops=number("a number of operations such as 1.2e21", 0, 1e40, above=True),
    precision=choice(WorkPrecision, _PRECISION_SLIPS),
    efficiency=number("a share of the peak from 0 to 1, such as 0.4", 0, 1, above=True),
    samples=number("a number of samples such as 1e6", 0, 1e30, above=True),
    rates=MapKind(
        "a table of rates in samples per second of one node, keyed by accelerator name or cpu",
        _check_rate_name,
        number("a rate in samples per second of one node", 0, 1e18, above=True),
    ),
    margin=number("a factor of at least 1, such as 1.2", 1, 100),
    duration=length_kind(),
    measured_on=text_kind("the accelerators of a node such as A100:8, or cpu", read_device),
    profile=text_kind("the path of a work profile, such as work.json", lambda path: path),
)

# The section `webhooks`


def _read_web_address(text: str) -> str:
    if not is_web_address(text):
        if "@" in text:  # probably a password
            raise WrongValue("the web address has a user name or password, which cannot be sent")
        raise WrongValue(f"{shown(text)} is not a web address")
    return text


_URL = text_kind(
    "a web address such as https://example.org/hook",
    _read_web_address,
)
_ON = choice(
    Delivery, {"success": Delivery.FINISH, "done": Delivery.FINISH, "error": Delivery.FAILURE}
)


def _build_webhook(table: SectionReader) -> WebhookTarget | None:
    return table.make(lambda url, on=(): WebhookTarget(url=url, on=on or tuple(Delivery)))


_WEBHOOK = section(
    "webhooks",
    _build_webhook,
    url=FieldSpec(_URL, required=True),
    on=ListKind(_ON, single=True),
)
WEBHOOKS = ListKind(either(_URL, lambda url: WebhookTarget(url=url), _WEBHOOK), single=True)
