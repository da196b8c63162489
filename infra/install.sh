#!/usr/bin/env bash
# Makes the environment: the locked packages and this project, into the directory given.
set -euo pipefail
venv=$1
uv_version=0.13.9

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
  echo "groupstream needs Python 3.11 to 3.14, and '$python' is $("$python" --version 2>&1 || true)." >&2
  echo "Name another one: make demo PYTHON=/path/to/python3.12" >&2
  exit 1
fi
if [ ! -x "$venv/bin/python" ]; then
  "$python" -m venv "$venv" || {
    echo "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv" >&2
    exit 1
  }
fi
echo "Installing the locked packages into $venv (torch and vLLM are large: 1 minute from a cache, 5 or more without)."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$uv_version"

# uv draws its own progress on a terminal; elsewhere a line every ten seconds says that it is alive.
"$venv/bin/uv" pip install --python "$venv/bin/python" --constraint requirements.lock \
  --editable ".[${EXTRA:-cpu},dev]" &
install=$!
trap 'kill "$install" 2>/dev/null || true' INT TERM
if [ ! -t 2 ]; then
  while sleep 10 && kill -0 "$install" 2>/dev/null; do
    echo "  still installing: $(du -sh "$venv" | cut -f1) in $venv"
  done &
  alive=$!
fi
status=0
wait "$install" || status=$?
[ -z "${alive:-}" ] || kill "$alive" 2>/dev/null || true
exit "$status"
