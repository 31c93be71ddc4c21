"""Creates a virtual environment with pip: `python -I -c SOURCE FOLDER UV`, run by the Python that
the environment will use. UV is the path of uv, or "" to use Python's own module `venv`.

This program takes a tenth of the time of `python -m venv`, which runs pip to install pip. The
program needs Python 3.6 or later. Exit code 3: the environment was created, but without pip,
because this Python does not contain pip.
"""

import glob
import os
import shutil
import sys
import sysconfig
import zipfile

PIP = '#!/bin/sh\nexec "${0%/*}/python" -m pip "$@"\n'


def main(folder: str, uv: str) -> int:
    # Packages that conda has put into an environment stay visible; pip installs into the new
    # folder.
    conda = os.path.isdir(sys.base_prefix + "/conda-meta")
    if not (uv and made_by_uv(uv, folder, conda)):
        import venv

        venv.EnvBuilder(symlinks=True, system_site_packages=conda).create(folder)
    packages = glob.glob(folder + "/lib/*/site-packages")[0]
    if not put_pip(packages):
        return 3
    for name in ("pip", "pip3", f"pip3.{sys.version_info[1]}"):
        with open(folder + "/bin/" + name, "w") as file:
            file.write(PIP)
        os.chmod(file.name, 0o755)
    return 0


def made_by_uv(uv: str, folder: str, conda: bool) -> bool:
    """Create the environment with uv. Return whether the environment was created."""
    words = [uv, "venv", "--quiet", "--no-config", "--python", sys.executable, folder]
    return os.spawnv(os.P_WAIT, uv, words + ["--system-site-packages"] * conda) == 0


def put_pip(packages: str) -> bool:
    """Install pip from the wheel that is shipped with Python. If there is no wheel, copy the
    installed pip. Return whether pip was found.
    """
    folders = [sysconfig.get_config_var("WHEEL_PKG_DIR") or "", "/usr/share/python-wheels"]
    try:
        import ensurepip

        folders.insert(0, os.path.dirname(ensurepip.__file__) + "/_bundled")
    except ImportError:  # Debian ships `ensurepip` in another package, python3-venv
        pass
    for wheel in (found for folder in folders for found in glob.glob(folder + "/pip-*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(packages)
        return True
    try:
        import pip
    except ImportError:
        return False
    shutil.copytree(os.path.dirname(pip.__file__), packages + "/pip")
    return True


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
