#!/bin/sh
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
#SBATCH --exclusive
#SBATCH --no-kill
# A job whose store outlives a node: `sbatch slurm-replicated.sh python train.py`. Its first three nodes run etcd, the first two a
# server, of which one serves; all have etcd and tcpstore-async[etcd]. What they write is on the nodes' own disks, in TMPDIR.
# Ranks find the server that serves by TCPSTORE_SERVER_URL. Whether the job itself goes on without a node is up to the program.
# Slurm ends a job whose batch script's node fails, the first: to survive that too, run the script in an allocation (salloc).
set -eu
base=$((20000 + SLURM_JOB_ID % 3000 * 4)) # below the ports of outgoing connections
hosts= addresses= members= cluster= servers=
for host in $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 3); do
    address=$(getent ahostsv4 "$host" | awk '{print $1; exit}') # which servers announce, and etcd can bind
    hosts=${hosts:+$hosts,}$host
    addresses="$addresses $host=$address"
    members=${members:+$members,}http://$address:$base
    cluster=${cluster:+$cluster,}$host=http://$address:$((base + 1))
    servers=${servers:+$servers,}$address:$((base + 2))
done
servers=tcp://${servers%,*} # the first two
export base addresses members cluster

# Runs a command on each of so many nodes, again and again, in a folder of its own, until the step is ended.
daemon='
for one in $addresses; do
    case $one in "$SLURMD_NODENAME="*) address=${one#*=} ;; esac
done
cd "$(mktemp -d "${TMPDIR:-/tmp}/tcpstore-$SLURM_JOB_ID.XXXXXX")"
trap "kill \$! 2>/dev/null; wait; rm -rf \"\$PWD\"" EXIT
trap "exit 0" TERM INT
while :; do
    eval "$1" &
    wait $! || true
    sleep 1
done'
on() {
    nodes=$1
    shift
    srun --overlap --no-kill --kill-on-bad-exit=0 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
        --nodelist="$(echo "$hosts" | cut -d, -f"1-$nodes")" sh -c "$daemon" daemon "$1" >&2 &
}
on 3 'exec etcd --name "$SLURMD_NODENAME" --data-dir etcd --initial-cluster "$cluster" --initial-cluster-token "$SLURM_JOB_ID" \
    --listen-client-urls "http://$address:$base" --advertise-client-urls "http://$address:$base" \
    --listen-peer-urls "http://$address:$((base + 1))" --initial-advertise-peer-urls "http://$address:$((base + 1))" \
    --auto-compaction-mode periodic --auto-compaction-retention 1m --log-level error'
etcds=$!
on 2 'exec tcpstore serve --host "$address" --port $((base + 2)) --etcd "$members" --link-grace 600'
trap 'kill $! $etcds 2>/dev/null || true; wait' EXIT
tcpstore ping --wait --timeout 120 --url "$servers" >/dev/null
tcpstore doctor --ranks "$SLURM_NTASKS" --url "$servers" --etcd "$members" >&2 || true # what it says is for the log
export TCPSTORE_SERVER_URL="$servers" TCPSTORE_INSTALL=1 MASTER_ADDR="job-$SLURM_JOB_ID" MASTER_PORT=29500
srun --no-kill sh -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"' rank "$@"
