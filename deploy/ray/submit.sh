#!/bin/bash
# Runs training as a Ray job, resubmitted until it is done: if the driver dies or the cluster restarts, only what was
# not committed is lost. Workers that die are handled by Ray Train itself (FailureConfig).
#   RAY_API_SERVER_ADDRESS=http://head:8265 submit.sh FOLDER-OF-THE-CODE python train.py s3://bucket/prefix/run-a
set -u
code=${1:?usage: submit.sh FOLDER COMMAND...}
shift
tries=${TRIES:-20}

for try in $(seq "$tries"); do
  # This shows the job's log, and exits as the job does.
  ray job submit --working-dir "$code" -- "$@" && exit 0
  echo "try $try of $tries failed: once more" >&2
  sleep "${PAUSE_S:-10}"
done
exit 1
