"""Services: the section of the task file, and the legal moves of replicas."""

import json
import re
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.capabilities.serving.replicas import (
    COMING_REPLICAS,
    REPLICA_MOVES,
    SERVING,
    ReplicaState,
)
from cavvy.cli.main import cli
from cavvy.domain.services import (
    BatchRule,
    CronTrigger,
    EventTrigger,
    FallbackApi,
    QueueTerms,
    RateScope,
    ReplicaTarget,
    RequestLimits,
    RequestRate,
    ServiceSpec,
    ServiceUpdate,
    TargetKind,
    UpdateStrategy,
    WebhookSignature,
    WebhookTrigger,
)
from cavvy.domain.units import HourlyRate
from cavvy.domain.values import replace
from cavvy.spec import SpecError
from cavvy.spec.describe import describe_task
from cavvy.spec.support import object_to_service
from cavvy.task_files import ReadOptions, parse_file, parse_task

ORIGINS = {
    "https://app.example.com": "https://app.example.com",
    "HTTPS://App.example.com:443": "https://app.example.com",
    "http://localhost:5173": "http://localhost:5173",
    "http://[::1]:80": "http://[::1]",
    "tauri://localhost": "tauri://localhost",
    "*": "*",
}
SMALL = "run: serve\nservice: {port: 8000}\n"
WHOLE = """\
name: chat
run: serve
service:
  port: 8000
  concurrency: 16
  replicas: {min: 1, max: 8, target: {metric: "vllm:waiting", value: 4}, idle: 10m}
  probe:
    {path: /health, headers: {X-A: 1}, body: "{}", every: 5s, timeout: 2s, start: 10m, failures: 5,
    any_status: true}
  drain: 30s
  timeouts: {queue: 1m, response: 2m, silence: 3m}
  keys: true
  rate: [{requests: 100, per: 1m, burst: 20, each: header, header: X-User, prefix: /v1/}, 5]
  limits: {body: 100MiB, waiting: 50}
  batch: {max: 32, wait: 20ms, input: inputs, output: outputs}
  slo: {p95: 2s, availability: 99.9%}
  regions: [eu]
  residency: eu
  budget: $40/h
  update: {strategy: canary, weight: 0.2, requests: 500, within: 10m}
  queue: {attempts: 3, backoff: 1m, keep: 1d, at_once: 8, waiting: 9}
  events:
    - {bucket: "s3://photos/in/", path: /files, every: 5s}
    - {cron: "0  3 * * *", time_zone: Europe/Berlin, body: hello, path: /nightly}
    - {webhook: pushes, secret: HOOK, signature: github, path: /push}
"""


def read(text: str) -> ServiceSpec:
    (task,) = parse_file(text).tasks
    assert task.service is not None
    return task.service


def test_a_service_is_read_with_its_defaults() -> None:
    service = read(SMALL)
    assert service == ServiceSpec(port=8000)
    assert (service.replicas.least, service.replicas.most) == (0, 1)
    assert service.replicas.target == ReplicaTarget(kind=TargetKind.QUEUE_WAIT, value=10.0)


@pytest.mark.parametrize(
    ("run", "fixed"),
    [
        ("python3 -m http.server 8080", True),
        ("uvicorn app:app --host 0.0.0.0 --port=8080", True),
        ("gunicorn -b '0.0.0.0:8080' app", True),
        ("npx serve -l 8080", True),
        ("A=1 streamlit run app.py", True),  # by STREAMLIT_SERVER_PORT
        ("uvicorn app:app --port $PORT --peer 10.0.0.1:8080", False),
        ("uvicorn app:app --port 80801", False),
        ("python serve.py --tokens 8080", False),
        ("PORT=8080 python serve.py", True),
        ("cd app && export A=1 PORT=8080; exec serve --port $PORT", True),
        ("docker run -e PORT=8080 -p $PORT:8080 web", False),
        ("web --listen-address=:8080", True),
        ("dotnet web.dll --urls http://*:8080", True),
        ("gunicorn -b $HOST:8080 app", True),
        ("caddy --bind localhost:8080", True),
        # other programs
        ("vllm serve m & python proxy.py --upstream http://localhost:8080/v1", False),
        ("python serve.py --triton 10.0.0.5:8080", False),
        ("python serve.py", False),
    ],
)
def test_a_command_that_names_the_port_listens_there(run: str, fixed: bool) -> None:
    name = "STREAMLIT_SERVER_PORT" if "streamlit" in run else "PORT"
    text = f"env: {{{name}: 8080}}\nrun: {json.dumps(run)}\nservice: {{port: 8080}}\n"
    assert read(text).fixed_port == fixed


