#!/usr/bin/env bash
# Trains drafters on the toy target over several seeds, training lengths and sources of states. It prints one line per
# run: drafter, seed, steps, learning rate, states, the accepted length of each suite and their mean.
#
#   scripts/seeds.sh [DEMO_DIR [STEPS...]]      default runs/demo 250 500 1500; uses the data of scripts/demo.sh
#
# These variables override the comparison: DRAFTERS="dspark dflash", SEEDS="1 2 3", RATES=recipe (the recipes' own) and
# STATES=bf16. STATES may be encodings of a cache, which is built if it is missing, `online` or `hybrid`. The cost of
# fp8:
#
#   DRAFTERS=dspark STATES="bf16 fp8" scripts/seeds.sh runs/demo 500
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "seeds: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
demo=${1:-runs/demo}
shift || true
lengths=("${@:-250}")
[ $# -gt 0 ] || lengths=(250 500 1500)
read -ra seeds <<<"${SEEDS:-1 2 3}"
read -ra rates <<<"${RATES:-recipe}"
read -ra drafters <<<"${DRAFTERS:-dspark dflash}"
read -ra sources <<<"${STATES:-bf16}"
bin=target/release
out=$demo/seeds
mkdir -p "$out"
cores=$(nproc) # before OMP_NUM_THREADS, which nproc obeys
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} OMP_NUM_THREADS=1

folder() { # encoding: bf16 is what the demo built
    [ "$1" = bf16 ] && echo "$demo/cache" || echo "$demo/cache-$1"
}

for source in "${sources[@]}"; do
    case $source in online | hybrid) continue ;; esac
    [ -f "$(folder "$source")/manifest.json" ] || $bin/deepspec-data --quiet cache build --config configs/tiny/dspark.yaml \
        --input "$demo/answers.jsonl" --output-dir "$(folder "$source")" --encoding "$source" >&2
done

run() { # drafter seed steps rate states
    local name=$1-seed$2-steps$3-lr$4-$5 more=()
    [ "$4" = recipe ] || more+=(--set "train.lr=$4")
    case $5 in
        online) more+=(--set data.states=online --set "data.input=[$demo/answers.jsonl]") ;;
        hybrid) more+=(--set "data.states={hybrid: $out/$name.cache}" --set "data.input=[$demo/answers.jsonl]") ;;
        *) more+=(--set "data.states.cache=$(folder "$5")") ;;
    esac
    $bin/deepspec-train --quiet --config "configs/tiny/$1.yaml" "${more[@]}" --set "logging.output_dir=$out" \
        --set "name=$name" --set "seed=$2" --set "train.max_train_steps=$3"
    [ -f "$out/$name.eval/results.json" ] || $bin/deepspec-eval run --quiet --no-baseline --target assets/tiny-target \
        --draft "$out/$name/step_latest" --suite smoke-math --suite smoke-code --suite smoke-chat --max-new-tokens 256 \
        --output-dir "$out/$name.eval" --json >/dev/null
    python3 -c '
import json, sys
results = json.load(open(sys.argv[1]))
tau = [suite["metrics"]["accepted_length"] for suite in results["suites"]]
print(*sys.argv[2:], *(f"{t:.3f}" for t in tau), f"macro {sum(tau) / len(tau):.3f}")
' "$out/$name.eval/results.json" "$@"
}

# As many runs at once as there are cores, one thread each.
for steps in "${lengths[@]}"; do
    for rate in "${rates[@]}"; do
        for seed in "${seeds[@]}"; do
            for drafter in "${drafters[@]}"; do
                for source in "${sources[@]}"; do
                    while [ "$(jobs -rp | wc -l)" -ge "$cores" ]; do wait -n; done
                    run "$drafter" "$seed" "$steps" "$rate" "$source" &
                done
            done
        done
    done
done
wait
