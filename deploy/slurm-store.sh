#!/bin/sh
#SBATCH --job-name=tcpstore
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --requeue
#SBATCH --open-mode=append
# A store for many jobs, which Slurm starts again where it was if the node fails or is drained:
#   sbatch --nodelist=node7 slurm-store.sh /shared/tcpstore
# The folder is on a file system that has locks and outlives the node. Jobs find the store by the node's name, so pin it. They
# wait for it for ten minutes (--link-grace). `scancel` leaves the stores to the next server; `tcpstore stop`, on the node, ends them.
set -eu
exec tcpstore serve --host :: --port 29400 --persist "$1" --sync always --link-grace 600
