"""Switches those GPUs to MIG mode that the owner of this host has marked, while nothing uses them.

The marks are words in the file MARKS: indices or UUIDs of GPUs, or `all`. Nothing switches a GPU
back. Commands and their effects are those of NVIDIA's MIG user guide, "Enable MIG Mode": the driver
resets GPUs of the generation Ampere for the mode, which they keep; later GPUs switch at once, and
need the mode again after each restart of the host. If a program holds the GPU, or a virtual machine
cannot reset it, the driver only notes the mode for the next reset. Cavvy takes such a note back,
because the GPU would change under the job that runs then.
"""

from __future__ import annotations

import os
import shutil

from .facts import SMI, run_smi
from .files import FileLock, read_text
from .service import LockBusy, check_free

MARKS = "/etc/cavvy/mig"
MODES = [*SMI[:1], "--query-gpu=index,uuid,mig.mode.current,mig.mode.pending", SMI[2]]
PROGRAMS = [*SMI[:1], "--query-compute-apps=gpu_uuid,pid", SMI[2]]
LONGEST = 300  # characters of a reason


def divide_marked(root: str) -> dict[str, str]:
    """Switch the marked GPUs, and return why others of them were not switched, by their UUIDs.
    `root` is the folder of the installation."""
    marks = read_marks(read_text(os.environ.get("CAVVY_MIG_MARKS", MARKS)))
    if not marks or shutil.which(SMI[0]) is None:
        return {}
    shared = os.path.dirname(os.path.dirname(root))
    undivided = {}
    with FileLock(shared + "/devices.lock"):  # no agent starts meanwhile
        for index, uuid, mode, _ in read_modes():
            if marks & {index, uuid, "all"} and mode != "Enabled":
                undivided[uuid] = divide(shared, uuid, mode)[:LONGEST]
    return {uuid: why for uuid, why in undivided.items() if why}


def read_marks(text: str) -> set[str]:
    lines = (line.partition("#")[0] for line in text.splitlines())
    return {word for line in lines for word in line.replace(",", " ").split()}


def read_modes() -> list[list[str]]:
    """Return the index, UUID, mode and noted mode of each GPU."""
    rows = [line.split(",") for line in run_smi(MODES).get("text", "").splitlines()]
    return [[cell.strip() for cell in row] for row in rows if len(row) == 4]


def divide(shared: str, uuid: str, mode: str) -> str:
    """Switch one GPU if nothing uses it. Return why not, or ""."""
    command = f"nvidia-smi -i {uuid} -mig 1"
    if mode != "Disabled":  # [N/A]
        return "it does not support MIG"
    if os.geteuid() != 0:
        return f"only root can switch the mode: `sudo {command}` while the GPU is idle"
    used = find_use(shared, uuid)
    if used:
        return f"{used}; `sudo {command}` switches it when it is idle"
    told = run_smi([SMI[0], "-i", uuid, "-mig", "1"])
    after = {row[1]: row[2:] for row in read_modes()}.get(uuid, ["", ""])
    if after[0] == "Enabled":
        return ""
    if after[1] == "Enabled":
        run_smi([SMI[0], "-i", uuid, "-mig", "0"])
    why = " ".join((told.get("error") or told.get("text", "")).split())
    return f"the driver did not switch it at once ({why[:150]}); `sudo {command}`, then restart"


def find_use(shared: str, uuid: str) -> str:
    """Return what uses the GPU, or ""."""
    try:
        check_free(shared, {uuid: 1.0})
    except LockBusy as error:
        return str(error)
    programs = run_smi(PROGRAMS)
    if "text" not in programs:
        return f"its programs are unknown ({programs['error'][:100]})"
    found = [row.split(",")[1].strip() for row in programs["text"].splitlines() if uuid in row]
    return f"the process {found[0]} uses it" if found else ""
