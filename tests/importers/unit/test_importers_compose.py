"""Files of Docker Compose become groups of jobs, or errors with a line."""

import http.server
import os
import subprocess
import threading
from pathlib import Path

import pytest

from cavvy.capabilities.importers.compose import merging
from cavvy.capabilities.importers.compose.files import _WAIT
from cavvy.domain.tasks import AcceleratorNeed, ImageBuild, JobDependency, TaskSpec, VolumeKind
from cavvy.spec import SpecError
from cavvy.spec.problems import ProblemNotes
from cavvy.spec.tree import Node, compose_all, to_value
from cavvy.task_files import ReadOptions, load_file, load_tasks

GPU = "{resources: {reservations: {devices: [{driver: nvidia, capabilities: [gpu]%s}]}}}"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("COMPOSE_PROFILES", raising=False)
    monkeypatch.delenv("TAG", raising=False)
    place = tmp_path / "stack"
    place.mkdir()
    return place


def read(folder: Path, text: str) -> dict[str, TaskSpec]:
    (folder / "compose.yaml").write_text(text)
    found = load_tasks(folder / "compose.yaml")
    assert found[0].source.guess.endswith("was read as a file of Docker Compose")
    return {each.task.name: each.task for each in found}


def read_one(folder: Path, lines: str) -> TaskSpec:
    text = "services:\n  web:\n    image: nginx\n" + "".join(
        f"    {line}\n" for line in lines.splitlines()
    )
    return read(folder, text)["web"]


def complain(folder: Path, text: str) -> str:
    with pytest.raises(SpecError) as error:
        read(folder, text)
    return str(error.value)


def list_notes(folder: Path) -> str:
    found = load_file(folder / "compose.yaml")
    return "\n".join([*map(str, found.kept), *found.notes])


STACK = """\
services:
  api:
    build: {context: ./app, target: run, args: [A=1]}
    depends_on:
      db: {condition: service_healthy}
      setup: {condition: service_completed_successfully}
    ports: ["8501:80"]
  db:
    image: postgres:16
    container_name: pg
    volumes: [data:/var/lib/data, "./init.sql:/init.sql:ro"]
    healthcheck: {test: [CMD-SHELL, pg_isready -U postgres]}
  setup: {image: flyway, command: [migrate, it is]}
  debug: {image: busybox, profiles: [debug]}
volumes: {data: }
"""


def test_services_become_a_group(folder: Path) -> None:
    tasks = read(folder, STACK)
    assert [*tasks] == ["api", "db", "setup"]
    api, db, setup = tasks.values()
    assert api.image_build == ImageBuild(path="app", target="run", args={"A": "1"})
    assert api.after == (JobDependency("setup"),)
    assert (api.group and api.group.name, api.group and api.group.helper) == ("stack", False)
    assert (db.group and db.group.name, db.group and db.group.helper) == ("stack", True)
    assert setup.group is None
    assert setup.run == "exec ${{ image.entrypoint }} migrate 'it is'"
    assert "echo \"${CAVVY_HOSTS_DB%%,*}\" 'db pg'" in api.run
    assert "_cavvy_wait db \"${CAVVY_HOSTS_DB%%,*}\" 5432 '' 600" in api.run
    assert db.run.endswith("\nexec ${{ image.command }}")
    named, part = db.volumes
    assert (named.kind, named.source, named.path) == (
        VolumeKind.NAMED,
        "stack_data",
        "/var/lib/data",
    )
    assert (part.kind, part.source, part.read_only) == (VolumeKind.FOLDER, "init.sql", True)
    assert (db.workdir and db.workdir.path, setup.workdir) == (".", None)
    said = list_notes(folder)
    assert "COMPOSE_PROFILES=debug before `cavvy` adds it" in said
    assert "`cavvy forward api 8501:80`" in said
    assert "others wait until its port 5432 answers" in said


