"""The known engines: programs that serve a model. For each engine, Cavvy writes the command, the
port and the probe of the service, and stores the path of the engine's metrics.

`flags` are the engine's options, as listed in `source` on the date `as_of`. A test checks that the
command uses only options in `flags`. The tests run the command of only one engine, `onnxruntime`.
"""

import shlex
from collections.abc import Mapping
from datetime import date
from pathlib import Path

from cavvy.domain.values import Struct, field

# keys of `service.model`, other than `source`, that are options of the engine
OPTIMISATION = ("optimise", "samples", "agree", "compare")
SERVER_FOLDER = ".cavvy"  # folder of our own server's files in the working folder
# The address on which a replica's program listens. A service that is exported to Kubernetes sets
# SERVE_HOST.
_HOST = '"${SERVE_HOST:-127.0.0.1}"'
_PORT = '"${PORT:-%d}"'
# ZeroMQ binds this address to 127.0.0.1. Engines bind only addresses with `*` or `::`, and connect
# to all others; `*` would show the tokens of prompts to the whole network.
_EVENTS = (
    r"\"publisher\":\"zmq\",\"endpoint\":\"tcp://[::ffff:127.0.0.1]:${CAVVY_EVENTS_PORT:-5557}\""
)


class Engine(Struct, frozen=True, kw_only=True):
    """An engine. `command` precedes the options. `model`, `host`, `port_flag`, `names` and `gpus`
    are the engine's options for the model, the host, the port, the names of the model, and the
    number of GPUs of a node. A field is "" if the engine does not have the option.

    A replica gets at most `at_once` requests at the same time, unless the option `limit` states a
    number. vLLM and SGLang process 256 and more, depending on the GPU's memory, and TGI refuses
    requests beyond 128. Each request slows down the others, so 64 is a compromise, not measured on
    GPUs: larger numbers start further replicas only when answers are slow, and smaller ones leave
    GPUs unused.
    """

    command: str
    model: str
    host: str = "--host"
    port_flag: str = "--port"
    port: int = 8000
    probe: str = "/health"
    metrics: str = "/metrics"
    names: str = ""
    gpus: str = ""
    fixed: tuple[str, ...] = ()
    at_once: int = 1
    limit: str = ""
    separator: str = " "  # the separator between an option and its value
    chats: bool = True  # whether the engine implements OpenAI's API
    # the values of `model.optimise` that the engine supports
    optimises: frozenset[str] = frozenset()
    environment: str = ""  # a variable that is 1 unless the task or the image sets it
    events: str = ""  # the options with which it publishes key-value events
    # for each role of a group, the options that the command gets; for a router, its whole command
    roles: Mapping[str, str] = field(default_factory=dict)
    flags: frozenset[str]
    source: str
    as_of: date = date(2026, 11, 24)


