"""The key of a setup: the same exactly where a finished setup would serve again."""

import json
from datetime import UTC, datetime
from hashlib import sha256

from tests.records import make_job_record

from cavvy.control.agents.work import setup_key
from cavvy.domain.jobs import RunOrigin
from cavvy.domain.tasks import TaskSpec, Workdir
from cavvy.domain.values import replace
from cavvy.spec.uses import NAME, explain_unused, is_used

NOW = datetime(2030, 1, 1, tzinfo=UTC)
FILES = {"requirements.txt": "torch", "train.py": "x", "src/pkg/a.c": "int a;", "src/pkgs": "no"}


def manifest(**changes: str) -> bytes:
    files = {
        **FILES,
        **{name.replace("__", "/").replace("_DOT_", "."): text for name, text in changes.items()},
    }
    entries = [
        {
            "path": path,
            "sha256": sha256(text.encode()).hexdigest(),
            "mode": 0o644,
            "size": len(text),
        }
        for path, text in sorted(files.items())
    ]
    return json.dumps({"files": entries}).encode()


def key(content: bytes, project: str = "p", **changes: object) -> str | None:
    task = TaskSpec(
        name="t", run="x", setup="pip install", workdir=Workdir(path="."), params={"lr": 0.1}
    )
    task = replace(task, **changes)  # type: ignore[arg-type]  # any field
    snapshot = sha256(content).hexdigest()
    job = make_job_record(
        NOW, project=project, name="t", task=task, origin=RunOrigin(snapshot=snapshot)
    )
    return setup_key(job, content)


USES = ("requirements.txt", "src/pkg")


def test_without_uses_any_file_counts() -> None:
    assert key(manifest()) == key(manifest())
    assert key(manifest()) != key(manifest(train_DOT_py="y"))


def test_projects_share_no_setup() -> None:
    assert key(manifest(), "a") != key(manifest(), "b")


def test_with_uses_only_these_files_count() -> None:
    plain = key(manifest(), setup_uses=USES)
    assert plain == key(manifest(train_DOT_py="y"), setup_uses=USES)
    assert plain == key(manifest(src__pkgs="other"), setup_uses=USES)
    assert plain != key(manifest(requirements_DOT_txt="jax"), setup_uses=USES)
    assert plain != key(manifest(src__pkg__a_DOT_c="long a;"), setup_uses=USES)
    assert plain != key(manifest(src__pkg__b_DOT_c="new"), setup_uses=USES)
    assert plain != key(manifest().replace(b'"mode": 420', b'"mode": 493'), setup_uses=USES)
    assert plain != key(manifest())
    assert key(manifest(), setup_uses=()) == key(
        manifest(requirements_DOT_txt="jax"), setup_uses=()
    )


def test_what_else_a_setup_can_see_counts() -> None:
    keys = {
        key(manifest(), setup_uses=USES),
        key(manifest(), setup_uses=USES, setup="pip install -q"),
        key(manifest(), setup_uses=USES, image="python:3.12"),
        key(manifest(), setup_uses=USES, env={"A": "b"}),
        key(manifest(), setup_uses=USES, secrets=("TOKEN",)),
    }
    assert len(keys) == 5
    assert key(manifest(), setup=None) is None


def test_parameters_count_where_the_setup_names_their_variables() -> None:
    other = {"lr": 0.2}
    assert key(manifest()) == key(manifest(), params=other)
    named = "make LR=$CAVVY_PARAM_LR"
    assert key(manifest(), setup=named) != key(manifest(), setup=named, params=other)


def test_what_is_used_is_a_file_or_what_lies_in_a_folder() -> None:
    assert is_used("src/pkg/deep/a.c", USES)
    assert is_used("requirements.txt", USES)
    assert not is_used("src/pkgs", USES)
    assert not is_used("requirements.txt.in", USES)


def test_what_no_file_answers_to_is_explained() -> None:
    assert explain_unused(FILES, USES) == []
    [(message, hint)] = explain_unused(FILES, ("requirement.txt", "src"))
    assert (
        message
        == "`setup.uses` names requirement.txt, which is not in the frozen working folder (4 files)"
    )
    assert hint.startswith("did you mean `requirements.txt`?")
    [(_, hint)] = explain_unused(FILES, ("*.txt",))
    assert hint.startswith("patterns are not supported")
    [(_, hint)] = explain_unused(FILES, ("cavvy-0.0.9-py3-none-any.whl",))
    assert hint.startswith(f"this Cavvy adds its own package as `{NAME}`")
