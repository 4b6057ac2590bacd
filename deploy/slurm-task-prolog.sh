#!/bin/sh
# Slurm task prolog: `srun --task-prolog=$PWD/slurm-task-prolog.sh python train.py`, or TaskProlog in slurm.conf.
#
# On each node of the step, the first task starts a relay, and every task is told to use it. The store runs on the
# job's first node: `tcpstore serve --host :: --port 29400 &` in the batch script. The relay belongs to the step, so
# Slurm ends it with the step, and admits only the job's user. The port differs from job to job, since jobs may share a node;
# another user's process that listens there first is taken for the relay. For nodes that users share, and for TLS and a token
# per job: slurm-secure-prolog.sh.
set -eu
port=$((20000 + SLURM_JOB_ID % 10000))
if [ "$SLURM_LOCALID" = 0 ]; then
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # Nothing of the relay may hold the prolog's standard output, which Slurm reads to its end.
    # The folder's name cannot be guessed: a known name in /tmp could be someone else's link.
    log=$(mktemp -d "/tmp/tcpstore-$SLURM_JOB_ID.XXXXXX")/relay.log
    tcpstore relay --upstream "tcp://$first:29400" --port "$port" --same-user >/dev/null 2>"$log" </dev/null &
fi
echo "export MASTER_ADDR=127.0.0.1"
echo "export MASTER_PORT=$port"
# With these PyTorch's env:// makes every rank a client, rank 0 too.
echo "export TORCHELASTIC_USE_AGENT_STORE=True"
echo "export TORCHELASTIC_RESTART_COUNT=0"
