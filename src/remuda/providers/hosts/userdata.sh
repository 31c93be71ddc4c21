#!/bin/sh
# Made by Remuda: fetches its agent by hash, lets it work, and ends the machine when that is over. Nothing in here lasts:
# each token is good for one claim.
umask 077
home=/var/lib/remuda
mkdir -p $home && cd $home || exit 1
cat > boot.json <<'END_OF_BOOT'
@BOOT@
END_OF_BOOT
cat > boot.py <<'END_OF_PYTHON'
@PYTHON@
END_OF_PYTHON
python=
find_python() {
  for each in python3 /usr/libexec/platform-python /usr/local/bin/python3 /opt/conda/bin/python3 python; do
    if "$each" -I -S -c 'import sys, ssl, fcntl, json, select, zipfile; sys.exit(sys.version_info < (3, 8))' \
      >/dev/null 2>&1; then
      python=$each
      return 0
    fi
  done
  return 1
}
fetch_python() {
  case "$(uname -s) $(uname -m)" in
@PYTHONS@
    *) return 1 ;;
  esac
  if command -v curl >/dev/null 2>&1; then
    curl -fsSk --max-time 120 -o python.tgz "@ADDRESS@/boot/v1/$hash" || return 1
  else
    wget -q --no-check-certificate -T 120 -O python.tgz "@ADDRESS@/boot/v1/$hash" || return 1
  fi
  [ "$(sha256sum python.tgz | cut -d ' ' -f 1)" = "$hash" ] || return 1
  mkdir -p python && tar -xzf python.tgz -C python || return 1
  python="$home/python/lib/loader --library-path $home/python/lib $home/python/bin/python3"
}
tries=0
until find_python || fetch_python; do
  tries=$((tries + 1))
  [ $tries -lt 60 ] || break
  sleep 5
done
[ -z "$python" ] || $python -I -S boot.py boot.json "$python"
echo "remuda: the work is over; this machine ends itself"
shutdown -h now || poweroff -f
