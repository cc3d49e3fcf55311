#!/usr/bin/env bash
# Runs the commands of docs/large-targets.md, from the states to the accepted length, on the toy target with vLLM's build
# for CPUs. Model, recipe and port take the place of those of the page. Needs a build.
#
#   eval "$(scripts/engines.sh vllm)"; scripts/test-large-targets.sh
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "large-targets test: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
: "${DEEPSPEC_VLLM_PYTHON:?eval \"\$(scripts/engines.sh vllm)\" sets it}"
work=$(mktemp -d)
stop() {
    status=$?
    [ $status = 0 ] || tail -n 20 "$work"/*.log >&2 2>/dev/null || true
    end_vllm
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
server=
end_vllm() {
    [ -z "$server" ] || kill -KILL -- "-$server" 2>/dev/null || true
    [ -z "$server" ] || wait "$server" 2>/dev/null || true
    server=
}
trap stop EXIT
# shellcheck source=scripts/vllm_cpu/command.sh
. scripts/vllm_cpu/command.sh
vllm_on_path "$work/path"
PATH=${DEEPSPEC_TEST_BIN:-$PWD/target/release}:$PATH
port=$(python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')

# The page's files: a recipe with states from a server, answers, and two prompts of a suite.
target=$PWD/assets/tiny-target
mkdir "$work/eval_datasets"
head -n 2 eval_datasets/smoke-math.jsonl >"$work/eval_datasets/smoke-math.jsonl"
sed -e "s|assets/tiny-target|$target|; s|^data: .*|data: {states: {server: 'http://127.0.0.1:$port', folder: $work/states}, input: [answers.jsonl], chat_template: qwen, max_length: 512}|" \
    -e 's|max_train_steps: .*|max_train_steps: 20|; s|output_dir: .*|output_dir: runs}|' configs/tiny/eagle3.yaml >"$work/R.yaml"
python3 - assets/demo-prompts.jsonl "$work/answers.jsonl" <<'PY'
import itertools, json, sys
with open(sys.argv[2], "w") as out:
    for index, row in enumerate(itertools.islice(map(json.loads, open(sys.argv[1])), 24)):
        messages = [{"role": "user", "content": row["conversations"][0]["value"]}]
        messages.append({"role": "assistant", "content": " ".join(f"word {word} of {index}." for word in range(20))})
        print(json.dumps({"id": index, "conversations": messages}), file=out)
PY

# serve COMMAND: starts vLLM by a printed command, and waits until it answers.
serve() {
    local attempt
    end_vllm
    # The build for CPUs has no tensor parallelism.
    set -m
    (cd "$work" && eval "exec ${1/ --tensor-parallel-size 2/} --dtype float32 --enforce-eager") >"$work/vllm.log" 2>&1 &
    server=$!
    set +m
    for ((attempt = 0; attempt < 600; attempt++)); do
        ! curl --silent --fail "http://127.0.0.1:$port/health" >/dev/null || return 0
        kill -0 "$server" || return 1
        sleep 1
    done
    echo "large-targets test: vLLM does not answer" >&2
    return 1
}

# Commands of the section, without comments.
mapfile -t commands < <(awk '/^## Step by step/ { inside = 1 } /^## / && !/Step by step/ { inside = 0 }
    inside && /^```bash/ { block = 1; next } /^```/ { block = 0 } inside && block' docs/large-targets.md |
    sed 's/ *#.*//' | grep -v '^$')
[ ${#commands[@]} = 8 ] || { echo "large-targets test: the page has ${#commands[@]} commands" >&2; exit 1; }
printed='' ran=0
for line in "${commands[@]}"; do
    command=${line//Qwen\/Qwen3-30B-A3B/$target}
    command=${command//127.0.0.1:8000/127.0.0.1:$port}
    command=${command//runs\/…/runs/tiny_eagle3}
    echo "== $command" >&2
    case $command in
        "pip install vllm") command -v vllm >/dev/null ;;
        "vllm serve …") serve "$printed" ;;
        *"states vllm-command"*) printed=$(cd "$work" && eval "$command --port $port") ;;
        *"checkpoint convert"*)
            (cd "$work" && eval "$command") 2>"$work/convert.log"
            printed=$(sed -n 's/.*serve it with: //p' "$work/convert.log" | tail -n 1)
            printed+=" --port $port --per-request-spec-decode-metrics detailed"
            ;;
        *) (cd "$work" && eval "$command") >"$work/command.log" 2>&1 ;;
    esac
    ran=$((ran + 1))
done
python3 - "$work/eval/results.json" "$ran" <<'PY'
import json, sys
suite = json.load(open(sys.argv[1]))["suites"][0]
assert suite["counts"]["samples"] == 2 and suite["metrics"]["accepted_length"] >= 1, suite
print(f"large-targets test: {sys.argv[2]} commands of the page, accepted length {suite['metrics']['accepted_length']:.2f}")
PY
