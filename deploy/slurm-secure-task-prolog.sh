#!/bin/sh
# Slurm task prolog (TaskProlog= in slurm.conf, or srun --task-prolog): runs as the job's user. On each node of the step the
# first task starts a relay with the token that slurm-secure-prolog.sh has made; all tasks are told to use it.
#
# The relay admits only processes of the job's user: another user's job on the node cannot use it. It belongs to the step, so
# Slurm ends it with the step. The server keeps jobs apart by their stores: TCPSTORE_SERVER_URL and TCPSTORE_INSTALL make
# PyTorch's env:// take MASTER_ADDR and MASTER_PORT for the name of a store, which rank 0 owns. Change STORE.
#
# The kernel chooses the relay's port, and the tasks read it in the job's own folder: on a port that can be foretold, another
# user's process could listen first, and the ranks would take it for their relay, and unpickle what it sends.
set -eu
STORE=store.example:29400
folder=/run/tcpstore/$SLURM_JOB_ID
port_file=$folder/port.$SLURM_STEP_ID
log=$folder/relay.$SLURM_STEP_ID.log
if [ "$SLURM_LOCALID" = 0 ]; then
    # Nothing of the relay may hold the prolog's standard output, which Slurm reads to its end. The log is in the job's own
    # folder: a name in /tmp could be someone else's link.
    TCPSTORE_CA=/etc/tcpstore/ca.pem TCPSTORE_TOKEN_FILE=$folder/token \
        tcpstore relay --upstream "tcps://$STORE" --port 0 --port-file "$port_file" --same-user \
        >/dev/null 2>"$log" </dev/null &
fi
tries=0
until [ -s "$port_file" ]; do
    tries=$((tries + 1))
    if [ $tries -gt 300 ]; then
        echo "print the relay has not started: see $log"
        exit 1
    fi
    sleep 0.1
done
echo "export TCPSTORE_INSTALL=1"
echo "export TCPSTORE_SERVER_URL=tcp://127.0.0.1:$(cat "$port_file")"
echo "export MASTER_ADDR=job-$SLURM_JOB_ID"
echo "export MASTER_PORT=29500"
