#!/usr/bin/env bash
# Fetches libtorch for the programs beside this script from the wheel of torch, into the folder `libtorch` here. The CPU
# parts are 0.6 GB to download, and 3 GB with the CUDA libraries. These come with programs that were built for GPUs,
# where there is a GPU, or with DEEPSPEC_FULL_TORCH=1. Needs Python 3.10 with venv.
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "install-libtorch: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")"
version=$(sed -n 's/^libtorch \([0-9.]*\).*/\1/p' LIBTORCH)
python3 -m venv --clear .venv
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
if [ "${DEEPSPEC_FULL_TORCH:-0}" = 1 ] || grep -q 'for cuda$' LIBTORCH || command -v nvidia-smi >/dev/null; then
    "${pip[@]}" "torch==$version"
else
    "${pip[@]}" --no-deps "torch==$version"
    toolkit=$(sed -n 's/^Requires-Dist: cuda-toolkit\[.*\]==\([0-9.]*\).*/\1/p' "$site/torch-$version".dist-info/METADATA)
    # Two of the CUDA libraries are needed by the CPU part too.
    [ -z "$toolkit" ] || "${pip[@]}" --no-warn-conflicts "cuda-toolkit[cudart,cupti]==$toolkit"
fi
ln -sfn "${site#"$PWD"/}/torch" libtorch
bin/deepspec-eval --version