def test_profiles_are_chosen_by_the_variable_of_compose(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COMPOSE_PROFILES", "debug")
    assert "debug" in read(folder, STACK)


@pytest.mark.parametrize(
    ("lines", "need"),
    [
        ("deploy: " + GPU % ", count: 2", AcceleratorNeed(count_min=2)),
        ("deploy: " + GPU % ", count: all", AcceleratorNeed(count_max=65536)),
        ("deploy: " + GPU % "", AcceleratorNeed(count_max=65536)),
        ("deploy: " + GPU % ", device_ids: ['0', '3']", AcceleratorNeed(count_min=2)),
        ("gpus: all", AcceleratorNeed(count_max=65536)),
        ("runtime: nvidia", AcceleratorNeed(count_max=65536)),
        ("gpus: [{driver: nvidia, count: 1}]", AcceleratorNeed(count_min=1)),
    ],
)
def test_gpus(folder: Path, lines: str, need: AcceleratorNeed) -> None:
    assert read_one(folder, lines).resources.accelerators == (need,)


def test_the_values_of_a_service(folder: Path) -> None:
    (folder / ".env").write_text("# x\nexport A='one two' # y\nTAG=7\nB=b # c\n")
    task = read_one(
        folder,
        """\
env_file: [.env, {path: none.env, required: false}]
environment: {B: "${B}-${C:-c}", D: "$$x", ON: true}
command: sh -c "echo $$A ${TAG}"
entrypoint: []
restart: on-failure:3
stop_grace_period: 1m30s
cpus: "1.5"
mem_limit: 512m
x-own: 1
""",
    )
    assert task.env == {"A": "one two", "TAG": "7", "B": "b-c", "D": "$x", "ON": "true"}
    assert task.run == "exec sh -c 'echo $A 7'"
    assert (task.retry.exit, task.grace.total_seconds()) == (3, 90)
    assert (task.resources.cpus_min, task.resources.memory_min_mib) == (1.5, 512)
    assert task.group is None
    assert task.workdir is None
    entry = read_one(folder, 'working_dir: /app\nentrypoint: python3 -u\ncommand: ["a b.py"]')
    assert entry.run == "cd /app\nexec python3 -u 'a b.py'"


def test_folders_without_files_are_those_of_the_container(folder: Path) -> None:
    (folder / "empty").mkdir()
    (folder / "full").mkdir()
    (folder / "full" / "a").write_text("a")
    task = read_one(folder, "volumes: [./models:/models, ./empty:/e, ./full:/f]\ncap_drop: [ALL]")
    assert [(each.source, each.path) for each in task.volumes] == [("full", "/f")]
    assert "./models is empty here, so /models is a folder of the container" in list_notes(folder)


def test_anchors_and_merged_keys(folder: Path) -> None:
    tasks = read(
        folder,
        "x-base: &base\n  image: nginx\n  environment: {A: '1'}\n"
        "services:\n  a: {<<: *base}\n  b: {<<: *base, environment: {B: '2'}}\n",
    )
    assert (tasks["a"].env, tasks["b"].env) == ({"A": "1"}, {"B": "2"})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("privileged: true", "jobs get no privileges"),
        ("imagee: x", "did you mean image?"),
        ("deploy: {replicas: 3}", "several replicas"),
        ("network_mode: service:db", "the name of the other service"),
        ("volumes: ['../up:/x']", "outside of the folder"),
        ("volumes: ['/var/run/docker.sock:/var/run/docker.sock']", "the engine of their node"),
        ("volumes: ['~/.ssh:/root/.ssh']", "home folder"),
        ("volumes: [data:/x]", "which `volumes` does not have"),
        ("env_file: ../../etc/passwd", "outside of the folder"),
        ("env_file: none.env", "there is no file none.env"),
        ("restart: sometimes", "on-failure:3"),
        ("mem_limit: lots", "such as 512m"),
        ("cpus: many", "such as 2 or 0.5"),
        ("stop_grace_period: 90", "such as 30s"),
        ("stop_grace_period: 90h", "an hour|1h|too long"),
        ("ports: ['http']", "no port"),
        ("deploy: " + GPU % ", count: some", "1, 2 or all"),
        ("deploy: " + GPU % ", count: 1, device_ids: ['0']", "exclude each other"),
        ("gpus: [{driver: fpga}]", "devices of fpga"),
        ("depends_on: [db]", "no service that starts"),
        ("depends_on: [web]", "wait for each other"),
        ("depends_on: {web: {condition: ready}}", "is unknown"),
        ('command: "${NONE:?set it}"', "NONE is not set: set it"),
        ('command: "echo \'open"', "cannot be read"),
        ("environment: {1BAD: x}", "environment variable"),
        ("extends: {file: a.yaml}", "the keys of the other service"),
        ("secrets: [a]", "add `a:` to `secrets`"),
        ("configs: [{source: a, made: up}]", "'made' is unknown"),
        ("configs: [{source: a, mode: 9}]", "such as 0440"),
        ("extra_hosts: ['host.docker.internal:host-gateway']", "the machine of Docker"),
        ("extra_hosts: ['a:b']", "is no address"),
        ("extra_hosts: ['a;rm -rf x:1.2.3.4']", "is no name of a host"),
    ],
)
def test_what_cannot_be_kept_is_an_error_with_its_line(folder: Path, line: str, said: str) -> None:
    text = f"services:\n  web:\n    image: nginx\n    {line}\n"
    found = complain(folder, text)
    assert any(part in found for part in said.split("|")), found
    assert "compose.yaml:4:" in found or "compose.yaml:2:" in found


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("services: {}\n", "has no services"),
        ("services: {a: x}\n", "is no table"),
        ("services: {a: {}}\n", "neither `image` nor `build`"),
        ("services: {a: {image: x, profiles: [p]}}\n", "without a profile"),
        ("include: [b.yaml]\nservices: {a: {image: x}}\n", "`include` is not supported"),
        ("servcies: 1\nservices: {a: {image: x}}\n", "no key 'servcies'"),
    ],
)
def test_mistakes_in_the_whole_file(folder: Path, text: str, said: str) -> None:
    assert said in complain(folder, text)


