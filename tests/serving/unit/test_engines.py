"""Named engines: the commands that Cavvy writes, and the options that the engines have."""

import re
import shlex
from pathlib import Path

import pytest

from cavvy.capabilities.serving.autoscaler.decide import ScalingState, decide
from cavvy.capabilities.serving.autoscaler.terms import MarketObservation, ServiceObservation
from cavvy.capabilities.serving.decide.queued_calls import count_at_once
from cavvy.capabilities.serving.decide.traffic import make_terms
from cavvy.capabilities.serving.stored_services import find_open_models
from cavvy.spec import SpecError
from cavvy.spec.describe import describe_task
from cavvy.spec.engines import ENGINES, write_command
from cavvy.store.objects.hub import HubRepository
from cavvy.task_files import parse_file

FILE = """\
resources: {gpu: 'L4:2'}
service:
  engine: %s
  model: org/tiny
  options: {enable-prefix-caching: true, trust-remote-code: false, max-model-len: 4096}
"""


@pytest.mark.parametrize("name", ENGINES)
def test_a_command_has_only_options_of_the_engine(name: str) -> None:
    engine = ENGINES[name]
    command = write_command(engine, "a model", ("x y",), {}, True)
    words = shlex.split(command)
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert flags <= engine.flags
    assert engine.source
    assert words[0] == "exec"
    assert "a model" in command


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("./tiny", "tiny"),
        ("./models/tiny/", "tiny"),
        ("../tiny.gguf", "tiny.gguf"),
        ("/data/tiny", "tiny"),
        ("org/tiny", "org/tiny"),
        ("..", ".."),
    ],
)
def test_a_model_of_a_folder_is_served_by_the_folders_name(model: str, name: str) -> None:
    text = FILE.replace("org/tiny", model) % "vllm"
    (task,) = parse_file(text).tasks
    assert task.service is not None
    assert task.service.models == (name,)
    assert f" vllm serve {model} " in task.run
    assert f" --served-model-name {name} " in task.run
    (task,) = parse_file(f"{text}  models: mine\n").tasks
    assert task.service is not None
    assert task.service.models == ("mine",)
    assert " --served-model-name mine " in task.run


@pytest.mark.parametrize(
    ("name", "flag"), [("vllm", "enable-prompt-tokens-details"), ("sglang", "enable-cache-report")]
)
def test_an_engine_states_cached_tokens_unless_the_task_says_otherwise(
    name: str, flag: str
) -> None:
    engine = ENGINES[name]
    assert f" --{flag}" in write_command(engine, "m", (), {}, False)
    assert write_command(engine, "m", (), {flag: "true"}, False).count(flag) == 1
    assert flag not in write_command(engine, "m", (), {flag: "false"}, False)


def test_an_engine_gives_a_service_all_it_needs() -> None:
    (task,) = parse_file(FILE % "vllm").tasks
    assert task.run == (
        'exec env VLLM_ENABLE_RESPONSES_API_STORE="${VLLM_ENABLE_RESPONSES_API_STORE:-1}" '
        'vllm serve org/tiny --host "${SERVE_HOST:-127.0.0.1}" --port "${PORT:-8000}" '
        '--served-model-name org/tiny --tensor-parallel-size "$NPROC_PER_NODE" '
        "--enable-prompt-tokens-details --enable-prefix-caching --max-model-len 4096"
    )
    service = task.service
    assert service is not None
    assert (service.port, service.probe.path, service.models) == (8000, "/health", ("org/tiny",))


@pytest.mark.parametrize(
    ("model", "source", "path", "name"),
    [
        ("hf://org/tiny@main", "hf://org/tiny@main/", "model/tiny", "org/tiny"),
        ("hf://org/tiny/", "hf://org/tiny/", "model/tiny", "org/tiny"),
        ("hf://org/tiny@v1/q4.gguf", "hf://org/tiny@v1/q4.gguf", "model/q4.gguf", "org/tiny"),
        ("s3://bucket/models/tiny/", "s3://bucket/models/tiny/", "model/tiny", "tiny"),
    ],
)
def test_a_model_at_a_url_is_copied_before_its_engine_starts(
    model: str, source: str, path: str, name: str
) -> None:
    (task,) = parse_file((FILE % "vllm").replace("org/tiny", model)).tasks
    assert [(each.source, each.target) for each in task.inputs] == [(source, path)]
    assert f"vllm serve {path} " in task.run
    assert f"--served-model-name {name} " in task.run
    assert task.service is not None
    assert task.service.models == (name,)


def test_a_model_at_a_wrong_url_is_refused() -> None:
    with pytest.raises(SpecError, match="names no repository"):
        parse_file((FILE % "vllm").replace("org/tiny", "hf://tiny"))


