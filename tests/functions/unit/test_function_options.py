"""Options of functions, images, frames and apps."""

from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner

import cavvy
from cavvy.capabilities.functions.app import App, FunctionClass
from cavvy.capabilities.functions.app_file import read_words
from cavvy.capabilities.functions.deployed import make_scheduled
from cavvy.capabilities.functions.errors import NotSendable
from cavvy.capabilities.functions.frames import CallFrames, WrongFrame, pack
from cavvy.capabilities.functions.image import FunctionImage
from cavvy.capabilities.functions.jobs import describe_app, group_functions
from cavvy.capabilities.functions.lengths import read_length
from cavvy.capabilities.functions.options import read_options
from cavvy.capabilities.functions.program import find_program
from cavvy.cli.main import cli
from cavvy.cli.view.failure import CommandFailure
from cavvy.sdk.errors import InvalidArgument


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("20ms", 0.02),
        ("1.5m", 90.0),
        (timedelta(minutes=2), 120.0),
    ],
)
def test_lengths(value: str | int | timedelta, seconds: float) -> None:
    assert read_length(value, "timeout") == pytest.approx(seconds)


@pytest.mark.parametrize("value", ["soon", "", "5 parsecs", -1, True])
def test_what_is_no_length(value: str | int) -> None:
    with pytest.raises(InvalidArgument, match="timeout"):
        read_length(value, "timeout")


def test_an_unknown_option_names_the_nearest() -> None:
    with pytest.raises(InvalidArgument, match=r"f: retrys is no option[\s\S]*retries"):
        read_options("f", {"retrys": 2}, None)


@pytest.mark.parametrize(
    "keys", [{"retries": -1}, {"retries": True}, {"concurrency": 0}, {"image": "python"}]
)
def test_impossible_options(keys: dict[str, object]) -> None:
    with pytest.raises(InvalidArgument, match="f: "):
        read_options("f", keys, None)


def test_options_become_keys_of_a_task() -> None:
    image = FunctionImage.from_registry("python:3.12").pip_install("numpy>=2").env({"A": "1"})
    options = read_options(
        "f",
        {
            "cpu": 4,
            "gpu": "A100:2",
            "spot": True,
            "secrets": "HF_TOKEN",
            "volumes": {"/cache": "/scratch"},
            "env": {"B": "2"},
        },
        None,
    )
    assert options.to_keys(image) == {
        "image": {"name": "python:3.12"},
        "setup": {"run": "pip install -q 'numpy>=2'"},
        "env": {"A": "1", "B": "2"},
        "resources": {"cpu": 4, "gpu": "A100:2", "spot": "only"},
        "secrets": ["HF_TOKEN"],
        "volumes": ["/scratch:/cache"],
    }
    assert options.to_head()["gpus"] == 2


def test_an_image_is_also_a_key_of_a_task(tmp_path: Path) -> None:
    assert cavvy.Image(build=".") == {"build": "."}
    assert cavvy.Image is FunctionImage
    base = FunctionImage.python()
    assert base.run_commands("true").to_keys() != base.to_keys() == {}
    (tmp_path / "r.txt").touch()
    for image in (base, FunctionImage.from_registry("python:3.12"), FunctionImage(build=".")):
        keys = image.pip_install("numpy").pip_install_from_requirements("r.txt").to_keys()
        task = cavvy.Task("true", workdir=str(tmp_path), **keys)
        assert "pip install -q -r r.txt" in task.text
        assert ("r.txt" in keys["setup"].get("uses", ())) is (image is base)


def test_an_image_of_a_uv_lock(tmp_path: Path) -> None:
    """A changed lock is another setup."""
    (tmp_path / "my project").mkdir()
    for name in ("uv.lock", "pyproject.toml"):
        (tmp_path / "my project" / name).touch()
    keys = FunctionImage.python().uv_sync("./my project").to_keys()
    assert keys["setup"]["uses"] == ["my project/pyproject.toml", "my project/uv.lock"]
    assert "--directory './my project'" in keys["setup"]["run"]
    assert "uv.lock" in cavvy.Task("true", workdir=str(tmp_path), **keys).text


