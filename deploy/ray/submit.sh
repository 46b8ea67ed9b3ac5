#!/bin/bash
# A training as a Ray job, submitted again until it is done: a driver that dies, or a cluster that restarts, costs what was
# not committed. Workers that die are Ray Train's own business (FailureConfig).
#   RAY_API_SERVER_ADDRESS=http://head:8265 submit.sh FOLDER-OF-THE-CODE python train.py s3://bucket/prefix/run-a
set -u
code=${1:?usage: submit.sh FOLDER COMMAND...}
shift
tries=${TRIES:-20}

for try in $(seq "$tries"); do
  # It shows the job's log, and ends as the job does.
  ray job submit --working-dir "$code" -- "$@" && exit 0
  echo "try $try of $tries failed: once more" >&2
  sleep "${PAUSE_S:-10}"
done
exit 1
