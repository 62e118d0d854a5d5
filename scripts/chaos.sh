#!/bin/sh
# Faults of all kinds, for as long as they take:
#     sh scripts/chaos.sh hub|amqp        what the training of the first part meets by
# A promise that was missed in one part says nothing about the next: all of them run, and the worst
# exit code is that of the whole.
set -u
cd "$(dirname "$0")/.."
link="${1:-hub}"
case "$link" in
    hub) results=benchmarks/results/chaos.json ;;
    amqp) results=benchmarks/results/chaos-amqp.json ;;
    *) echo "error: no link $link here: hub, amqp" >&2; exit 2 ;;
esac
python="${CHAOS_PYTHON:-.venv/bin/python}"  # the tests put another in its place
worst=0
missed=""
play() {
    code=0
    "$python" -m "$@" || code=$?
    [ "$code" -eq 0 ] || missed="$missed
    exit code $code: python -m $*"
    [ "$code" -le "$worst" ] || worst="$code"
}
play tests.replica.chaos --link "$link" --seconds 600 --json "$results"
play tests.collectives.chaos --schedules 100000
play tests.collectives.chaos --schedules 60000 --seed 500000 --unordered
play tests.collectives.chaos_links --link hub --seconds 120
play tests.collectives.chaos_links --link amqp --seconds 120
play tests.cluster.chaos --seconds 600
[ -z "$missed" ] || echo "== what failed, or missed a promise ==$missed" >&2
exit "$worst"
