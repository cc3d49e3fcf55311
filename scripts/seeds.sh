#!/usr/bin/env bash
# DSpark against DFlash on the toy target over several seeds and training lengths; prints one line per run.
#
#   scripts/seeds.sh [DEMO_DIR [STEPS...]]      default runs/demo 250 500 1500; uses the cache that scripts/demo.sh left there
#
# SEEDS and RATES override the seeds and the learning rates (RATES=recipe takes the recipes' own).
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
demo=${1:-runs/demo}
shift || true
lengths=("${@:-250}")
[ $# -gt 0 ] || lengths=(250 500 1500)
read -ra seeds <<<"${SEEDS:-1 2 3}"
read -ra rates <<<"${RATES:-recipe}"
bin=target/release
out=$demo/seeds
mkdir -p "$out"
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE} OMP_NUM_THREADS=1

run() { # drafter seed steps rate
    local name=$1-seed$2-steps$3-lr$4 rate=()
    [ "$4" = recipe ] || rate=(--set "train.lr=$4")
    $bin/deepspec-train --quiet --config "configs/tiny/$1.yaml" --set "data.states.cache=$demo/cache" \
        --set "logging.output_dir=$out" --set "name=$name" --set "seed=$2" --set "train.max_train_steps=$3" "${rate[@]}"
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
            for drafter in dspark dflash; do
                while [ "$(jobs -rp | wc -l)" -ge "$(nproc)" ]; do wait -n; done
                run $drafter "$seed" "$steps" "$rate" &
            done
        done
    done
done
wait
