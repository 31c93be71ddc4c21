"""`make test-changed` runs what a change can break, and not everything."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[3]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed", ROOT / "scripts/changed_tests.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load()
TESTS = SCRIPT._tests()


def chosen(*changed: str) -> set[str]:
    return {Path(name).stem for name in SCRIPT.select(set(changed), TESTS)}


@pytest.mark.parametrize(
    ("changed", "needed", "spared"),
    [
        ("src/cavvy/capabilities/serving/autoscaler/decide.py", "test_autoscaler", "test_mounts"),
        # far below what the test imports itself
        ("src/cavvy/domain/units.py", "test_scheduler_queue", "test_mounts"),
        # loaded by the names of a command and of a provider
        ("src/cavvy/cli/export.py", "test_export_ecs", "test_cli_wait"),
        ("src/cavvy/providers/runpod.py", "test_provider_runpod", "test_provider_vast"),
        ("src/cavvy/providers/lambda_cloud.py", "test_provider_lambda", "test_provider_vast"),
        # a name of the Python interface, which `cavvy` loads when it is used
        ("src/cavvy/sdk/curves.py", "test_log", "test_scheduler_queue"),
        # what capabilities add is walked through by tests that do not import it
        ("src/cavvy/capabilities/edge/routes.py", "test_route_matrix", "test_scheduler_queue"),
        ("src/cavvy/capabilities/edge/routes.py", "test_api_schema", "test_api_jobs"),
        # what a gateway, which a test starts as a process, finds by the descriptions
        (
            "src/cavvy/capabilities/language_models/token_meter.py",
            "test_gateway_fallbacks",
            "test_scheduler_queue",
        ),
        # what a program imports that a test loads by its path
        ("src/cavvy/providers/fake/cloud.py", "test_big_day", "test_readers"),
        ("benchmarks/big_day.py", "test_big_day", "test_readers"),
        # a test whose own argument is named like a shared fixture does not use that
        ("src/cavvy/server/embedded.py", "test_cli_imports", "test_agent_checkpoint_sync"),
        # a file that is no module, and which one module names
        ("src/cavvy/capabilities/functions/apps.html", "test_api_apps", "test_cli_wait"),
        # a file that is no module
        ("src/cavvy/store/schema.sql", "test_store_jobs", "test_mounts"),
        ("src/cavvy/console/templates/base.html", "test_console_pages", "test_provider_vast"),
        # files that tests read by their paths
        ("docs/concepts/spot.md", "test_spot_page", "test_readers"),
        ("README.md", "test_docs_pages", "test_readers"),
        ("examples/digits/task.yaml", "test_spec_docs", "test_provider_vast"),
        ("scripts/docs/generate.py", "test_docs_pages", "test_readers"),
        ("tests/train/short.py", "test_train_restarts", "test_readers"),
        # what all files must keep to
        ("Dockerfile", "test_plain_words", "test_readers"),
        ("src/cavvy/providers/vast.py", "test_ways_to_jobs", "test_gateway_haproxy_tls"),
        ("src/cavvy/providers/runpod.py", "test_names", "test_provider_vast"),
    ],
)
def test_what_imports_a_changed_file_is_chosen(changed: str, needed: str, spared: str) -> None:
    assert (ROOT / changed).exists()
    found = chosen(changed)
    assert needed in found
    assert spared not in found


def test_a_module_that_is_gone_chooses_what_still_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SCRIPT._fixtures()  # of the repository
    monkeypatch.setattr(SCRIPT, "ROOT", tmp_path)
    (tmp_path / "tests").mkdir()
    late = tmp_path / "tests" / "test_late.py"
    late.write_text("from cavvy.planner.gone import score\n")
    assert SCRIPT.select({"src/cavvy/planner/gone.py"}, [late]) == ["tests/test_late.py"]
    assert SCRIPT.select({"src/cavvy/planner/other.py"}, [late]) == []


def test_a_changed_test_or_what_it_shares_is_chosen() -> None:
    own = next(each for each in TESTS if each.stem == "test_readers")
    found = SCRIPT.select({own.relative_to(ROOT).as_posix()}, TESTS)
    others = {name for name in found if not name.startswith(SCRIPT.READS_ALL)}
    assert {Path(name).stem for name in others} == {"test_readers"}
    assert "test_api_jobs" in chosen("tests/api/api_state.py")


def test_what_every_test_shares_chooses_every_test_without_servers() -> None:
    assert chosen("pyproject.toml") == {
        each.stem for each in TESTS if each.parent.name not in SCRIPT.PROCESSES
    }
