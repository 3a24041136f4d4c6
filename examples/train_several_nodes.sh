#!/bin/sh
# Train on several machines: start this on each of them, here on two, whose first is 10.0.0.1:
#
#     NODES=2 NODE=0 HEAD=10.0.0.1 sh examples/train_several_nodes.sh my.toml --run.dir /shared/runs/mine
#     NODES=2 NODE=1 HEAD=10.0.0.1 sh examples/train_several_nodes.sh my.toml --run.dir /shared/runs/mine
#
# Settings and options are the same on all, and the folders of run and data lie where all see them.
# RANKS says how many processes a machine runs, where that is not the number of its GPUs; PORT, where they meet on HEAD.
set -eu
exec torchrun --nnodes "$NODES" --node-rank "$NODE" --nproc-per-node "${RANKS:-gpu}" \
    --master-addr "$HEAD" --master-port "${PORT:-29500}" -m scrimp train "$@"