def _words(text: str) -> frozenset[str]:
    return frozenset(f"--{each}" for each in text.split())


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine(
        command="vllm serve",
        model="",
        names="--served-model-name",
        gpus="--tensor-parallel-size",
        at_once=64,
        limit="--max-num-seqs",
        fixed=("--enable-prompt-tokens-details",),  # otherwise, cached tokens are not stated
        # otherwise, a response cannot be continued or read again
        environment="VLLM_ENABLE_RESPONSES_API_STORE",
        events=f'--kv-events-config "{{\\"enable_kv_cache_events\\":true,{_EVENTS}}}"',
        flags=_words(
            "host port served-model-name tensor-parallel-size max-model-len dtype quantization "
            "gpu-memory-utilization max-num-batched-tokens max-num-seqs tokenizer revision "
            "enable-prefix-caching enable-prompt-tokens-details trust-remote-code "
            "data-parallel-size ssl-keyfile ssl-certfile enable-lora max-loras max-lora-rank "
            "max-cpu-loras kv-events-config"
        ),
        source="www.mintlify.com/vllm-project/vllm/api/cli/serve, and public commands",
    ),
    "sglang": Engine(
        command="python3 -m sglang.launch_server",
        model="--model-path",
        port=30000,
        names="--served-model-name",
        gpus="--tp-size",
        # the second one states cached tokens
        fixed=("--enable-metrics", "--enable-cache-report"),
        at_once=64,
        limit="--max-running-requests",
        events=f'--kv-events-config "{{{_EVENTS}}}"',
        roles={
            "router": f"smg launch --host {_HOST} --port {_PORT % 30000} --prometheus-port "
            '"$CAVVY_METRICS_PORT" --disable-circuit-breaker',
            "prefill": "--disaggregation-mode prefill --disaggregation-bootstrap-port "
            '"$CAVVY_BOOTSTRAP_PORT"',
            "decode": "--disaggregation-mode decode",
        },
        flags=_words(
            "model-path host port served-model-name tp-size enable-metrics enable-cache-report "
            "context-length "
            "mem-fraction-static reasoning-parser tool-call-parser max-running-requests "
            "enable-lora max-loras-per-batch max-loaded-loras max-lora-rank lora-target-modules "
            "kv-events-config"
        ),
        source="commands in public repositories",
    ),
    "tgi": Engine(
        command="text-generation-launcher",
        model="--model-id",
        host="--hostname",
        port=3000,
        gpus="--num-shard",
        at_once=64,
        limit="--max-concurrent-requests",
        flags=_words(
            "model-id hostname port num-shard sharded quantize max-concurrent-requests "
            "lora-adapters"
        ),
        source="commands in public repositories",
    ),
    "triton": Engine(
        command="tritonserver",
        model="--model-repository",
        host="--http-address",
        port_flag="--http-port",
        probe="/v2/health/ready",
        metrics="",
        separator="=",
        fixed=("--allow-grpc=false", "--allow-metrics=false"),
        chats=False,
        flags=_words("model-repository http-address http-port allow-grpc allow-metrics"),
        source="commands in public repositories",
    ),
    "onnxruntime": Engine(
        command=f"env PYTHONPATH={SERVER_FOLDER}${{PYTHONPATH:+:$PYTHONPATH}} "
        "python3 -m model_server",
        model="--model",
        probe="/v2/health/ready",
        chats=False,
        optimises=frozenset({"onnx-int8"}),
        flags=_words("model host port name threads optimise samples agree compare"),
        source="src/cavvy/model_server, which is submitted with the service",
    ),
    "llama.cpp": Engine(
        command="llama-server",
        model="--model",
        port=8080,
        names="--alias",
        fixed=("--metrics",),
        at_once=4,  # its slots, if the option is not stated
        limit="--parallel",
        flags=_words(
            "model host port alias metrics ctx-size parallel n-gpu-layers threads lora "
            "lora-init-without-apply"
        ),
        source="tools/server/README.md of llama.cpp at 00dc8057, and public commands",
    ),
}


def write_command(
    engine: Engine,
    model: str,
    names: tuple[str, ...],
    options: Mapping[str, str],
    gpus: bool,
    events: bool = False,
) -> str:
    """Return the command that serves a model. An option with the value `true` is written without a
    value, and an option with the value `false` is omitted. With `events`, the engine publishes
    changes of its cache.
    """
    pairs: list[tuple[str, str]] = []
    if engine.model:
        pairs.append((engine.model, shlex.quote(model)))
    pairs += [(engine.host, _HOST), (engine.port_flag, _PORT % engine.port)]
    if engine.names and names:
        several = names if engine.names == "--served-model-name" and not engine.model else names[:1]
        pairs.append((engine.names, " ".join(map(shlex.quote, several))))
    given = {f"--{name}": value for name, value in options.items()}
    if gpus and engine.gpus and engine.gpus not in given:
        pairs.append((engine.gpus, '"$NPROC_PER_NODE"'))
    words = ["exec"]
    if engine.environment:
        words += ["env", f'{engine.environment}="${{{engine.environment}:-1}}"']
    words.append(engine.command)
    if not engine.model:
        words.append(shlex.quote(model))
    words += [f"{flag}{engine.separator}{value}" for flag, value in pairs]
    words += (each for each in engine.fixed if each.partition("=")[0] not in given)
    if events and engine.events:
        words.append(engine.events)
    for flag, value in given.items():
        if value != "false":
            words.append(
                flag if value == "true" else f"{flag}{engine.separator}{shlex.quote(value)}"
            )
    return " ".join(words)


def count_at_once(engine: Engine, options: Mapping[str, str]) -> int:
    """Return how many requests a replica processes at the same time."""
    stated = options.get(engine.limit.removeprefix("--"), "")
    number = int(stated) if stated.isascii() and stated.isdecimal() and len(stated) < 6 else 0
    return number or engine.at_once


def list_own_files(engine: Engine) -> Mapping[str, Path]:
    """Return the files of Cavvy that the engine's command needs, by their paths in the working
    folder."""
    if SERVER_FOLDER not in engine.command:
        return {}
    package = Path(__file__).parent.parent / "model_server"
    return {f"{SERVER_FOLDER}/model_server/{each.name}": each for each in package.glob("*.py")}


def list_own_flags(engine: Engine) -> frozenset[str]:
    """Return the options that Cavvy itself sets; a file cannot set them."""
    own = {engine.model, engine.host, engine.port_flag, engine.names}
    if engine.optimises:
        own |= {f"--{name}" for name in OPTIMISATION}
    return frozenset(each.removeprefix("--") for each in own if each)
