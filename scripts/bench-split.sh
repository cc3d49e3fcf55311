#!/usr/bin/env bash
# Measures `deepspec-data split` against Hugging Face's datasets on the same rows, one after the other. It prints the
# best seconds of several runs each, their ratio, and the most memory that either held.
#
#   scripts/bench-split.sh [ROWS [RUNS [FOLDER]]]     1000000 rows of about 1 kB, 3 runs, a temporary folder
#
# PYTHON names a Python that has datasets and numpy; without it, one is set up in .venv-bench.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*)
        echo "bench-split: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd "$(dirname "$0")/.."
rows=${1:-1000000} runs=${2:-3} folder=${3:-}

if [[ -z ${PYTHON:-} ]]; then
    PYTHON=.venv-bench/bin/python
    [[ -x $PYTHON ]] || python3 -m venv .venv-bench
    "$PYTHON" -c 'import datasets' 2>/dev/null || .venv-bench/bin/pip install --quiet datasets
fi
if [[ -z $folder ]]; then
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
fi
mkdir -p "$folder"
cargo build --quiet --release --locked --workspace --bin deepspec-data

data=$folder/rows-$rows.parquet
[[ -s $data ]] || "$PYTHON" deepspec-data/benches/split.py make "$rows" "$data"
echo "$rows rows, $(stat -c %s "$data") bytes of parquet; load before: $(cut -d' ' -f1 /proc/loadavg)"

# Runs a command and prints its seconds and its peak memory in kB. What was written before must not be written on its time.
measure() {
    rm -f "$folder"/*.jsonl*
    sync
    "$PYTHON" - "$@" <<'PY'
import resource, subprocess, sys, time
start = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
seconds = time.monotonic() - start
if done.returncode != 0:
    sys.exit(f"{sys.argv[1]} failed: {done.stdout}")
print(f"{seconds:.2f} {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss}")
PY
}

best() { sort -n | head -1; }
ours=() theirs=()
check() {
    [[ $(cat "$@" | wc -l) == "$rows" ]] || { echo "$* do not have $rows rows" >&2; exit 1; }
}
for ((run = 1; run <= runs; run++)); do
    ours+=("$(measure target/release/deepspec-data split --quiet --overwrite --dataset "$data" \
        --train-output "$folder/train.jsonl" --eval-output "$folder/eval.jsonl")")
    check "$folder/train.jsonl" "$folder/eval.jsonl"
    theirs+=("$(measure "$PYTHON" deepspec-data/benches/split.py split "$data" "$folder/p-train.jsonl" "$folder/p-eval.jsonl")")
    check "$folder/p-train.jsonl" "$folder/p-eval.jsonl"
    echo "run $run: split ${ours[-1]% *} s, datasets ${theirs[-1]% *} s"
done
read -r our_seconds _ < <(printf '%s\n' "${ours[@]}" | best)
read -r their_seconds _ < <(printf '%s\n' "${theirs[@]}" | best)
our_memory=$(printf '%s\n' "${ours[@]#* }" | sort -n | tail -1)
their_memory=$(printf '%s\n' "${theirs[@]#* }" | sort -n | tail -1)
"$PYTHON" - "$our_seconds" "$their_seconds" "$our_memory" "$their_memory" <<'PY'
import sys
ours, theirs, our_memory, their_memory = map(float, sys.argv[1:])
print(f"split    {ours:7.2f} s  {our_memory / 1024:6.0f} MB at most")
print(f"datasets {theirs:7.2f} s  {their_memory / 1024:6.0f} MB at most")
print(f"split is {theirs / ours:.1f} times as fast")
PY
