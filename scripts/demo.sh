#!/usr/bin/env bash
# From prompts to accepted length on this machine: sets everything up, then runs every stage on the embedded toy target.
#
#   scripts/demo.sh [OUTPUT_DIR]      default runs/demo; a second call goes on where the first one stopped
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "demo: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/demo}
target=assets/tiny-target
suites=(--suite smoke-math --suite smoke-code --suite smoke-chat)

say() { echo "== demo ($((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))): $*" >&2; }

say "set-up and build"
scripts/setup.sh
cargo build --workspace --release --bins
bin=target/release
SECONDS=0

# Stages that run side by side get a core each.
cores=$(nproc)
half=$((cores > 1 ? cores / 2 : 1))
mkdir -p "$out"

say "splitting the committed prompts"
if [ ! -f "$out/train.jsonl" ]; then
    $bin/deepspec-data split --dataset assets/demo-prompts.jsonl \
        --train-output "$out/train.jsonl" --eval-output "$out/eval.jsonl" --sample-size 1600
fi

say "the target answers them over HTTP"
: >"$out/serve.log" # a line of an earlier server must not be taken for this one's
$bin/deepspec-data --quiet serve --model $target --port 0 --max-num-seqs 48 2>"$out/serve.log" &
server=$!
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
until url=$(sed -n 's/^listening on //p' "$out/serve.log") && [ -n "$url" ]; do
    kill -0 $server 2>/dev/null || { cat "$out/serve.log" >&2; exit 1; }
    sleep 0.05
done
$bin/deepspec-data regenerate --input "$out/train.jsonl" --output "$out/answers.jsonl" --model $target --server "$url" \
    --concurrency 96 --temperature 1.0 --max-tokens 256 --seed 1 --disable-thinking
kill $server
wait $server || true

say "caching the target's hidden states"
shared=(--set "data.states.cache=$out/cache" --set "logging.output_dir=$out/checkpoints")
$bin/deepspec-data cache build --config configs/tiny/dspark.yaml "${shared[@]}" \
    --input "$out/answers.jsonl" --output-dir "$out/cache"

say "training DSpark and DFlash side by side: same samples, steps, layers and taps"
# The untrained DSpark, for comparison, is an experiment of its own.
OMP_NUM_THREADS=$half $bin/deepspec-train --quiet --config configs/tiny/dspark.yaml "${shared[@]}" \
    --set name=untrained --init-only
trainers=()
for drafter in dspark dflash; do
    OMP_NUM_THREADS=$half $bin/deepspec-train --config configs/tiny/$drafter.yaml "${shared[@]}" \
        2> >(sed "s/^/$drafter /" >&2) &
    trainers+=($!)
done
for trainer in "${trainers[@]}"; do wait "$trainer"; done

say "measuring accepted lengths"
for drafter in untrained dflash dspark; do
    case $drafter in
        untrained) checkpoint=$out/checkpoints/untrained/step_0 ;;
        *) checkpoint=$out/checkpoints/tiny_$drafter/step_latest ;;
    esac
    echo
    echo "$drafter"
    $bin/deepspec-eval run --target $target --draft "$checkpoint" "${suites[@]}" --max-new-tokens 256 --max-num-seqs 16 \
        --output-dir "$out/eval-$drafter" --overwrite
done

echo
say "the three drafters side by side"
$bin/deepspec-eval compare "$out/eval-untrained" "$out/eval-dflash" "$out/eval-dspark" \
    --label "untrained DSpark" --label DFlash --label DSpark
say "done; everything is in $out"
