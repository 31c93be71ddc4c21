"""dstack's profiles: their keys are added to the configurations that lack them."""

from pathlib import Path

import pytest

from cavvy.domain.tasks import SpotPolicy
from cavvy.spec import SpecError
from cavvy.task_files import ReadOptions, load_file, load_task, parse_task

PROFILES = """\
profiles:
  - name: cheap
    max_price: 1.5
  - name: usual
    default: true
    backends: [aws]
    spot_policy: spot
    max_duration: 72h
"""
FILE = "type: task\nspot_policy: on-demand\nmax_duration:\ncommands:\n  - |\n    echo hi"


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    home, work = tmp_path / "home", tmp_path / "work"
    for folder in (home, work):
        (folder / ".dstack").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)
    for name in ("DSTACK_PROFILE", "DSTACK_NO_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (work / "a.dstack.yml").write_text(FILE)
    return work / "a.dstack.yml"


@pytest.mark.parametrize("place", ["work/.dstack/profiles.yml", "home/.dstack/profiles.yaml"])
def test_the_default_profile_adds_missing_keys(file: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / place).write_text(PROFILES)
    loaded = load_task(file)
    needs, limits = loaded.task.resources, loaded.task.limits
    assert (needs.providers, needs.spot) == (("aws",), SpotPolicy.NEVER)
    assert limits.duration is not None
    assert limits.duration.total_seconds() == 72 * 3600
    note = next(each for each in loaded.source.kept if each.key == "profile")
    assert note.reason.startswith(f"the profile usual of {tmp_path / place} adds backends, max_d")
    submitted = parse_task(loaded.text, file="a.dstack.yml", options=ReadOptions(dialect="dstack"))
    assert submitted == loaded.task


def test_a_variable_names_the_profile(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file.parent / ".dstack/profiles.yml").write_text(PROFILES)
    monkeypatch.setenv("DSTACK_PROFILE", "cheap")
    needs = load_task(file).task.resources
    assert needs.providers == ()
    assert needs.max_rate is not None
    monkeypatch.setenv("DSTACK_PROFILE", "other")
    with pytest.raises(SpecError, match="no file with profiles has a profile other"):
        load_task(file)
    monkeypatch.setenv("DSTACK_NO_PROFILE", "1")
    assert load_task(file).text == FILE


def test_only_runs_of_dstack_have_profiles(file: Path) -> None:
    (file.parent / ".dstack/profiles.yml").write_text("not: valid")
    for text in ("run: x\nnum_nodes: 1\n", "type: fleet\nname: a\nnodes: 1\n"):
        file.write_text(text)
        assert load_file(file).what in ("task", "fleet")


@pytest.mark.parametrize(
    "text", ["{type: task, commands: [x]}", "{\ntype: task,\ncommands: [x]}", f"{FILE}\n...\n"]
)
def test_a_profile_needs_one_key_per_line(file: Path, text: str) -> None:
    (file.parent / ".dstack/profiles.yml").write_text(PROFILES)
    file.write_text(text)
    with pytest.raises(SpecError, match="the profile usual cannot be added"):
        load_task(file)


@pytest.mark.parametrize(
    ("profiles", "problem"),
    [
        ("profile: []", "`profiles` is missing"),
        ("profiles: [{name: a, backends: [awss]}]", "did you mean aws?"),
        ("profiles: [{name: a, gpu: 1}]", "unknown key 'gpu'"),
    ],
)
def test_a_wrong_profile_is_reported(file: Path, profiles: str, problem: str) -> None:
    (file.parent / ".dstack/profiles.yml").write_text(profiles)
    with pytest.raises(SpecError) as caught:
        load_task(file)
    assert problem in str(caught.value)
    assert "profiles.yml" in str(caught.value)
