#!/usr/bin/env bash
# A Slurm of one node on this machine, from Debian's packages; run it as root, more than once does no harm:
#     apt-get install slurmctld slurmd munge
#     bash tests/slurm/slurm-up.sh
# The node's GPUs, two or as many as GPUS says, are empty files: enough for scheduling, not for computing.
set -euo pipefail
GPUS=${GPUS:-2}

for command in slurmctld slurmd munged sinfo; do
    command -v "$command" > /dev/null || {
        echo "error: $command is not there; apt-get install slurmctld slurmd munge" >&2
        exit 1
    }
done
host=$(hostname -s)
# What the rules ask for on a third attempt (rules/*.smk), sized for real models; the small experiment needs a fraction of it.
memory=128000
gres_types="" gres="" gpu_lines=""
if [ "$GPUS" -gt 0 ]; then
    gres_types="GresTypes=gpu"
    gres="Gres=gpu:h200:$GPUS"
    gpu_lines="Name=gpu Type=h200 File=/run/slurm/fakegpu[0-$((GPUS - 1))] Flags=nvidia_gpu_env"
fi

mkdir -p /etc/slurm /run/slurm /var/spool/slurmctld /var/spool/slurmd /var/log/slurm
chown slurm: /var/spool/slurmctld
for ((i = 0; i < GPUS; i++)); do
    [ -e "/run/slurm/fakegpu$i" ] || : > "/run/slurm/fakegpu$i"
done
# No slurmdbd: the plugin must ask squeue (profiles/slurm).
cat > /etc/slurm/slurm.conf << CONF
ClusterName=test
SlurmctldHost=$host(127.0.0.1)
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
ReturnToService=2
SlurmUser=slurm
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MinJobAge=3600
$gres_types
SlurmdParameters=config_overrides
DefMemPerCPU=1000
NodeName=$host NodeAddr=127.0.0.1 CPUs=$(nproc) RealMemory=$memory $gres State=UNKNOWN
PartitionName=test Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
echo "$gpu_lines" > /etc/slurm/gres.conf
echo "CgroupAutomount=no" > /etc/slurm/cgroup.conf

munge -n > /dev/null 2>&1 || {
    install -d -o munge -g munge /run/munge
    runuser -u munge -- "$(command -v munged)"
}
scontrol ping > /dev/null 2>&1 || slurmctld
if ! { [ -e /run/slurm/slurmd.pid ] && kill -0 "$(cat /run/slurm/slurmd.pid)" 2> /dev/null; }; then
    slurmd
fi
for _ in $(seq 30); do
    if sinfo -h -o %T 2> /dev/null | grep -q idle; then
        sinfo
        exit 0
    fi
    sleep 1
done
echo "error: the node did not become idle in 30 s; see /var/log/slurm" >&2
exit 1
