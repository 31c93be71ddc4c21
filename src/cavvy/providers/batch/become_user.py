"""Runs on the login node before the login-node helper: continues as the Unix user `user`, and then
runs the program `boot`, which is the helper's. `login_session.py` sends this program and sets both
names. It needs only the standard library of Python 3.8 or newer.

Nothing of the session of root remains: neither groups nor variables of its environment.
"""

import os
import pwd
import sys

KEPT = ("PATH", "LANG", "TZ")
KEPT_PREFIXES = ("LC_", "SLURM_", "PBS_")
# By this token, the commands of Slurm would act as its owner instead of the user.
TOKEN = "SLURM_JWT"


def become(user: str) -> None:
    """Continue as the user, who is never root, by whichever name. Exit with a message if this is
    not possible.
    """
    try:
        entry = pwd.getpwnam(user)
    except KeyError:
        refuse("the login node has no user " + user)
    if entry.pw_uid == 0:
        refuse("user " + user + " is root on the login node, and no job runs as root")
    if os.getuid() == 0:
        os.initgroups(entry.pw_name, entry.pw_gid)
        os.setgid(entry.pw_gid)
        os.setuid(entry.pw_uid)
    if (os.getuid(), os.geteuid()) != (entry.pw_uid, entry.pw_uid):
        refuse("the login is neither root nor " + user)
    if not os.access(os.__file__, os.R_OK):
        told = user + " cannot read the Python of the login (" + sys.executable + ")"
        refuse(told + ": set `python` to one that all users can read")
    for name in list(os.environ):
        if name == TOKEN or (name not in KEPT and not name.startswith(KEPT_PREFIXES)):
            del os.environ[name]
    names = {"USER": entry.pw_name, "LOGNAME": entry.pw_name}
    os.environ.update(names, HOME=entry.pw_dir, SHELL=entry.pw_shell or "/bin/sh")
    os.umask(0o077)
    os.chdir("/")


def refuse(message: str) -> None:
    sys.stderr.write(message + "\n")
    sys.stderr.flush()
    os._exit(126)


if __name__ == "__main__":
    become(user)  # type: ignore[name-defined]  # noqa: F821 - see above
    exec(boot)  # type: ignore[name-defined]  # noqa: F821