def test_a_service_that_ends_first_cannot_need_others(folder: Path) -> None:
    text = """\
services:
  app: {image: x, depends_on: {init: {condition: service_completed_successfully}}}
  init: {image: x, depends_on: [db]}
  db: {image: x}
"""
    assert "init must end before others start, and needs db meanwhile" in complain(folder, text)


@pytest.mark.parametrize(
    ("check", "expose", "wait"),
    [
        ("{test: curl -f http://localhost:8000/health}", "[]", "8000 /health 600"),
        ("{test: [CMD, wget, 'http://127.0.0.1/']}", "[]", "80 / 600"),
        ("{test: ./check, interval: 5m, retries: 9}", "['9000']", "9000 '' 2700"),
    ],
)
def test_others_wait_for_a_healthy_service(
    folder: Path, check: str, expose: str, wait: str
) -> None:
    text = f"""\
services:
  a: {{image: x, depends_on: {{b: {{condition: service_healthy}}}}}}
  b: {{image: x, healthcheck: {check}, expose: {expose}}}
"""
    assert f'_cavvy_wait b "${{CAVVY_HOSTS_B%%,*}}" {wait}' in read(folder, text)["a"].run
    hidden = text.replace(check, "{test: ./check}").replace(expose, "[]")
    assert "name its port in `expose` of b" in complain(folder, hidden)
    without = text.replace(f"healthcheck: {check}, ", "")
    assert "b has no `healthcheck`" in complain(folder, without)


def test_the_wait_ends_when_the_service_answers() -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 500)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_port

        def wait(port: int, path: str) -> tuple[int, str]:
            line = f"{_WAIT}_cavvy_wait db 127.0.0.1 {port} '{path}' 2\necho on\n"
            done = subprocess.run(["sh", "-ec", line], capture_output=True, text=True, check=False)
            return done.returncode, done.stdout + done.stderr

        assert wait(port, "/health") == (0, "on\n")
        assert wait(port, "") == (0, "on\n")
        assert wait(port, "/other") == (1, "db did not become healthy in 2 s\n")
        server.shutdown()
    assert wait(port, "") == (1, "db did not become healthy in 2 s\n")


def test_the_tool_can_be_named(folder: Path) -> None:
    (folder / "a.yaml").write_text("services:\n  a: {image: x, run: y}\n")
    with pytest.raises(SpecError, match="has no key 'run'"):
        load_tasks(folder / "a.yaml", options=ReadOptions(dialect="compose"))