def test_two_functions_of_one_name() -> None:
    app = App("twice")

    def first() -> None: ...

    def second() -> None: ...

    app.function(first, name="f")
    with pytest.raises(InvalidArgument, match=r"two functions f: .*py:\d+ and .*py:\d+"):
        app.function(second, name="f")


def test_a_class_without_a_method() -> None:
    with pytest.raises(InvalidArgument, match="has no method"):
        App("none").cls(type("Empty", (), {}))


def test_methods_have_the_options_of_their_class() -> None:
    app = App("classes")

    @app.cls(gpu="L4", retries=1)
    class Model:
        @cavvy.method(batch=8, wait="5ms")
        def embed(self, texts: list[str]) -> list[int]:
            return [len(each) for each in texts]

    assert isinstance(Model, FunctionClass)
    options = app.functions["Model.embed"].options
    assert (options.gpu, options.retries, options.batch, options.wait) == ("L4", 1, 8, 0.005)
    assert Model().embed.local(["ab", "c"]) == [2, 1]


def test_a_generator_is_not_mapped() -> None:
    app = App("generators")

    @app.function()
    def count(number: int):  # type: ignore[no-untyped-def]  # as users write it
        yield from range(number)

    with pytest.raises(InvalidArgument, match=r"count is a generator \(.*\.py:\d+\)"):
        count.map([1, 2])
    with pytest.raises(InvalidArgument, match="cannot be spawned"):
        count.spawn(3)


def test_a_schedule_passes_no_arguments() -> None:
    app = App("timed")

    @app.function(schedule="0 3 * * *")
    def nightly(day: str) -> None: ...

    with pytest.raises(InvalidArgument, match=r"nightly \(.*\) has a schedule and needs .* day"):
        make_scheduled(app, nightly)


def test_frames_arrive_in_any_pieces() -> None:
    sent = [({"op": "call", "id": 1}, b"abc"), ({"op": "done"}, b"")]
    data = b"".join(pack(*each) for each in sent)
    for size in (1, 3, len(data)):
        reader = CallFrames()
        found = [
            frame for at in range(0, len(data), size) for frame in reader.feed(data[at : at + size])
        ]
        assert found == sent


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n", b"\0\0\0\2\0\0\0\0[]", b"\0\0\0\1\0\0\0\0{"]
)
def test_what_is_no_frame(data: bytes) -> None:
    with pytest.raises(WrongFrame):
        CallFrames().feed(data)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import cavvy\napp = cavvy.App('x')\n", True),
        ("import cavvy as c\napp: object = c.App('x')\n", True),
        ("from cavvy import App\napp = App('x')\n", True),
        ("from other import App\nimport cavvy\napp = App('x')\n", False),
        ("import cavvy\nclient = cavvy.Client()  # no App\n", False),
        ("import cavvy\ndef f():\n    app = cavvy.App('x')\n", False),
        ("import cavvy; App = (\n", False),
    ],
)
def test_files_that_make_an_app(text: str, found: bool) -> None:
    assert (find_program(text) is not None) is found


@pytest.mark.parametrize(
    ("words", "text", "told"),
    [
        (
            ["run", "app.py", "--text", "hi"],
            "import cavvy\napp = cavvy.App('x')\n",
            "app.py -- --text",
        ),
        (["run", "app.py"], "import modal\napp = modal.App('x')\n", "`cavvy import app.py"),
        (["deploy", "app.py"], "from modal import App\napp = App('x')\n", "`cavvy import app.py"),
        (["dev", "app.py"], "VALUE = 1\n", "app.py makes no app"),
    ],
)
def test_files_that_are_not_run(
    words: list[str], text: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "app.py").write_text(text)
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == 2
    assert told in done.output


def test_words_become_arguments_of_the_main_function() -> None:
    def main(count: int, name: str = "a", *, dry_run: bool = False, rate: float = 1) -> None: ...

    words = ["--count", "3", "--name=b c", "--dry-run"]
    assert read_words(main, words) == {"count": 3, "name": "b c", "dry_run": True}
    assert read_words(main, ["--count=1", "--no-dry-run"]) == {"count": 1, "dry_run": False}
    for words, message in (
        ([], "needs --count"),
        (["--count", "x"], "not of type int"),
        (["--cuont", "1"], "no option"),
        (["--count"], "needs a value"),
    ):
        with pytest.raises(CommandFailure, match=message):
            read_words(main, words)


