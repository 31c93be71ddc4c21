"""Paths of requests lead only to what their names say."""

from pathlib import Path

import pytest

import cavvy.client
from cavvy.client.errors import ApiError
from cavvy.client.paths import job_path


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "/"])
def test_a_name_that_would_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(ApiError, match="cannot be the name of a job"):
        job_path("default", name)


def test_other_characters_are_encoded() -> None:
    assert job_path("default", "a b?x=1") == "/v1/projects/default/jobs/a%20b%3Fx%3D1"


def test_names_become_parts_of_paths_in_one_module() -> None:
    folder = Path(cavvy.client.__file__).parent
    quoting = [each.name for each in folder.rglob("*.py") if "quote(" in each.read_text("utf-8")]
    assert sorted(quoting) == ["mlflow.py", "paths.py"]  # mlflow.py asks another server
