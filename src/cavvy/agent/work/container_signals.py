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
    STAGERS,
    STARTS_S,
    sets_trap,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..config import RankPaths
    from ..documents import WorkConfig

# `ask PID` ends the program of the shell PID. The masks are those of `signal_targets`: 4000 is
# SIGTERM, 4c0 are the signals that the data workers of PyTorch handle, and 28 those they do not.
_TEXT = r"""
look() { # c: whether it has a handler, k: its children
  for d in $all; do unset "c_$d" "k_$d"; done
  all=
  for d in /proc/[0-9]*; do
    i=${d#/proc/} parent= caught=0 blocked=0
    { while read -r name value; do
      case $name in
        State:) case $value in Z*|X*) continue 2;; esac;;
        PPid:) parent=$value;;
        SigBlk:) blocked=$((0x${value#????????}));;
        SigCgt:) caught=$((0x${value#????????})); break;;
      esac
    done <"$d/status"; } 2>/dev/null
    [ -n "$parent" ] || continue
    all="$all $i"
    eval "k_$parent=\"\${k_$parent-} $i\""
    [ $(((caught | blocked) & 0x4000)) != 0 ] || continue
    [ $((caught & 0x4e8)) = $((0x4c0)) ] || eval "c_$i=1"
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
is_stager() { exe "$1"; case ${exe##*/} in {stagers}) ;; *) false;; esac; }
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
  local pid=$1 caught shell= traps= front= beside= before=$first child kids c
  eval "caught=\${c_$pid-} kids=\${k_$pid-}"
  is_shell "$pid" && shell=1
  [ -z "$shell" ] || [ "$pid" != "$work" ] || caught={trap} # its trap may be the agent's
  if [ -n "$caught" ] && [ -z "$shell" ] && ! passes "$pid"; then
    first="$first $pid" programs="$programs $pid"
    return
  fi
  [ -z "$caught" ] || [ -z "$shell" ] || traps=1
  for child in $kids; do
    if [ -n "$traps" ] && aside "$child" "$pid"; then
      eval "beside=1 c=\${c_$child-}"
      [ -z "$c" ] || programs="$programs $pid"
    else
      front=1
      walk "$child"
    fi
  done
  [ -z "$beside" ] || [ -n "$front" ] || programs="$programs $pid" # its trap need not wait
  if [ -n "$caught" ] && { [ -n "$shell" ] || [ "$first" = "$before" ]; }; then
    first="$first $pid"
  elif [ "$first" != "$before" ] && { [ -n "$shell" ] || is_stager "$pid"; }; then
    held="$pid $held"
  fi
}
find_awaited() { # what the work's shell waits for
  eval "below=\${k_$work-}"
  for i in $below; do aside "$i" "$work" || programs="$programs $i"; done
}
choose() {
  first= held= programs=
  look
  case $1 in
    all) ;;
    main)
      below=$work
      if is_shell "$work"; then
        held=$work
        find_awaited
        eval "below=\${programs:-\${k_$work-}}"
        programs=
      fi
      for i in $below; do eval "programs=\"\$programs \${c_$i:+$i}\""; done
      case $programs in *[0-9]*) ;; *) programs=$below;; esac
      first=$programs;;
    *)
      walk "$work"
      case $programs in
        *[0-9]*) ;;
        *) # what nohup has started in a script that has ended
          first= held=
          for i in $k_1; do
            case $i in "$self"|"$work") ;; *) eval "k_$work=\"\${k_$work-} $i\"";; esac
          done
          walk "$work";;
      esac
      leave_piped;;
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
reads() { # whether one reads from a pipe what the other writes
  pipe=$(readlink "/proc/$1/fd/0")
  case $pipe in pipe:*) ;; *) return 1;; esac
  [ "$pipe" = "$(readlink "/proc/$2/fd/1")" ] || [ "$pipe" = "$(readlink "/proc/$2/fd/2")" ]
} 2>/dev/null
leave_piped() { # to the script that they are connected with
  scripts= others= left=
  for i in $programs; do
    if is_interpreter "$i"; then scripts="$scripts $i"; else others="$others $i"; fi
  done
  for i in $others; do
    for j in $scripts; do
      if ! is_shell "$i" && { reads "$i" "$j" || reads "$j" "$i"; }; then left="$left $i "; fi
    done
  done
  [ -n "$left" ] || return
  others="$programs " programs= all_first=$first first=
  for i in $others; do case $left in *" $i "*) ;; *) programs="$programs $i";; esac; done
  for i in $all_first; do case $left in *" $i "*) ;; *) first="$first $i";; esac; done
}
halt() { # stops the shells, and chooses again: a shell may have started a command meanwhile
  stopped=
  while :; do
    new=
    for i in $held; do
      case " $stopped " in *" $i "*) ;; *) new="$new $i"; kill -STOP "$i";; esac
    done
    [ -n "$new" ] || return 0
    stopped="$stopped$new"
    choose "$notify" || return
  done
}
choose_all() { # all but the work's shell
  is_shell "$work" || return
  case " $stopped " in *" $work "*) ;; *) stopped="$stopped $work"; kill -STOP "$work";; esac
  look
  first= programs= held=$work
  for i in $all; do
    case $i in 1|"$self"|"$work") ;; *) first="$first $i";; esac
  done
  find_awaited
}
is_complete() { # whether the agent says so
  echo halted >{halted}
  left=10
  until [ -s {answer} ]; do
    [ $((left -= 1)) -gt 0 ] || return
    sleep 1
  done
  read -r answer <{answer}
  [ "$answer" = complete ]
}
ask() {
  all= work=$1 notify={notify} stopped=
  read -r self _ </proc/self/stat
  patience
  until choose "$notify"; do
    if [ "$notify" = all ] || [ $((patience -= 1)) -lt 0 ] || ! starting "$work"; then break; fi
    sleep 1
  done
  case $programs in *[0-9]*) halt;; *) false;; esac ||
    { [ "$notify" != all ] && choose_all; } || { kill -TERM -1; kill -CONT $stopped; return; }
  [ -z "$first" ] || kill -TERM $first
  for i in $stopped; do case " $held " in *" $i "*) ;; *) kill -CONT "$i";; esac; done
  told=" $first " there=" $all " awaited=$programs stopped=$held
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
  if [ -n "$stopped" ]; then
    complete=
    is_complete && complete=1
    [ -n "$complete" ] || kill -TERM $stopped
    order=
    for i in $stopped; do order="$i $order"; done # the inner ones first
    kill -CONT $order $there
    [ -z "$complete" ] || return
  fi
  alive "$work" || return
  sleep 5
  kill -TERM -1
}
"""


def _any(words: tuple[str, ...], after: str = "") -> str:
    return "|".join(word + after for word in words)


def make_functions(work: WorkConfig, paths: RankPaths) -> str:
    """Return the functions for a task. In `paths.notice_file`, the agent writes how many seconds a
    notice leaves."""
    named = {
        "shells": _any(SHELLS),
        "interpreters": _any((*INTERPRETERS, *(f"{each}[0-9]*" for each in INTERPRETERS))),
        "launchers": _any(LAUNCHERS),
        "modules": _any(LAUNCHER_MODULES),
        "ranks": _any(tuple(each.decode() for each in RANKS), "=*"),
        "starts_s": f"{STARTS_S:.0f}",
        "stagers": _any(STAGERS),
        "trap": "$caught" if sets_trap(work.run) else "",
        "notice": shlex.quote(paths.notice_file),
        "halted": shlex.quote(paths.halted_file),
        "answer": shlex.quote(paths.answer_file),
        "notify": shlex.quote(work.notify),
    }
    text = _TEXT
    for name, value in named.items():
        text = text.replace("{" + name + "}", value)
    return text