def test_parameters_of_a_class() -> None:
    app = App("sizes")

    @app.cls()
    class Box:
        size: int = cavvy.parameter()
        name: str = cavvy.parameter(default="box")

        @cavvy.method()
        def show(self) -> str:
            return f"{self.name} {self.size}"

    assert Box(size=3).show.local() == "box 3"
    assert Box(4, name="crate").show.local() == "crate 4"
    for args, named, told in (((), {}, "needs the parameter size"), ((1, 2, 3), {}, "size, name")):
        with pytest.raises(TypeError, match=told):
            Box(*args, **named).show.local()
    with pytest.raises(TypeError, match="has the parameters size, name"):
        Box(size=1, other=2).show.local()


def test_packages_of_the_image_may_be_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    image = cavvy.Image.python()
    monkeypatch.delenv("CAVVY_JOB", raising=False)
    with image.imports():
        import nowhere_to_be_found
    monkeypatch.setenv("CAVVY_JOB", "x")
    with pytest.raises(ImportError), image.imports():
        import nowhere_to_be_found  # noqa: F401


def test_code_of_another_python_is_refused_before_a_job_is_submitted() -> None:
    app = App("versions")
    for image in (cavvy.Image.python("2.7"), cavvy.Image.from_registry("python:2.7-slim")):

        def f() -> None: ...

        app.functions.clear()
        app.function(f, image=image)
        ((key, _),) = group_functions(app).items()
        with pytest.raises(NotSendable, match=r"f \(.*its image has Python 2\.7"):
            describe_app(app, key, 0.0)


def test_an_image_without_a_container_is_that_of_its_function() -> None:
    app = App("images", image=cavvy.Image.python().pip_install("of-the-app"))
    own = cavvy.Image.python().pip_install("of-the-function")
    for image, package in ((own, "of-the-function"), (None, "of-the-app")):
        keys = read_options("f", {"image": image}, None).to_keys(app.image)
        assert keys["setup"]["run"] == f"pip install -q {package}"


def test_volumes_and_secrets_become_keys_of_the_task() -> None:
    volumes = {
        "/cache": cavvy.Volume("models", size="200GB"),
        "/data": cavvy.Volume.nfs("nas:/export").read_only(),
        "/scratch": cavvy.Volume.folder("/scratch"),
        "/old": "nas:/old",
        "/bucket": cavvy.Volume.bucket("s3://b/m", writable=True),
        "/again": cavvy.Volume.bucket("s3://b/m", writable=True, cached=True).read_only(),
    }
    secrets = [cavvy.Secret("A", "B"), "C", "A"]
    keys = read_options("f", {"volumes": volumes, "secrets": secrets}, None).to_keys(None)
    assert keys["secrets"] == ["A", "B", "C"]
    assert keys["volumes"] == [
        {"name": "models", "size": "200GB", "path": "/cache"},
        {"nfs": "nas:/export", "read_only": True, "path": "/data"},
        {"host": "/scratch", "path": "/scratch"},
        "nas:/old:/old",
    ]
    assert keys["inputs"] == [
        {"source": "s3://b/m", "mode": "mount", "writable": True, "target": "/bucket"},
        {"source": "s3://b/m", "mode": "cached", "target": "/again"},
    ]
    task = cavvy.Task("true", **keys)
    assert "s3://b/m" in task.text


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"secrets": ["no name"]}, "no name"),
        ({"secrets": [cavvy.Volume("v")]}, "is no name of a secret"),
        ({"volumes": {"/a": 1}}, "'/a': 1"),
        ({"volumes": {1: "a"}}, "cavvy.Volume"),
    ],
)
def test_wrong_volumes_and_secrets_are_named(keys: dict[str, object], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        read_options("f", keys, None)
    with pytest.raises(InvalidArgument, match=r"Volume\.folder"):
        cavvy.Volume("s3://bucket/x")
