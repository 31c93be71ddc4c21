"""Every block of a guide or tutorial is checked, by the language that it names.

| language | check |
|---|---|
| `console` | runs as written in tests/cli/system/test_tour.py, with the output that it shows |
| `python` | runs as written in the test that `PROGRAMS` names, or is compiled |
| `yaml` | is a valid task or service, or the part of one, or a pool |
| `toml` | are valid settings |
| `json` | is JSON |
| `sh` | is not run, for the reason in `NOT_RUN`; the shell and the commands' parsers accept it |
| `text` | output that `OUTPUTS` explains |

`OTHERS` lists the files of other tools. A block of another kind fails.
"""

import json
import subprocess
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.cli.system.test_tour import CLUSTER, GUIDES, HOSTS, TOURS, find_file_name
from tests.pages import ROOT, Block, read_blocks

from cavvy import settings
from cavvy.providers import registry
from cavvy.task_files import load_file
from cavvy.task_files.pools import parse_pool

PAGES = (*TOURS, *GUIDES, HOSTS, CLUSTER)
BLOCKS = [
    block
    for folder in ("extend", "guides", "tutorials")
    for page in sorted((ROOT / "docs" / folder).glob("*.md"))
    for block in read_blocks(page)
]

PROGRAMS = {
    "guides/formats.md": "tests/train/torch/test_train_guides.py",
    "guides/profile-and-tune.md": "tests/train/torch/test_train_guides.py",
    "guides/python.md": "tests/sdk/system/test_sdk_guide.py",
    "extend/spot-policy.md": "tests/planner/unit/test_deadline_session.py",
    "guides/train.md": "tests/train/torch/test_train_guides.py",
    "tutorials/embedding-service.md": "tests/functions/system/test_functions.py",
    "tutorials/functions.md": "tests/functions/system/test_functions.py",
    "tutorials/sandboxes.md": "tests/sandboxes/system/test_sandbox_jobs.py",
    "tutorials/training-with-resume.md": "tests/train/torch/test_train_guides.py",
}
ELSEWHERE = {
    "guides/language-models.md": "openai and a model; test_gateway_openai.py calls each route with it",
    "guides/trainers.md": "transformers and lightning; tests/train/torch/test_train_trainers.py runs both",
    "extend/write-a-capability.md": "examples/capability; tests/frame adds it to a copy",
    "extend/write-a-provider.md": "parts of a package; examples/provider is a whole one, with tests",
}
# Pages of which no command runs without what they describe.
PLACES = {
    **{
        Path(each.docs).stem: "an account, a cluster or hosts"
        for each in registry.manifests()
        if each.name not in ("local", "join")
    },
    "clouds": "an account of a cloud",
    "credentials": "an account of a cloud",
    "install": "root, systemd, docker or kubectl",
    "isolation": "root, and a firewall to change",
    "postgresql": "a PostgreSQL server",
    "sign-in": "an identity provider",
}
# By page and beginning of the block.
NOT_RUN = {
    (
        "tutorials/sandboxes.md",
        "id=",
    ): "a server; tests/sandboxes/system/test_sandbox_jobs.py runs it",
    ("guides/scripts.md", "cavvy plan train.py"): "a GPU",
    ("guides/access.md", "cavvy forward digits"): "a node that is another machine",
    ("guides/access.md", "ssh digits"): "OpenSSH reads the home folder of /etc/passwd",
    ("guides/backup.md", "sudo -Hu cavvy"): "systemd, docker or kubectl",
    ("guides/backup.md", "docker compose up"): "docker",
    ("guides/audit.md", "file=/var/log"): "a server of a team, and jq",
    ("guides/console.md", "cavvy console --listen 0"): "a certificate",
    ("guides/console.md", "cavvy console --listen 127"): "a port that may be in use",
    ("guides/console.md", "ssh -t"): "another machine",
    ("guides/costs.md", "cavvy cost reconcile"): "a bill of a cloud",
    ("guides/estimate.md", "cavvy bench"): "machines with GPUs",
    ("guides/estimate.md", "cavvy estimate train.py --"): "ten seconds; the page traces the script",
    ("guides/export.md", "cavvy export slurm"): "clusters and accounts",
    ("guides/machines.md", "cavvy dev --gpu"): "a GPU, and an installation of JupyterLab",
    ("guides/offers.md", "cavvy catalog refresh "): "the network",
    ("guides/offers.md", "cavvy nodes quota"): "an account",
    ("guides/policies.md", "cosign"): "cosign and a registry",
    ("guides/secrets.md", "vault"): "a server of HashiCorp Vault",
    ("guides/profile-and-tune.md", "cavvy profile"): "minutes; tests/train measures loops",
    (
        "guides/profile-and-tune.md",
        "cavvy tune",
    ): "minutes; tests/tuning/torch/test_tuning.py tunes",
    ("guides/python.md", "ssh -N"): "another machine",
    ("guides/from-notebooks.md", "cavvy run"): "papermill, which the setup downloads",
    ("guides/language-models.md", "cavvy serve"): "a language model of 200 MB",
    ("guides/language-models.md", "curl"): "a language model of 200 MB",
    ("guides/language-models.md", "cavvy services key"): "a language model of 200 MB",
    ("guides/data.md", "cavvy run task.yaml --workdir"): "files of the reader",
    ("guides/data.md", "cavvy cp --checkpoint"): "a job that ended; test_access_nodes.py copies",
    ("guides/devices.md", ""): "devices; scripts/demo_edge.py does all of it",
    ("guides/serve.md", "cavvy deploy"): "a model that a job has trained",
    ("guides/serve.md", "cd examples/plan-service"): "half a minute; test_service_plan.py plans",
    ("guides/simulate.md", "sacct"): "Slurm; test_slurm_accounts.py runs it",
    ("guides/simulate.md", "cavvy simulate serve --trace Azure"): "recordings to download",
    ("guides/simulate.md", "cavvy simulate fleet --pods csv"): "recordings to download",
    ("guides/simulate.md", "cavvy simulate fleet --jobs philly"): "recordings to download",
    ("guides/team.md", "cavvy login"): "a server with a name and a certificate",
    ("guides/team.md", "cavvy server start"): "a server with a name and a certificate",
    ("guides/team.md", "curl"): "a server with a name and a certificate",
    (
        "guides/templates.md",
        "cavvy run",
    ): "PyTorch; tests/templates/system/test_templates.py runs templates",
    ("guides/train.md", "make setup"): "an installation",
    ("tutorials/first-job.md", "make setup"): "an installation, which CI has made",
    ("tutorials/training-with-resume.md", ""): "PyTorch; a test of the example runs it",
}
OUTPUTS = {
    ("guides/backup.md", "FINDING"): "nodes in a cloud",
    ("guides/backup.md", "0 2 * * *"): "a line for cron, no output",
    ("guides/backup.md", "the database"): "accounts and tokens of a team",
    ("guides/estimate.md", "gpt2"): "the begin of a long table",
    ("guides/from-notebooks.md", "Executing"): "papermill",
    ("guides/gcp.md", "compute.machineTypes"): "rights of an account, no output",
    ("guides/install.md", "cavvy login"): "a token",
    ("guides/kubernetes.md", "provider"): "a cluster",
    ("guides/notebooks.md", "http"): "an account",
    ("guides/oci.md", "Allow"): "rights of an account, no output",
    ("guides/offers.md", "PROVIDER"): "an account",
    ("guides/offers.md", "aws"): "an account",
    ("guides/postgresql.md", "the server"): "a PostgreSQL server",
    ("guides/profile-and-tune.md", "measuring"): "a slow disk",
    ("guides/python.md", ""): "compared by tests/sdk/system/test_sdk_guide.py",
    ("guides/ray.md", "provider"): "a cluster",
    ("guides/serve.md", "0 8 * * 1-5"): "two lines for cron, no output",
    ("guides/serve.md", "WAY"): "half a minute; test_service_plan.py compares figures",
    ("guides/serve.md", "slo"): "an hour of requests",
    ("guides/serve.md", "update"): "a service that fails; test_serve_canary.py rolls back",
    ("guides/sign-in.md", "open"): "an identity provider",
    ("guides/slurm.md", "provider"): "a cluster",
    ("guides/ssh-hosts.md", "provider"): "hosts",
    ("tutorials/sandboxes.md", "42 0"): "first.py",
    ("tutorials/sandboxes.md", "attempt"): "agent.py",
    ("tutorials/sandboxes.md", "[True"): "many.py",
    ("tutorials/sandboxes.md", "1 left"): "files.py",
    ("tutorials/embedding-service.md", ""): (
        "packages; tests/functions/system/test_functions.py runs it"
    ),
    ("tutorials/functions.md", ""): "packages; tests/functions/system/test_functions.py runs it",
}
# Files of other programs, or of other kinds.
OTHERS = {
    ("guides/console.md", "server {"): "nginx",
    ("guides/install.md", "configMapGenerator"): "Kustomize",
    ("extend/write-a-capability.md", "[project"): "a package",
    ("guides/install.md", "patches"): "Kustomize",
    ("guides/install.md", "# systemctl edit"): "systemd",
    ("guides/isolation.md", "# ~/.ssh/config"): "OpenSSH",
    ("guides/kubernetes.md", "- {name"): "the file of the setting `pools`",
    ("guides/postgresql.md", "[Service]"): "systemd",
    ("guides/sign-in.md", "jobs:"): "GitHub Actions",
    ("guides/sign-in.md", "train:"): "GitLab CI",
    ("guides/simulate.md", "# scenario.yaml"): "a scenario, which test_simulate_scenario.py reads",
    ("tutorials/money.md", "# plan.yaml"): "a plan of costs, which the tour reads",
    ("guides/ssh-hosts.md", "# inventory"): "the inventory of hosts",
    ("extend/write-a-provider.md", "[project.entry"): "a pyproject.toml",
    ("guides/from-slurm.md", "executor = submitit"): "needs submitit",
    ("tutorials/first-job.md", "# wrong.yaml"): "wrong on purpose, as its test sees",
}


