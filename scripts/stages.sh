# shellcheck shell=bash
# Defines files and arguments of each stage, from prompts to a judged drafter and the files of an engine. Callers are
# scripts/pipeline.sh, which runs the stages on this machine, and scripts/slurm/pipeline.sbatch, which submits them as
# jobs.
#
# The caller sets:
#
#   run             folder of the run
#   target, recipe, prompts
#   states          cache or online
#   shares          parts of the answers
#   overrides       more `--set KEY=VALUE` of the recipe
#   engine          vllm, sglang, llama.cpp, or nothing for the target's default
#   target_server   vllm if vLLM runs the target in all stages, else deepspec or nothing
#   states_urls     servers of hidden states, which hand over files in states_folder
#
# DEEPSPEC_{SPLIT,REGENERATE,INSPECT,CACHE,TRAIN,EVAL}_ARGS hold more arguments of a stage's program, separated by
# blanks.

# more_arguments SPLIT|REGENERATE|… [ARGS|SBATCH]: the words of DEEPSPEC_STAGE_ARGS, in $more.
more_arguments() {
    local name=DEEPSPEC_$1_${2:-ARGS}
    read -ra more <<<"${!name:-}"
}

# The engine of the exported files in $engine, and what `checkpoint convert --to` calls it in $export_name.
choose_engine() {
    case ${target,,} in *.gguf) engine=${engine:-llama.cpp} ;; *) engine=${engine:-vllm} ;; esac
    case $engine in
        vllm | sglang) export_name=$engine ;;
        llama.cpp | gguf) engine=llama.cpp export_name=gguf ;;
        *) return 1 ;;
    esac
}

# The answers of all shares, in $answers.
answer_files() {
    local share
    answers=()
    for ((share = 0; share < shares; share++)); do answers+=("$run/answers-$share.jsonl"); done
}

# states_setting [STORAGE]: `data.states` of states from vLLM, in $setting. A recipe that names servers needs no layer of the target, even
# where none is asked.
states_setting() {
    local list
    printf -v list ', "%s"' "${states_urls[@]:-http://127.0.0.1:8000}"
    setting="data.states={${1:+$1, }\"server\": [${list#, }], \"folder\": \"$states_folder\"}"
}

# The recipe with the target, files and folders of this run, in $recipe_args.
recipe_arguments() {
    recipe_args=(--config "$recipe" --set "target.model=$target" "${overrides[@]}" --set name=drafter
        --set "logging.output_dir=$run/checkpoints")
    local list storage='' setting=data.states=online
    case $states in
        cache)
            storage="\"cache\": \"$run/cache\""
            setting="data.states={$storage}"
            # A cache has its samples in it.
            recipe_args+=(--set "data.input=[]")
            ;;
        online)
            answer_files
            printf -v list '"%s", ' "${answers[@]}"
            recipe_args+=(--set "data.input=[${list%, }]")
            ;;
    esac
    [ "${target_server:-deepspec}" = deepspec ] || states_setting "$storage"
    recipe_args+=(--set "$setting")
}

# stage_arguments STAGE: the program's arguments without the program, in $arguments.
# `{task}` in the arguments of regenerate is the number of the share.
stage_arguments() {
    recipe_arguments
    answer_files
    case $1 in
        split)
            more_arguments SPLIT
            arguments=(split --dataset "$prompts" --train-output "$run/train.jsonl" --eval-output "$run/held-out.jsonl" --overwrite "${more[@]}")
            ;;
        regenerate)
            more_arguments REGENERATE
            arguments=(--model "$target" --input "$run/train.jsonl" --output "$run/answers-{task}.jsonl" "${more[@]}")
            ;;
        inspect)
            more_arguments INSPECT
            arguments=(inspect "${recipe_args[@]}" --input "${answers[@]}" "${more[@]}")
            ;;
        cache)
            more_arguments CACHE
            arguments=("${recipe_args[@]}" --input "${answers[@]}" --output-dir "$run/cache" "${more[@]}")
            ;;
        train)
            more_arguments TRAIN
            arguments=("${recipe_args[@]}" "${more[@]}")
            # A run of a few hundred steps would end before the recipe's first checkpoint.
            [[ "${arguments[*]}" == *checkpointing_steps* ]] || arguments+=(--set logging.checkpointing_steps=200)
            [[ "${arguments[*]}" == *keep_checkpoints* ]] || arguments+=(--set logging.keep_checkpoints=2)
            ;;
        eval)
            more_arguments EVAL
            local draft=$run/checkpoints/drafter/step_latest
            [ "${target_server:-deepspec}" = deepspec ] || draft=$run/export
            arguments=(--target "$target" --draft "$draft" --output-dir "$run/eval" "${more[@]}")
            ;;
        export)
            choose_engine
            arguments=(checkpoint convert --to "$export_name" --from "$run/checkpoints/drafter/step_latest" --target "$target"
                --output-dir "$run/export" --overwrite)
            ;;
    esac
}

# has_output STAGE: whether the files that the stage publishes at its end are there.
has_output() {
    case $1 in
        split) [ -f "$run/train.jsonl" ] && [ -f "$run/held-out.jsonl" ] ;;
        cache) [ -f "$run/cache/manifest.json" ] ;;
        eval) [ -f "$run/eval/results.json" ] ;;
        export) [ -f "$run/export/config.json" ] || [ -f "$run/export/model.gguf" ] ;;
    esac
}