WANTS = [
    "environment: [API_TOKEN]",
    "environment: {API_TOKEN: }",
    'environment: {A: "${API_TOKEN}"}',
    'command: echo "${API_TOKEN:?needed}"',
    "build: {context: ., args: [API_TOKEN]}",
]


@pytest.mark.parametrize("lines", WANTS)
def test_variables_of_this_machine_are_sent_only_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lines: str
) -> None:
    """Docker Compose starts its services here; jobs may run with anyone."""
    monkeypatch.setenv("API_TOKEN", "from-here")
    text = f"services:\n  web:\n    image: nginx\n    {lines}\n"
    if lines.startswith("build"):
        text = text.replace("    image: nginx\n", "")
    told = complain(folder, text)
    assert "--env API_TOKEN sends this one" in told
    assert "from-here" not in told
    named = ReadOptions(overrides='{"env": {"API_TOKEN": "named"}}')
    [found] = load_tasks(folder / "compose.yaml", options=named)
    build = found.task.image_build
    taken = [found.task.run, *found.task.env.values(), *(build.args.values() if build else ())]
    assert any("named" in each for each in taken)
    assert not any("from-here" in each for each in taken)
    (folder / ".env").write_text("API_TOKEN=beside\n")
    assert "from-here" not in str(read(folder, text))


def test_a_default_is_taken_although_this_machine_has_the_variable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PORT", "9999")
    task = read_one(folder, 'environment: {A: "${PORT:-3000}", B: "${PORT:+set}"}')
    assert task.env == {"A": "3000", "B": ""}
    assert "--env PORT sends it" in list_notes(folder)


def test_dot_env_is_no_link_out_of_the_folder(folder: Path) -> None:
    (folder.parent / "keys").write_text("TOKEN=secret\n")
    (folder / ".env").symlink_to("../keys")
    told = complain(folder, "services:\n  web: {image: nginx, environment: {A: x}}\n")
    assert ".env is a link out of the folder" in told