def test_a_service_is_read_with_all_keys() -> None:
    service = read(WHOLE)
    assert service.replicas.target.kind is TargetKind.METRIC
    assert (service.replicas.target.metric, service.replicas.target.value) == ("vllm:waiting", 4.0)
    assert service.rates == (
        RequestRate(
            requests=100,
            per=timedelta(minutes=1),
            burst=20,
            each=RateScope.HEADER,
            header="X-User",
            prefix="/v1",
        ),
        RequestRate(requests=5, burst=5),
    )
    assert (service.keys, service.limits) == (True, RequestLimits(body_mib=100, waiting=50))
    assert service.batch == BatchRule(
        most=32, wait=timedelta(milliseconds=20), input="inputs", output="outputs"
    )
    assert service.probe.start == timedelta(minutes=10)
    assert (service.probe.headers, service.probe.body) == ((("X-A", "1"),), "{}")
    assert (service.probe.failures, service.probe.any_status) == (5, True)
    assert service.slo.availability == pytest.approx(0.999)
    assert service.budget == HourlyRate(40_000_000)
    assert (service.regions, service.residency) == (("eu",), "eu")
    assert service.update == ServiceUpdate(
        strategy=UpdateStrategy.CANARY, weight=20, requests=500, within=timedelta(minutes=10)
    )
    assert service.queue == QueueTerms(
        attempts=3, backoff=timedelta(minutes=1), keep=timedelta(days=1), at_once=8, waiting=9
    )
    assert service.events == (
        EventTrigger(bucket="s3://photos/in/", path="/files", every=timedelta(seconds=5)),
    )
    assert service.crons == (
        CronTrigger(cron="0 3 * * *", time_zone="Europe/Berlin", path="/nightly", body="hello"),
    )
    assert service.webhooks == (
        WebhookTrigger(
            name="pushes", secret="HOOK", signature=WebhookSignature.GITHUB, path="/push"
        ),
    )


