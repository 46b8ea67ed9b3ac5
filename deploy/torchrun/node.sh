#!/bin/bash
# Runs one node of a multi-node torchrun training. Start it on each node, by whatever means you start processes there:
#   node.sh /local/checkpoints node0:29400 2 --nproc-per-node=8 train.py s3://bucket/prefix/run-a
# It restarts torchrun until training is done. A node that comes back, with or without its disk, joins the others, and
# all resume from the store. RUN_ID distinguishes runs that use the same HOST:PORT.
set -u
usage="usage: node.sh FOLDER HOST:PORT NODES [TORCHRUN OPTIONS] SCRIPT [ARGUMENTS]"
folder=${1:?$usage} endpoint=${2:?$usage} nodes=${3:?$usage}
shift 3

# torchrun gives its workers 30 s after SIGTERM. What is not uploaded by then is drained below.
export CKPT_ASYNC_SIGTERM_FLUSH_S=${CKPT_ASYNC_SIGTERM_FLUSH_S:-25}
agent=0 ended=
trap 'ended=1; kill -TERM "$agent" 2>/dev/null' TERM INT

while :; do
  torchrun --nnodes="$nodes" --rdzv-backend=c10d --rdzv-endpoint="$endpoint" --rdzv-id="${RUN_ID:-train}" \
    --max-restarts=100 "$@" &
  agent=$!
  wait "$agent"
  code=$?
  if [ -n "$ended" ]; then # the signal ended the first wait, not the agent
    wait "$agent"
    code=$?
  fi
  [ "$code" -eq 0 ] && exit 0
  # Finish what a killed worker left on this node. Exit code 5: another worker has started, and finishes it itself.
  ckpt-async drain "$folder" --timeout 60
  [ -n "$ended" ] && exit "$code"
  sleep "${PAUSE_S:-5}"
done
