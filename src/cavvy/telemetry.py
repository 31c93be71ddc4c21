"""What the server and the gateway share to export telemetry: samples of metrics, which
prometheus_client (the extra `metrics`) writes in the format that a reader accepts, and what the
variables of OpenTelemetry ask for. docs/reference/metrics.md and telemetry.md list both.
"""

import os
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from cavvy import __version__
from cavvy.packages import extra_command


class MetricsMissing(Exception):
    """Raised if prometheus_client is not installed. `hint` contains the command that installs
    it.
    """

    def __init__(self, program: str) -> None:
        super().__init__(f"the {program} lacks prometheus_client")
        self.hint = f"install it where the {program} runs: {extra_command('metrics')}"


class Figures:
    """Samples by the name of their metric; a metric has the same labels in all samples."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, str, tuple[str, ...], dict[tuple[str, ...], Any]]] = {}

    def add(
        self, name: str, text: str, value: float | None, *, kind: str = "gauge", **labels: str
    ) -> None:
        """Add to the sample with these labels; None adds nothing."""
        samples = self._found.setdefault(name, (kind, text, tuple(labels), {}))[3]
        key = tuple(labels.values())
        if value is not None:
            samples[key] = samples.get(key, 0) + value

    def set_histogram(
        self, name: str, text: str, counts: Mapping[float, int], total: float, **labels: str
    ) -> None:
        """Set the histogram with these labels. `counts` has, in ascending order, each upper bound
        and the number of values above the bound before it; the last bound is infinite. `total` is
        the sum of all values.
        """
        samples = self._found.setdefault(name, ("histogram", text, tuple(labels), {}))[3]
        samples[tuple(labels.values())] = (counts, total)

    def collect(self) -> Iterable[Any]:
        """Return the metric families, as prometheus_client asks for them."""
        import prometheus_client.core as core

        for name, (kind, text, labels, samples) in self._found.items():
            make = {
                "counter": core.CounterMetricFamily,
                "gauge": core.GaugeMetricFamily,
                "histogram": core.HistogramMetricFamily,
            }[kind]
            family = make(name, text, labels=labels)
            for key, value in samples.items():
                family.add_metric(key, *(_accumulate(*value) if kind == "histogram" else (value,)))
            yield family


def write_metrics(figures: Figures, accept: str, *, process: bool) -> tuple[bytes, str]:
    """Return the metrics and their content type, in the format that the reader accepts. `process`
    adds the CPU time, memory and files of this process. Writing 10,000 nodes takes a second.
    Raises MetricsMissing.
    """
    client = load_client()
    registry = client.CollectorRegistry()
    registry.register(figures)
    if process:
        client.ProcessCollector(registry=registry)
    try:
        encode, kind = client.exposition.choose_encoder(accept)
    except (TypeError, ValueError):  # at a version that is no number
        encode, kind = client.exposition.choose_encoder("")
    return encode(registry), kind


def load_client(program: str = "server") -> ModuleType:
    """Return prometheus_client. Raises MetricsMissing."""
    try:
        import prometheus_client.core
    except ImportError as error:
        raise MetricsMissing(program) from error
    return prometheus_client


def _accumulate(counts: Mapping[float, int], total: float) -> tuple[list[tuple[str, int]], float]:
    from prometheus_client.utils import floatToGoString as show

    seen, buckets = 0, []
    for bound, count in counts.items():
        seen += count
        buckets.append((show(bound), seen))  # type: ignore[no-untyped-call]  # it has no types
    return buckets, total


def is_wanted(signal: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variables of OpenTelemetry ask for a signal: `traces` or `logs`.

    A collector must be named. OTEL_TRACES_EXPORTER may exclude the traces. Logs are sent only if
    OTEL_LOGS_EXPORTER names `otlp`, because users' programs write them.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    name = signal.upper()
    endpoints = ("OTEL_EXPORTER_OTLP_ENDPOINT", f"OTEL_EXPORTER_OTLP_{name}_ENDPOINT")
    usual = "otlp" if signal == "traces" else "none"
    exporters = environment.get(f"OTEL_{name}_EXPORTER") or usual
    asked = "otlp" in [each.strip() for each in exporters.split(",")]
    return asked and any(environment.get(each) for each in endpoints)


def make_resource(service: str, **attributes: str) -> Any:
    """Return OpenTelemetry's description of this process. The variables may name another service
    and further attributes. Raises ImportError without OpenTelemetry's SDK.
    """
    from opentelemetry.sdk.resources import Resource

    usual = {"service.name": service, "service.version": __version__, **attributes}
    stated = Resource.create().attributes  # by the variables
    stated = {k: v for k, v in stated.items() if not str(v).startswith("unknown_service")}
    return Resource({**usual, **stated})
