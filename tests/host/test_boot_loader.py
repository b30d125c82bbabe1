"""The boot loader's own files, in the shapes that Debian, Fedora, Proxmox and systemd-boot write them."""

import pytest

from agent.core.boot import GRUB_DROP_IN, Wish
from agent.core.boot_edit import grub_drop_in
from agent.core.fact import Absent, Known, Unknown
from agent.core.observation import Unit
from agent.host.boot_loader import UNIT, read_boot, refresh_boot_loader
from agent.host.grub_config import default_cmdline, settings_of
from agent.host.manager import TransientCommand
from tests.host.trees import Tree

HEAD = """\
if [ -s $prefix/grubenv ]; then
  set have_grubenv=true
  load_env
fi
if [ "${next_entry}" ] ; then
   set default="${next_entry}"
   set next_entry=
   save_env next_entry
   set boot_once=true
else
   set default="DEFAULT"
fi
function savedefault {
  if [ -z "${boot_once}" ]; then
    saved_entry="${chosen}"
    save_env saved_entry
  fi
}
menuentry 'Debian GNU/Linux' --class debian --class gnu-linux $menuentry_id_option 'gnulinux-simple-1f' {
\tload_video
\tif [ x$grub_platform = xxen ]; then insmod xzio; fi
\techo\t'Loading Linux 6.12 ...'
\tlinux\t/boot/vmlinuz-6.12 root=UUID=1f ro  quiet iommu=pt
\tinitrd\t/boot/initrd.img-6.12
}
submenu 'Advanced options for Debian GNU/Linux' $menuentry_id_option 'gnulinux-advanced-1f' {
\tmenuentry 'Debian, with Linux 6.12' --class debian $menuentry_id_option 'gnulinux-6.12-advanced-1f' {
\t\tlinux\t/boot/vmlinuz-6.12 root=UUID=1f ro quiet iommu=pt
\t}
\tmenuentry 'Debian, with Linux 6.1' --class debian $menuentry_id_option 'gnulinux-6.1-advanced-1f' {
\t\tlinux\t/boot/vmlinuz-6.1 root=UUID=1f ro old
\t}
}
menuentry 'UEFI Firmware Settings' $menuentry_id_option 'uefi-firmware' {
\tfwsetup
}
"""


def grub(default: str, environment: str = "") -> object:
    return default_cmdline(HEAD.replace("DEFAULT", default), environment)


@pytest.mark.parametrize(
    ("default", "environment", "last"),
    [
        ("0", "", "iommu=pt"),
        ("1>1", "", "old"),
        ("gnulinux-advanced-1f>gnulinux-6.1-advanced-1f", "", "old"),
        ("Advanced options for Debian GNU/Linux>Debian, with Linux 6.1", "", "old"),
        ("gnulinux-6.1-advanced-1f", "", "old"),
        ("1", "", "iommu=pt"),
        ("${saved_entry}", "# GRUB Environment Block\nsaved_entry=1>1\n####", "old"),
        ("${saved_entry}", "", "iommu=pt"),
        ("0", "next_entry=1>1\n", "old"),
    ],
)
def test_the_entry_that_grub_will_take_is_found(default: str, environment: str, last: str) -> None:
    found = grub(default, environment)
    assert isinstance(found, Known)
    assert found.value[:2] == ("root=UUID=1f", "ro")
    assert found.value[-1] == last


@pytest.mark.parametrize("default", ["7", "no such entry", "2", "$x", "1>9"])
def test_an_entry_that_grub_cfg_does_not_show_is_not_guessed(default: str) -> None:
    assert isinstance(grub(default), Unknown)


def test_entries_that_grub_has_elsewhere_or_computes_are_not_guessed() -> None:
    assert isinstance(default_cmdline("insmod blscfg\nblscfg\n", ""), Unknown)
    assert isinstance(default_cmdline("menuentry 'x' {\n linux /v root=$root\n}\n", ""), Unknown)
    assert isinstance(default_cmdline("", ""), Unknown)


