#!/bin/sh
# A second systemd on this machine, with nothing of this machine's in reach of it but a read-only view of its files.
#   ring.sh enter WORK NAME CONSOLE SHARED...  in a mount namespace of its own; becomes the parent of the ring's PID 1
#   ring.sh clean WORK NAME                    in another one, when that process has ended
# WORK: an empty directory. NAME: of the cgroup. CONSOLE: a terminal. SHARED: DIRECTORY=PLACE, seen read-only there.
set -eu

# What would reach through to the kernel that both share, or only costs time.
masked='systemd-udevd.service systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udev-trigger.service
systemd-udev-settle.service systemd-hwdb-update.service systemd-modules-load.service systemd-sysctl.service
systemd-binfmt.service systemd-random-seed.service systemd-pstore.service systemd-logind.service systemd-timesyncd.service
systemd-networkd.service systemd-networkd.socket systemd-resolved.service systemd-firstboot.service
systemd-update-utmp.service systemd-update-utmp-runlevel.service systemd-ask-password-console.path
systemd-ask-password-wall.path systemd-initctl.socket systemd-journald-audit.socket systemd-tmpfiles-clean.timer
systemd-vconsole-setup.service kmod-static-nodes.service dev-hugepages.mount dev-mqueue.mount tmp.mount
sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount sys-fs-fuse-connections.mount
proc-sys-fs-binfmt_misc.automount proc-sys-fs-binfmt_misc.mount getty.target remote-fs.target'

enter() {
  work=$1
  name=$2
  mkdir "$work/cgroup" "$work/store"
  mount -t cgroup2 cgroup2 "$work/cgroup"
  mkdir "$work/cgroup/$name"
  echo $$ >"$work/cgroup/$name/cgroup.procs"
  umount "$work/cgroup"
  shift 2
  exec unshare --pid --ipc --uts --cgroup --net --fork --kill-child=KILL -- sh "$0" boot "$work/store" "$@"
}

boot() {
  store=$1
  console=$2
  shift 2
  mount -t tmpfs -o mode=0755 ring "$store"
  mkdir "$store/upper" "$store/work" "$store/root"
  mount -t overlay -o "lowerdir=/,upperdir=$store/upper,workdir=$store/work" ring "$store/root"
  cd "$store/root"
  kernel_view
  devices "$console"
  mount -t tmpfs -o mode=0755,nosuid,nodev run run
  mount -t tmpfs -o mode=1777,nosuid,nodev tmp tmp
  for shared in "$@"; do
    place=.${shared#*=}
    mkdir -p "$place"
    mount --bind "${shared%%=*}" "$place"
    mount -o remount,bind,ro "$place"
  done
  settings
  mkdir run/machine
  pivot_root . run/machine
  umount -l /run/machine
  rmdir /run/machine
  exec setpriv --bounding-set=-sys_module,-sys_time,-sys_boot,-wake_alarm,-mac_admin,-mac_override \
    env -i container=ring PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin TERM=dumb \
    /lib/systemd/systemd --show-status=1
}

kernel_view() {
  mount -t proc -o nosuid,nodev,noexec proc proc
  for file in proc/sys proc/sysrq-trigger proc/irq proc/bus; do
    [ -e $file ] || continue
    mount --bind $file $file
    mount -o remount,bind,ro $file
  done
  mount -t sysfs -o ro,nosuid,nodev,noexec sysfs sys
  mount -t cgroup2 -o nosuid,nodev,noexec cgroup2 sys/fs/cgroup
  # A bus without devices that may be written, where the machine's would be.
  mount -t tmpfs -o mode=0755,nosuid,nodev,noexec bus sys/bus
  mkdir -p sys/bus/pci/devices sys/bus/pci/drivers
  : >sys/bus/pci/drivers_probe
}

devices() {
  mount -t tmpfs -o mode=0755,nosuid dev dev
  mkdir dev/pts dev/shm
  mount -t devpts -o newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
  mount -t tmpfs -o mode=1777,nosuid,nodev shm dev/shm
  mknod -m 666 dev/null c 1 3
  mknod -m 666 dev/zero c 1 5
  mknod -m 666 dev/full c 1 7
  mknod -m 666 dev/random c 1 8
  mknod -m 666 dev/urandom c 1 9
  mknod -m 666 dev/tty c 5 0
  ln -s pts/ptmx dev/ptmx
  ln -s /proc/self/fd dev/fd
  : >dev/kmsg # the machine's own log is nobody's business here
  : >dev/console
  mount --bind "$1" dev/console
}

settings() {
  # Only what packages bring: how this machine itself is set up must not decide a test.
  rm -rf etc/systemd/system etc/systemd/journald.conf.d etc/modprobe.d etc/udev
  rm -rf etc/gpu-host-agent var/lib/gpu-host-agent
  mkdir -p etc/systemd/system etc/systemd/system-generators etc/systemd/journald.conf.d
  for unit in $masked; do ln -s /dev/null "etc/systemd/system/$unit"; done
  for generator in lib/systemd/system-generators/*; do
    ln -sf /dev/null "etc/systemd/system-generators/${generator##*/}"
  done
  ln -s /lib/systemd/system/multi-user.target etc/systemd/system/default.target
  printf '[Journal]\nStorage=volatile\nRateLimitBurst=0\n' >etc/systemd/journald.conf.d/ring.conf
  echo ring >etc/hostname
  : >etc/fstab
  : >etc/machine-id
}

clean() {
  mkdir -p "$1/cgroup"
  mount -t cgroup2 cgroup2 "$1/cgroup"
  left=50
  while [ -d "$1/cgroup/$2" ] && [ $left -gt 0 ]; do
    # A group can be removed when the last of its processes is gone for good, an instant after the ring's end.
    find "$1/cgroup/$2" -depth -type d -exec rmdir {} + 2>/dev/null || sleep 0.1
    left=$((left - 1))
  done
  gone=0
  [ ! -d "$1/cgroup/$2" ] || gone=1
  umount "$1/cgroup"
  return $gone
}

verb=$1
shift
"$verb" "$@"
