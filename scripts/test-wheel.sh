#!/usr/bin/env bash
# Installs the wheel in a fresh environment outside the checkout, and runs the demo's stages with it on the toy target.
#
#   scripts/test-wheel.sh [--download]
#
# Without --download the environment borrows the torch of DEEPSPEC_TEST_PYTHON, and only pip is tried. --download
# fetches torch itself, with `pip install` and with `uv tool install` (3 GB).
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    --download) ;;
    -*)
        echo "test-wheel: unknown argument \`$1\`; --help lists what it takes" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
download=
[ "${1:-}" != --download ] || download=1
peers=${DEEPSPEC_TEST_PYTHON:?an interpreter with torch}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
wheel=$(python3 scripts/wheel.py "${DEEPSPEC_TEST_BIN:-target/release}" "$work" | tail -n 1)

# Every stage on the toy, from a folder that is no checkout; $1 is the folder of the programs.
stages() {
    local bin=$1 out=$2 recipe=("--config" "$root/configs/tiny/dspark.yaml" "--set" "target.model=$root/assets/tiny-target")
    recipe+=(--set "data.states.cache=$out/cache" --set "logging.output_dir=$out/checkpoints")
    mkdir -p "$out"
    cd "$out"
    "$bin/deepspec-data" --version | grep -q "^libtorch 2\."
    "$bin/deepspec-data" --quiet split --dataset "$root/assets/demo-prompts.jsonl" --train-output train.jsonl --eval-output eval.jsonl --sample-size 60
    "$bin/deepspec-data" --quiet regenerate --local-model "$root/assets/tiny-target" --model toy --device cpu --input train.jsonl \
        --output answers.jsonl --max-tokens 48 --seed 1 --disable-thinking
    "$bin/deepspec-data" --quiet cache build "${recipe[@]}" --input answers.jsonl --output-dir cache --device cpu
    "$bin/deepspec-train" --quiet "${recipe[@]}" --device cpu --processes 2 --set train.local_batch_size=2 --set train.max_train_steps=2
    "$bin/deepspec-eval" --quiet run --target "$root/assets/tiny-target" --draft checkpoints/tiny_dspark/step_latest --device cpu \
        --suites-dir "$root/eval_datasets" --suite smoke-math --limit 2 --max-new-tokens 16 --no-baseline --output-dir eval >/dev/null
    [ -s eval/report.html ]
    cd "$root"
}

"$peers" -m venv "$work/pip"
python=$work/pip/bin/python
if [ -n "$download" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check "$wheel"
else
    "$python" -m pip install --quiet --disable-pip-version-check --no-deps "$wheel"
    # Without torch the error says what to install.
    ! "$work/pip/bin/deepspec-train" --version 2>"$work/error"
    grep -q "torch is not installed in this environment" "$work/error"
    site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # A torch of another series is refused, too.
    mkdir -p "$site/torch" "$site/torch-1.0.dist-info"
    touch "$site/torch/__init__.py"
    printf 'Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n' >"$site/torch-1.0.dist-info/METADATA"
    ! "$work/pip/bin/deepspec-train" --version 2>"$work/error"
    grep -q "torch 1.0 is installed, and the programs need 2\." "$work/error"
    # So is one without libraries.
    sed -i "s/^Version: .*/Version: $(sed -n "s/^torch==//p" scripts/requirements-test.txt)/" "$site/torch-1.0.dist-info/METADATA"
    ! "$work/pip/bin/deepspec-train" --version 2>"$work/error"
    grep -q "is incomplete; install it again" "$work/error"
    rm -r "$site/torch" "$site/torch-1.0.dist-info"
    "$peers" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/peers.pth"
fi
stages "$work/pip/bin" "$work/run-pip"
echo "wheel test: $(basename "$wheel"): pip install, every stage on the toy" >&2
if [ -n "$download" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check uv
    UV_TOOL_DIR=$work/tools UV_TOOL_BIN_DIR=$work/uv-bin "$work/pip/bin/uv" --quiet tool install "$wheel"
    stages "$work/uv-bin" "$work/run-uv"
    echo "wheel test: uv tool install, every stage on the toy" >&2
fi
