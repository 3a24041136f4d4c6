#!/bin/sh
# Train under Slurm, a task for each GPU:
#
#     sbatch examples/train_slurm.sh my.toml --run.dir runs/mine
#
# Five minutes before the time limit the run gets SIGUSR1: it writes its last checkpoint and ends, and
# `--resume` goes on with it in the next job.
#SBATCH --job-name=scrimp
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=12:00:00
#SBATCH --signal=USR1@300
set -eu
exec srun --kill-on-bad-exit=1 scrimp train "$@"
