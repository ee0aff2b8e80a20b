#!/bin/busybox sh
# First process of the guest: loads drivers, mounts the file systems, runs /command and turns the power off.
# The last line it prints, GUEST_RESULT=n, is how the host learns of the result.

/bin/busybox --install -s /bin
export PATH=/bin

mkdir -p /dev /proc /sys /tmp /pmem /disk
mount -t devtmpfs devices /dev
mount -t proc processes /proc
mount -t sysfs system /sys
mount -t tmpfs memory /tmp
mkdir -p /dev/shm
mount -t tmpfs memory /dev/shm

finish() {
    echo "GUEST_RESULT=$1"
    poweroff -f
    # Power goes a moment later.
    while :; do sleep 1; done
}

fail() {
    echo "guest: $1"
    dmesg | tail -n 20
    finish 97
}

# Waits until a device is there.
await() {
    waits=0
    while [ ! -e "$1" ]; do
        waits=$((waits + 1))
        [ "$waits" -lt 200 ] || fail "no $1"
        sleep 0.05
    done
}

for module in $(cat /modules/order); do
    insmod "/modules/$module.ko" || fail "cannot load $module"
done

await /dev/pmem0
if [ "$(cat /sys/block/pmem0/queue/dax)" != 1 ]; then
    # The device is new and has no page descriptors, without which there is no DAX. Written down on it once
    # (mode "fsdax", descriptors in DRAM), the next boots find them set up.
    bus=/sys/bus/nd
    echo namespace0.0 > "$bus/drivers/nd_pmem/unbind"
    seed=$(cat "$bus/devices/region0/pfn_seed")
    cat /proc/sys/kernel/random/uuid > "$bus/devices/$seed/uuid"
    echo ram > "$bus/devices/$seed/mode"
    echo 2097152 > "$bus/devices/$seed/align"
    echo namespace0.0 > "$bus/devices/$seed/namespace"
    echo "$seed" > "$bus/drivers/nd_pmem/bind"
    await /dev/pmem0
fi

await /dev/nvme0n1
mount -t ext4 -o dax=always /dev/pmem0 /pmem || fail "cannot mount the persistent memory"
mount -t ext4 /dev/nvme0n1 /disk || fail "cannot mount the disk"
# The file system says so even if it was asked for DAX and cannot.
dmesg | grep -i "dax unsupported" && fail "no DAX"
echo "guest: up after $(cut -d ' ' -f 1 /proc/uptime) s, persistence domain $(cat /sys/bus/nd/devices/region0/persistence_domain)"

echo "guest: flush instructions$(grep -m 1 '^flags' /proc/cpuinfo | tr ' ' '\n' | grep -E '^(clwb|clflush|clflushopt)$' | sort | sed 's/^/ /' | tr -d '\n')"

# What nobody flushed or synced stays where it is, instead of being written back after half a minute.
echo 0 > /proc/sys/vm/dirty_writeback_centisecs

cd /tests
sh /command
result=$?
cd /
umount /pmem /disk
finish "$result"
