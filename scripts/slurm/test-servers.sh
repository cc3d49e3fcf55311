#!/usr/bin/env bash
# Tests vLLM's server under a real Slurm of this one machine. regenerate.sbatch starts it, waits until it answers, asks,
# and ends it. The answers must be those of our own engine. A second job has a server that ends before it answers.
# Installs Slurm where it may; needs a build.
#
#   eval "$(scripts/engines.sh vllm)"; scripts/slurm/test-servers.sh
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "slurm test: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/../.."
bin=$PWD/target/release
: "${DEEPSPEC_VLLM_PYTHON:?eval \"\$(scripts/engines.sh vllm)\" sets it}"
work=$(mktemp -d)
# shellcheck source=scripts/slurm/cluster.sh
. scripts/slurm/cluster.sh
stop() {
    status=$?
    [ $status = 0 ] || tail -n 20 "$work"/answers.* "$work"/broken.* >&2 2>/dev/null || true
    kill "${slurm_daemons[@]}" 2>/dev/null || true
    wait "${slurm_daemons[@]}" 2>/dev/null || true
    [ -n "${KEEP:-}" ] || rm -rf "$work"
}
trap stop EXIT
start_slurm "$work" 1

# In the build for CPUs `vllm serve` fails: it looks for a package called vllm.
mkdir "$work/path"
cat >"$work/path/vllm" <<SH
#!/usr/bin/env bash
model=\$2
shift 2
exec "$DEEPSPEC_VLLM_PYTHON" -m vllm.entrypoints.openai.api_server --model "\$model" "\$@"
SH
chmod +x "$work/path/vllm"
export PATH=$work/path:$PATH VLLM_CPU_KVCACHE_SPACE=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1
export DEEPSPEC_SERVER=vllm DEEPSPEC_SERVER_ARGS="--dtype float32 --max-model-len 512 --enforce-eager" DEEPSPEC_STATE=$work/jobs
target=assets/tiny-target
"$bin/deepspec-data" --quiet split --dataset assets/demo-prompts.jsonl --sample-size 20 --test-size 0.2 --train-output "$work/prompts.jsonl" \
    --eval-output "$work/held-out.jsonl"
asked=(--model "$target" --input "$work/prompts.jsonl" --temperature 0 --max-tokens 64 --disable-thinking)
submit() { sbatch --parsable --wait --gpus-per-node=0 --cpus-per-task=1 --output="$work/$1.log" scripts/slurm/regenerate.sbatch "${asked[@]}" --output "$work/$1.jsonl"; }

# Processes of vLLM on this machine, by their command lines or by what they call themselves.
servers() { processes 'VLLM::|vllm\.entrypoints' | sort; }

echo "== regenerate.sbatch with vLLM's server" >&2
before=$(servers)
submit answers
"$bin/deepspec-data" --quiet regenerate --local-model "$target" "${asked[@]}" --output "$work/own.jsonl"
python3 - "$work/answers.jsonl" "$work/own.jsonl" <<'PY'
import json, sys
served, own = ({row["id"]: [m["content"] for m in row["conversations"]] for row in map(json.loads, open(file))} for file in sys.argv[1:])
same = sum(served[key] == own[key] for key in own)
print(f"slurm test: vLLM's server: {same} of {len(own)} answers are those of our own engine")
# Where two tokens are nearly as good as each other, engines may part.
assert served.keys() == own.keys() and len(own) == 16 and same >= 15
PY
# The job ends a moment before the last of its programs.
for ((attempt = 0; attempt < 100; attempt++)); do
    left=$(servers)
    [ "$left" != "$before" ] || break
    sleep 0.1
done
if [ "$left" != "$before" ]; then
    echo "slurm test: parts of the server outlived the job: ${left//$'\n'/ }" >&2
    exit 1
fi

echo "== and with one that does not start" >&2
DEEPSPEC_SERVER_ARGS="--no-such-flag" submit broken && { echo "slurm test: the job did not fail" >&2; exit 1; }
grep -q 'failed: no server on GPU none' "$work/jobs"
grep -q 'no-such-flag' "$work/broken.log"
echo "slurm test: a server that does not start fails its job with its own words" >&2
