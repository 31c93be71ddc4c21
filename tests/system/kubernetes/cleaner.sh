# Takes away the empty control groups and the folder of a cluster once those who used it are gone: GROUP FOLDER.
cat >/dev/null
clean() {
  for top in /sys/fs/cgroup/*/"$1"[0-9]*; do
    [ -d "$top" ] && find "$top" -depth -type d -exec rmdir {} + 2>/dev/null
  done
  for top in /sys/fs/cgroup/*/"$1"[0-9]*; do
    [ -d "$top" ] && return 1
  done
  return 0
}
tries=0
until clean "$1" || [ $tries -gt 100 ]; do
  tries=$((tries + 1))
  sleep 0.1
done
rm -rf "$2"
