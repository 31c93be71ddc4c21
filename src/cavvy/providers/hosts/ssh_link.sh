# Prints facts about a host and creates Cavvy's folder on it: sh -s FOLDER INSTALLATION HOST FILE...
# Needs only a POSIX shell, mkdir, chmod and uname.
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
