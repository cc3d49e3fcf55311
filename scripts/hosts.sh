#!/usr/bin/env bash
# Tests several hosts: three network namespaces of this machine, each with its own address, joined by a switch. Two of
# them train with two ranks each. A cut cable ends the job with a named cause within the timeout, and the job resumes
# elsewhere with another number of ranks. `regenerate` asks servers on all three hosts while one of them goes away and
# comes back.
#
# Needs root, iproute2 and a build (cargo build --release).
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "hosts: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
bin=$PWD/target/release
work=$(mktemp -d)
mark=ds$$
hosts=(1 2 3)
export OMP_NUM_THREADS=1

stop() {
    local pids
    for host in "${hosts[@]}" s; do
        pids=$(ip netns pids "$mark$host" 2>/dev/null || true)
        [ -z "$pids" ] || kill -KILL $pids 2>/dev/null || true
        ip netns del "$mark$host" 2>/dev/null || true
        rm -rf "/etc/netns/$mark$host"
    done
    rm -rf "$work"
}
trap stop EXIT
fail() {
    tail -n 20 "$work"/*.log >&2 || true
    echo "hosts: $1" >&2
    exit 1
}

# Host N is namespace $mark$N with address 10.77.0.N, on a cable to the switch, namespace ${mark}s. `ip netns exec` gives it an /etc/hosts of its own.
ip netns add "${mark}s"
ip -n "${mark}s" link add name bridge0 type bridge
ip -n "${mark}s" link set bridge0 up
for host in "${hosts[@]}"; do
    name=$mark$host
    ip netns add "$name"
    ip -n "$name" link set lo up
    ip -n "$name" link add eth0 type veth peer name "port$host" netns "${mark}s"
    ip -n "$name" addr add "10.77.0.$host/24" dev eth0
    ip -n "$name" link set eth0 up
    ip -n "$name" route add default via 10.77.0.254
    ip -n "${mark}s" link set "port$host" master bridge0 up
    mkdir -p "/etc/netns/$name"
    printf '127.0.0.1 localhost\n10.77.0.%s %s\n' "$host" "$(hostname)" >"/etc/netns/$name/hosts"
done
on() { # HOST COMMAND…
    local host=$1
    shift
    ip netns exec "$mark$host" "$@"
}
cable() { ip -n "${mark}s" link set "port$1" "$2"; } # HOST up|down

"$bin/deepspec-data" --quiet split --dataset assets/demo-prompts.jsonl --sample-size 400 --test-size 0.1 \
    --train-output "$work/train.jsonl" --eval-output "$work/held-out.jsonl" >/dev/null
ask=(--model assets/tiny-target --input "$work/train.jsonl" --temperature 1.0 --max-tokens 96 --seed 1 --disable-thinking)

echo "== answers from servers on three hosts, one of which goes away and comes back" >&2
servers=()
for host in "${hosts[@]}"; do
    on "$host" "$bin/deepspec-data" serve --model assets/tiny-target --host "10.77.0.$host" --port 30000 --max-num-seqs 2 2>"$work/serve-$host.log" &
    servers+=(--server "http://10.77.0.$host:30000")
done
for host in "${hosts[@]}"; do
    for ((attempt = 0; attempt < 300; attempt++)); do
        ! grep -q 'listening on' "$work/serve-$host.log" || break
        sleep 0.1
    done
done
answered() { cat "$1" 2>/dev/null | wc -l; }
on 1 "$bin/deepspec-data" regenerate "${ask[@]}" "${servers[@]}" --concurrency 2 --timeout 2 --output "$work/answers.jsonl" 2>"$work/regenerate.log" >"$work/regenerate.out" &
asking=$!
until [ "$(answered "$work/answers.jsonl")" -ge 10 ]; do
    kill -0 $asking || fail "regenerate ended early"
    sleep 0.05
done
cable 3 down
# noticed WORDS: waits until regenerate says them of the third host's server.
noticed() {
    until grep -q "10\.77\.0\.3:30000.*$1" "$work/regenerate.log"; do
        kill -0 $asking || fail "regenerate ended before it said of host 3: $1"
        sleep 0.05
    done
}
noticed 'trying it again'
at=$(answered "$work/answers.jsonl")
until [ "$(answered "$work/answers.jsonl")" -ge $((at + 20)) ]; do
    kill -0 $asking || fail "regenerate ended without host 3"
    sleep 0.05
done
cable 3 up
noticed 'is back'
# Tokens that the third host's server has generated so far.
generated() { on 3 python3 -c 'import urllib.request as web; print(*[line.split()[-1] for line in web.urlopen("http://10.77.0.3:30000/metrics").read().decode().splitlines() if line.startswith("deepspec:generation_tokens_total")])'; }
before=$(generated)
wait $asking || fail "regenerate failed"
[ "$(generated)" -gt "$before" ] || fail "host 3 was back and asked nothing"
for host in "${hosts[@]}"; do
    pids=$(ip netns pids "$mark$host")
    [ -z "$pids" ] || kill $pids
done
wait
"$bin/deepspec-data" --quiet regenerate "${ask[@]}" --local-model assets/tiny-target --output "$work/alone.jsonl" >/dev/null
python3 - "$work" <<'PY'
import json, sys
work = sys.argv[1]
def said(name):
    rows = [json.loads(line) for line in open(f"{work}/{name}.jsonl")]
    assert len({row["id"] for row in rows}) == len(rows), name
    return {row["id"]: [message["content"] for message in row["conversations"]] for row in rows}
shared, alone = said("answers"), said("alone")
same = sum(shared[key] == alone[key] for key in alone)
report = json.load(open(f"{work}/answers.jsonl.report.json"))
print(f"hosts: {same} of {len(alone)} answers are those of one process; servers: "
      + ", ".join(f"{server['answered']}" for server in report["this_run"]["servers"]))
assert shared.keys() == alone.keys() and same == len(alone), (len(shared), len(alone), same)
PY

echo "== two ranks on each of two hosts" >&2
"$bin/deepspec-data" --quiet cache build --config configs/tiny/dspark.yaml --input "$work/answers.jsonl" --output-dir "$work/cache" --device cpu
common=(--config configs/tiny/dspark.yaml --device cpu --set "data.states.cache=$work/cache" --set "logging.output_dir=$work/out"
    --set logging.logging_steps=1 --set logging.checkpointing_steps=5 --set train.max_train_steps=30 --set train.local_batch_size=1
    --set train.timeout_s=15)
# train NAME WORLD HOST…: the ranks in turn on these hosts, as many of them as there are ranks; their codes are in $codes.
train() {
    local name=$1 world=$2 rank pids=()
    shift 2
    local places=("$@") local_rank=0
    for ((rank = 0; rank < world; rank++)); do
        [ $rank = 0 ] || [ "${places[$rank]}" != "${places[$((rank - 1))]}" ] && local_rank=0
        RANK=$rank WORLD_SIZE=$world LOCAL_RANK=$local_rank MASTER_ADDR=10.77.0.${places[0]} MASTER_PORT=29500 \
            on "${places[$rank]}" "$bin/deepspec-train" "${common[@]}" --set name="$name" 2>"$work/$name-$rank.log" &
        pids+=($!)
        local_rank=$((local_rank + 1))
    done
    ranks=("${pids[@]}")
}
codes() {
    codes=()
    local pid code
    for pid in "${ranks[@]}"; do
        code=0
        wait "$pid" || code=$?
        codes+=("$code")
    done
}
"$bin/deepspec-train" --quiet "${common[@]}" --set name=one
train four 4 1 1 2 2
codes
[ "${codes[*]}" = "0 0 0 0" ] || fail "four ranks ended with ${codes[*]}"

# The ranks that the cause of a rank's end names, with a space before and after each.
missed() { sed -nE 's/.*ERROR rank [0-9]+ stopped in .*: no word from ranks? ([0-9, ]+), which died or hangs: .*/ \1 /p' "$1" | tail -1 | tr -d ,; }

# Ranks ask each other through rank 0 what ended them, and nothing gets across the cut: whatever the load, a cause names every rank of the other host and is no
# other rank's word. It may name one of its own host besides: always on host 2, which does not reach rank 0, and on host 1 where that one takes over
# two and a half seconds, a sixth of the timeout, to answer.
echo "== the cable is cut" >&2
places=(1 1 2 2)
train cut 4 "${places[@]}"
for ((attempt = 0; attempt < 1200; attempt++)); do
    ! grep -q 'step 8/' "$work/cut-0.log" 2>/dev/null || break
    kill -0 "${ranks[0]}" 2>/dev/null || fail "rank 0 ended before the cut"
    sleep 0.05
done
cable 2 down
cut=$SECONDS
codes
took=$((SECONDS - cut))
for ((rank = 0; rank < 4; rank++)); do
    [ "${codes[$rank]}" = 1 ] || fail "rank $rank ended with ${codes[$rank]} after the cut, expected 1"
    named=$(missed "$work/cut-$rank.log")
    [ -n "$named" ] || fail "rank $rank does not say which ranks it misses"
    for ((peer = 0; peer < 4; peer++)); do
        [ "${places[$peer]}" = "${places[$rank]}" ] || [[ $named = *" $peer "* ]] || fail "rank $rank misses ranks${named}and not rank $peer of the other host"
    done
    echo "hosts: rank $rank: $(grep ERROR "$work/cut-$rank.log" | tail -1 | cut -c 1-160)" >&2
done
# A machine with other work may be late.
[ $took -le 22 ] || fail "it took $took s to notice the cut, with a timeout of 15 s"
cable 2 up

echo "== and goes on elsewhere, with two ranks" >&2
train cut 2 3 3
codes
[ "${codes[*]}" = "0 0" ] || fail "two ranks ended with ${codes[*]}"
grep -q 'resuming from' "$work/cut-0.log" || fail "it did not go on"

python3 - "$work/out" "$took" <<'PY'
import json, sys
def losses(name):
    return [json.loads(line)["loss"] for line in open(f"{sys.argv[1]}/{name}/metrics.jsonl")]
one = losses("one")
for name in ["four", "cut"]:
    other = losses(name)
    assert len(other) == len(one) == 30, (name, len(other))
    worst = max(abs(a - b) / abs(b) for a, b in zip(other, one))
    print(f"hosts: {name}: 30 steps, losses within {worst:.1e} of one process")
    assert worst < 1e-4, worst
print(f"hosts: the cut was noticed everywhere within {sys.argv[2]} s, with a timeout of 15 s")
PY
