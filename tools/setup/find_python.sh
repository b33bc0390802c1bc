#!/bin/sh
# Prints the path of a Python 3.12 or 3.13: PYTHON if it is set, else one on PATH, of pyenv, conda or uv, else one that uv
# installs.
set -u

fits() {
	"$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 12), (3, 13)))' 2> /dev/null
}

if [ -n "${PYTHON:-}" ]; then
	fits "$PYTHON" && command -v "$PYTHON" && exit
	echo "PYTHON=$PYTHON is not a Python 3.12 or 3.13" >&2
	exit 1
fi

for version in 3.12 3.13; do
	for python in "python$version" python3 \
		"${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/python \
		"$HOME"/miniforge3/bin/python$version "$HOME"/miniforge3/envs/*/bin/python$version \
		"$HOME"/miniconda3/bin/python$version "$HOME"/miniconda3/envs/*/bin/python$version \
		"$HOME"/anaconda3/bin/python$version "$HOME"/anaconda3/envs/*/bin/python$version \
		"${UV_PYTHON_INSTALL_DIR:-$HOME/.local/share/uv/python}/cpython-$version"*/bin/python; do
		fits "$python" && command -v "$python" && exit
	done
done

uv=$(command -v uv)
own=
if [ -z "$uv" ] && own=$(mktemp -d) && python3 -m venv "$own" 2> /dev/null && "$own/bin/pip" install -qq uv 2> /dev/null; then
	uv=$own/bin/uv
fi
if [ -n "$uv" ]; then
	echo "No Python 3.12 or 3.13 here: uv installs one" >&2
	timeout 600 "$uv" python install --no-bin 3.12 >&2
	found=$("$uv" python find --managed-python 3.12 2> /dev/null)
fi
[ -z "$own" ] || rm -rf "$own"
[ -z "${found:-}" ] || { echo "$found"; exit; }
cat >&2 <<'WAYS'
MegaRL needs Python 3.12 or 3.13, and none was found on PATH, in pyenv, conda or uv. Three ways to get one:
  the system's packages     apt install python3.12 python3.12-venv
  uv                        uv python install 3.12
  conda                     conda create -n python312 python=3.12
A Python elsewhere is named with PYTHON=/path/to/python3.12.
WAYS
exit 1
