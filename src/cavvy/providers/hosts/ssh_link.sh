# Prints facts about a host and creates Cavvy's folder on it: sh -s FOLDER INSTALLATION HOST FILE...
# Needs only a POSIX shell, mkdir, chmod, rm and uname. A file is named after its hash. Where jobs can see the folder,
# a job can change a file: a changed file is removed, so that the control plane sends it again.
set -eu
umask 077
case $1 in
  "~") base=$HOME ;;
  "~/"*) base=$HOME/${1#"~/"} ;;
  *) base=$1 ;;
esac
mkdir -p "$base/$2/$3"
chmod 700 "$base"
echo "base=$base"
echo "system=$(uname -s) $(uname -m)"
shift 3
for python in python3 /usr/libexec/platform-python /usr/local/bin/python3 /opt/conda/bin/python3 python; do
  if "$python" -I -S -c 'import sys, fcntl, json, select, socket, zipfile; sys.exit(sys.version_info < (3, 8))' \
    >/dev/null 2>&1; then
    echo "python=$(command -v "$python")"
    break
  fi
done

hash() { # of the standard input
  if command -v sha256sum >/dev/null 2>&1; then sha256sum
  elif command -v openssl >/dev/null 2>&1; then openssl dgst -sha256 -r
  elif command -v shasum >/dev/null 2>&1; then shasum -a 256
  else "${python:-python3}" -I -S -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
  fi
}
intact() { # FILE, which is a file or an unpacked Python
  [ ! -L "$1" ] || return 1
  if [ -f "$1" ]; then found=$(hash <"$1")
  elif ! command -v sha256sum >/dev/null 2>&1; then return 0 # a folder, which cannot be compared here
  elif [ -n "$(find "$1" ! -type f ! -type d)" ]; then return 1
  else found=$(cd "$1" && find . -type f -exec sha256sum {} + | LC_ALL=C sort | sha256sum)
  fi
  name=${1##*/}
  case $found in "${name%%.*}"*) return 0 ;; esac
  return 1
}
for file in "$@"; do
  if [ -e "$base/$file" ] || [ -L "$base/$file" ]; then
    if intact "$base/$file"; then echo "has=$file"; else rm -rf "$base/$file"; fi
  fi
done
