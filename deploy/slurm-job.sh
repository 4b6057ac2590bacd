#!/bin/sh
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
# A job with a store of its own: `sbatch slurm-job.sh python train.py`. The server is a process of the batch script, on the
# job's first node. Nobody chooses its port: the kernel does, and the ranks are told, so no two jobs on a node can collide.
# For a relay on each node: slurm-task-prolog.sh. For TLS and a token per job: slurm-secure-prolog.sh.
set -eu
folder=$(mktemp -d "${TMPDIR:-/tmp}/tcpstore-$SLURM_JOB_ID.XXXXXX")
mkfifo "$folder/ready"
# Should the batch script be killed, the server ends five minutes after the last rank.
tcpstore serve --host :: --port 0 --port-file "$folder/port" --linger 300 >"$folder/ready" 2>"$folder/log" &
trap 'kill $! 2>/dev/null || true; wait; rm -rf "$folder"' EXIT
# The server writes one line when it accepts connections; if it fails, there is none.
if ! read -r _ <"$folder/ready"; then
    cat "$folder/log" >&2
    exit 1
fi
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$(cat "$folder/port")
tcpstore doctor --ranks "$SLURM_NTASKS" --url "tcp://$MASTER_ADDR:$MASTER_PORT" >&2 || true # what it says is for the log
# With TORCHELASTIC_USE_AGENT_STORE, PyTorch's env:// makes every rank a client, rank 0 too.
export MASTER_ADDR MASTER_PORT TORCHELASTIC_USE_AGENT_STORE=True TORCHELASTIC_RESTART_COUNT=0
srun sh -c 'RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS exec "$@"' rank "$@"
