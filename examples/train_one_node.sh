#!/bin/sh
# Train on all GPUs of this machine, a process for each:
#
#     sh examples/train_one_node.sh my.toml --run.dir runs/mine
#
# RANKS says how many processes, where that is not the number of GPUs.
set -eu
exec scrimp launch --ranks "${RANKS:-$(nvidia-smi -L | wc -l)}" train "$@"
