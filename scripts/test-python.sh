#!/usr/bin/env bash
# Installs the Python packages that tests compare with: transformers and others in .venv-test, speculators, SpecForge and
# SGLang in .venv-speculators. It prints where they are as shell assignments. A variable that is set already stays.
#
#   eval "$(scripts/test-python.sh)"
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "test-python: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

# A venv of its own: .venv may hold torch without the CUDA libraries that Python's `import torch` wants.
if [ -z "${DEEPSPEC_TEST_PYTHON:-}" ]; then
    venv=.venv-test
    # The copy of the requirements is written last and so says that all of them are in.
    if ! cmp -s scripts/requirements-test.txt "$venv/installed.txt" || ! "$venv/bin/python" -c ''; then
        if ! python3 -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "test: please install Python 3.11 or newer with its venv module (apt-get install python3-venv)" >&2
            exit 1
        fi
        echo "test: installing the Python peers in $venv (3 GB to download)" >&2
        "$venv/bin/python" -c 'import pip' 2>/dev/null || python3 -m venv --clear "$venv"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r scripts/requirements-test.txt >&2
        cp scripts/requirements-test.txt "$venv/installed.txt"
    fi
    DEEPSPEC_TEST_PYTHON=$PWD/$venv/bin/python
fi

# speculators wants other versions of some packages than the peers above: a venv that looks into theirs behind its own.
if [ -z "${DEEPSPEC_SPECULATORS_PYTHON:-}" ]; then
    venv=.venv-speculators
    if ! cmp -s scripts/requirements-speculators.txt "$venv/installed.txt" || ! "$venv/bin/python" -c 'import torch'; then
        echo "test: installing speculators, SpecForge and SGLang in $venv (90 MB to download)" >&2
        "$DEEPSPEC_TEST_PYTHON" -m venv --clear "$venv"
        place=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        "$DEEPSPEC_TEST_PYTHON" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$place/peers.pth"
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps -r scripts/requirements-speculators.txt >&2
        cp scripts/requirements-speculators.txt "$venv/installed.txt"
    fi
    DEEPSPEC_SPECULATORS_PYTHON=$PWD/$venv/bin/python
fi
printf 'export DEEPSPEC_TEST_PYTHON=%q DEEPSPEC_SPECULATORS_PYTHON=%q\n' "$DEEPSPEC_TEST_PYTHON" "$DEEPSPEC_SPECULATORS_PYTHON"
