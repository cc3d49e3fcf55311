#!/usr/bin/env bash
# Measures schedules under load on the tiny target. Each schedule has a server. Rounds go over all of them in turns, so
# that a machine's changing clock affects all alike. Prints the median of the rounds: tokens/s of all users together.
#
# Beside it stand estimates of `simulate`. They come from one recorded run and from the cost of steps, which every round
# measures anew. With eight measured throughputs or more, estimates are also fitted to the loads that are not held out.
#
#   scripts/load.sh [OUTPUT_DIR]      default runs/load
#
# In the environment:
#
#   LOAD_SCHEDULES    plain whole fixed:4 prefix prefix-async; also fixed:K and threshold:T
#   LOAD_CONCURRENCY  1 2 4 8 16 32
#   LOAD_HELD_OUT     loads that are measured, but that `simulate` does not know: none
#   LOAD_ROUNDS       3
#   LOAD_SECONDS      4, after one that does not count
#   LOAD_TARGET, LOAD_DRAFT, LOAD_SUITES   assets/tiny-target, assets/tiny-dspark, smoke-math smoke-code smoke-chat
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "load: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/load}
read -ra schedules <<<"${LOAD_SCHEDULES:-plain whole fixed:4 prefix prefix-async}"
read -ra told <<<"${LOAD_CONCURRENCY:-1 2 4 8 16 32}"
read -ra held_out <<<"${LOAD_HELD_OUT:-}"
levels=("${told[@]}" ${held_out[@]+"${held_out[@]}"})
read -ra names <<<"${LOAD_SUITES:-smoke-math smoke-code smoke-chat}"
rounds=${LOAD_ROUNDS:-3} seconds=${LOAD_SECONDS:-4}
target=${LOAD_TARGET:-assets/tiny-target} draft=${LOAD_DRAFT:-assets/tiny-dspark}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
bin=target/release
suites=()
for name in "${names[@]}"; do suites+=(--suite "$name"); done
slots=$(printf '%s\n' "${levels[@]}" 32 | sort -n | tail -1)
# Steps are profiled up to the highest load.
requests=1
for ((count = 1; count < slots; count *= 2)); do requests+=,$((2 * count < slots ? 2 * count : slots)); done

scripts/setup.sh
cargo build --workspace --release --bins
mkdir -p "$out"
rm -rf "$out/measured"
# What was recorded of other models or prompts says nothing of these.
settings="$target $draft ${names[*]} $requests"
if [ "$(cat "$out/settings" 2>/dev/null)" != "$settings" ]; then
    rm -rf "$out/whole" "$out/calibration.json" "$out/cost.json"
    echo "$settings" >"$out/settings"
fi
[ -f "$out/whole/results.json" ] || $bin/deepspec-eval run --quiet --target "$target" --draft "$draft" "${suites[@]}" --temperature 0 --no-baseline \
    --output-dir "$out/whole" >/dev/null
[ -f "$out/calibration.json" ] || $bin/deepspec-eval calibrate "$out/whole" --output "$out/calibration.json" >/dev/null
[ -f "$out/cost.json" ] || $bin/deepspec-eval profile --target "$target" --draft "$draft" --max-num-seqs "$requests" --context-lens 96 --output "$out/cost.json" >/dev/null

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
    $bin/deepspec-data serve --model "$target" --draft "$draft" --schedule "$schedule" ${more[@]+"${more[@]}"} --max-num-seqs "$slots" --port 0 2>"$log" &
    pids+=($!)
    until grep -q "listening on" "$log"; do
        kill -0 $! 2>/dev/null || { tail -5 "$log" >&2; exit 1; }
        sleep 0.1
    done
    urls+=("$schedule=$(sed -n 's/^listening on //p' "$log")")
done
for round in $(seq "$rounds"); do
    $bin/deepspec-eval profile --quiet --target "$target" --draft "$draft" --max-num-seqs "$requests" --context-lens 96 --output "$out/cost-$round.json" --overwrite >/dev/null
    for level in "${levels[@]}"; do
        for url in "${urls[@]}"; do
            $bin/deepspec-eval load --quiet --server "$url" "${suites[@]}" --concurrency "$level" --seconds "$seconds" --warm-up 1 --overwrite \
                --output-dir "$out/measured/${url%%=*}-$level-$round" >/dev/null
        done
    done
    echo "load: round $round of $rounds" >&2
done
# What was measured, and in brackets what so many simulations estimated over it.
table() {
    python3 - "$out" "$1" "${held_out[*]-}" <<'P'
import collections
import glob
import json
import re
import statistics
import sys

out, rounds, held_out = sys.argv[1], int(sys.argv[2]), [int(level) for level in sys.argv[3].split()]
# Numbers as `simulate` writes them: threshold:0.50 is threshold:0.5.
named = lambda schedule: re.sub(r"\d[\d.]*$", lambda number: f"{float(number[0]):g}", schedule)
measured, estimated = collections.defaultdict(list), collections.defaultdict(list)
for file in glob.glob(f"{out}/measured/*/load.json"):
    for run in json.load(open(file))["runs"]:
        measured[named(run["server"]), run["level"]["concurrency"]].append(run["tokens_per_second"])
for number in range(1, rounds + 1):
    for course in json.load(open(f"{out}/simulation-{number}/simulation.json"))["courses"]:
        for cell in course["outcomes"]:
            estimated[named(course["schedule"]), cell["concurrency"]].append((cell["tokens"] + cell["first_tokens"]) / cell["seconds"])
levels = sorted({level for _, level in measured})
print("| tokens/s at | " + " | ".join(f"{level}, held out" if level in held_out else str(level) for level in levels) + " |")
print("|---" + "|---" * len(levels) + "|")
worst = {True: (0, ""), False: (0, "")}
for schedule in sorted({schedule for schedule, _ in measured}):
    cells = []
    for level in levels:
        found = statistics.median(measured[schedule, level])
        if (schedule, level) not in estimated:
            cells.append(f"{found:.0f}")
            continue
        said = statistics.median(estimated[schedule, level])
        is_held_out = level in held_out
        worst[is_held_out] = max(worst[is_held_out], (abs(said / found - 1), f"{schedule} at {level}"))
        cells.append(f"{found:.0f} ({said / found - 1:+.0%})")
    print(f"| {schedule} | " + " | ".join(cells) + " |")
told = ", ".join(f"{'held out' if out else 'told'}: {where}, {off:.1%}" for out, (off, where) in worst.items() if where)
if told:
    print("in brackets the difference of the estimate; furthest off " + told)
P
}

table 0
served=()
for level in "${told[@]}"; do
    for file in "$out"/measured/*-"$level"-*/load.json; do served+=(--served "$file"); done
done
# Of fewer nothing can be told.
if [ $((${#told[@]} * ${#schedules[@]})) -lt 8 ] || [ ${#told[@]} -lt 2 ] || [ ${#schedules[@]} -lt 2 ]; then served=(); fi
for round in $(seq "$rounds"); do
    $bin/deepspec-eval simulate "$out/whole" --cost "$out/cost-$round.json" --calibration "$out/calibration.json" ${served[@]+"${served[@]}"} --quiet --overwrite \
        --concurrency "$(IFS=,; echo "${levels[*]}")" --schedule "$(IFS=,; echo "${schedules[*]}")" --output-dir "$out/simulation-$round" >/dev/null
done
table "$rounds"
