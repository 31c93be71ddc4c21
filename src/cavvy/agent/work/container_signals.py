r"""Chooses in a container which processes get SIGTERM, as `signal_targets` does outside.

A container's first process alone gets the signal from outside. Its image may lack Python, so the
choice is made by functions of POSIX shell, which need /proc, `sleep`, `tr` and `readlink`, such as
those of busybox. Without the latter two, a process is known by the name that the kernel tells, and
launchers are not known.
"""

from __future__ import annotations

import shlex

from .signal_targets import (
    INTERPRETERS,
    LAUNCHER_MODULES,
    LAUNCHERS,
    RANKS,
    SHELLS,
    STARTS_S,
)

# `ask PID` ends the program of the shell PID. The masks are those of `signal_targets`: 4000 is
# SIGTERM, 4c0 are the signals that the data workers of PyTorch handle, and 28 those they do not.
_TEXT = r"""
look() { # c: whether it has a handler, k: its children
  for d in $all; do unset "c_$d" "k_$d"; done
  all=
  for d in /proc/[0-9]*; do
    i=${d#/proc/} parent= caught=0
    { while read -r name value; do
      case $name in
        State:) case $value in Z*|X*) continue 2;; esac;;
        PPid:) parent=$value;;
        SigCgt:) caught=$((0x${value#????????})); break;;
      esac
    done <"$d/status"; } 2>/dev/null
    [ -n "$parent" ] || continue
    all="$all $i"
    eval "k_$parent=\"\${k_$parent-} $i\""
    [ $((caught & 0x4000)) = 0 ] || [ $((caught & 0x4e8)) = $((0x4c0)) ] || eval "c_$i=1"
  done
}
alive() {
  { while read -r name value; do
    case $name in State:) case $value in Z*|X*) return 1;; *) return 0;; esac;; esac
  done <"/proc/$1/status"; } 2>/dev/null
  return 1
}
exe() {
  exe=$(readlink "/proc/$1/exe" 2>/dev/null) || { read -r exe <"/proc/$1/comm"; } 2>/dev/null
  exe=${exe%" (deleted)"}
}
is_shell() { exe "$1"; case ${exe##*/} in {shells}) ;; *) false;; esac; }
is_interpreter() { exe "$1"; case ${exe##*/} in {interpreters}) ;; *) false;; esac; }
below() {
  local kids
  below=
  while [ $# -gt 0 ]; do
    eval "kids=\${k_$1-}"; shift; below="$below $kids"; set -- "$@" $kids
  done
}
is_launcher() {
  tr '\0' '\n' 2>/dev/null <"/proc/$1/cmdline" | {
    read -r word; at=1
    case ${word##*/} in {launchers}) exit 0;; esac
    while [ $((at += 1)) -le 6 ] && read -r word; do
      case $word in
        -m) read -r word; case $word in {modules}) exit 0;; esac; exit 1;;
        -*) ;;
        *) case ${word##*/} in {launchers}) exit 0;; esac; exit 1;;
      esac
    done
    exit 1
  }
}
ranks() {
  tr '\0' '\n' 2>/dev/null <"/proc/$1/environ" | while read -r word; do
    case $word in {ranks}) echo "$word";; esac
  done
}
passes() { # whether it is a launcher or a wrapper
  local own i caught given word
  is_launcher "$1" && return
  below "$1"
  set -- "$1" $below
  if ! is_interpreter "$1"; then
    own=$exe
    for i in "$@"; do
      eval "caught=\${c_$i-}"
      [ -z "$caught" ] || is_shell "$i" || [ "$exe" = "$own" ] || return 0
    done
  fi
  given=$(ranks "$1"); shift
  for i in "$@"; do
    for word in $(ranks "$i"); do
      case "
$given
" in *"
$word
"*) continue;; esac
      case $word in LOCAL_RANK=0) return 0;; LOCAL_RANK=*) ;; *) return 0;; esac
    done
  done
  return 1
}
aside() { # whether a shell has started a process in the background, without its own input
  [ "$(readlink "/proc/$1/fd/0")" = /dev/null ] && [ "$(readlink "/proc/$2/fd/0")" != /dev/null ]
} 2>/dev/null
walk() { # adds to first, held and programs
  local pid=$1 caught shell= traps= before=$first child kids c
  eval "caught=\${c_$pid-} kids=\${k_$pid-}"
  is_shell "$pid" && shell=1
  if [ -n "$caught" ] && [ -z "$shell" ] && ! passes "$pid"; then
    first="$first $pid" programs="$programs $pid"
    return
  fi
  [ -z "$caught" ] || [ -z "$shell" ] || [ "$pid" = "$work" ] || traps=1
  for child in $kids; do
    if [ -n "$traps" ] && aside "$child" "$pid"; then
      eval "c=\${c_$child-}"
      [ -z "$c" ] || programs="$programs $pid"
    else
      walk "$child"
    fi
  done
  if [ -n "$caught" ] && { [ -n "$shell" ] || [ "$first" = "$before" ]; }; then
    first="$first $pid"
  elif [ -n "$shell" ] && [ "$first" != "$before" ]; then
    held="$held $pid"
  fi
}
choose() {
  first= held= programs=
  look
  case $1 in
    all) ;;
    main)
      below=$work
      if is_shell "$work"; then
        eval "below=\${k_$work-}"
        for i in $below; do aside "$i" "$work" || programs="$programs $i"; done
        below=${programs:-$below} programs=
      fi
      for i in $below; do eval "programs=\"\$programs \${c_$i:+$i}\""; done
      case $programs in *[0-9]*) ;; *) programs=$below;; esac
      first="$work $programs";;
    *) walk "$work";;
  esac
  case $programs in *[0-9]*) ;; *) return 1;; esac
}
starting() {
  local pid=$1 child kids caught
  eval "kids=\${k_$pid-} caught=\${c_$pid-}"
  if is_interpreter "$pid" && ! passes "$pid"; then
    [ -z "$caught" ] || return
    { read -r line <"/proc/$pid/stat" && read -r now _ </proc/uptime; } 2>/dev/null || return
    set -- ${line##*) }
    [ $((${now%.*} - ${20} / 100)) -lt {starts_s} ]
    return
  fi
  for child in $kids; do starting "$child" && return; done
  return 1
}
patience() { # half of the notice's seconds
  patience=0 line=
  { read -r line <{notice}; } 2>/dev/null # whose line has no end
  line=${line#*'"seconds": '}
  line=${line%%[!0-9]*}
  patience=$((${line:-0} / 2))
}
ask() {
  all= work=$1 notify={notify}
  patience
  until choose "$notify"; do
    if [ "$notify" = all ] || [ $((patience -= 1)) -lt 0 ] || ! starting "$work"; then
      kill -TERM -1
      return
    fi
    sleep 1
  done
  stopped=$held
  [ -z "$stopped" ] || kill -STOP $stopped
  kill -TERM $first
  told=" $first " there=" $all " awaited=$programs
  while :; do
    busy=
    for i in $awaited; do ! alive "$i" || busy="$busy $i"; done
    [ -n "$busy" ] || break
    sleep 1
    choose "$notify" || continue
    for i in $programs; do # those that have installed a handler since
      case $told in *" $i "*) continue;; esac
      case $there in *" $i "*) kill -TERM "$i"; told="$told$i " awaited="$awaited $i";; esac
    done
  done
  [ -z "$stopped" ] || { kill -TERM $stopped; kill -CONT $stopped; }
  alive "$work" || return
  sleep 5
  kill -TERM -1
}
"""


def _any(words: tuple[str, ...], after: str = "") -> str:
    return "|".join(word + after for word in words)


def make_functions(notify: str, notice_file: str) -> str:
    """Return the functions for a task's `notify`. `notice_file` is where the agent writes how many
    seconds a notice leaves."""
    named = {
        "shells": _any(SHELLS),
        "interpreters": _any((*INTERPRETERS, *(f"{each}[0-9]*" for each in INTERPRETERS))),
        "launchers": _any(LAUNCHERS),
        "modules": _any(LAUNCHER_MODULES),
        "ranks": _any(tuple(each.decode() for each in RANKS), "=*"),
        "starts_s": f"{STARTS_S:.0f}",
        "notice": shlex.quote(notice_file),
        "notify": shlex.quote(notify),
    }
    text = _TEXT
    for name, value in named.items():
        text = text.replace("{" + name + "}", value)
    return text
