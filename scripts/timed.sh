#!/usr/bin/env bash
# timed.sh WHAT COMMAND…: says what it does, does it, says how long it took; the exit status is the command's.
what=$1
shift
printf '==> %s\n' "$what"
SECONDS=0
"$@"
status=$?
if [ "$status" -eq 0 ]; then
    printf '<== %s: done in %d s\n' "$what" "$SECONDS"
else
    printf '<== %s: FAILED (exit %d) after %d s\n' "$what" "$status" "$SECONDS" >&2
fi
exit "$status"