def test_configs_and_secrets_are_files_of_the_container(folder: Path) -> None:
    (folder / "app.conf").write_text("a\n")
    (folder / "pw.txt").write_text("secret\n")
    (folder / "compose.yaml").write_text("""\
services:
  web:
    image: nginx
    entrypoint: [sh, -c, "cat /tmp/here/in.conf /tmp/here/t"]
    configs:
      - {source: app, target: /etc/app.conf}
      - {source: inline, target: /tmp/here/in.conf, mode: 0440, uid: "5"}
    secrets: [password, {source: token, target: /tmp/here/t}]
    extra_hosts: ["api.local:10.0.0.5", "six=[::1]"]
configs:
  app: {file: ./app.conf}
  inline: {content: "port=${PORT:-80} $$HOME\\n"}
secrets:
  password: {file: ./pw.txt}
  token: {environment: MY_TOKEN}
""")
    found = load_file(folder / "compose.yaml")
    (task,) = found.tasks
    assert task.secrets == ("PASSWORD", "MY_TOKEN")
    (volume,) = task.volumes
    assert (volume.source, volume.path, volume.read_only) == ("app.conf", "/etc/app.conf", True)
    assert "secret\n" not in task.run
    assert 'printf %s "$PASSWORD" > /run/secrets/password' in task.run
    notes = {each.key: each.reason for each in found.kept}
    assert notes["secrets.password"] == (
        "set it with `cavvy secret set PASSWORD --file ./pw.txt`, and name ./pw.txt in "
        ".cavvyignore, so that it is not sent with the folder"
    )
    hosts, _, rest = task.run.partition("mkdir")
    assert hosts == (
        "echo '10.0.0.5 api.local' >> /etc/hosts || exit\necho '::1 six' >> /etc/hosts || exit\n"
    )
    own = rest.replace("/tmp/here", str(folder / "here")).replace("/run/secrets", str(folder / "s"))
    env = {**os.environ, "PASSWORD": "p", "MY_TOKEN": "q"}
    done = subprocess.run(
        ["sh", "-c", f"mkdir{own}"], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout == "port=80 $HOME\nq"
    assert (folder / "s" / "password").read_text() == "p"


def test_no_key_is_left_out_without_a_word(folder: Path) -> None:
    (folder / "compose.yaml").write_text("""\
services:
  web:
    image: nginx
    container_name: front
    hostname: front
    healthcheck: {test: [CMD, "true"]}
    ports: ["53:53/udp", {target: 54, protocol: udp}, "80:80/tcp"]
    deploy:
      resources:
        limits: {cpus: "4", memory: 8g}
        reservations:
          cpus: "2"
          memory: 8g
          devices: [{driver: nvidia, count: 1, capabilities: [gpu], options: {a: b}}]
""")
    found = load_file(folder / "compose.yaml")
    assert [(each.line, each.key) for each in found.kept] == [
        (4, "services.web.container_name"),
        (5, "services.web.hostname"),
        (6, "services.web.healthcheck"),
        (7, "ports"),
        (10, "deploy.resources.limits.cpus"),
        (14, "devices.options"),
    ]
    assert sum("cavvy forward" in note for note in found.notes) == 1


IDS = ", device_ids: ['0,2,3']"


@pytest.mark.parametrize(
    ("lines", "need"),
    [
        (f"deploy: {GPU % ', device_ids: [all]'}", AcceleratorNeed(count_max=65_536)),
        (f"deploy: {GPU % IDS}", AcceleratorNeed(count_min=3)),
        ("devices: [nvidia.com/gpu=all]", AcceleratorNeed(count_max=65_536)),
        ("devices: [nvidia.com/gpu=0, nvidia.com/gpu=1]", AcceleratorNeed(count_min=2)),
        ("devices: [/dev/nvidia0, /dev/nvidiactl, /dev/nvidia-uvm:/x]", AcceleratorNeed()),
        (
            f"deploy: {(GPU % ', device_ids: [nvidia.com/gpu=all]').replace('nvidia,', 'cdi,')}",
            AcceleratorNeed(count_max=65_536),
        ),
    ],
)
def test_devices_that_are_gpus(folder: Path, lines: str, need: AcceleratorNeed) -> None:
    assert read_one(folder, lines).resources.accelerators == (need,)


def test_other_devices_are_refused(folder: Path) -> None:
    text = "services: {a: {image: b, devices: ['/dev/snd:/dev/snd']}}"
    assert "the device /dev/snd:/dev/snd is not supported" in complain(folder, text)


def test_a_cache_in_the_home_folder_is_a_folder_of_the_container(folder: Path) -> None:
    task = read_one(folder, "volumes: ['~/.cache/huggingface:/root/.cache/huggingface']")
    assert not task.volumes
    assert "is a cache" in list_notes(folder)
    assert "home folder" in complain(
        folder, "services: {a: {image: b, volumes: ['~/.cache/../.ssh:/x']}}"
    )


def test_a_missing_folder_whose_name_begins_with_a_point(folder: Path) -> None:
    for source in ("./.cache/", "./data/.cache"):
        task = read_one(folder, f"volumes: ['{source}:/cache']")
        assert task.volumes == ()
        assert f"{source} is empty here" in list_notes(folder)


def put(folder: Path, **files: str) -> None:
    for name, text in files.items():
        (folder / f"{name.replace('_', '-')}.yml").write_text(text)


BASE = """\
services:
  api:
    image: app:1
    command: serve
    environment: [A=1, B=2]
    volumes: [./data:/data, ./old:/logs]
    expose: ["80"]
  web:
    image: nginx
"""
CHANGE = """\
services:
  api:
    gpus: all
    command: [train, --fast]
    environment: {B: "3", C: "4"}
    volumes: [./new:/logs]
"""


def check_joined(file: Path) -> str:
    for name in ("data", "old", "new"):
        (file.parent / name).mkdir(exist_ok=True)
        (file.parent / name / "a").write_text("")
    found = load_tasks(file)
    tasks = {each.task.name: each.task for each in found}
    assert sorted(tasks) == ["api", "web"]
    api = tasks["api"]
    assert api.image == "app:1"
    assert api.run.endswith("train --fast")
    assert api.env == {"A": "1", "B": "3", "C": "4"}
    assert {(each.path, each.source) for each in api.volumes} == {
        ("/data", "data"),
        ("/logs", "new"),
    }
    assert api.resources.accelerators
    return found[0].source.guess


def test_an_override_beside_the_file_is_read_as_by_docker_compose_up(folder: Path) -> None:
    put(folder, docker_compose=BASE)
    (folder / "docker-compose.override.yml").write_text(CHANGE)
    said = check_joined(folder / "docker-compose.yml")
    assert "docker-compose.override.yml changes it, so both were read" in said


def test_a_file_that_changes_services_is_read_with_theirs(folder: Path) -> None:
    put(folder, docker_compose=BASE)
    (folder / "docker-compose.gpu.yml").write_text(CHANGE)
    said = check_joined(folder / "docker-compose.gpu.yml")
    assert "`docker compose -f docker-compose.yml -f docker-compose.gpu.yml`" in said


def test_a_file_that_can_start_stands_alone(folder: Path) -> None:
    put(folder, docker_compose=BASE)
    (folder / "other.yml").write_text("services:\n  api:\n    image: other\n")
    (found,) = load_tasks(folder / "other.yml")
    assert found.task.image == "other"


def test_mistakes_of_two_files_are_named_with_their_own_lines(folder: Path) -> None:
    put(folder, docker_compose=BASE + "    privileged: true\n")
    (folder / "docker-compose.gpu.yml").write_text(CHANGE + "    madeup: 1\n")
    with pytest.raises(SpecError) as error:
        load_tasks(folder / "docker-compose.gpu.yml")
    places = {(each.file.rpartition("/")[2], each.line) for each in error.value.problems}
    assert places == {("docker-compose.yml", 10), ("docker-compose.gpu.yml", 7)}


def test_notes_of_two_files_are_named_with_their_own_lines(folder: Path) -> None:
    put(folder, docker_compose=BASE + "    tty: true\n")
    (folder / "docker-compose.gpu.yml").write_text(CHANGE)
    kept = load_file(folder / "docker-compose.gpu.yml").kept
    (tty,) = (each for each in kept if each.key.endswith("tty"))
    assert (tty.line, tty.reason.endswith("(in docker-compose.yml)")) == (10, True)


def test_a_file_that_only_adds_arguments_of_the_build_is_read_with_the_other(folder: Path) -> None:
    put(folder, docker_compose="services:\n  api:\n    build: ./app\n    command: serve\n")
    (folder / "app").mkdir()
    (folder / "docker-compose.gpu.yml").write_text(
        "services:\n  api:\n    build: {args: {VARIANT: gpu}}\n    gpus: all\n"
    )
    (found,) = load_tasks(folder / "docker-compose.gpu.yml")
    build = found.task.image_build
    assert build is not None
    assert (build.path, build.args) == ("app", {"VARIANT": "gpu"})


def join_lines(folder: Path, base: str, change: str) -> TaskSpec:
    """Read a file with one service, which has these lines, and one beside it that changes it."""
    for name, lines in (("compose", base), ("compose.override", change)):
        inner = "\n".join(f"    {line}" for line in lines.splitlines())
        text = f"services:\n  api:\n{inner}\nvolumes: {{data: , other: , x: }}\n"
        (folder / f"{name}.yaml").write_text(text)
    (found,) = load_tasks(folder / "compose.yaml")
    return found.task


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("env_file: a.env", "env_file: b.env"),
        ("env_file: [a.env]", "env_file: b.env"),
        ("env_file: a.env", "env_file: [{path: b.env}]"),
        ("env_file: [{path: a.env}, {path: b.env, required: false}]", "env_file: b.env"),
    ],
)
def test_the_files_of_variables_of_both_files_are_read(
    base: str, change: str, folder: Path
) -> None:
    (folder / "a.env").write_text("A=1\nB=1\n")
    (folder / "b.env").write_text("B=2\n")
    assert join_lines(folder, f"image: b\n{base}", change).env == {"A": "1", "B": "2"}


