# The command of each pod: finds a Python for the agent, or waits until `tunnel.sh` brings a Python.
run=/cavvy/run
if [ "$1" != bring ] && command -v python3 >/dev/null 2>&1; then
  exec python3 -I -S /cavvy/agent/init.py
fi
mkdir -p $run
: >$run/needs-python
tries=0
while [ ! -e $run/brought/ready ]; do
  tries=$((tries + 1))
  [ $tries -gt 6000 ] && exit 78
  sleep 0.05 2>/dev/null || sleep 1
done
exec $run/brought/lib/loader --library-path $run/brought/lib $run/brought/bin/python3 -I -S /cavvy/agent/init.py
