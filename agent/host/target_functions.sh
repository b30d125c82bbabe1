# POSIX shell, run by `sh -s` in a container or on another machine: dash, bash and busybox will do.
# Statuses: 0 the output is the answer; 44 it is not there; anything else, see what stands on stderr.
PATH=$PATH:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
SYSTEMD_COLORS=0
SYSTEMD_PAGER=
export PATH LC_ALL SYSTEMD_COLORS SYSTEMD_PAGER
umask 022

# NUMBER FUNCTION ARGUMENTS: output and status, encoded, so that nothing in them can pass for a mark.
part() {
  number=$1
  shift
  printf '%s %s\n' "$MARK" "$number"
  printf '%s %s\n' "$MARK" "$number" >&2
  {
    ("$@") </dev/null
    printf '\n%s' "$?"
  } | base64
  printf '%s end\n' "$MARK"
}

say() {
  printf '%s\n' "$1" >&2
}

# PATH: true where it is not there. Where that cannot be told, that is the answer.
absent() {
  [ -e "$1" ] && return 1
  words=$(ls -dL -- "$1" 2>&1) && return 1
  case $words in
    *': No such file or directory' | *': Not a directory') return 0 ;;
  esac
  say "$words"
  exit 1
}

exists() {
  absent "$1" && return 44
  return 0
}

# PATH BYTES
read_file() {
  absent "$1" && return 44
  [ -f "$1" ] || { say "$1: not a regular file"; return 1; }  # a FIFO would be waited for
  head -c "$2" <"$1"
}

# PATH: a temporary file beside it, removed at the end where it was not moved there.
begin_file() {
  directory=${1%/*}
  mkdir -p -- "${directory:-/}" || return
  temporary=$(mktemp "$directory/.gpu-host-agent.XXXXXX") || return
  trap 'rm -f -- "$temporary"' EXIT
  trap 'exit 1' HUP INT TERM
}

# PATH MODE: `sync FILE` is not in every version, and the rename is atomic without it.
finish_file() {
  chmod "$2" "$temporary" || return
  sync "$temporary" 2>/dev/null
  mv -fT -- "$temporary" "$1" || return
  sync "${directory:-/}" 2>/dev/null
  return 0
}

# PATH TEXT, in base64
write_file() {
  begin_file "$1" || return
  printf '%s' "$2" | base64 -d >"$temporary" || return
  finish_file "$1" 0644
}

remove_file() {
  rm -f -- "$1"
}

# PATH, then VARIABLE FILE for each. The values pass through pipes alone, never through arguments or variables.
install_secrets() {
  umask 077
  path=$1
  shift
  begin_file "$path" || return
  while [ $# -gt 1 ]; do
    secret "$1" "$2" >>"$temporary" || return
    shift 2
  done
  finish_file "$path" 0600
}

secret() {
  absent "$2" && { say "$2: no such file"; return 44; }
  [ -f "$2" ] || { say "$2: not a regular file"; return 1; }
  cat <"$2" >/dev/null || return 1
  [ "$(head -c 16385 <"$2" | wc -c)" -le 16384 ] || { say "$2: larger than 16 KiB"; return 1; }
  [ "$(trimmed "$2" | sed -n 2p | wc -c)" -eq 0 ] || { say "$2: a secret has one line"; return 1; }
  # systemd passes over a value that holds one of these, and the service would start without it.
  [ "$(trimmed "$2" | tr -d '\t\n -~\200-\377' | wc -c)" -eq 0 ] || { say "$2: control characters"; return 1; }
  if command -v iconv >/dev/null && ! iconv -f UTF-8 -t UTF-8 <"$2" >/dev/null 2>&1; then
    say "$2: not UTF-8"
    return 1
  fi
  printf '%s="' "$1"
  trimmed "$2" | sed 's/[\\"`$]/\\&/g' | tr -d '\n'
  printf '"\n'
}

# FILE: without the ends of lines at its end.
trimmed() {
  sed -e ':more' -e '$!{' -e N -e 'b more' -e '}' \
    -e ':end' -e 's/\n$//' -e 't end' -e "s/$(printf '\r')\$//" -e 't end' <"$1"
}

# NAME: properties by `systemctl show`, and Pids, every process in its cgroup.
unit() {
  shown=$(systemctl show --no-pager \
    --property=Id,LoadState,ActiveState,SubState,MainPID,Result,ExecMainStatus,NRestarts,ControlGroup,NeedDaemonReload,DropInPaths \
    -- "$1") || return
  printf '%s\n' "$shown"
  unread_drop_in && printf 'NeedDaemonReload=yes\n'
  group=$(property ControlGroup)
  case $group in
    '' | /) return 0 ;;
  esac
  root=/sys/fs/cgroup
  [ ! -e $root/cgroup.controllers ] && [ -d $root/systemd ] && root=$root/systemd # version 1, or hybrid
  main=$(property MainPID)
  if [ ! -d "$root$group" ] && [ "${main:-0}" -gt 0 ] && [ -d "/proc/$main" ]; then
    say "$root$group is not there, and its main process is" # so it is mounted elsewhere, and holds what nobody sees
    return 1
  fi
  pids=$(cgroup_pids "$root$group") || { say "$root$group: its processes cannot be read"; return 1; }
  # shellcheck disable=SC2086 # one line of many
  set -- $pids
  printf 'Pids=%s\n' "$*"
}

property() {
  printf '%s\n' "$shown" | sed -n "s/^$1=//p"
}

# systemd sees changes of the files that it has read; the first drop-in of a unit that is loaded already it does not.
unread_drop_in() {
  read_already=$(property DropInPaths)
  for drop_in in "/etc/systemd/system/$(property Id).d"/*.conf; do
    [ -s "$drop_in" ] || continue # none, or a mask
    case "$read_already " in
      *"/${drop_in##*/} "*) ;;
      *) return 0 ;;
    esac
  done
  return 1
}