@pytest.mark.parametrize("name", ["test", "command", "entrypoint", "environment", "build"])
def test_services_may_have_the_names_of_keys(name: str, folder: Path) -> None:
    (folder / "compose.yaml").write_text(f"services: {{{name}: {{image: b, command: [x, '1']}}}}")
    change = f"services: {{{name}: {{environment: {{command: a}}, command: [y]}}}}"
    (folder / "compose.override.yaml").write_text(change)
    (found,) = load_tasks(folder / "compose.yaml")
    assert (found.task.image, found.task.env) == ("b", {"command": "a"})
    assert found.task.run.endswith(" y")


def test_the_command_of_a_check_of_health_is_replaced() -> None:
    base = compose_one(
        "services: {a: {healthcheck: {test: [CMD, a], interval: 5s}, profiles: [p]}}"
    )
    change = compose_one("services: {a: {healthcheck: {test: [CMD, b]}, profiles: [p, q]}}")
    assert to_value(merging._merge(base, change, ())) == {
        "services": {
            "a": {"healthcheck": {"test": ["CMD", "b"], "interval": "5s"}, "profiles": ["p", "q"]}
        }
    }


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("build: {dockerfile: D, args: {A: '1'}, context: old}", "build: ."),
        ("build: .", "build: {dockerfile: D, args: [A=1]}"),
        ("build: {dockerfile: D, args: [A=0]}", "build: {context: ., args: {A: '1'}}"),
    ],
)
def test_a_build_is_joined_in_each_form(base: str, change: str, folder: Path) -> None:
    build = join_lines(folder, base, change).image_build
    assert build is not None
    assert (build.path, build.dockerfile, build.args) == (".", "D", {"A": "1"})


