#!/usr/bin/env bash
# Makes .venv ready, from nothing: Python, torch for this machine, the rest from requirements.lock, Maieutic itself.
#
#   PYTHON=python3.12   the interpreter to build .venv with (else the first fit one of those below)
#   TORCH=cpu|cuda      which build of torch (else: cuda where nvidia-smi lists a GPU). A torch that is already in .venv
#                       and fits the lock is kept, so a build for an older driver can be installed there by hand first.
#   EXTRAS=dev,vllm     which extras to install (else: dev,reat,latent, which is what the tests use)
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.venv
say() { printf '    %s\n' "$*"; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

fit='import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 14))'
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13}; do
        if "$candidate" -c "$fit" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "no fit interpreter among: ${PYTHON:-python3 python3.12 python3.11 python3.13}. Maieutic needs Python 3.11 to 3.13;" \
        "install one, or name it: make setup PYTHON=/path/to/python3.12"
}

# ------------------------------------------------------------------------------------------------ the environment
if ! "$venv/bin/python" -c "$fit" >/dev/null 2>&1; then
    [ ! -e "$venv" ] || die "$venv is there but has no working Python 3.11 to 3.13: remove it (rm -r $venv) and try again"
    python=$(find_python)
    say "making $venv with $("$python" --version) ($python)"
    if ! "$python" -m venv "$venv" >"$venv.log" 2>&1; then
        rm -rf "$venv" # half an environment, made one line above
        command -v uv >/dev/null || { cat "$venv.log" >&2; die "$python cannot make environments (Debian: apt install python3-venv)"; }
        uv venv --quiet --seed --python "$python" "$venv"
    fi
    rm -f "$venv.log"
fi
py="$venv/bin/python"
"$py" -m pip --version >/dev/null 2>&1 || "$py" -m ensurepip --upgrade >/dev/null 2>&1 || die "$venv has no pip, and ensurepip failed"
pip() { "$py" -m pip --disable-pip-version-check --no-input "$@"; }
locked() { sed -n "s/^$1==\([^ ;]*\).*/\1/p" requirements.lock | head -n 1; }

# ---------------------------------------------------------------------------------------------------------- torch
# The index's own Linux torch is a CUDA build of several GB. Without a GPU ask for exactly `VERSION+cpu`: first where pip
# looks anyway (a mirror or a folder of wheels may have it), then PyTorch's index of CPU builds, and only then give in.
torch=$(locked torch)
if [ -z "${TORCH:-}" ]; then
    if nvidia-smi -L 2>/dev/null | grep -q '^GPU'; then TORCH=cuda; else TORCH=cpu; fi
fi
has_torch() { "$py" -c "from importlib.metadata import version as v; import sys; sys.exit(v('torch').split('+')[0] != '$torch')" 2>/dev/null; }
if has_torch; then
    say "torch $torch is there"
elif [ "$TORCH" = cpu ] && [ "$(uname -s)" = Linux ]; then
    say "no NVIDIA GPU (or TORCH=cpu): installing torch $torch for the CPU"
    cpu_index=https://download.pytorch.org/whl/cpu
    if ! why=$(pip install --quiet --no-deps "torch==$torch+cpu" 2>&1) &&
        ! why=$(pip install --quiet --no-deps --timeout 20 --retries 1 --index-url "$cpu_index" "torch==$torch+cpu" 2>&1); then
        say "no CPU build of torch $torch where pip looks, nor at $cpu_index ($(tail -n 1 <<<"$why"))"
        say "taking the index's own torch, a CUDA build of several GB: it works on a CPU too"
    fi
else
    say "installing torch $torch as the index has it (TORCH=$TORCH)"
fi

# ------------------------------------------------------------------------------- everything else, as the lock has it
extras=${EXTRAS:-dev,reat,latent}
say "installing maieutic[$extras] as requirements.lock has it"
pip install --quiet "uv==$(locked uv)" || pip install --quiet uv || say "uv is not to be had: pip alone will take longer"
# uv does not read pip's settings; an index or a certificate named there is meant for it too.
setting() { pip config list 2>/dev/null | sed -n "s/^\(global\|user\|site\|:env:\)\.$1='\(.*\)'\$/\2/p" | tail -n 1; }
index=$(setting index-url) cert=$(setting cert)
[ -z "$index" ] || export UV_DEFAULT_INDEX="${UV_DEFAULT_INDEX:-$index}"
[ -z "$cert" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$cert}"
if ! { [ -x "$venv/bin/uv" ] && "$venv/bin/uv" pip install --quiet --python "$py" -c requirements.lock -e ".[$extras]"; }; then
    say "uv could not; trying pip"
    pip install --quiet -c requirements.lock -e ".[$extras]"
fi
"$py" -c 'import torch, maieutic; print(f"    maieutic {maieutic.__version__}, torch {torch.__version__}, GPUs: {torch.cuda.device_count()}")'
