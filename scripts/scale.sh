#!/usr/bin/env bash
# Checks the estimates of `deepspec-train --plan --measured` on this machine. Every stage is measured at some sizes of
# the toy target. From some of them the plan estimates the others, and more than 15 % off is a failure. Everything is
# measured in two rounds, and the faster run of the two counts. Then it times steps of training on one, two and four
# processes, beside the plan's estimates for these numbers of devices.
#
#   scripts/scale.sh [OUTPUT_DIR]      default runs/scale; earlier measurements there are replaced
#
# Run it beside nothing else.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "scale: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
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

# fastest FILE COMMAND…: what the command prints, if no earlier round's was faster.
fastest() {
    local file=$1 begun took
    shift
    begun=$(date +%s%N)
    "$@" >"$out/fresh"
    took=$(($(date +%s%N) - begun))
    [ -f "$file.ns" ] && [ "$took" -ge "$(cat "$file.ns")" ] || { mv "$out/fresh" "$file" && echo "$took" >"$file.ns"; }
}

bench() { # told|held-out TOKENS ANCHORS SAMPLES
    fastest "$out/$1/training-$2-$3-$4.json" $bin/deepspec-train --config "$recipe" --set "data.max_length=$2" --set "drafter.dspark.num_anchors=$3" \
        --set "train.local_batch_size=$4" --set "train.global_batch_size=$4" --bench 12 --json --device cpu
}
$bin/deepspec-data --quiet split --dataset assets/demo-prompts.jsonl --train-output "$out/train.jsonl" --eval-output "$out/rest.jsonl" --sample-size 220
regenerate() { # AT_ONCE TOKENS: prints the report
    $bin/deepspec-data --quiet regenerate --local-model $target --model $target --input "$out/train.jsonl" --output "$out/answers-$1-$2.jsonl" --max-num-seqs "$1" \
        --concurrency "$1" --temperature 1.0 --max-tokens "$2" --seed 1 --disable-thinking --overwrite >/dev/null
    cat "$out/answers-$1-$2.jsonl.report.json"
}
answers() { fastest "$out/$1/answers-$2-$3.json" regenerate "$2" "$3"; } # told|held-out AT_ONCE TOKENS
states() { # told|held-out TOKENS
    fastest "$out/$1/states-$2.json" $bin/deepspec-data cache plan --config "$recipe" --set "data.max_length=$2" --input "$out/answers-32-96.jsonl" \
        --output-dir "$out/cache" --device cpu --measure --json
}
run() { # SLOTS: prints the results
    $bin/deepspec-eval run --quiet --target $target --draft $draft --suite smoke-math --suite smoke-code --suite smoke-chat --max-num-seqs "$1" --temperature 0 \
        --no-baseline --output-dir "$out/eval-$1" --overwrite >/dev/null
    cat "$out/eval-$1/results.json"
}
evaluate() { fastest "$out/$1/evaluation-$2.json" run "$2"; } # told|held-out SLOTS

for round in 1 2; do
    say "round $round: training (tokens of a sample, anchors, samples of a forward)"
    bench told 128 8 1
    bench told 512 64 4
    bench told 512 16 4
    bench told 256 64 1
    bench held-out 256 32 4
    bench held-out 384 48 2
    say "round $round: answers (asked at once, tokens of each)"
    # Steps of one, two and four tokens wait for the same weights and take the same time: nothing could be told from fewer at once.
    answers told 4 96
    answers told 32 96
    answers told 32 24
    answers held-out 8 96
    answers held-out 16 48
    say "round $round: states (tokens that samples are cut at)"
    states told 48
    states told 512
    states held-out 96
    say "round $round: evaluation (slots)"
    evaluate told 1
    evaluate told 16
    evaluate held-out 4
done

say "steps on several processes"
$bin/deepspec-data --quiet cache build --config "$recipe" --input "$out/answers-32-96.jsonl" --output-dir "$out/cache" --device cpu
train() { # NAME PROCESSES GLOBAL_BATCH
    $bin/deepspec-train --quiet --config "$recipe" --set "name=$1" --set "data.states.cache=$out/cache" --set "logging.output_dir=$out/runs" \
        --set train.local_batch_size=2 --set "train.global_batch_size=$3" --set train.max_train_steps=60 --set logging.logging_steps=20 --device cpu \
        --processes "$2" --torch-profile "$out/$1.trace.json"
}
for processes in 1 2 4; do
    train "strong-$processes" $processes 16
    train "weak-$processes" $processes $((8 * processes))
done

measured=() held_out=()
for file in "$out"/told/*.json; do measured+=(--measured "$file"); done
for file in "$out"/held-out/*.json; do held_out+=(--validate-on "$file"); done
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
        --set train.max_train_steps=60 --device cpu --plan "${measured[@]}" --devices 1,2,4 --interconnect "$link" "${@:2}"
}
plan 16 "${held_out[@]}"
for batch in 8 16 32; do plan "$batch" "${held_out[@]}" --json >"$out/plan-$batch.json"; done
echo
python3 - "$out" <<'P'
import json
import sys

out = sys.argv[1]
print("| processes | strong: 16 samples a step, s | estimated | weak: 8 samples each, s | estimated |\n|---|---|---|---|---|")
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
apart = [(one["foretold_s"] / one["measured_s"] - 1, one["stage"], one["file"]) for one in json.load(open(f"{out}/plan-16.json"))["pipeline"]["held_out"]]
far = [f"{stage} of {file}: {off:+.1%}" for off, stage, file in apart if abs(off) > 0.15]
if far:
    sys.exit("scale: estimates are more than 15 % off for " + "; ".join(far))
print(f"scale: {len(apart)} held out, the worst {max(abs(off) for off, *_ in apart):.1%} off")
P
