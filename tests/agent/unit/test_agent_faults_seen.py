"""Signs of a broken GPU, as NVIDIA's driver and CUDA write them, and what is not one."""

from pathlib import Path

import pytest

from cavvy.agent.gpu_faults import GpuFaultScanner, find_sign, read_kernel

XID = b"NVRM: Xid (PCI:0000:3b:00): %d, pid='<unknown>', name=<unknown>, GPU has a problem."


@pytest.mark.parametrize(
    ("number", "broken"),
    [(79, True), (48, True), (119, True), (13, False), (31, False), (43, False)],
)
def test_an_xid_of_the_hardware_is_a_fault_and_one_of_the_program_is_none(
    number: int, broken: bool
) -> None:
    said = find_sign(XID % number)
    assert said == (f"Xid {number} of PCI:0000:3b:00" if broken else "")


@pytest.mark.parametrize(
    "line",
    [
        b"RuntimeError: CUDA error: an illegal memory access was encountered",
        b"torch.OutOfMemoryError: CUDA out of memory",
    ],
)
def test_what_a_program_does_wrong_is_not_the_nodes_fault(line: bytes) -> None:
    assert find_sign(line) == ""


def test_a_sign_that_comes_in_two_pieces_is_found_once() -> None:
    faults = GpuFaultScanner()
    faults.feed(b"RuntimeError: CUDA error: uncorrectable EC")
    assert faults.found == ""
    faults.feed(b"C error encountered\n")
    assert faults.found == "uncorrectable ECC error"
    faults.feed(b"GPU is lost")
    assert faults.found == "uncorrectable ECC error"


def test_the_kernels_log_is_read_from_the_works_start_on(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_bytes(b"4,1,5000000,-;" + XID % 79 + b"\n")
    assert read_kernel(4.0, str(log)) == "Xid 79 of PCI:0000:3b:00"
    assert read_kernel(6.0, str(log)) == ""
    assert read_kernel(0.0, str(tmp_path / "none")) == ""