# A cgroup that is not there has no processes; one that cannot be read may have some.
cgroup_pids() {
  [ -d "$1" ] || return 0
  cat "$1/cgroup.procs" || [ ! -d "$1" ] || return 1
  for below in "$1"/*/ "$1"/.[!.]*/; do
    cgroup_pids "${below%/}" || return 1
  done
  return 0
}

# PID: command line and environment, each in base64 on lines of its own, a blank line between.
process() {
  argv=$(base64 <"/proc/$1/cmdline") || gone "$1"
  [ -n "$argv" ] || return 44 # a zombie
  environ=$(base64 <"/proc/$1/environ") || gone "$1"
  printf '%s\n\n%s\n' "$argv" "$environ"
}

gone() {
  [ -d "/proc/$1" ] && exit 1
  exit 44
}

daemon_reload() {
  systemctl daemon-reload
}

start_unit() {
  systemctl start --no-block -- "$1"
}

stop_unit() {
  systemctl stop --no-block -- "$1"
}

# To every process of the cgroup: that is what systemctl does unless told otherwise, in every version.
kill_unit() {
  systemctl kill --signal=SIGKILL -- "$1" || without_processes "$1"
}

without_processes() {
  shown=$(unit "$1") || return 1
  case $shown in
    *Pids=[0-9]*) return 1 ;;
  esac
  return 0
}

reset_failed() {
  systemctl reset-failed -- "$1" || not_failed "$1"
}

not_failed() {
  shown=$(systemctl show --no-pager --property=ActiveState -- "$1") || return 1
  [ -n "$shown" ] && [ "$shown" != ActiveState=failed ]
}

# NAME LINES BYTES
unit_log() {
  {
    status=$({
      {
        journalctl --no-pager --quiet --output=cat --lines="$2" --unit="$1"
        echo $? >&3
      } | tail -c "$3" >&4
    } 3>&1)
  } 4>&1
  return "$status"
}

# DIRECTORIES of libraries: what the place looks like from inside, one word and its values a line, by tabs.
facts() {
  printf 'boot\t%s %s\n' "$(cat /proc/sys/kernel/random/boot_id)" "$(sed 's/.*) //' /proc/1/stat | cut -d ' ' -f 20)"
  [ -d /dev/shm ] && printf 'shm\t%s\n' "$(stat -f -c '%b %S' /dev/shm)"
  for node in /dev/nvidia*; do
    [ -e "$node" ] && [ ! -d "$node" ] && printf 'node\t%s\n' "$node"
  done
  for directory in "$@"; do
    for library in "$directory"/libcuda.so.* "$directory"/libnvidia-ml.so.*; do
      [ -e "$library" ] && printf 'library\t%s\t%s\n' "$library" "$(readlink -f "$library")"
    done
  done
  return 0
}

# Addresses by the order of the interfaces.
network() {
  ip -o addr show scope global 2>/dev/null | sed -n 's/.* inet6\{0,1\} \([0-9a-fA-F.:]*\).*/\1/p'
  hostname -I 2>/dev/null
  return 0
}

# SECONDS: what nvidia-smi says. 45: an earlier one still sleeps in the kernel, and another would join it.
nvml() {
  command -v nvidia-smi >/dev/null || return 44
  stuck=$(asleep)
  if [ -n "$stuck" ]; then
    sleep 1
    [ "$stuck" = "$(asleep)" ] && return 45
  fi
  if command -v timeout >/dev/null; then
    timeout -k 1 "$1" nvidia-smi -L 2>&1
  else
    nvidia-smi -L 2>&1
  fi
}

asleep() {
  grep -l '^[0-9]* (nvidia-smi) D ' /proc/[0-9]*/stat 2>/dev/null
}
