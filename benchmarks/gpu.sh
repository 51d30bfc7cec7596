#!/usr/bin/env bash
# Thirty minutes of one GPU, in three calls of at most ten: `gpu.sh 1`, `gpu.sh 2`, `gpu.sh 3`.
#
# For a machine that has no network and is forgotten when it goes idle, so the calls follow each
# other at once. docs/benchmarks.md has the plan. Before them, where there is a network:
#
#     benchmarks/gpu.sh wheels            packages that are missing there, into gpu/wheels
#     benchmarks/gpu.sh halves SHEETS     the sheets of CIFAR-10, into gpu/sheets-1 and gpu/sheets-2
#
# Call 1 needs gpu/wheels and gpu/sheets-1 beside the repository's own files (59 MiB together),
# call 2 gpu/sheets-2 (54 MiB), call 3 nothing more (5 MiB). What is carried out lies in $OUT: a log,
# metrics and summaries, and encoders in parts of 15 MiB (carry_encoder.py joins them).
#
# What must outlive a call lies in $STATE, outside of the checkout, and trainings are processes of
# their own there: started again, they continue. Every line has its own time limit and may fail.
#
# Variables: PYTHON, DEVICE (cuda), OUT, STATE, DATA (CIFAR-10), RECIPES (simclr_lightly moco_symmetric),
# COMPILE (auto, or as call 1 favors), TRAIN (more arguments of `nearkin train`), BATCH (512), ROUNDS
# (3), METHODS of call 3 (all), MINUTES of calls 2 and 3 (9), SLOWER (1: a factor of all limits, for a
# rehearsal with DEVICE=cpu). If the machine is lost: RECIPES=simclr_lightly TRAIN="--epochs 100".
set -u
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
out=${OUT:-gpu/out}
state=${STATE:-/tmp/nearkin-gpu}
recipes=${RECIPES:-simclr_lightly moco_symmetric}
batch=${BATCH:-512}
rounds=${ROUNDS:-3}
runs=$state/runs
mkdir -p "$out" "$runs" "$state/sheets"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH="$state/site:src:tests:benchmarks${PYTHONPATH:+:$PYTHONPATH}"

say() { printf '\n== %s s: %s\n' "$SECONDS" "$*" | tee -a "$out/log.txt"; }

limited() { # SECONDS COMMAND...: to the log, with a time limit; its failure ends nothing
    local limit=$(($1 * ${SLOWER:-1})) code=0
    shift
    say "$*"
    timeout --signal=TERM --kill-after=10 "$limit" "$@" 2>&1 | tee -a "$out/log.txt"
    code=${PIPESTATUS[0]}
    [ "$code" -eq 0 ] || say "ended with $code"
}

keep() { cp "gpu/sheets-$1/"* "$state/sheets/" 2>/dev/null || say "no gpu/sheets-$1"; }

