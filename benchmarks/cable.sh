#!/usr/bin/env bash
# Run a command, such as a benchmark, in a network namespace of its own whose loopback address is a slow cable: packets
# queue in the kernel, and TCP itself finds out how much fits. Needs root and iproute2.
#     benchmarks/cable.sh 1600mbit 20 ./dev bench network --links ceiling
# RATE is in the notation of `tc`; QUEUE_MS is how long a packet may wait before it is dropped.
set -eu
[ $# -ge 3 ] || { echo "usage: cable.sh RATE QUEUE_MS COMMAND..." >&2; exit 2; }
rate=$1 queue_ms=$2 name=cable$$
shift 2
ip netns add $name
trap 'ip netns del $name' EXIT
ip netns exec $name ip link set lo mtu 9000 up
ip netns exec $name tc qdisc add dev lo root tbf rate "$rate" burst 256kb latency "${queue_ms}ms"
ip netns exec $name "$@"
ip netns exec $name tc -s qdisc show dev lo >&2