def test_a_file_may_say_more_than_its_engine() -> None:
    text = "service: {engine: llama.cpp, model: a.gguf, models: [tiny], port: 9, probe: /v1/models}"
    (task,) = parse_file(text).tasks
    assert task.service is not None
    assert "--alias tiny --metrics" in task.run
    assert (task.service.port, task.service.probe.path) == (9, "/v1/models")
    triton = parse_file("service: {engine: triton, model: models}").tasks[0]
    assert triton.service is not None
    assert triton.service.models == (), "it does not speak OpenAI's API"
    assert "--model-repository=models" in triton.run


@pytest.mark.parametrize(
    ("engine", "options", "at_once"),
    [
        ("vllm", "{max-model-len: 4096}", 64),
        ("vllm", "{max-num-seqs: 256}", 256),
        ("vllm", "{--max-num-seqs: '8'}", 8),
        ("vllm", "{max-num-seqs: 12345678}", 64),
        ("sglang", "{}", 64),
        ("sglang", "{max-running-requests: 16}", 16),
        ("tgi", "{max-concurrent-requests: 32}", 32),
        ("llama.cpp", "{ctx-size: 8192}", 4),
        ("llama.cpp", "{parallel: 2}", 2),
        ("llama.cpp", "{parallel: -1}", 4),
        ("triton", "{}", 1),
        ("onnxruntime", "{threads: 2}", 1),
    ],
)
def test_an_engine_tells_how_many_requests_a_replica_processes(
    engine: str, options: str, at_once: int
) -> None:
    text = f"service: {{engine: {engine}, model: m, options: {options}%s}}"
    assert [
        task.service.concurrency
        for more in ("", ", concurrency: 3")
        for task in parse_file(text % more).tasks
        if task.service is not None
    ] == [at_once, 3]


