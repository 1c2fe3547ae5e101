#!/bin/bash
# Process 1 of a node: init.sh NAME ROLE STATE SHARE...
# Prints its process id on stdout, then waits on stdin for a line: its network is there.
set -e
name=$1 role=$2 state=$3
shift 3
read -r pid _ </proc/self/stat # as the machine counts: the node's own /proc is not mounted yet

# What the private folders are about to hide stays reachable through open descriptors.
exec {here}<"$state"
open=()
for share in "$@"; do
    exec {descriptor}<"$share"
    open+=("$descriptor")
done

hostname "$name"
mount -t proc -o nosuid,nodev,noexec proc /proc
mount -t sysfs -o nosuid,nodev,noexec sysfs /sys # of this network namespace: /sys/class/net
mount -t tmpfs -o mode=1777,nosuid,nodev tmp /tmp
mount -t tmpfs -o mode=1777,nosuid,nodev shm /dev/shm
mount -t tmpfs -o mode=755,nosuid,nodev run /run
mkdir -p /run/minicluster /run/munge /run/sshd /run/slurmd /run/lock
chmod 1777 /run/lock
mount -c --bind "/proc/self/fd/$here" /run/minicluster
for share in "$@"; do
    mkdir -p "$share"
    mount -c --rbind "/proc/self/fd/${open[0]}" "$share"
    exec {open[0]}<&-
    open=("${open[@]:1}")
done
exec {here}<&-
for file in hosts shadow munge profile.d slurm ssh; do
    mount --bind "/run/minicluster/etc/$file" "/etc/$file"
done

echo "$pid"
read -r
exec </dev/null >&2
munged --num-threads=2 --log-file="/run/minicluster/log/munged.$name.log" --seed-file=/run/munge/seed
/usr/sbin/sshd -E "/run/minicluster/log/sshd.$name.log"
"$role"
set +e
while :; do # the shell reaps the node's orphans
    sleep 3600 &
    wait $!
done
