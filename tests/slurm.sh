#!/usr/bin/env bash
# A Slurm cluster of one node on this machine, with its own keys, ports and files, for as long as a test takes.
#
#     tests/slurm.sh start FOLDER     # then: export SLURM_CONF=FOLDER/slurm.conf PATH=FOLDER/bin:$PATH
#     tests/slurm.sh stop FOLDER      # ends the daemons that `start` began, and no others
#
# Needs root and the programs of Debian's slurm-wlm and munge (without them: status 3, what does not start: 1), and neither
# their services nor accounting. FOLDER becomes the
# cluster's: it should be new and have a short path (a Unix socket's path has at most 107 characters).
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
command=${1:?start or stop} folder=$(realpath -m "${2:?a folder}")

stop() {
    for daemon in slurmd slurmctld munged; do
        [ -s "$folder/$daemon.pid" ] && kill "$(cat "$folder/$daemon.pid")" 2>/dev/null || true
    done
}

fail() {
    echo "$1" >&2
    tail -n 5 "$folder"/*.log >&2 || true
    stop
    exit 1
}

start() {
    for program in munged slurmctld slurmd sinfo srun; do
        command -v "$program" >/dev/null || { echo "$program is not installed (Debian: slurm-wlm, munge)" >&2; exit 3; }
    done
    [ "$(id -u)" = 0 ] || { echo "jobs run as root here, as whom slurmd starts them: call this as root" >&2; exit 3; }
    mkdir -p "$folder/state" "$folder/spool" "$folder/bin"
    chmod 755 "$folder"
    # Snakemake's plugin takes SLURM_* out of a job's environment; a job's own srun must find this cluster all the same.
    printf '#!/bin/sh\nSLURM_CONF=%s exec %s "$@"\n' "$folder/slurm.conf" "$(command -v srun)" > "$folder/bin/srun"
    chmod 755 "$folder/bin/srun"
    (umask 077 && head -c 1024 /dev/urandom > "$folder/munge.key")
    read -r control node < <(python3 -c '
import socket
two = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
print(*(each.getsockname()[1] for each in two))')
    cat > "$folder/slurm.conf" <<CONF
ClusterName=one
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
SlurmctldPort=$control
SlurmdPort=$node
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,defer
MinJobAge=600
ReturnToService=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2 RealMemory=16000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF=$folder/slurm.conf
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --pid-file="$folder/munged.pid" \
        --log-file="$folder/munged.log" --seed-file="$folder/munge.seed" 2>"$folder/start.log" || fail "munged did not start"
    slurmctld -c -L "$folder/slurmctld.log" >>"$folder/start.log" 2>&1 || fail "slurmctld did not start"
    slurmd -N localhost -L "$folder/slurmd.log" >>"$folder/start.log" 2>&1 || fail "slurmd did not start"
    for _ in $(seq 600); do
        [ "$(sinfo --noheader --format=%T 2>/dev/null)" = idle ] && return 0
        sleep 0.1
    done
    fail "the node did not come up in a minute"
}

case $command in
    start) start ;;
    stop) stop ;;
    *) echo "start or stop, not $command" >&2; exit 1 ;;
esac
