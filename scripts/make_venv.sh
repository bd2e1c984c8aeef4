#!/bin/sh
# Makes a virtual environment with the first Python >= 3.11 that can: make_venv.sh FOLDER
# PYTHON names another interpreter to use. An environment that works is kept as it is.
set -eu

folder=$1
wanted='import sys; sys.exit(sys.version_info < (3, 11))'
without_venv=

if [ -x "$folder/bin/python" ] && "$folder/bin/python" -m pip --version >/dev/null 2>&1; then
    exit 0
fi

for python in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    "$python" -c "$wanted" 2>/dev/null || continue
    if ! "$python" -c 'import venv, ensurepip' 2>/dev/null; then
        without_venv=$python
        continue
    fi
    echo "making $folder with $("$python" --version)" >&2
    "$python" -m venv --clear "$folder"
    exit 0
done

if [ -n "$without_venv" ]; then
    version=$("$without_venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "error: $without_venv has no working venv module; on Debian or Ubuntu run" >&2
    echo "    apt install python3-venv        (or python$version-venv)" >&2
else
    echo "error: no Python >= 3.11 found (tried: ${PYTHON:-python3, python3.11 to python3.14});" >&2
    echo "    on Debian 12 or Ubuntu 24.04 and newer run: apt install python3 python3-venv" >&2
    echo "    or name one: make setup PYTHON=/path/to/python3.12" >&2
fi
exit 2
