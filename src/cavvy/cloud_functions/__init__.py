"""Functions for clouds' function platforms, which pass events on to a webhook of a service.

`cavvy services queue trigger` prints the functions of this package. The functions are copied to the
platform, and need only the standard library.
"""

from importlib.resources import files

PLATFORMS = {
    "aws-lambda": "aws_lambda.py",
    "azure-function": "azure_function.py",
    "google-function": "google_function.py",
}
# of the function itself; the file has its own
_IMPORTS = "\nfrom typing import Any\n\nfrom cavvy.cloud_functions.forward import forward\n\n"


def read_function(platform: str) -> str:
    """Return the program for a platform, as one file."""
    folder = files(__name__)
    shared = (folder / "forward.py").read_text(encoding="utf-8")
    own = (folder / PLATFORMS[platform]).read_text(encoding="utf-8")
    return f"{shared}\n\n{own.replace(_IMPORTS, '')}"