def find_reason(block: Block, reasons: Mapping[tuple[str, str], str]) -> str:
    found = [
        reason
        for (page, start), reason in reasons.items()
        if page == block.page and block.text.startswith(start)
    ]
    assert len(found) < 2, f"{block}: {found}"
    return found[0] if found else ""


def find_class(block: Block) -> str:
    """What checks a block; "" where nothing does."""
    if find_reason(block, OTHERS):
        return "another program's"
    if block.language == "console":
        return "runs" if f"docs/{block.page}" in PAGES else ""
    if block.language == "python" and find_file_name(block.text) and f"docs/{block.page}" in PAGES:
        return "runs"
    if block.language == "python":
        return "runs" if block.page in PROGRAMS else "compiled" if block.page in ELSEWHERE else ""
    if block.language == "sh" and find_file_name(block.text):
        return "runs" if f"docs/{block.page}" in PAGES else ""
    if block.language == "sh":
        why = PLACES.get(Path(block.page).stem, "") or find_reason(block, NOT_RUN)
        return f"needs {why}" if why else ""
    if block.language == "text":
        return f"output of {why}" if (why := find_reason(block, OUTPUTS)) else ""
    return "valid" if block.language in ("yaml", "toml", "json") else ""


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_every_block_is_checked(block: Block) -> None:
    assert find_class(block), (
        f"```{block.language} of {block} is not checked: mark it as `console` and add the page to "
        "tests/cli/system/test_tour.py, or state here why it cannot run"
    )


