#!/usr/bin/env bash
# How near to the truth `deepspec-train --plan --measured` comes on this machine: every stage is measured at some sizes of the toy target; the plan
# is told of some of them and foretells the others. Then steps of training on one, two and four processes, beside what the plan says of so many
# devices.
#
#   scripts/scale.sh [OUTPUT_DIR]      default runs/scale; what was measured before is measured anew
#
# To be run beside nothing else.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/scale}
target=assets/tiny-target draft=assets/tiny-dspark recipe=configs/tiny/dspark.yaml
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
scripts/setup.sh
cargo build --workspace --release --bins
bin=target/release
rm -rf "$out"
mkdir -p "$out/told" "$out/held-out"
say() { echo "== scale ($((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))): $*" >&2; }

say "training: tokens of a sample, anchors, samples of a forward"
bench() { # told|held-out TOKENS ANCHORS SAMPLES
    $bin/deepspec-train --config "$recipe" --set "data.max_length=$2" --set "drafter.dspark.num_anchors=$3" --set "train.local_batch_size=$4" \
        --set "train.global_batch_size=$4" --bench 12 --json --device cpu >"$out/$1/training-$2-$3-$4.json"
}
bench told 128 8 1
bench told 512 64 4
bench told 512 16 4
bench told 256 64 1
bench held-out 256 32 4
bench held-out 384 48 2

say "answers: asked at once, tokens of each"
$bin/deepspec-data --quiet split --dataset assets/demo-prompts.jsonl --train-output "$out/train.jsonl" --eval-output "$out/rest.jsonl" --sample-size 220
answers() { # told|held-out AT_ONCE TOKENS
    $bin/deepspec-data --quiet regenerate --embedded $target --model $target --input "$out/train.jsonl" --output "$out/answers-$2-$3.jsonl" --slots "$2" \
        --concurrency "$2" --temperature 1.0 --max-tokens "$3" --seed 1 --disable-thinking >/dev/null
    mv "$out/answers-$2-$3.jsonl.report.json" "$out/$1/answers-$2-$3.json"
}
# Steps of one, two and four tokens wait for the same weights and take the same time: nothing could be told from fewer at once.
answers told 4 96
answers told 32 96
answers told 32 24
answers held-out 8 96
answers held-out 16 48

say "states: tokens that samples are cut at"
states() { # told|held-out TOKENS
    $bin/deepspec-data cache plan --config "$recipe" --set "data.max_length=$2" --input "$out/answers-32-96.jsonl" --output-dir "$out/cache" --device cpu \
        --measure --json >"$out/$1/states-$2.json"
}
states told 48
states told 512
states held-out 96

say "evaluation: slots"
evaluate() { # told|held-out SLOTS
    $bin/deepspec-eval run --quiet --target $target --draft $draft --suite smoke-math --suite smoke-code --suite smoke-chat --slots "$2" --temperature 0 \
        --no-baseline --output-dir "$out/eval-$2" >/dev/null
    cp "$out/eval-$2/results.json" "$out/$1/evaluation-$2.json"
}
evaluate told 1
evaluate told 16
evaluate held-out 4

say "steps on several processes"
$bin/deepspec-data --quiet cache build --config "$recipe" --input "$out/answers-32-96.jsonl" --output-dir "$out/cache" --device cpu
train() { # NAME PROCESSES GLOBAL_BATCH
    $bin/deepspec-train --quiet --config "$recipe" --set "name=$1" --set "data.states.cache=$out/cache" --set "logging.output_dir=$out/runs" \
        --set train.local_batch_size=2 --set "train.global_batch_size=$3" --set train.max_train_steps=60 --set logging.logging_steps=20 --device cpu \
        --processes "$2" --profile "$out/$1.trace.json"
}
for processes in 1 2 4; do
    train "strong-$processes" $processes 16
    train "weak-$processes" $processes $((8 * processes))
done

measured=() held_out=()
for file in "$out"/told/*.json; do measured+=(--measured "$file"); done
for file in "$out"/held-out/*.json; do held_out+=(--held-out "$file"); done
# Bytes per second of summing on two processes, as their trace has it.
link=$(python3 - "$out/strong-2.trace.json" "$out/told"/training-*.json <<'P'
import json
import sys

trace, bench = sys.argv[1], json.load(open(sys.argv[2]))
events = [event for event in json.load(open(trace))["traceEvents"] if event.get("name") == "collectives" and "dur" in event]
seconds = sum(event["dur"] for event in events) / 1e6 / 5  # five steps are recorded
print(4 * bench["trainable_weights"] / seconds)  # of two in a ring each sends as much as there is
P
)
plan() { # GLOBAL_BATCH
    $bin/deepspec-train --config "$recipe" --set "data.states.cache=$out/cache" --set train.local_batch_size=2 --set "train.global_batch_size=$1" \
        --set train.max_train_steps=60 --device cpu --plan "${measured[@]}" --devices 1,2,4 --link "$link" "${@:2}"
}
plan 16 "${held_out[@]}"
for batch in 8 16 32; do plan "$batch" --json >"$out/plan-$batch.json"; done
echo
python3 - "$out" <<'P'
import json
import sys

out = sys.argv[1]
print("| processes | strong: 16 samples a step, s | foretold | weak: 8 samples each, s | foretold |\n|---|---|---|---|---|")
for processes in (1, 2, 4):
    cells = []
    for kind, batch in (("strong", 16), ("weak", 8 * processes)):
        lines = [json.loads(line) for line in open(f"{out}/runs/{kind}-{processes}/metrics.jsonl")]
        # The first lines hold the recorded steps.
        took = lines[-1]["step_s"]
        estimates = json.load(open(f"{out}/plan-{batch}.json"))["pipeline"]["estimates"]
        said = next(one["step_seconds"] for one in estimates if one["devices"] == processes)
        cells += [f"{took:.3f}", f"{said:.3f} ({said / took - 1:+.0%})"]
    print(f"| {processes} | " + " | ".join(cells) + " |")
P
