#!/bin/busybox sh
# The guest's first process: it makes the machine that tests/softroce/README.md promises, runs one
# command in it and reports. It runs twice: from the initramfs (loads modules, builds the root) and
# again, with the argument "root", inside that root (network, devices, command).
#
# Invariants: only the command writes to the ports "out" and "err", save for marker lines (NUL, the
# run's nonce, words, newline): "ready" on out before the command, "exit STATUS" on both after
# it. A port takes one opener, so the command writes to pipes and a cat carries each to its port.
# The command's leftover processes are killed before the marker, so no output of theirs follows it.

fail() {
    echo "softroce guest: $*" >/dev/console
    /bin/busybox poweroff -f
    exec /bin/busybox sleep 3600
}

build_root() {
    /bin/busybox --install -s /bin
    export PATH=/bin
    mount -t proc proc /proc
    mount -t sysfs sys /sys
    mount -t devtmpfs dev /dev
    for module in /modules/*; do
        # A module may refuse this processor (crc32_pclmul); what matters is checked below.
        insmod "$module" || echo "softroce guest: $module not loaded"
    done
    options=trans=virtio,version=9p2000.L,msize=1048576,cache=loose,ro
    mount -t 9p -o $options hostroot /lower || fail "no host file system"
    mount -t tmpfs -o mode=0755 rw /rw
    mkdir /rw/upper /rw/work
    mount -t overlay -o lowerdir=/lower,upperdir=/rw/upper,workdir=/rw/work root /newroot ||
        fail "no overlay on the host file system"
    mount -t tmpfs -o mode=0755 run /newroot/run
    mkdir -p /newroot/run/softroce/job
    mount -t 9p -o $options job /newroot/run/softroce/job || fail "no job folder"
    cp /init /newroot/run/softroce/init
    for folder in proc sys dev; do
        mount --move /$folder /newroot/$folder
    done
    # From here the host's shell and tools: busybox's shell prefers its own ip, which lacks veth.
    exec switch_root /newroot /bin/sh /run/softroce/init root
}

fill_root() {
    mkdir -p /dev/pts /dev/shm
    mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
    mount -t tmpfs -o mode=1777 shm /dev/shm
    ln -sfn /proc/self/fd /dev/fd
    ln -sfn fd/0 /dev/stdin
    ln -sfn fd/1 /dev/stdout
    ln -sfn fd/2 /dev/stderr
    chmod 1777 /tmp
    mkdir -p /run/lock /lib/modules
    echo softroce >/proc/sys/kernel/hostname
    echo "127.0.1.1 softroce" >>/etc/hosts
    # The rest of the kernel's modules, for modprobe and for what the kernel loads on demand.
    ln -sfn "$modules" "/lib/modules/$(uname -r)"
}

# add_link N A B: a veth pair A/B on 10.9.N.1 and 10.9.N.2, with one rxe device on each end.
add_link() {
    ip link add "$2" type veth peer name "$3" || fail "no veth $2"
    ip addr add "10.9.$1.1/24" dev "$2"
    ip addr add "10.9.$1.2/24" dev "$3"
    ip link set "$2" up
    ip link set "$3" up
    rdma link add "rxe$(($1 * 2))" type rxe netdev "$2" || fail "no rxe device on $2"
    rdma link add "rxe$(($1 * 2 + 1))" type rxe netdev "$3" || fail "no rxe device on $3"
    await_device $(($1 * 2)) "0a09:0${1}01"
    await_device $(($1 * 2 + 1)) "0a09:0${1}02"
}

# await_device INDEX HEX: waits for an active port that has its IPv4 address among its GIDs.
await_device() {
    port=/sys/class/infiniband/rxe$1/ports/1
    tries=0
    until grep -q ACTIVE $port/state && grep -q "ffff:$2" $port/gids/? &&
        [ -c "/dev/infiniband/uverbs$1" ]; do
        tries=$((tries + 1))
        [ $tries -lt 100 ] || fail "rxe$1 is not ready: $(cat $port/state)"
        sleep 0.1
    done 2>/dev/null
}

# serial_port NAME: prints the device file of the port that the host gave this name.
serial_port() {
    for entry in /sys/class/virtio-ports/*; do
        if [ "$(cat "$entry/name")" = "$1" ]; then
            echo "/dev/${entry##*/}"
            return
        fi
    done
    fail "no port $1"
}

run_in_root() {
    export PATH=/usr/sbin:/usr/bin:/sbin:/bin
    . /run/softroce/job/setup.sh
    fill_root
    ulimit -l unlimited
    ip link set lo up
    for scope in all default; do
        echo 0 >/proc/sys/net/ipv4/conf/$scope/rp_filter
        echo 1 >/proc/sys/net/ipv4/conf/$scope/accept_local
    done
    add_link 0 va vb
    [ "$links" -lt 2 ] || add_link 1 vc vd
    [ -c /dev/infiniband/rdma_cm ] || fail "no rdma_cm device"

    exec 3>"$(serial_port out)" 4>"$(serial_port err)"
    printf '\0%s ready\n' "$nonce" >&3
    if [ "$tty" = 1 ]; then
        stty rows "$rows" cols "$columns" </dev/console
        /bin/busybox setsid -c sh /run/softroce/job/command.sh \
            </dev/ttyS0 >/dev/ttyS0 2>&1 3>&- 4>&-
        status=$?
    else
        mkfifo /run/softroce/out /run/softroce/err
        cat </run/softroce/out >&3 &
        cat </run/softroce/err >&4 &
        # The redirections are the child's own, so that what this shell says of a signal stays out.
        /bin/busybox setsid sh -c 'exec sh /run/softroce/job/command.sh \
            </dev/null >/run/softroce/out 2>/run/softroce/err 3>&- 4>&-'
        status=$?
        kill_leftovers
        wait
    fi
    printf '\0%s exit %s\n' "$nonce" "$status" >&3
    printf '\0%s exit %s\n' "$nonce" "$status" >&4
    exec sleep 3600 # the host ends the machine when it has both markers
}

# Kills what the command left, until a look round finds nothing; what survives SIGKILL for some
# seconds is stuck in the kernel, and then the host's time limit is what ends the run.
kill_leftovers() {
    for _ in 1 2 3 4 5 6 7 8 9 10; do
        found=0
        for entry in /proc/[0-9]*; do
            read -r line <"$entry/stat" || continue
            # After the name: state, parent, group, session; this shell, its cats and the kernel's
            # threads have session 0, as nothing but the command called setsid.
            # shellcheck disable=SC2086
            set -- ${line##*) }
            if [ "$4" != 0 ] && [ "$1" != Z ]; then
                found=1
                kill -9 "${entry##*/}"
            fi
        done 2>/dev/null
        [ $found = 1 ] || return 0
        sleep 0.2
    done
}

if [ "$1" = root ]; then run_in_root; else build_root; fi
