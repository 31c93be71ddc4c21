"""Notebooks and Makefiles become tasks without a task file."""

import json
from pathlib import Path
from typing import Any

import pytest

from cavvy.task_files import load_script


def write(folder: Path, *tags: str, language: str = "python", name: str = "nb.ipynb") -> Path:
    cells = [{"cell_type": "code", "metadata": {"tags": tags}, "source": "lr = 1", "outputs": []}]
    metadata = {"kernelspec": {"name": "mine", "language": language}}
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps({"nbformat": 4, "metadata": metadata, "cells": cells}))
    return folder / name


def read(path: Path, *words: str) -> tuple[dict[str, Any], str]:
    found = load_script(path, words)
    assert found is not None
    return found.keys, "\n".join(found.notes)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_notebook_runs_with_parameters_and_comes_back(folder: Path) -> None:
    keys, notes = read(write(folder, "parameters"), "done.ipynb", "-p", "lr", "0.5 x")
    assert keys["run"] == (
        "exec python3 -m papermill nb.ipynb nb.out.ipynb -k python3 --log-output "
        "--no-progress-bar --cwd . -p lr '0.5 x'"
    )
    assert keys["setup"] == {"run": "python3 -m pip install papermill ipykernel", "uses": []}
    assert keys["outputs"] == [{"source": "nb.out.ipynb", "target": str(folder / "done.ipynb")}]
    assert notes == ""


def test_a_bucket_gets_the_notebook_while_it_runs(folder: Path) -> None:
    (folder / "requirements.txt").write_text("numpy\n")
    keys, notes = read(write(folder, name="sub/nb.ipynb"), "s3://b/nb.ipynb", "-p", "lr", "1")
    (output,) = keys["outputs"]
    assert output == {"source": "sub/nb.out.ipynb", "target": "s3://b/nb.ipynb", "every": "30s"}
    assert keys["setup"]["run"].startswith("python3 -m pip install papermill ipykernel && ")
    assert keys["setup"]["run"].endswith("pip install -r requirements.txt")
    assert "--cwd sub" in keys["run"]
    assert "no cell of nb.ipynb has the tag `parameters`" in notes


def test_without_a_place_a_note_says_where_the_notebook_is(folder: Path) -> None:
    keys, notes = read(write(folder), "-y", "lr: 1")
    assert "outputs" not in keys
    assert "the executed notebook is nb.out.ipynb in the job's folder" in notes


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"worksheets": []}', "no notebook of the format 4"),
        ('{"cells": [1]}', "no notebook of the format 4"),
    ],
)
def test_a_file_that_is_no_notebook(folder: Path, text: str, said: str) -> None:
    (folder / "nb.ipynb").write_text(text)
    with pytest.raises(ValueError, match=said):
        load_script(folder / "nb.ipynb", ())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("-p", "lr"), "expected -p NAME VALUE"),
        (("-f",), "expected -f VALUE"),
        (("a.ipynb", "lr=1"), "write a parameter as -p NAME VALUE"),
    ],
)
def test_mistakes_in_parameters(folder: Path, words: tuple[str, ...], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_script(write(folder), words)


def test_a_notebook_of_another_language_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="is for R, not for Python"):
        load_script(write(folder, language="R"), ())


def test_a_makefile_runs_as_it_is(folder: Path) -> None:
    (folder / "Makefile").write_text("all:\n\techo $(X)\n")
    assert read(folder / "Makefile", "all", "X=1")[0]["run"] == "exec make -f Makefile all X=1"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"kernelspec": {"name": "ir"}}, "is for R"),
        ({"kernelspec": {"name": "julia-1.10"}}, "is for Julia"),
        ({"language_info": {"name": "scala"}}, "is for scala"),
        ({"kernelspec": {"name": "python2", "language": "python"}}, "`2to3` rewrites"),
        ({"language_info": {"name": "python", "version": "2.7.12"}}, "is for Python 2"),
    ],
)
def test_the_language_is_known_without_the_kernels_word_for_it(
    folder: Path, metadata: dict[str, Any], said: str
) -> None:
    (folder / "nb.ipynb").write_text(json.dumps({"metadata": metadata, "cells": []}))
    with pytest.raises(ValueError, match=said):
        load_script(folder / "nb.ipynb", ())


def test_what_a_notebook_expects_of_its_place_is_said(folder: Path) -> None:
    sources = ["x = 1", "name = input('who?')\n", ["from google.colab import drive\n", "y = 2\n"]]
    sources.append("open('/kaggle/input/a.csv')")
    cells = [{"cell_type": "code", "source": each} for each in sources]
    (folder / "nb.ipynb").write_text(json.dumps({"metadata": {}, "cells": cells}))
    notes = read(folder / "nb.ipynb", "done.ipynb")[1].split("\n")
    assert [note.split(":")[0].split(";")[0] for note in notes] == [
        "the code cell 2 asks for input, which fails without a person",
        "google.colab exists only in Colab",
        "the data of Kaggle are not here",
    ]
    quiet = ["# input()", "get_input(1)", "try:\n  import google.colab\nexcept ImportError: pass"]
    cells = [{"cell_type": "code", "source": each} for each in quiet]
    (folder / "nb.ipynb").write_text(json.dumps({"metadata": {}, "cells": cells}))
    assert read(folder / "nb.ipynb", "done.ipynb")[1] == ""


def test_a_notebook_with_large_outputs_is_not_read(folder: Path) -> None:
    path = write(folder)
    with path.open("r+b") as file:
        file.truncate(50 << 20)
    with pytest.raises(ValueError, match=r"has 50 MiB, and at most 16 .* drops the outputs"):
        load_script(path, ())