call_1() { # 530 s at most
    say "call 1 on $device"
    limited 30 "$python" -m pip install -q --no-index --no-deps --no-compile --upgrade \
        --target "$state/site" gpu/wheels/*.whl
    keep 1
    limited 20 "$python" -m nearkin doctor
    limited 150 "$python" -m pytest -q -p no:cacheprovider tests/training/test_cuda.py \
        tests/objectives/test_fused.py
    limited 60 "$python" benchmarks/kernels.py simclr moco --batch "$batch" --device "$device"
    local steps=("$python" benchmarks/steps.py --device "$device" --batch "$batch" --rounds "$rounds")
    limited 30 "${steps[@]}" simclr
    limited 30 "${steps[@]}" moco --bn-groups 8
    limited 30 "${steps[@]}" moco --bn-groups 1
    limited 90 "${steps[@]}" simclr --compile on
    limited 90 "${steps[@]}" moco --compile on
}

start() { # RECIPE: trains it in a session of its own, which the end of the call does not end
    local run=$runs/$1
    rm -f "$run.code"
    # Some papers have measured the embedding: the head of such a recipe says so.
    local embedding=
    tr -d '#\n' <"src/nearkin/recipes/cifar10/$1.toml" | tr -s ' ' | grep -q -e '--features embedding' &&
        embedding="$python -m nearkin evaluate $run --features embedding"
    # shellcheck disable=SC2016,SC2086  (the inner shell expands; TRAIN is several arguments)
    setsid nohup bash -c 'run=$1 after=$2; shift 2; "$@" && $after; echo $? >"$run.code"' \
        train "$run" "$embedding" \
        "$python" -m nearkin train "${DATA:-$state/cifar10.npz}" --config "recipe:cifar10/$1" \
        --device "$device" --compile "${COMPILE:-auto}" --out "$run" --resume --no-report ${TRAIN:-} \
        >>"$run.log" 2>&1 </dev/null &
}

running() { # whether a training has not ended yet
    local recipe
    for recipe in $recipes; do
        [ -e "$runs/$recipe.code" ] || return 0
    done
    return 1
}

progress() {
    local recipe
    for recipe in $recipes; do
        say "$recipe, code $(cat "$runs/$recipe.code" 2>/dev/null || echo none yet)"
        tail -n 2 "$runs/$recipe.log" 2>/dev/null | cut -c 1-200 | tee -a "$out/log.txt"
    done
}

follow() { # SECONDS: waits until all trainings have ended, or until so late in this call
    while running && [ "$SECONDS" -lt "$1" ]; do sleep "${POLL:-10}"; done
    progress
}

results() { # what is small of every run, as one file
    (cd "$runs" && tar czf - --ignore-failed-read -- *.log \
        */{metrics.csv,{summary,evaluation,machine}.json,config.toml,train.log} 2>/dev/null) >"$out/runs.tar.gz"
    limited 30 "$python" benchmarks/recipes.py "$runs"
}

call_2() {
    local recipe
    say "call 2 on $device"
    keep 2
    limited 90 "$python" benchmarks/pack_cifar10.py "$state/sheets" "$state/cifar10.npz"
    for recipe in $recipes; do
        start "$recipe"
    done
    follow "$((${MINUTES:-9} * 60))"
    results
}

encoders() {
    local recipe
    for recipe in $recipes; do
        [ -e "$runs/$recipe/encoder.safetensors" ] || continue
        limited 30 "$python" benchmarks/carry_encoder.py cut "$runs/$recipe/encoder.safetensors" \
            "$out/$recipe"
    done
}

call_3() { # nothing is timed while a recipe trains
    local end=$((${MINUTES:-9} * 60))
    say "call 3 on $device"
    follow "$end"
    results
    encoders
    # shellcheck disable=SC2086  (METHODS is several)
    running || limited "$((end > SECONDS ? end - SECONDS : 1))" "$python" benchmarks/steps.py \
        ${METHODS:-} --device "$device" --batch "$batch" --rounds "$rounds"
    if [ "$((end - SECONDS))" -gt 60 ]; then
        recipes=byol
        start byol
        follow "$end"
        results
    fi
}

wheels() {
    local platforms=()
    for glibc in 2_28 2_27 2_24 2_17; do
        platforms+=(--platform "manylinux_${glibc}_x86_64")
    done
    "$python" -m pip download --no-deps --only-binary=:all: --python-version 3.12 \
        --implementation cp "${platforms[@]}" --platform manylinux2014_x86_64 -d gpu/wheels \
        cyclopts docstring_parser rich_rst msgspec openTSNE beartype
}

halves() { # SHEETS: labels and twelve sheets, then twelve
    local sheets=("$1"/*.webp)
    mkdir -p gpu/sheets-1 gpu/sheets-2
    cp "$1/labels.npz" "${sheets[@]:0:12}" gpu/sheets-1/
    cp "${sheets[@]:12}" gpu/sheets-2/
}

case ${1:-} in
1 | 2 | 3) "call_$1" ;;
wheels | halves) "$@" ;;
*) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" && exit 2 ;;
esac
