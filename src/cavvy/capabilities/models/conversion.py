"""Converts and evaluates models of `cavvy model publish`. The files of a model are programs, which
a job, a registry or a colleague may have written: they run without the rights of the user.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from cavvy.cli.view.failure import CommandFailure

_PACKAGES = ("cavvy", "numpy", "onnx", "onnxruntime", "torch")


def convert_confined(
    model: Path, convert: str, target: Path, evaluate: Path | None
) -> dict[str, float]:
    """Convert a model to `target` if `convert` says so, and return what was measured. The program
    reads the folder of the model, a copy of the samples, and what is installed; it writes only to a
    folder of its own. Raises CommandFailure, also if this machine cannot confine it.
    """
    from cavvy.agent.work import confine

    if not confine.is_able():
        raise CommandFailure(
            "this machine cannot confine the programs that a model consists of, and does not "
            "convert or evaluate it: that needs Linux 5.13 with Landlock and seccomp on 64 bits of "
            "x86 or Arm",
            "convert the model in a job, and publish the job's checkpoint without --convert and "
            "--evaluate",
            exit_code=2,
        )
    with TemporaryDirectory(prefix="cavvy-convert-") as fresh:
        files, work = Path(fresh, "files"), Path(fresh, "work")
        shutil.copytree(model.parent, files, symlinks=True)
        work.mkdir()
        made = work / "made"
        words = [sys.executable, "-P", "-m", "cavvy.model_server.publish", "--model"]
        words.append(str(files / model.name))
        words += ["--convert", convert, "--target", str(made)] if convert else []
        if evaluate is not None:
            samples = files / f"samples-of-the-user{evaluate.suffix}"
            samples.unlink(missing_ok=True)
            shutil.copyfile(evaluate, samples)
            words += ["--samples", str(samples)]
        # without -P, `cavvy` could be a folder of the working folder
        confined = [sys.executable, "-P", "-m", confine.__name__, "--strict"]
        done = subprocess.run(
            [*confined, fresh, str(files), str(work), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(_find_packages())},
        )
        if done.returncode:
            problem = (_text(done.stderr).strip() or "no reason given").splitlines()[-1]
            raise CommandFailure(f"the model was not published: {problem}")
        figures = _read_figures(_text(done.stdout))
        if convert:
            _take(made, target)
    return figures


def _find_packages() -> list[str]:
    """Return the folders with the packages that a conversion imports."""
    found = [find_spec(name) for name in _PACKAGES]
    paths = [str(Path(each.origin).parents[1]) for each in found if each and each.origin]
    return list(dict.fromkeys(paths))


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _read_figures(text: str) -> dict[str, float]:
    try:
        said = json.loads(text.strip().splitlines()[-1])
        return {str(name): float(value) for name, value in said.items()}
    except (ValueError, IndexError, AttributeError, TypeError, RecursionError) as error:
        raise CommandFailure("the model was not published: its figures cannot be read") from error


def _take(made: Path, target: Path) -> None:
    """Copy what the program has made. A link could lead to a file of the user, so nothing but a
    plain file is opened.
    """
    try:
        descriptor = os.open(made, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CommandFailure("the model was not published: nothing was converted") from error
    try:
        told = os.fstat(descriptor)
        if not stat.S_ISREG(told.st_mode) or told.st_nlink != 1:
            raise CommandFailure("the model was not published: no plain file was converted")
        target.unlink(missing_ok=True)
        with open(descriptor, "rb", closefd=False) as file, open(target, "xb") as to:
            shutil.copyfileobj(file, to)
    finally:
        os.close(descriptor)
