#!/bin/sh
# Slurm task prolog (TaskProlog= in slurm.conf, or srun --task-prolog): runs as the job's user. On each node of the step the
# first task starts a relay with the token that slurm-secure-prolog.sh has made; all tasks are told to use it.
#
# The relay admits only processes of the job's user: another user's job on the node cannot use it. It belongs to the step, so
# Slurm ends it with the step. The server keeps jobs apart by their keys, so each rank joins as a client whose keys begin with
# the job's number: TCPSTORE_INSTALL has PyTorch's env:// do so. Change STORE.
set -eu
STORE=store.example:29400
folder=/run/tcpstore/$SLURM_JOB_ID
port=$((20000 + SLURM_JOB_ID % 10000))
if [ "$SLURM_LOCALID" = 0 ]; then
    # Nothing of the relay may hold the prolog's standard output, which Slurm reads to its end. The log is in the job's own
    # folder: a name in /tmp could be someone else's link.
    TCPSTORE_CA=/etc/tcpstore/ca.pem TCPSTORE_TOKEN_FILE=$folder/token \
        tcpstore relay --upstream "tcps://$STORE" --port "$port" --same-user >/dev/null 2>"$folder/relay.log" </dev/null &
fi
echo "export MASTER_ADDR=127.0.0.1"
echo "export MASTER_PORT=$port"
echo "export TCPSTORE_INSTALL=1"
echo "export TCPSTORE_JOIN=1"
echo "export TCPSTORE_JOB=$SLURM_JOB_ID"
echo "export TCPSTORE_ATTEMPT=${SLURM_RESTART_COUNT:-0}"
