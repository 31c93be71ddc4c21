"""Numbers of task files and commands have the digits 0 to 9, as no reader could compare others."""

import re
from collections.abc import Callable
from datetime import UTC, datetime

import click
import pytest
from click.testing import CliRunner

from cavvy.catalog.needs import NeedError, parse_accelerator
from cavvy.cli.main import cli
from cavvy.cli.view.numbers import NumberRange, WholeRange
from cavvy.domain.units import UnitError, parse_duration, parse_memory_mib, parse_rate, parse_usd
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, parse_task

ARABIC = str.maketrans("0123456789", "٠١٢٣٤٥٦٧٨٩")
WIDE = {48 + digit: 0xFF10 + digit for digit in range(10)}


def read_line(line: str) -> None:
    """Raises SpecError."""
    options = ReadOptions(serves=line.startswith("service"))
    now = datetime(2026, 1, 1, tzinfo=UTC)
    parse_task(f"name: t\nrun: x\n{line}", now=now, options=options)


def _read(kind: click.ParamType) -> Callable[[str], object]:
    return lambda text: kind.convert(text, None, None)


@pytest.mark.parametrize("other", [ARABIC, WIDE], ids=["Arabic", "wide"])
@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_usd, "3.50"),
        (parse_rate, "$12/h"),
        (parse_duration, "1h30m"),
        (parse_memory_mib, "80GB"),
        (parse_accelerator, "A100:8"),
        (parse_accelerator, "A100:80GB:1..4"),
        (parse_accelerator, "8xH100"),
        (parse_accelerator, "A10:0.5"),
        (parse_accelerator, "TPU-v5e:16"),
        (_read(NumberRange()), "1.5"),
        (_read(WholeRange()), "12"),
    ],
)
def test_a_number_in_digits_of_another_script_is_refused(
    read: Callable[[str], object], text: str, other: dict[int, str]
) -> None:
    if text != "8xH100":  # which is an error with a suggestion, in any digits
        read(text)
    with pytest.raises((UnitError, NeedError, click.BadParameter)) as caught:
        read(text.translate(other))
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "resources: {gpu: 'H100:8'}",
        "resources: {gpu: {name: H100, count: '2..4'}}",
        "resources: {gpu: {name: A100, memory: '80'}}",
        "resources: {cpu: '8..32'}",
        "resources: {memory: '64'}",
        "resources: {memory: '4x'}",
        "resources: {disk: '100GB'}",
        "resources: {network: '100Gbps'}",
        "resources: {max_price: '3'}",
        "nodes: '2'",
        "limits: {duration: '90s'}",
        "limits: {budget: '20'}",
        "limits: {deadline: '2030-05-31T18:00Z'}",
        "limits: {idle: {for: 10m, gpu: '5%'}}",
        "schedule: {cron: '5 4 * * 1-5'}",
        "window: '22:00-06:00'",
        "service: {port: '80', slo: {availability: 0.9}}",
        "service: {port: 80, slo: {availability: '99.9%'}}",
        "service: {port: 80, slo: {availability: '0.9'}}",
        "service: {port: 80, replicas: {min: '1', max: 2}}",
        "service: {port: 80, replicas: {min: 1, max: 2, target: {concurrency: '4'}}}",
        "service: {port: 80, update: {strategy: canary, weight: '10%'}}",
    ],
)
def test_a_task_file_has_the_digits_0_to_9(line: str) -> None:
    read_line(line)
    text = re.sub(r"'[^']*'", lambda found: found[0].translate(ARABIC), line)
    with pytest.raises(SpecError):
        read_line(text)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("service: {port: 80, slo: {availability: '99,9 %'}}", "write 99.9%"),
        ("service: {port: 80, slo: {availability: '0,999'}}", "write 0.999"),
        (
            "service: {port: 80, replicas: {min: 1, max: 2, target: {concurrency: '1,5'}}}",
            "write 1.5",
        ),
        ("limits: {idle: {for: 10m, gpu: '2,5%'}}", "write 2.5%"),
        ("resources: {cpu: '0,5'}", "write 0.5"),
        ("resources: {memory: '1,5TB'}", "write 1.5TB"),
        ("resources: {network: '2,5 Gbps'}", "write 2.5Gbps"),
    ],
)
def test_a_decimal_comma_gets_the_number_with_a_point(line: str, hint: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_line(line)
    [problem] = caught.value.problems
    assert problem.suggestion == hint


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ([""], "GPU is empty"),
        (["  "], "GPU is empty"),
        (["--gpu", ""], "--gpu is empty"),
        (["--region", "eu", "--region", ""], "--region is empty"),
        (["--provider", ""], "--provider is empty"),
        (["--max-price", ""], "--max-price is empty"),
        (["--cpus", " "], "--cpus is empty"),
    ],
)
def test_offers_takes_no_empty_value_for_all_offers(words: list[str], what: str) -> None:
    result = CliRunner().invoke(cli, ["offers", *words])
    assert result.exit_code == 2
    assert f"{what}; omit it to list all offers" in result.output
