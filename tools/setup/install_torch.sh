#!/bin/sh
# Installs the locked torch and torchvision into the environment $1: their CPU builds where pip's indexes or the index $2
# have both, else the general ones with CUDA libraries.
set -u
log=$1/torch.log

cpu=requirements/torch-cpu.txt
pip="$1/bin/python -m pip install -qq --disable-pip-version-check --no-deps --require-hashes"
$pip -r $cpu 2> "$log" && exit
$pip --retries 1 --timeout 20 --extra-index-url "$2" -r $cpu 2>> "$log" && exit
echo "No CPU builds of torch and torchvision in pip's indexes or $2: installing the general ones (3 GB)"
$pip -r requirements/torch.txt 2>> "$log" && exit
cat "$log" >&2
exit 1
