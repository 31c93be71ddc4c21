"""Creates work profiles by tracing a script."""

import gc
import sys
from contextlib import redirect_stdout
from pathlib import Path
from threading import Timer
from typing import Any

from cavvy.capabilities.estimates.script_argument import explain_relative_import, list_words
from cavvy.cli.view.failure import CommandFailure
from cavvy.packages import extra_command, install_command

# packages of training scripts whose import name differs from the package name
PACKAGES = {"PIL": "pillow", "cv2": "opencv-python", "sklearn": "scikit-learn", "yaml": "pyyaml"}
_PATIENCE_S = 30.0  # seconds after which `trace` says that it waits for the script
_LAZY = "UninitializedParameter"  # in PyTorch's error for a lazy module on fake tensors


def trace(script: str, arguments: list[str]) -> dict[str, Any]:
    """Trace the first step of a script. Returns the profile as plain data. Raises
    CommandFailure.
    """
    gc.disable()  # A quarter of the time of PyTorch's import is that of collections.
    try:
        from cavvy.capabilities.estimates.tracer.script import NoStep, trace_script
    except ImportError as error:
        raise CommandFailure(
            f"{error.name} is not installed for the Python that runs cavvy, and tracing needs it",
            f"`{extra_command('train')}`, or `cavvy estimate --model NAME`",
        ) from error
    finally:
        gc.enable()
    gc.freeze()  # so that collections while the script runs do not examine PyTorch's modules
    waits = Timer(_PATIENCE_S, _explain_wait, [script])
    waits.daemon = True
    waits.start()
    try:
        # This keeps the script's output out of the command's output.
        with redirect_stdout(sys.stderr):
            return trace_script(script, arguments, name=_name(script))
    except SystemExit as error:
        hint = f"options of the script go after `--`: cavvy estimate {script} -- --help"
        message = (
            f"{script} exited before its first optimizer step: {error.code}"
            if isinstance(error.code, str)  # of `sys.exit("message")`
            else f"{script} exited (exit code {error.code or 0}) before its first optimizer step"
        )
        raise CommandFailure(message, hint) from error
    except NoStep as error:
        raise CommandFailure(
            str(error),
            "a step is a call of `step()` of a torch optimizer; parameters that a script changes "
            "itself are not seen",
        ) from error
    except Exception as error:  # The user's own code may raise any exception.
        if package := _find_missing(error):
            place = "which is not installed for the Python that runs cavvy"
            raise CommandFailure(
                f"{script} imports {package}, {place}",
                install_command(PACKAGES.get(package, package)),
            ) from error
        if _LAZY in str(error):
            raise CommandFailure(
                f"{script} makes a lazy module, whose sizes a trace cannot know: "
                f"{_last_line(script, error)}",
                "state the sizes, for example nn.Linear(784, 10) for nn.LazyLinear(10)",
            ) from error
        raise CommandFailure(
            f"{script} could not be traced: {type(error).__name__}: {error}",
            _last_line(script, error),
        ) from error
    finally:
        waits.cancel()
        gc.unfreeze()


def _explain_wait(script: str) -> None:
    """Say that a script has made no optimizer step yet: it may read much data, or make none."""
    sys.stderr.write(
        f"note: {script} has run for {_PATIENCE_S:g} s without an optimizer step, after which its "
        "trace ends; Ctrl-C stops it\n"
    )


def _find_missing(error: BaseException | None) -> str:
    """Return the name of the package that is missing according to an error or its causes, or "".
    Some packages import their modules late, and raise an error without a name for a missing
    module.
    """
    while isinstance(error, ModuleNotFoundError):
        if error.name:
            return error.name.partition(".")[0]
        error = error.__cause__
    return ""


def _name(script: str) -> str:
    *option, path = list_words(script)
    return path if option else Path(path).stem


def _last_line(script: str, error: Exception) -> str:
    """Return the last line of the script itself that appears in the traceback of `error`."""
    import traceback

    if hint := explain_relative_import("estimate", str(error)):
        return hint
    names = {script, *_list_files(script)}
    here = [each for each in traceback.extract_tb(error.__traceback__) if each.filename in names]
    return f"{here[-1].filename}:{here[-1].lineno}: {here[-1].line}" if here else ""


def _list_files(script: str) -> list[str]:
    """Return the paths that the file of a module can have."""
    _, *names = list_words(script)
    if not names:
        return []
    path = Path.cwd().joinpath(*names[0].split("."))
    return [str(path.with_suffix(".py")), str(path / "__main__.py")]
