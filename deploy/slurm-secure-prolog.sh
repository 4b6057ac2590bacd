#!/bin/sh
# Slurm prolog (Prolog= in slurm.conf): runs as root on each node of a job before it, and makes a token for this job only.
#
# One server serves the cluster, on a host where no user can log in:
#
#   tcpstore serve --host :: --port 29400 --tls-cert store.pem --tls-key store.key \
#       --token-keys token.keys --revoked-tokens revoked --require-auth=all --require-tls
#
# Each node has the same /etc/tcpstore/token.keys (root, mode 0600) and /etc/tcpstore/ca.pem. The token opens one store only,
# which has the job's number in its name. It expires by itself; the epilog removes its folder:
# rm -rf "/run/tcpstore/$SLURM_JOB_ID"
#
# Next: slurm-secure-task-prolog.sh.
set -eu
umask 077
folder=/run/tcpstore/$SLURM_JOB_ID
install -d -m 0711 /run/tcpstore
rm -rf "$folder"
mkdir "$folder"
tcpstore token create --token-keys /etc/tcpstore/token.keys --store "job-$SLURM_JOB_ID:29500" --rights write \
    --expires 604800 --max-bytes 1000000000 >"$folder/token"
# The folder comes last: in one of its own, the user could put a link in the token's place, for root to write to and to chown.
chown "$SLURM_JOB_UID" "$folder/token"
chown "$SLURM_JOB_UID" "$folder"