def test_every_reason_is_needed() -> None:
    for reasons in (NOT_RUN, OUTPUTS, OTHERS):
        for page, start in reasons:
            assert [each for each in BLOCKS if each.page == page and each.text.startswith(start)], (
                f"no block of {page} begins with {start!r}"
            )
    for page in {f"docs/{block.page}" for block in BLOCKS if block.language == "console"}:
        assert page in PAGES


def pick(*languages: str) -> Any:
    chosen = [block for block in BLOCKS if block.language in languages]
    return pytest.mark.parametrize("block", chosen, ids=str)


def split_choices(text: str) -> list[str]:
    """The alternatives of a block whose lines all have the same key; otherwise the block itself."""
    lines = [line for line in text.splitlines() if line.strip()]
    keys = {line.split(":")[0] for line in lines}
    return lines if len(keys) == 1 < len(lines) else [text]


def complete(text: str) -> str:
    """A part of a task file becomes a whole one."""
    found = yaml.safe_load(text)
    own = {"run", "image"} & set(found) or "engine" in found.get("service", {})
    return text if own else f"{text}\nrun: 'true'\n"


@pick("yaml")
def test_task_files_are_valid(block: Block, tmp_path: Path) -> None:
    if find_reason(block, OTHERS):
        yaml.safe_load(block.text)
        return
    name = find_file_name(block.text)
    if name == "pool.yaml":
        assert parse_pool(block.text, file=name, project="p").name
        return
    for text in split_choices(block.text):
        file = tmp_path / (name or "task.yaml")
        file.write_text(text if name else complete(text))
        found = load_file(file)
        assert found.tasks
        assert not found.refused


@pick("toml")
def test_settings_are_known(block: Block, tmp_path: Path) -> None:
    if find_reason(block, OTHERS):
        tomllib.loads(block.text)
        return
    file = tmp_path / "settings.toml"
    file.write_text(block.text)
    given = settings.load({"CAVVY_CONFIG": str(file), "HOME": str(tmp_path)})
    manifests = {each.name: each for each in registry.manifests()}
    assert given.values or given.providers
    for name, table in given.providers.items():
        registry.check_settings(manifests[name], table)


@pick("json")
def test_documents_are_json(block: Block) -> None:
    json.loads(block.text)


@pick("sh")
def test_commands_that_are_not_run_could_be_called(block: Block) -> None:
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert checked.stderr == ""
