"""Scripts that use modal are rewritten, and never run."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from cavvy.capabilities.functions.modal_script import NoModalScript, rewrite_script
from cavvy.cli.main import cli

_HEAD = "import modal\napp = modal.App('a')\n"


def change(text: str) -> tuple[str, list[str], list[str]]:
    """Return the rewritten script below its head, and the notes: what to change, and the others."""
    made, notes = rewrite_script(_HEAD + text)
    head = "import cavvy\napp = cavvy.App('a')\n"
    assert made.startswith(head)
    return (
        made.removeprefix(head),
        [each.text for each in notes if each.open],
        [each.text for each in notes if not each.open],
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            "@app.local_entrypoint()\ndef main(): f.remote()\n",
            "@app.main()\ndef main(): f.remote()\n",
        ),
        (
            "@app.function(max_containers=3, memory=1024, scaledown_window=60)\ndef f(): ...\n",
            '@app.function(max_replicas=3, memory="1024MB", idle=60)\ndef f(): ...\n',
        ),
        (
            "@app.function(\n    gpu='A100',  # large\n    serialized=True,\n)\ndef f(): ...\n",
            "@app.function(\n    gpu='A100',  # large\n)\ndef f(): ...\n",
        ),
        (
            "@app.function()\n@modal.concurrent(max_inputs=8)\nasync def f(): ...\n",
            "@app.function(concurrency=8)\nasync def f(): ...\n",
        ),
        (
            "@app.function(cpu=1,)\n@modal.batched(max_batch_size=4, wait_ms=20)\ndef f(x): ...\n",
            '@app.function(cpu=1,batch=4, wait="20ms")\ndef f(x): ...\n',
        ),
        (
            "@app.cls()\nclass A:\n    @modal.batched(max_batch_size=4, wait_ms=N)\n"
            "    def f(self, x): ...\n",
            "@app.cls()\nclass A:\n    @cavvy.method(batch=4, wait=(N) / 1000)\n"
            "    def f(self, x): ...\n",
        ),
        (
            "@app.cls()\nclass A:\n    @modal.enter(snap=True)\n    def load(self): ...\n",
            "@app.cls()\nclass A:\n    @cavvy.enter()\n    def load(self): ...\n",
        ),
        (
            "i = modal.Image.debian_slim().uv_sync('p', frozen=True)\n"
            "j = modal.Image.debian_slim().uv_sync(uv_project_dir='q', groups=['x'])\n",
            "i = cavvy.Image.python().uv_sync('p')\nj = cavvy.Image.python().uv_sync(folder='q')\n",
        ),
        (
            "@app.cls()\nclass A:\n    size: int = modal.parameter(default=3)\n"
            "    @modal.enter()\n    def load(self): ...\n",
            "@app.cls()\nclass A:\n    size: int = cavvy.parameter(default=3)\n"
            "    @cavvy.enter()\n    def load(self): ...\n",
        ),
        (
            "image = modal.Image.debian_slim(python_version='3.12').uv_pip_install(['a', 'b'])\n",
            "image = cavvy.Image.python('3.12').pip_install(*['a', 'b'])\n",
        ),
        (
            "image = modal.Image.debian_slim().add_local_dir('x', '/y').env({'é': 'ü'})\n",
            "image = cavvy.Image.python().env({'é': 'ü'})\n",
        ),
        (
            "image = modal.Image.from_registry('x:1', add_python='3.12').apt_install('git', 'jq')\n",
            "image = cavvy.Image.from_registry('x:1')"
            '.run_commands("apt-get update && apt-get install -y git jq")\n',
        ),
        (
            "@app.function(schedule=modal.Cron('0 3 * * *'))\ndef f(): ...\n",
            "@app.function(schedule='0 3 * * *')\ndef f(): ...\n",
        ),
        (
            "@app.function(schedule=modal.Period(hours=6), retries=modal.Retries(max_retries=2))\n"
            "def f(): ...\n",
            '@app.function(schedule="0 */6 * * *", retries=2)\ndef f(): ...\n',
        ),
        (
            "v = modal.Volume.from_name('m', create_if_missing=True)\n"
            "@app.function(volumes={'/m': v})\ndef f():\n    v.commit()\n    v.reload()\n",
            "v = cavvy.Volume('m')\n"
            "@app.function(volumes={'/m': v})\ndef f():\n    v.commit()\n    v.reload()\n",
        ),
        (
            "d = modal.Dict.from_name('d', create_if_missing=True)\n"
            "q = modal.Queue.from_name('q')\n"
            "with modal.Queue.ephemeral() as e: e.put(d['a'])\n",
            "d = cavvy.Dict('d')\nq = cavvy.Queue('q')\n"
            "with cavvy.Queue.ephemeral() as e: e.put(d['a'])\n",
        ),
        (
            "@app.function(secrets=[modal.Secret.from_name('s', required_keys=['A', 'B'])])\n"
            "def f(): ...\n",
            "@app.function(secrets=['A', 'B'])\ndef f(): ...\n",
        ),
        (
            "@app.function(gpu='L4', timeout=9)\n@modal.asgi_app()\ndef web(): ...\n",
            "@app.asgi_app(gpu='L4')\ndef web(): ...\n",
        ),
        (
            "@app.function()\n@modal.concurrent(max_inputs=5)\n"
            "@modal.fastapi_endpoint(method='POST', docs=True)\ndef web(x): ...\n",
            "@app.endpoint(concurrency=5, method='POST')\ndef web(x): ...\n",
        ),
        ("@app.function\n@modal.wsgi_app()\ndef web(): ...\n", "@app.wsgi_app()\ndef web(): ...\n"),
        (
            "for x in g.remote_gen(3): print(x)\nh = modal.Function.from_name('o', 'h')\n",
            "for x in g.remote(3): print(x)\nh = cavvy.Function.lookup('o', 'h')\n",
        ),
    ],
)
def test_what_has_a_counterpart_is_rewritten(before: str, after: str) -> None:
    made, open_, _ = change(before)
    assert (made, open_) == (after, [])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("d = modal.Dict()\n", "needs a name"),
        ("modal.Queue.objects.delete('q')\n", "cavvy state rm"),
        ("v = modal.Volume.from_id('vo-1')\n", "Volume.from_id has no counterpart"),
        (
            "@app.cls()\nclass A:\n    @modal.asgi_app()\n    def web(self): ...\n",
            "above a function",
        ),
        ("@app.function()\n@modal.web_server(80)\ndef web(): ...\n", "`cavvy serve`"),
        ("@app.function(gpu='any')\ndef f(): ...\n", "name accelerators"),
        ("@app.function(unheard=1)\ndef f(): ...\n", "unheard has no counterpart"),
        ("@app.function(secrets=[modal.Secret.from_name('s')])\ndef f(): ...\n", "variables"),
        ("@app.function(schedule=modal.Period(days=1, hours=2))\ndef f(): ...\n", "cron line"),
        ("i = modal.Image.micromamba()\n", "from_registry"),
        ("import modal.experimental\n", "modal.experimental has no counterpart"),
    ],
)
def test_what_has_none_is_said(text: str, told: str) -> None:
    _, open_, _ = change(text)
    assert any(told in each for each in open_), open_


def test_names_that_are_imported_one_by_one() -> None:
    made, notes = rewrite_script(
        "from modal import App, Image as I, gpu, Secret, Volume\n"
        "stub = App(name='My_App')\n"
        "@stub.function(gpu=gpu.A100(count=2), image=I.debian_slim())\n"
        "def f(): ...\n"
    )
    assert made == (
        "from cavvy import App, Image as I, Volume\nimport cavvy\n"
        'stub = App("my-app")\n'
        '@stub.function(gpu="A100:2", image=I.python())\n'
        "def f(): ...\n"
    )
    assert [each.line for each in notes] == [2, 3]


@pytest.mark.parametrize(
    "text", ["", "import os\n", "import modal_x\n", "def f(:\n", "\0", "(" * 9999]
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(NoModalScript):
        rewrite_script(text)


def test_the_command_runs_no_code(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(f"{_HEAD}open({str(tmp_path / 'ran')!r}, 'w')\nd = modal.Queue()\n")
    done = subprocess.run(
        [sys.executable, "-m", "cavvy", "import", str(script), "--to", str(tmp_path / "new.py")],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 3, done.stderr
    assert f"{script}:4: change this: Queue" in done.stderr
    assert (tmp_path / "new.py").read_text().startswith("import cavvy\n")
    assert not (tmp_path / "ran").exists()


def test_a_rewritten_script_that_was_edited_is_not_replaced_unasked(tmp_path: Path) -> None:
    script, new = tmp_path / "app.py", tmp_path / "new.py"
    script.write_text(f"{_HEAD}d = modal.Queue()\n")
    new.write_text("mine\n")
    words = ["import", str(script), "--to", str(new)]
    assert CliRunner().invoke(cli, words).exit_code == 2
    assert new.read_text() == "mine\n"
    done = CliRunner().invoke(cli, [*words, "--yes"])
    assert done.exit_code == 3
    assert new.read_text().startswith("import cavvy\n")
    assert "1 to change before it runs" in done.stderr
    assert "try it" not in done.stderr