def test_a_service_with_an_engine_has_as_many_replicas_as_its_requests_need() -> None:
    text = "service: {engine: vllm, model: m, replicas: {max: 8}}"
    service = parse_file(text).tasks[0].service
    assert service is not None
    for present, replicas in ((1, 1), (12, 1), (130, 3), (1000, 8)):
        running = min(present, service.concurrency)
        seen = ServiceObservation(
            now_s=100.0,
            arrivals=(present,),
            started=running,
            in_flight=running,
            in_flight_s=20.0 * running,
            backlog=present - running,
            markets=(MarketObservation(name="a", ready_s=(100.0,)),),
        )
        decision, _ = decide(make_terms(service), ScalingState(), seen)
        assert decision.wanted == replicas
    assert count_at_once(service) == 256, "calls of a queue at the same time"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{engine: vlm, model: a}", "did you mean `vllm`?"),
        ("{engine: vllm}", "the engine has no model"),
        ("{engine: vllm, model: a, options: {port: 1}}", "Cavvy itself sets the option port"),
        ("{engine: vllm, model: a, options: {a: [1]}}", "not a single value"),
    ],
)
def test_mistakes_are_told(section: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_file(f"service: {section}")


def test_a_file_has_an_engine_or_commands() -> None:
    with pytest.raises(SpecError, match="`run` cannot be used"):
        parse_file("run: x\nservice: {engine: vllm, model: a}")


def test_a_model_may_be_optimised_by_its_engine() -> None:
    model = "{source: m.onnx, optimise: onnx-int8, samples: s.npz, agree: 99.5%}"
    found = parse_file(f"service: {{engine: onnxruntime, model: {model}, options: {{threads: 2}}}}")
    assert found.tasks[0].run == (
        "exec env PYTHONPATH=.cavvy${PYTHONPATH:+:$PYTHONPATH} python3 -m model_server "
        '--model m.onnx --host "${SERVE_HOST:-127.0.0.1}" --port "${PORT:-8000}" '
        "--optimise onnx-int8 --samples s.npz --agree 0.995 --threads 2"
    )
    files = {each.inside: Path(each.source) for each in found.local}
    assert {".cavvy/model_server/__main__.py", ".cavvy/model_server/__init__.py"} <= set(files)
    assert all(each.is_file() for each in files.values())


@pytest.mark.parametrize(
    ("engine", "model", "said"),
    [
        ("vllm", "{source: m, optimise: onnx-int8}", "the engine has no optimisation"),
        ("onnxruntime", "{source: m, optimise: int3}", "expected: onnx-int8"),
        ("onnxruntime", "{optimise: onnx-int8}", "the engine has no model"),
        ("onnxruntime", "{source: m, optimise: onnx-int8, agree: 2}", "is not a share"),
    ],
)
def test_a_wrong_optimisation_is_told(engine: str, model: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_file(f"service: {{engine: {engine}, model: {model}}}")


ADAPTERS = "adapters: {a: /lora/a, b: hf://org/b, c: s3://bucket/c/, d: 'hf://org/d@v1'}"


@pytest.mark.parametrize(
    ("engine", "options", "command", "slots"),
    [
        ("vllm", "", "exec env VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_ENABLE_", 4),
        ("vllm", "max-loras: 2", "--enable-lora --max-loras 2", 2),
        ("vllm", "max-loras: 2, max-cpu-loras: 3", "--max-cpu-loras 3", 3),
        ("sglang", "", "--lora-target-modules all --max-loras-per-batch 4", 4),
        ("sglang", "max-lora-rank: 8", "--max-lora-rank 8 ", 4),
        (
            "tgi",
            "",
            "--lora-adapters a=/lora/a,b=org/b,c=.cavvy/adapters/c,d=.cavvy/adapters/d",
            4,
        ),
    ],
)
def test_adapters_are_options_and_models_of_the_engine(
    engine: str, options: str, command: str, slots: int
) -> None:
    text = f"service: {{engine: {engine}, model: org/base, {ADAPTERS}, options: {{{options}}}}}"
    (task,) = parse_file(text).tasks
    assert command in task.run
    words = shlex.split(task.run)
    assert words[0] == "exec"
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert flags <= ENGINES[engine].flags
    assert [(each.source, each.target) for each in task.inputs] == [
        ("s3://bucket/c/", ".cavvy/adapters/c"),
        ("hf://org/d@v1/", ".cavvy/adapters/d"),
    ], "engines load neither buckets nor revisions"
    service = task.service
    assert service is not None
    assert service.adapters is not None
    assert service.adapters.slots == slots
    assert service.adapters.sources == {
        **{"a": "/lora/a", "b": "org/b"},
        **{"c": ".cavvy/adapters/c", "d": ".cavvy/adapters/d"},
    }
    assert service.model_names == ("org/base", "a", "b", "c", "d")
    assert find_open_models(service) == set(service.model_names), "no other service may have them"
    rows = dict(describe_task(task))
    assert rows["runs"] == task.run, "the whole command that Cavvy has written"
    assert rows["adapters"].startswith("a from /lora/a, b from org/b, c from .cavvy/adapters/c")
    assert rows["adapters"].endswith(f"; a replica holds {slots} at a time")


def test_a_revision_of_an_adapter_may_be_a_branch_with_slashes() -> None:
    (task,) = parse_file("service: {engine: vllm, model: m, adapters: {a: hf://b/c@d/1.0}}").tasks
    assert [each.source for each in task.inputs] == ["hf://b/c@d%2F1.0/"]
    place = HubRepository(task.inputs[0].source)
    assert place.key == ""


def test_llama_cpp_loads_files_when_it_starts() -> None:
    text = "service: {engine: llama.cpp, model: m.gguf, adapters: {a: /a.gguf, b: s3://x/b.gguf}}"
    (task,) = parse_file(f"inputs: [{{source: s3://x/y/, target: y}}]\n{text}").tasks
    lora = "--lora-init-without-apply --lora /a.gguf,.cavvy/adapters/b/b.gguf"
    assert task.run.endswith(lora)
    assert [each.target for each in task.inputs] == ["y", ".cavvy/adapters/b/b.gguf"]


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("engine: triton, model: m, adapters: {a: /a}", "the engine triton cannot serve them"),
        ("models: m, adapters: {a: /a}", "no engine is named"),
        ("engine: vllm, model: m, adapters: {m: /a}", "has the name of the base model"),
        ("engine: vllm, model: m, models: [a, b], adapters: {b: /a}", "'b' has the name of the"),
        ("engine: vllm, model: m, adapters: {a: /a, a: /b}", "the key 'a' appears twice"),
        ("engine: vllm, model: m, adapters: {a: }", "the adapter has no source"),
        ("engine: vllm, model: m, adapters: {a: ''}", "a source is a path or a URL"),
        ("engine: vllm, model: m, adapters: {a: 'hf://b'}", "write hf://ORGANIZATION/NAME"),
        ("engine: vllm, model: m, adapters: {a: hf://b/c@.d}", "perhaps with @REVISION"),
        ("engine: vllm, model: m, adapters: {a: ftp://b/c}", "s3://, gs:// or az://"),
        ("engine: vllm, model: m, adapters: {'a b': /c}", "cannot be the name of an adapter"),
        ("engine: vllm, model: m, adapters: {'a:b': /c}", "cannot be the name of an adapter"),
        ("engine: vllm, model: m, adapters: [a]", "a list where a table was expected"),
        ("engine: llama.cpp, model: m, adapters: {a: 'hf://b/c'}", "loads adapters from files"),
        (
            "engine: vllm, model: m, adapters: {a: /a}, options: {max-loras: many}",
            "the option max-loras is not a number of adapters",
        ),
        (
            "engine: vllm, model: m, adapters: {a: /a}, options: {enable-lora: true}",
            "Cavvy itself sets the option enable-lora",
        ),
    ],
)
def test_mistakes_with_adapters_are_told(section: str, said: str) -> None:
    with pytest.raises(SpecError, match=re.escape(said)):
        parse_file(f"service: {{{section}}}")
