"""The filter of system calls that each sandbox has (seccomp).

Programs in a sandbox need no call that changes namespaces or mounts, looks into other processes,
loads code into the kernel or configures devices. These calls fail with EPERM; calls that are newer
than this list fail with ENOSYS, as on an older kernel. The numbers are those of Linux 6.16
(`arch/x86/entry/syscalls/syscall_64.tbl`, `include/uapi/asm-generic/unistd.h`).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

# by name: the numbers on x86-64 and arm64; -1: not there
REFUSED = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "unshare": (272, 97),
    "setns": (308, 268),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "vmsplice": (278, 75),  # a pipe would keep a huge page of 2 MiB that no process has any more
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "set_mempolicy_home_node": (450, 450),
    "sched_setaffinity": (203, 122),  # keeps a sandbox on its CPUs
    "vhangup": (153, 58),
    "lookup_dcookie": (212, 18),
    "nfsservctl": (180, 42),
    "ioperm": (173, -1),
    "iopl": (172, -1),
    "modify_ldt": (154, -1),
    "uselib": (134, -1),
    "create_module": (174, -1),
    "query_module": (178, -1),
    "_sysctl": (156, -1),
    "sysfs": (139, -1),
}
# Programs do without these if the system says that it has none: clone3 hides its flags from the
# filter, the memory of the next two is in no process, so it could not be limited, and the requests
# of io_setup are those of the whole machine, which are few.
ABSENT = {
    "clone3": (435, 435),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_setup": (206, 0),
}
# A program may change its own limits and priority, by the ID 0, and no others: the first
# process, which has the same user, would come too late to limit the memory of the others.
OWN_ONLY = {
    "prlimit64": (302, 261),
    "sched_setscheduler": (144, 119),
    "sched_setparam": (142, 118),
    "sched_setattr": (314, 274),
}
# as these, with the kind of the ID before it: a process is 0 for priorities and 1 for disks
OWN_ONLY_OF_KIND = {"setpriority": (141, 140, 0), "ioprio_set": (251, 30, 1)}
_SOCKET, _SOCKETPAIR, _CLONE = (41, 198), (53, 199), (56, 220)
_SETRLIMIT, _PRLIMIT = (160, 164), OWN_ONLY["prlimit64"]
_CORE = 4  # RLIMIT_CORE
_IOCTL, _PERSONALITY = (16, 29), (135, 92)
_MMAP, _SECCOMP = (9, 222), (317, 277)
# Programs get these one by one, from the first process, until they have had as many as there may
# be. It hears of no end, so it counts anew when all programs have ended. The watchers of files are
# those of the host's user, who has 128 of them and 8,192 files or more: they are the machine's
# programs' own, too.
MEMORY, WATCHERS, WATCHED = "memory", "watchers", "watched"
_WATCH = {(253, -1): WATCHERS, (294, 26): WATCHERS, (254, 27): WATCHED}
MOST_WATCHING = {WATCHERS: 32, WATCHED: 8192}
_SHARED, _ANONYMOUS, _HUGE = 0x1, 0x20, 0x40000  # flags of mmap
_NEWEST = 462  # mseal; calls with greater numbers are newer than this list
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_X32 = 0x40000000
_SPACES = 0x7E020000  # the flags of clone for new namespaces
# TIOCSTI types into a terminal, TIOCLINUX pastes, TIOCSETD loads a line discipline
_TERMINALS = (0x5412, 0x541C, 0x5423)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_EPERM, _ENOMEM, _EINVAL, _EMFILE, _ENOSPC, _ENOSYS, _EAFNOSUPPORT = 1, 12, 22, 24, 28, 38, 97
_TOO_MANY = {MEMORY: _ENOMEM, WATCHERS: _EMFILE, WATCHED: _ENOSPC}  # as without sandboxes

_LOAD, _EQUAL, _GREATER, _SET, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL, _ERRNO, _ASK = 0x7FFF0000, 0x80000000, 0x00050000, 0x7FC00000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16
_SET_SECCOMP, _FILTER = 22, 2
# `include/uapi/linux/seccomp.h`: who holds the listener decides on the calls that are asked for
_SET_FILTER, _NEW_LISTENER, _CONTINUE = 1, 8, 1
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_QUESTION = struct.Struct("=QIIiIQ6Q")  # ID, process, flags; number, architecture, place, arguments
_ANSWER = struct.Struct("=QqiI")  # ID, value, error, flags
_PAGE = os.sysconf("SC_PAGE_SIZE")


def make_filter(machine: str) -> bytes:
    """Return the program for the kernel. Raises OSError on other processors than those known."""
    if machine not in _ARCHITECTURES:
        raise OSError(_ENOSYS, f"no list of system calls for {machine}")
    column, architecture = _ARCHITECTURES[machine]
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if not column:
        lines += [(_GREATER, 0, 1, _X32 - 1), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    lines += [(_GREATER, 0, 1, _NEWEST), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    for table, error in ((REFUSED, _EPERM), (ABSENT, _ENOSYS)):
        for numbers in table.values():
            if numbers[column] >= 0:
                lines += [
                    (_EQUAL, 0, 1, numbers[column]),
                    (_RETURN, 0, 0, _ERRNO | error),
                ]
    lines += _when(_SETRLIMIT[column], _keep_core(0, []))
    lines += _when(_PRLIMIT[column], _check_limits())
    for pair in OWN_ONLY.values():
        lines += _when(pair[column], _allow_only(0, (0,), _EPERM))
    for x86, arm, kind in OWN_ONLY_OF_KIND.values():
        lines += _when((x86, arm)[column], _allow_own(kind))
    lines += _when(_SOCKET[column], _check_family())
    lines += _when(_SOCKETPAIR[column], _allow_only(0, (_AF_UNIX,), _EAFNOSUPPORT))
    lines += _when(_CLONE[column], _refuse_flags(0, _SPACES))
    lines += _when(_SECCOMP[column], _refuse_flags(1, _NEW_LISTENER))
    lines += _when(_MMAP[column], _check_mapping())
    for pair in _WATCH:
        if pair[column] >= 0:
            lines += _when(pair[column], [(_RETURN, 0, 0, _ASK)])
    lines += _when(_IOCTL[column], _refuse_values(1, _TERMINALS))
    lines += _when(_PERSONALITY[column], _allow_only(0, (0, 0xFFFFFFFF), _EPERM))
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("<HBBI", *line) for line in lines)


def install(program: bytes) -> int:
    """Give this process and its later children the filter. Return the file that has their questions
    (`answer`), or -1 if the kernel has none: then what they ask for fails with ENOSYS.
    Raises OSError.
    """
    library = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    number = ctypes.c_long(_SECCOMP[_ARCHITECTURES[find_machine()][0]])
    filter_at = ctypes.c_char_p(header)
    listener = int(library.syscall(number, _SET_FILTER, _NEW_LISTENER, filter_at))
    if listener >= 0:
        return listener
    if library.prctl(_SET_SECCOMP, _FILTER, filter_at, 0, 0):
        raise OSError(ctypes.get_errno(), "the filter of system calls")
    return -1


def answer(listener: int, left: Mapping[str, int]) -> tuple[str, int]:
    """Let the next program that asks have what it asks for, such as shared memory that it maps,
    unless this is more than what is left. Return what it has got, and how much. The size is in a
    register, so it cannot change any more.
    """
    asked = bytearray(_QUESTION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, asked)
        name, _, _, call, *_, size = _QUESTION.unpack(asked)[:8]
        what, amount = _find_asked(call, int(size))
        if amount > left[what]:
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(name, 0, -_TOO_MANY[what], 0))
            return what, 0
        try:
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(name, 0, 0, _CONTINUE))
        except OSError as error:
            if error.errno != _EINVAL:
                raise
            # a kernel before Linux 5.5
            fcntl.ioctl(listener, _SEND, _ANSWER.pack(name, 0, -_ENOSYS, 0))
            return what, 0
    except OSError:  # a signal has ended or interrupted the call; it asks again
        return MEMORY, 0
    return what, amount


def _find_asked(call: int, size: int) -> tuple[str, int]:
    for pair, what in _WATCH.items():
        if call == pair[_ARCHITECTURES[find_machine()][0]]:
            return what, 1
    return MEMORY, -(-size // _PAGE) * _PAGE


def find_machine() -> str:
    return os.uname().machine


def _when(number: int, then: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """Return lines that run `then`, which always returns, for one call."""
    return [(_EQUAL, 0, len(then), number), *then]


def _allow_only(
    argument: int, values: tuple[int, ...], error: int
) -> list[tuple[int, int, int, int]]:
    lines = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*lines, (_RETURN, 0, 0, _ERRNO | error)]


def _allow_own(kind: int) -> list[tuple[int, int, int, int]]:
    return [
        (_LOAD, 0, 0, _ARGUMENT),
        (_EQUAL, 1, 0, kind),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        *_allow_only(1, (0,), _EPERM),
    ]


def _keep_core(
    argument: int, unless: list[tuple[int, int, int, int]]
) -> list[tuple[int, int, int, int]]:
    """Let a new limit of crashes have no effect: 0 would start the machine's program for them. The
    call succeeds, since programs with secrets set 0 so that nothing is kept, and nothing is.
    """
    return [
        (_LOAD, 0, 0, _ARGUMENT + 8 * argument),
        (_EQUAL, 1, 0, _CORE),
        (_RETURN, 0, 0, _ALLOW),
        *unless,
        (_RETURN, 0, 0, _ERRNO),
    ]


def _check_limits() -> list[tuple[int, int, int, int]]:
    """Allow a process to read and change its own limits. A call that would both change that of
    crashes and tell the former one fails, as it would tell nothing."""
    return [
        (_LOAD, 0, 0, _ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        *_keep_core(1, [*_unless_given(2, _ALLOW), *_when_given(3, _ERRNO | _EPERM)]),
    ]


def _unless_given(argument: int, result: int) -> list[tuple[int, int, int, int]]:
    """Return lines that end with the result if the address is 0; both of its halves count."""
    low = _ARGUMENT + 8 * argument
    return [
        (_LOAD, 0, 0, low),
        (_EQUAL, 0, 3, 0),
        (_LOAD, 0, 0, low + 4),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, result),
    ]


def _when_given(argument: int, result: int) -> list[tuple[int, int, int, int]]:
    """Return lines that end with the result if the address is not 0."""
    low = _ARGUMENT + 8 * argument
    return [
        (_LOAD, 0, 0, low),
        (_EQUAL, 0, 2, 0),
        (_LOAD, 0, 0, low + 4),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, result),
    ]


def _refuse_values(argument: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    lines = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument)]
    for value in values:
        lines += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def _refuse_flags(argument: int, flags: int) -> list[tuple[int, int, int, int]]:
    return [
        (_LOAD, 0, 0, _ARGUMENT + 8 * argument),
        (_SET, 0, 1, flags),
        (_RETURN, 0, 0, _ERRNO | _EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _check_mapping() -> list[tuple[int, int, int, int]]:
    """Ask for shared memory without a file: it is in no process once most of it is unmapped, so
    only its creation can be counted. Pages of a special size are not counted, so there are none.
    """
    return [
        (_LOAD, 0, 0, _ARGUMENT + 8 * 3),
        (_SET, 0, 1, _HUGE),
        (_RETURN, 0, 0, _ERRNO | _ENOMEM),
        (_SET, 1, 0, _ANONYMOUS),
        (_RETURN, 0, 0, _ALLOW),
        (_SET, 0, 1, _SHARED),
        (_RETURN, 0, 0, _ASK),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _check_family() -> list[tuple[int, int, int, int]]:
    """Allow sockets of this machine and of the internet, and the one that lists addresses. Others,
    such as vsock, reach past namespaces or into rarely used parts of the kernel."""
    lines = [(_LOAD, 0, 0, _ARGUMENT)]
    for family in (_AF_UNIX, _AF_INET, _AF_INET6):
        lines += [(_EQUAL, 0, 1, family), (_RETURN, 0, 0, _ALLOW)]
    return [
        *lines,
        (_EQUAL, 0, 3, _AF_NETLINK),
        (_LOAD, 0, 0, _ARGUMENT + 16),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _ERRNO | _EAFNOSUPPORT),
    ]