@pytest.mark.parametrize(
    ("target", "kind", "value"),
    [
        ("{queue_wait: 500ms}", TargetKind.QUEUE_WAIT, 0.5),
        ("{concurrency: 8}", TargetKind.CONCURRENCY, 8.0),
        ("{rate: 2.5}", TargetKind.RATE, 2.5),
        ("{gpu_utilisation: 70%}", TargetKind.GPU_UTILISATION, 0.7),
    ],
)
def test_each_target_is_read(target: str, kind: TargetKind, value: float) -> None:
    text = f"run: serve\nservice: {{port: 1, replicas: {{max: 3, target: {target}}}}}\n"
    assert read(text).replicas.target == ReplicaTarget(kind=kind, value=value)
    (task,) = parse_file(text).tasks
    rows = dict(describe_task(task))
    assert "0 to 3" in rows["replicas"]
    assert "the port in the variable PORT" in rows["serves"]
    assert task.service is not None
    fixed = replace(task, service=replace(task.service, fixed_port=True))
    assert "on port 1," in dict(describe_task(fixed))["serves"]


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("engine: vllm, model: m, batch: 8", "forms batches itself"),
        ("engine: onnxruntime, model: m, batch: {input: inputs}", "delete `input` and `output`"),
        ("engine: onnxruntime, model: m, batch: 8, models: a", "streams, which cannot be divided"),
    ],
)
def test_batches_are_refused_where_the_gateway_cannot_divide_them(service: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_file(f"service: {{{service}}}\n")


def test_the_engine_of_onnx_models_may_have_batches() -> None:
    text = "service: {engine: onnxruntime, model: m.onnx, batch: {max: 8, wait: 1ms}}\n"
    assert read(text).batch == BatchRule(most=8, wait=timedelta(milliseconds=1))


def test_batches_are_read_and_described() -> None:
    text = "run: serve\nservice: {port: 1, batch: 8}\n"
    assert read(text).batch == BatchRule(most=8)
    (task,) = parse_file(text).tasks
    assert "at most 8 instances" in dict(describe_task(task))["batches"]


@pytest.mark.parametrize("written", ORIGINS)
def test_origins_are_read_as_browsers_write_them(written: str) -> None:
    service = read(f"run: serve\nservice: {{port: 1, origins: {written!r}}}\n")
    assert service.origins == (ORIGINS[written],)


@pytest.mark.parametrize(
    "written",
    ["null", "app.example.com", "https://a.example/", "https://*.example.com", "https://a:99999"],
)
def test_what_is_no_origin_is_refused(written: str) -> None:
    with pytest.raises(SpecError, match="is not the origin of a page"):
        read(f"run: serve\nservice: {{port: 1, origins: ['{written}']}}\n")


def test_fallbacks_are_read() -> None:
    api = "{base_url: 'https://a.example/v1/', model: big, key: K, price: {input: 0.15, output: 2}}"
    service = read(f"""\
run: serve
service:
  timeouts: {{fallback: 3s}}
  fallback: [backup, {{service: small, model: org/s}}, {{openai: {api}}}, {{openai: {{model: m}}}}]
""")
    assert service.timeouts.fallback == timedelta(seconds=3)
    first, second, third, last = service.fallbacks
    assert (first.service, second.service, second.model) == ("backup", "small", "org/s")
    assert third.api == FallbackApi(
        url="https://a.example/v1", model="big", secret="K", prices=(150_000, 2_000_000)
    )
    assert last.api == FallbackApi(model="m")
    assert read("run: s\nservice: {fallback: backup}\n").fallbacks == (first,)


def test_a_service_without_a_port_has_the_usual_one() -> None:
    assert read("run: serve\nservice: {drain: 1m}\n").port == 8000


def test_a_service_of_skypilot_is_still_one_of_skypilot() -> None:
    text = "run: serve\nservice: {readiness_probe: /, replicas: 2}\n"
    assert parse_file(text).kind == "SkyPilot"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("{port: 0}", "port"),
        ("{port: 1, replicas: {min: 5, max: 2}}", "the minimum (5) exceeds the maximum (2)"),
        ("{port: 1, replicas: {target: {}}}", "the target is empty"),
        ("{port: 1, replicas: {target: {rate: 1, concurrency: 2}}}", "both targets"),
        ("{port: 1, replicas: {target: {metric: x}}}", "a metric needs `value`"),
        ("{port: 1, events: {path: /x}}", "source"),
        ("{port: 1, events: {cron: '* * * * *', bucket: s3://b/}}", "`cron`"),
        (
            "{port: 1, events: {cron: '* * * * *', every: 5s}}",
            "`every` has no effect in an event with the source `cron`",
        ),
        ("{port: 1, events: {cron: '0 3 * *'}}", "five fields"),
        ("{port: 1, events: {cron: '0 0 30 2 *'}}", "no date matches"),
        ("{port: 1, events: {webhook: a}}", "`secret` is missing"),
        ("{port: 1, events: {webhook: A, secret: S}}", "is not a name"),
        ("{port: 1, events: [{webhook: a, secret: S}, {webhook: a, secret: T}]}", "same name"),
        ("{port: 1, fallback: {}}", "a fallback names no source"),
        ("{port: 1, fallback: A_b}", "fallback"),
        ("{port: 1, fallback: [a, {service: a, model: m}]}", "named twice"),
        ("{port: 1, fallback: [a, b, c, d, e, f]}", "fallback"),
        ("{port: 1, fallback: {service: a, openai: {model: m}}}", "two sources"),
        ("{port: 1, fallback: {openai: {}}}", "openai.model` is missing"),
        ("{port: 1, fallback: {openai: {model: 'a b'}}}", "cannot be the name of a model"),
        ("{port: 1, fallback: {openai: {model: m, api_key: sk-1}}}", "write `key`"),
        ("{port: 1, fallback: {openai: {model: m, key: sk-1}}}", "not a secret name"),
        (
            "{port: 1, fallback: {openai: {model: m, price: {input: 1}}}}",
            "price.output` is missing",
        ),
        ("{port: 1, fallback: {openai: {model: m, base_url: 'http://a/v1', key: K}}}", "TLS"),
        *(
            (f"{{port: 1, fallback: {{openai: {{model: m, base_url: '{url}'}}}}}}", "URL of an API")
            for url in (
                *("ftp://a/v1", "https://u:p@a/v1", "https://a/v1?x=1", "https://a/../v1"),
                *("https://a:99999/v1", "https://a/v 1", "https://a/%0d%0aX", "https:///v1"),
                *("https://a:00000443/v1", f"https://{'a.' * 124}b/v1", f"https://a{'/b' * 250}"),
            )
        ),
        ("{port: 1, residency: eu, fallback: {openai: {model: m}}}", "may answer in any place"),
        ("{port: 1, regions: [eu], fallback: {openai: {model: m}}}", "may answer in any place"),
        ("{port: 1, batch: 4, fallback: a}", "joined requests cannot be sent to fallbacks"),
        ("{port: 1, replicas: {target: {rate: 1, value: 2}}}", "for `metric` only"),
        ("{port: 1, replicas: {target: {qps: 1}}}", "write `rate`"),
        ("{port: 1, probe: health}", "write a path such as /health"),
        ("{port: 1, probe: {every: 1s, timeout: 2s}}", "exceeds the time between probes"),
        ("{port: 1, probe: {headers: {'a b': c}}}", "not a valid name of a header"),
        ('{port: 1, probe: {headers: {X-A: "a\\r\\nX-B: b"}}}', "or a line break"),
        ("{port: 1, probe: {headers: {content-length: 3}}}", "sets the header content-length"),
        ("{port: 1, probe: {headers: {X-A: 1, x-a: 2}}}", "two headers have the same name"),
        ("{port: 1, probe: {post_data: a}}", "write `body`"),
        ("{port: 1, slo: {availability: 200%}}", "not between 0 and 1"),
        ("{port: 1, update: green}", "is not one of the choices"),
        ("{port: 1, update: {weight: 10%}}", "`weight` is for canaries only"),
        ("{port: 1, update: {strategy: canary, weight: 0.5%}}", "not a whole percentage"),
        (
            f"{{port: 1, update: {{strategy: canary, weight: {'9' * 5000}}}}}",
            "not a whole percentage",
        ),
        ("{port: 1, update: {strategy: canary, weight: 30}}", "write 30%"),
        ("{port: 1, update: {strategy: canary, weight: 120%}}", "write 10%"),
        ("{port: 1, update: {strategy: canary, weight: much}}", "write 10%"),
        ("{port: 1, residency: mars}", "is not an area"),
        ("{port: 1, batch: 1}", "batch"),
        ("{port: 1, batch: {max_latency: 1s}}", "write `wait`"),
        ("{port: 1, batch: 8, models: a}", "streams, which cannot be divided"),
        ("{port: 1, readiness_probe: /}", "write `probe`"),
        ("{port: 1}\nschedule: 0 3 * * *", "`schedule` has no meaning with `service`"),
        ("{port: 1}\nkeep: 1h", "`keep` has no meaning with `service`"),
    ],
)
def test_a_wrong_service_is_said_with_its_line(changed: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_file(f"run: serve\nservice: {changed}\n")
    assert said in str(caught.value)
    assert all(problem.line >= 2 for problem in caught.value.problems)


def test_validate_names_a_key_that_serve_would_refuse(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(WHOLE)
    shown = CliRunner().invoke(cli, ["validate", str(path)])
    assert shown.exit_code == 2
    assert "service.budget: Cavvy cannot limit a price per hour" in shown.stderr


def test_a_service_is_explained_and_served_but_not_run(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("run: serve\nservice: {port: 8000, replicas: {min: 1, max: 8}}\n")
    shown = CliRunner().invoke(cli, ["validate", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "1 to 8" in shown.output
    assert "`cavvy serve` starts this service" in shown.output
    with pytest.raises(SpecError, match="describes a service, not a job"):
        parse_task(WHOLE)
    serves = ReadOptions(serves=True)
    assert parse_task(WHOLE, options=serves).service is not None
    with pytest.raises(SpecError, match="describes a job, not a service"):
        parse_task("run: serve", options=serves)
    ran = CliRunner().invoke(cli, ["run", str(path), "--dry-run"])
    assert ran.exit_code == 2


def test_every_replica_can_end_and_only_ready_ones_serve() -> None:
    assert set(REPLICA_MOVES) == set(ReplicaState)
    reached = {ReplicaState.ENDED}
    for _ in ReplicaState:
        reached |= {state for state, moves in REPLICA_MOVES.items() if reached & set(moves)}
    assert reached == set(ReplicaState)
    assert not REPLICA_MOVES[ReplicaState.ENDED]
    assert all(reason for moves in REPLICA_MOVES.values() for reason in moves.values())
    assert not SERVING & COMING_REPLICAS


@pytest.mark.parametrize(("gpu", "refused"), [("{}", True), ("{gpu: L4}", False)])
def test_gpu_use_needs_gpus(gpu: str, refused: bool) -> None:
    text = f"run: serve\nresources: {gpu}\nservice: {{port: 1, replicas: "
    task = parse_file(text + "{min: 0, max: 2, target: {gpu_utilisation: 70%}}}\n").task
    objection = object_to_service(task)
    assert (objection is not None) is refused
