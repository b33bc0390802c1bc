#!/bin/sh
# Makes the virtual environment $1, unless it is there with the same Python.
set -eu
version() {
	"$1" -c 'import sys; print(*sys.version_info[:2])' 2> /dev/null || true
}

python=$("$(dirname "$0")/find_python.sh")
[ "$(version "$1/bin/python")" = "$(version "$python")" ] || rm -rf "$1"
# A Python without ensurepip (Debian's) makes the environment without pip; its own pip then installs one there.
"$python" -m venv "$1" 2> /dev/null || {
	"$python" -m venv --without-pip "$1"
	"$python" -m pip --python "$1/bin/python" install -qq pip
}