@pytest.mark.parametrize("base", ["['a:10.0.0.1']", "{a: 10.0.0.1}", "[a=10.0.0.1]"])
@pytest.mark.parametrize("change", ["['b:10.0.0.2']", "{b: 10.0.0.2}"])
def test_the_hosts_of_both_files_are_known(base: str, change: str, folder: Path) -> None:
    run = join_lines(folder, f"image: b\nextra_hosts: {base}", f"extra_hosts: {change}").run
    assert "'10.0.0.1 a'" in run
    assert "'10.0.0.2 b'" in run


@pytest.mark.parametrize("key", ["dns", "dns_opt", "dns_search", "tmpfs", "label_file"])
def test_one_value_and_a_list_become_a_list(key: str) -> None:
    base, change = (
        compose_one(f"services: {{a: {{{key}: {text}}}}}") for text in ("one", "[one, two]")
    )
    joined = to_value(merging._merge(base, change, ()))
    assert joined == {"services": {"a": {key: ["one", "two"]}}}


@pytest.mark.parametrize(
    ("base", "change"),
    [
        ("'${D:-data}:/a'", "'${E:-other}:/b'"),
        ("'data:/a'", "'${D:-other}:/b'"),
        ("'data:/a/', 'x:/b'", "'other:/b/'"),
        ("'data:/a', '${X:-a:b}:/b:ro'", "{type: volume, source: other, target: /b}"),
    ],
)
def test_volumes_are_joined_by_their_paths(base: str, change: str, folder: Path) -> None:
    task = join_lines(folder, f"image: b\nvolumes: [{base}]", f"volumes: [{change}]")
    found = {each.path.rstrip("/"): each.source.rpartition("_")[2] for each in task.volumes}
    assert found == {"/a": "data", "/b": "other"}


@pytest.mark.parametrize(
    "text", [f"{CHANGE}---\n", f"---\n---\n{CHANGE}", f"{CHANGE}---\n# none\n"]
)
def test_empty_documents_of_two_files_do_not_count(folder: Path, text: str) -> None:
    put(folder, docker_compose=f"{BASE}---\n")
    (folder / "docker-compose.override.yml").write_text(text)
    assert "both were read" in check_joined(folder / "docker-compose.yml")


def test_a_second_file_of_several_documents_is_refused(folder: Path) -> None:
    put(folder, docker_compose=BASE)
    (folder / "docker-compose.override.yml").write_text(CHANGE + "---\nservices: {}\n")
    with pytest.raises(SpecError) as error:
        load_tasks(folder / "docker-compose.yml")
    (problem,) = error.value.problems
    assert (problem.file, problem.line) == ("docker-compose.override.yml", 8)
    assert "second document" in problem.message


def compose_one(text: str) -> Node:
    (node,) = compose_all(text, ProblemNotes("compose.yaml", text))
    return node
