# Says what a host has and makes Cavvy's folder there: sh -s FOLDER INSTALLATION HOST FILE...
# Nothing but a POSIX shell and mkdir, chmod, uname is needed.
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
for file in "$@"; do
  if [ -e "$base/$file" ]; then echo "has=$file"; fi
done
for python in python3 /usr/libexec/platform-python /usr/local/bin/python3 /opt/conda/bin/python3 python; do
  if "$python" -I -S -c 'import sys, fcntl, json, select, socket, zipfile; sys.exit(sys.version_info < (3, 8))' \
    >/dev/null 2>&1; then
    echo "python=$(command -v "$python")"
    break
  fi
done
