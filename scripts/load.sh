#!/usr/bin/env bash
# Schedules under load on the tiny target, in turns: each is served, and rounds go over all of them, so that the clock of a machine that moves
# is the same for all. Prints the median of the rounds, tokens/s of all users together.
#
#   scripts/load.sh [OUTPUT_DIR]      default runs/load
#
# In the environment:
#   LOAD_SCHEDULES    plain whole fixed:4 prefix prefix-async
#   LOAD_CONCURRENCY  1 2 4 8 16 32
#   LOAD_ROUNDS       3
#   LOAD_SECONDS      4, after one that does not count
#   LOAD_TARGET, LOAD_DRAFT, LOAD_SUITES   assets/tiny-target, assets/tiny-dspark, smoke-math smoke-code smoke-chat
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/load}
read -ra schedules <<<"${LOAD_SCHEDULES:-plain whole fixed:4 prefix prefix-async}"
read -ra levels <<<"${LOAD_CONCURRENCY:-1 2 4 8 16 32}"
read -ra names <<<"${LOAD_SUITES:-smoke-math smoke-code smoke-chat}"
rounds=${LOAD_ROUNDS:-3} seconds=${LOAD_SECONDS:-4}
target=${LOAD_TARGET:-assets/tiny-target} draft=${LOAD_DRAFT:-assets/tiny-dspark}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
bin=target/release
suites=()
for name in "${names[@]}"; do suites+=(--suite "$name"); done
slots=$(printf '%s\n' "${levels[@]}" 32 | sort -n | tail -1)

scripts/setup.sh
cargo build --workspace --release --bins
mkdir -p "$out"
[ -f "$out/whole/results.json" ] || $bin/deepspec-eval run --quiet --target "$target" --draft "$draft" "${suites[@]}" --temperature 0 --no-baseline \
    --output-dir "$out/whole" >/dev/null
[ -f "$out/calibration.json" ] || $bin/deepspec-eval calibrate "$out/whole" --output "$out/calibration.json" >/dev/null
[ -f "$out/cost.json" ] || $bin/deepspec-eval profile --target "$target" --draft "$draft" --contexts 96 --output "$out/cost.json" >/dev/null

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
urls=()
for schedule in "${schedules[@]}"; do
    more=()
    case $schedule in
        prefix*) more=(--cost "$out/cost.json" --calibration "$out/calibration.json") ;;
        threshold*) more=(--calibration "$out/calibration.json") ;;
    esac
    log=$out/serve-$schedule.log
    $bin/deepspec-data serve --model "$target" --draft "$draft" --schedule "$schedule" ${more[@]+"${more[@]}"} --slots "$slots" --port 0 2>"$log" &
    pids+=($!)
    until grep -q "listening on" "$log"; do
        kill -0 $! 2>/dev/null || { tail -5 "$log" >&2; exit 1; }
        sleep 0.1
    done
    urls+=("$schedule=$(sed -n 's/^listening on //p' "$log")")
done
: >"$out/rounds.txt"
for round in $(seq "$rounds"); do
    for level in "${levels[@]}"; do
        for url in "${urls[@]}"; do
            $bin/deepspec-eval load --quiet --json --server "$url" "${suites[@]}" --concurrency "$level" --seconds "$seconds" --warm-up 1 --overwrite \
                --output-dir "$out/last" | python3 -c '
import json, sys
run = json.load(sys.stdin)["runs"][0]
print(run["server"], run["level"]["concurrency"], run["tokens_per_second"])' >>"$out/rounds.txt"
        done
    done
    echo "load: round $round of $rounds" >&2
done
python3 - "$out/rounds.txt" <<'P'
import collections
import statistics
import sys

found = collections.defaultdict(lambda: collections.defaultdict(list))
for line in open(sys.argv[1]):
    schedule, level, rate = line.split()
    found[schedule][int(level)].append(float(rate))
levels = sorted({level for of in found.values() for level in of})
print("| tokens/s at | " + " | ".join(map(str, levels)) + " |\n|---" + "|---" * len(levels) + "|")
for schedule, of in found.items():
    print(f"| {schedule} | " + " | ".join(f"{statistics.median(of[level]):.0f}" for level in levels) + " |")
P
$bin/deepspec-eval simulate "$out/whole" --cost "$out/cost.json" --calibration "$out/calibration.json" --concurrency "$(IFS=,; echo "${levels[*]}")" \
    --output-dir "$out/simulation" --overwrite
