#!/usr/bin/env bash
# What to run on a GPU, in pieces of at most ten minutes, each useful alone:
#
#     benchmarks/gpu.sh check                      the tests of the CUDA paths
#     benchmarks/gpu.sh speed                      steps and objectives beside their limits and lightly
#     benchmarks/gpu.sh ablation                   compiled or not, CUDA graphs, and in float32
#     benchmarks/gpu.sh recipe NAME CIFAR10        a recipe; the same command continues it
#     benchmarks/gpu.sh results                    results of the recipes beside the published ones
#
# CIFAR10 is an .npz (benchmarks/pack_cifar10.py makes it) or torchvision:CIFAR10 on disk. Nothing
# is downloaded; lightly is measured if it is installed. Results go to $OUT, or to gpu/ if it is not
# set. A piece of a recipe saves and stops after MINUTES=9; exit code 143 means that there is more to
# do.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${OUT:-gpu}
export PYTHONPATH="src:tests:benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out"

note() { # commit and device
    {
        git log -1 --format='commit %h' 2>/dev/null || true
        python -c 'import torch; print("torch", torch.__version__, torch.cuda.get_device_name())'
    } | tee "$out/$1.log"
}

check() {
    note check
    python -m pytest -q -p no:cacheprovider tests/training/test_cuda.py tests/training/test_compilation.py \
        tests/objectives 2>&1 | tee -a "$out/check.log"
}

speed() {
    note speed
    {
        python benchmarks/steps.py simclr moco --device cuda --rounds 5 --compile on
        python benchmarks/steps.py --device cuda --rounds 3
        python benchmarks/objectives.py --device cuda
    } 2>&1 | tee -a "$out/speed.log"
}

ablation() {
    note ablation
    for method in simclr moco; do
        for way in "" "--compile on" "--compile graphs" "--precision fp32"; do
            echo "== $method ${way:-as it is}" | tee -a "$out/ablation.log"
            # shellcheck disable=SC2086  (an option and its value)
            python benchmarks/steps.py "$method" --device cuda --rounds 5 $way 2>&1 |
                tee -a "$out/ablation.log"
        done
    done
}

recipe() {
    local file=recipes/cifar10/$1.toml data=$2 run=${RUNS:-gpu/runs}/$1
    mkdir -p "$(dirname "$run")"
    local code=0
    timeout --signal=TERM --kill-after=60 "${MINUTES:-9}m" \
        python -m nearkin train "$data" --config "$file" --device cuda \
        --out "$run" --resume || code=$?
    [ "$code" -eq 124 ] && code=143
    if [ "$code" -eq 0 ] && tr -d '#\n' <"$file" | tr -s ' ' | grep -q -e '--features embedding'; then
        python -m nearkin evaluate "$run" --features embedding
    fi
    cp "$run"/{summary,evaluation,machine}.json "$run"/{metrics.csv,config.toml} "$out"/ 2>/dev/null || true
    return "$code"
}

results() {
    python benchmarks/recipes.py "${RUNS:-gpu/runs}" | tee "$out/results.md"
}

"$@"
