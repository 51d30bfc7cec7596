#!/usr/bin/env bash
#SBATCH --job-name=nearkin
#SBATCH --time=04:00:00
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#
# Train for any length of time under a job's time limit:
#
#     sbatch examples/slurm.sh photos/ --method simclr -o runs/photos
#     sbatch --nodes=2 --ntasks-per-node=8 examples/slurm.sh photos/ -o runs/photos
#
# With several tasks, each is a process with a GPU and its part of every batch; the result is that of one
# process. Two minutes before the time limit, or at a preemption, the current step is finished and
# saved, and the job is requeued and continues from that step. Any other exit code ends the job; exit
# codes are those of docs/reference.md.
set -u

start=()
if [ "${SLURM_NTASKS:-1}" -gt 1 ]; then
    start=(srun --kill-on-bad-exit=1)
fi
"${start[@]}" nearkin train "$@" --resume &
training=$!
trap 'kill -TERM "$training"' TERM
wait "$training"
code=$?
while kill -0 "$training" 2>/dev/null; do # the signal ends `wait`, not yet the training
    wait "$training"
    code=$?
done
if [ "$code" -eq 143 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