def words(*texts: str) -> tuple[str, ...] | None:
    found = settings_of((f"/etc/default/{n}", t) for n, t in enumerate(texts))
    return found.value.words if isinstance(found, Known) else None


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (('GRUB_DEFAULT=0\nGRUB_CMDLINE_LINUX_DEFAULT="quiet splash"\nGRUB_CMDLINE_LINUX=""\n',), ("quiet", "splash")),
        (("GRUB_CMDLINE_LINUX='a b'\nGRUB_CMDLINE_LINUX_DEFAULT=c # why\n",), ("a", "b", "c")),
        (("GRUB_CMDLINE_LINUX=a\n", 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX b"\n'), ("a", "b")),
        (('GRUB_CMDLINE_LINUX="a"\nGRUB_CMDLINE_LINUX+=" b"\n',), ("a", "b")),
        (("# GRUB_CMDLINE_LINUX=$(id)\nGRUB_CMDLINE_LINUX_RECOVERY=single\n",), ()),
        (('GRUB_CMDLINE_LINUX="x=\\"y z\\" w"\n',), ("x=y z", "w")),
    ],
)  # fmt: skip
def test_settings_of_grub_are_read_as_a_shell_reads_them(
    texts: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    assert words(*texts) == expected


@pytest.mark.parametrize(
    "line",
    [
        'GRUB_CMDLINE_LINUX="$(cat /x)"',
        "GRUB_CMDLINE_LINUX=`id`",
        'GRUB_CMDLINE_LINUX="$OTHER a"',
        "if x; then GRUB_CMDLINE_LINUX=a; fi",
        "GRUB_CMDLINE_LINUX=a GRUB_CMDLINE_LINUX_DEFAULT=b",
    ],
)
def test_settings_that_only_a_shell_can_tell_are_unknown(line: str) -> None:
    assert words(line) is None


def test_a_host_with_grub_shows_its_next_boot_and_what_is_configured(tree: Tree) -> None:
    tree.file("boot/grub/grub.cfg", HEAD.replace("DEFAULT", "0"))
    tree.file("etc/default/grub", 'GRUB_CMDLINE_LINUX_DEFAULT="quiet iommu=pt"\n')
    tree.file("etc/default/grub.d/50-local.cfg", 'GRUB_CMDLINE_LINUX="$GRUB_CMDLINE_LINUX nomodeset"\n')
    tree.file(GRUB_DROP_IN.lstrip("/"), grub_drop_in([Wish("iommu=pt", present=False)]))
    boot = read_boot(tree.root)
    assert boot.loader == Known("grub")
    assert boot.next_cmdline == Known(("root=UUID=1f", "ro", "quiet", "iommu=pt"))
    assert boot.configured_cmdline == Known(("nomodeset", "quiet"))
    assert boot.sources == {
        "/etc/default/grub": ("quiet", "iommu=pt"),
        "/etc/default/grub.d/50-local.cfg": ("nomodeset",),
    }


def test_a_changed_file_of_the_agent_makes_what_is_configured_unknown(tree: Tree) -> None:
    tree.file("boot/grub/grub.cfg", HEAD.replace("DEFAULT", "0"))
    tree.file(GRUB_DROP_IN.lstrip("/"), "GRUB_CMDLINE_LINUX=x\n")
    boot = read_boot(tree.root)
    assert isinstance(boot.configured_cmdline, Unknown)
    assert isinstance(boot.next_cmdline, Known)


def entry(options: str, version: str = "6.12", sort_key: str = "") -> str:
    keyed = f"sort-key {sort_key}\n" if sort_key else ""
    return f"title Linux\nversion {version}\n{keyed}linux /vmlinuz\noptions {options}\n"


def test_loader_entries_are_read_newest_first_and_edited_themselves_where_nothing_makes_them(
    tree: Tree,
) -> None:
    tree.file("boot/loader/entries/a-6.9.conf", entry("ro old", "6.9.1"))
    tree.file("boot/loader/entries/a-6.12.conf", entry("ro\noptions new", "6.12.1"))
    boot = read_boot(tree.root)
    assert boot.loader == Known("systemd-boot")
    assert boot.next_cmdline == Known(("ro", "new"))
    assert boot.sources == {"/boot/loader/entries/a-6.12.conf": ("ro", "new")}
    tree.file("boot/loader/loader.conf", "timeout 3\ndefault a-6.9*\n")
    assert read_boot(tree.root).next_cmdline == Known(("ro", "old"))


def test_a_one_shot_entry_decides_the_next_boot(tree: Tree) -> None:
    tree.file("efi/loader/entries/a.conf", entry("ro a", "2"))
    tree.file("efi/loader/entries/b.conf", entry("ro b", "1"))
    variable = "sys/firmware/efi/efivars/LoaderEntryOneShot-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f"
    assert read_boot(tree.root).next_cmdline == Known(("ro", "a"))
    tree.file(variable, b"\x07\0\0\0" + "b.conf\0".encode("utf-16-le"))
    assert read_boot(tree.root).next_cmdline == Known(("ro", "b"))


def test_entries_of_two_systems_and_unified_images_are_not_guessed(tree: Tree) -> None:
    tree.file("boot/loader/entries/a.conf", entry("ro a", sort_key="arch"))
    tree.file("boot/loader/entries/b.conf", entry("ro b", sort_key="debian"))
    assert isinstance(read_boot(tree.root).next_cmdline, Unknown)
    tree.file("boot/EFI/Linux/linux.efi", b"MZ")
    assert isinstance(read_boot(tree.root).next_cmdline, Unknown)


def test_grub_and_loader_entries_side_by_side_are_told_apart_by_the_firmware_or_not_at_all(
    tree: Tree,
) -> None:
    tree.file("boot/grub/grub.cfg", HEAD.replace("DEFAULT", "0"))
    tree.file("boot/loader/entries/a.conf", entry("ro a"))
    assert isinstance(read_boot(tree.root).loader, Unknown)
    info = tree.file(
        "sys/firmware/efi/efivars/LoaderInfo-4a67b082-0a4c-41cf-b6c7-440b29bb8c4f",
        b"\x06\0\0\0" + "systemd-boot 257\0".encode("utf-16-le"),
    )
    assert read_boot(tree.root).loader == Known("systemd-boot")
    info.write_bytes(b"\x06\0\0\0" + "GRUB 2.12\0".encode("utf-16-le"))
    assert read_boot(tree.root).loader == Known("grub")


def proxmox(tree: Tree) -> None:
    tree.file("etc/kernel/proxmox-boot-uuids", "AAAA-1111\nBBBB-2222\n")
    tree.file("etc/kernel/cmdline", "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n")
    tree.directory("sys/firmware/efi")
    for uuid, device in (("AAAA-1111", "nvme0n1p2"), ("BBBB-2222", "nvme1n1p2")):
        tree.link(f"dev/disk/by-uuid/{uuid}", f"../../{device}")


def mounts(tree: Tree, *devices: str) -> None:
    lines = [f"36 35 259:{n} / /mnt/{d} rw shared:1 - vfat /dev/{d} rw\n" for n, d in enumerate(devices)]
    tree.file("proc/self/mountinfo", "".join(lines))


def test_proxmox_keeps_its_esps_unmounted_and_then_only_the_configured_line_is_known(tree: Tree) -> None:
    proxmox(tree)
    mounts(tree)
    boot = read_boot(tree.root)
    assert boot.loader == Known("proxmox-systemd-boot")
    assert boot.configured_cmdline == Known(("root=ZFS=rpool/ROOT/pve-1", "boot=zfs"))
    assert isinstance(boot.next_cmdline, Unknown)
    assert boot.next_cmdline.code == "NotMounted"


def test_every_esp_of_proxmox_must_say_the_same(tree: Tree) -> None:
    proxmox(tree)
    mounts(tree, "nvme0n1p2", "nvme1n1p2")
    tree.file("mnt/nvme0n1p2/loader/entries/proxmox.conf", entry("ro boot=zfs"))
    tree.file("mnt/nvme1n1p2/loader/entries/proxmox.conf", entry("ro boot=zfs"))
    assert read_boot(tree.root).next_cmdline == Known(("ro", "boot=zfs"))
    tree.file("mnt/nvme1n1p2/loader/entries/proxmox.conf", entry("ro boot=zfs iommu=pt"))
    assert isinstance(read_boot(tree.root).next_cmdline, Unknown)


def test_proxmox_with_grub_takes_its_words_from_grubs_settings(tree: Tree) -> None:
    tree.file("etc/kernel/proxmox-boot-uuids", "AAAA-1111\n")
    tree.link("dev/disk/by-uuid/AAAA-1111", "../../sda2")
    tree.file("etc/default/grub", "GRUB_CMDLINE_LINUX=amd_iommu=on\n")
    mounts(tree, "sda2")
    tree.file("mnt/sda2/grub/grub.cfg", HEAD.replace("DEFAULT", "0"))
    boot = read_boot(tree.root)
    assert (boot.loader, boot.configured_cmdline) == (Known("proxmox-grub"), Known(("amd_iommu=on",)))
    assert isinstance(boot.next_cmdline, Known)


def test_a_host_whose_boot_loader_is_not_known_promises_nothing(tree: Tree) -> None:
    boot = read_boot(tree.root)
    assert isinstance(boot.loader, Absent)
    assert isinstance(boot.next_cmdline, Unknown)
    assert isinstance(boot.configured_cmdline, Unknown)


class Systemd:
    """A service manager whose one transient unit goes through the given states."""

    def __init__(self, *states: Unit) -> None:
        self.states = list(states)
        self.ran: list[TransientCommand] = []

    async def unit(self, name: str) -> Unit:
        return self.states.pop(0) if len(self.states) > 1 else self.states[0]

    async def run(self, command: TransientCommand) -> None:
        self.ran.append(command)

    async def reload(self) -> None:
        raise NotImplementedError

    async def start(self, name: str) -> None:
        raise NotImplementedError

    stop = kill = reset_failed = start


def unit(active: str, status: int = 0) -> Unit:
    return Unit(UNIT, "loaded", active, exit_status=status)


async def test_the_boot_loaders_own_command_is_run_by_pid_1_and_its_end_waited_for() -> None:
    systemd = Systemd(unit("activating"), unit("active"))
    await refresh_boot_loader("proxmox-grub", systemd)
    assert [c.argv for c in systemd.ran] == [("/usr/sbin/proxmox-boot-tool", "refresh")]
    with pytest.raises(OSError, match="failed with status 1"):
        await refresh_boot_loader("grub", Systemd(unit("failed", 1)))


async def test_a_command_that_pid_1_has_not_come_to_yet_is_waited_for_and_not_taken_for_failed() -> None:
    await refresh_boot_loader("grub", Systemd(unit("inactive"), unit("activating"), unit("active")))


async def test_no_command_is_made_up_for_a_loader_that_has_none() -> None:
    systemd = Systemd(unit("active"))
    with pytest.raises(OSError, match="systemd-boot"):
        await refresh_boot_loader("systemd-boot", systemd)
    assert systemd.ran == []
