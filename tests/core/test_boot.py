"""Kernel arguments: wishes against words, the edits that bring them about, and the shell that reads one of them."""

import subprocess
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.core.boot import (
    Wish,
    all_wishes,
    iommu_wishes,
    next_step,
    split_cmdline,
    state_of,
    words_of_file,
)
from agent.core.boot_edit import (
    dangerous,
    edited_cmdline,
    endangered,
    grub_drop_in,
    read_drop_in,
    unsafe,
    unusable_cmdline,
    with_wishes,
)
from agent.core.fact import Known, Unknown
from agent.core.forbidden_text import proposes_untranslated
from agent.core.observation import Platform
from agent.core.spec import Platform as PlatformSpec

ADD, NO_PT = Wish("pcie_aspm=off", present=True), Wish("iommu=pt", present=False)
PLAIN = st.text("abcdefgh=.,-_0129:/@%+", min_size=1, max_size=9).filter(lambda t: not t.startswith("="))
PATTERN = st.text("abcd=-_*?", min_size=1, max_size=6)
NEEDED = (
    "root=ZFS=rpool/ROOT/pve-1", "root=UUID=0a1b", "rootflags=subvol=@", "rootfstype=ext4", "rootwait", "ro", "rw",
    "boot=zfs", "init=/bin/sh", "cryptdevice=UUID=0a:crypt", "cryptopts=x", "rd.lvm.lv=vg/root", "rd.luks.uuid=0a",
    "resume=/dev/sda2", "zfs=rpool", "console=ttyS0,115200", "net.ifnames=0", "systemd.unit=rescue.target",
)  # fmt: skip
NEAR = st.one_of(
    st.text("rot=*?.wdcnsi", min_size=1, max_size=6),
    st.sampled_from(NEEDED).flatmap(lambda w: st.integers(0, len(w)).map(lambda n: w[:n] + "*")),
    st.sampled_from(NEEDED).flatmap(lambda w: st.integers(0, len(w)).map(lambda n: "*" + w[n:])),
)
WISHES = st.tuples(
    st.lists(st.builds(Wish, PLAIN, present=st.just(value=True)), max_size=3),
    st.lists(st.builds(Wish, PATTERN, present=st.just(value=False)), max_size=3),
).map(lambda both: (*both[0], *both[1]))


def shell(text: str, linux: str, default: str) -> tuple[list[str], list[str]]:
    """What a POSIX shell makes of GRUB's two variables, as grub-mkconfig reads its settings."""
    script = 'set -e\n. /dev/stdin\nprintf "%s\\n" "$GRUB_CMDLINE_LINUX" "$GRUB_CMDLINE_LINUX_DEFAULT"\n'
    env = {"GRUB_CMDLINE_LINUX": linux, "GRUB_CMDLINE_LINUX_DEFAULT": default, "PATH": "/nowhere"}
    done = subprocess.run(
        ["/bin/sh", "-c", script], input=text, env=env, capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    return first.split(), second.split()


def test_an_argument_is_applied_kept_pending_or_wrong_by_this_boot_and_the_next() -> None:
    states = {
        state_of(wish, now.split(), Platform(next_cmdline=Known(tuple(then.split()))))
        for wish, now, then in (
            (ADD, "ro pcie_aspm=off", "ro"),
            (ADD, "ro", "ro pcie_aspm=off"),
            (ADD, "ro", "ro"),
            (ADD, "pcie_aspm=off", "pcie_aspm=off"),
        )
    }
    assert states == {"not-kept", "pending", "not-applied", "applied"}


def test_a_next_boot_that_cannot_be_told_promises_nothing() -> None:
    unknown = Platform(next_cmdline=Unknown("not mounted"))
    assert state_of(ADD, ["ro"], unknown) == "not-applied"
    assert state_of(ADD, ["pcie_aspm=off"], unknown) == "applied"


@pytest.mark.parametrize("word", ["vfio-pci.ids=10de:2bb5", "vfio_pci.ids=1002:1478"])
def test_B9_dashes_and_underscores_of_a_name_are_the_same_argument(word: str) -> None:
    assert not Wish("vfio-pci.ids=*", present=False).met([word])
    assert not Wish("vfio_pci.ids=*", present=False).met([word])


def test_D1_translation_forbids_every_spelling_of_its_opposite() -> None:
    wishes = iommu_wishes(PlatformSpec(sev_snp="enabled"))
    for word in (
        "iommu=pt",
        "iommu=pt,nomerge",
        "iommu=off",
        "amd_iommu=off",
        "intel_iommu=off",
        "iommu.passthrough=1",
    ):
        assert not all(w.met([word]) for w in wishes), word
    assert all(w.met(["amd_iommu=on", "iommu=nopt", "ro"]) for w in wishes)


def test_D1_no_text_for_an_snp_host_proposes_to_leave_translation() -> None:
    spec = PlatformSpec(sev_snp="enabled", iommu="translated")
    wishes = all_wishes(spec)
    assert not proposes_untranslated(grub_drop_in(wishes))
    for loader in ("grub", "proxmox-systemd-boot", "systemd-boot", "unheard-of"):
        platform = Platform(boot_loader=Known(loader), next_cmdline=Known(("iommu=pt",)))
        for editing in (True, False):
            assert not proposes_untranslated(next_step(wishes, ("iommu=pt",), platform, editing=editing))


def test_the_drop_in_takes_words_away_and_adds_some_in_a_real_shell() -> None:
    wishes = (ADD, Wish("iommu=pt", present=False), Wish("vfio-pci.ids=*", present=False))
    linux, default = shell(grub_drop_in(wishes), "amd_iommu=on iommu=pt", "quiet vfio_pci.ids=10de:2bb5 x=*")
    assert linux == ["amd_iommu=on", "pcie_aspm=off"]
    assert default == ["quiet", "x=*"]


@given(WISHES, st.lists(PLAIN, max_size=4), st.lists(PLAIN, max_size=4))
def test_the_agent_predicts_what_the_shell_makes_of_its_drop_in(
    wishes: tuple[Wish, ...], linux: list[str], default: list[str]
) -> None:
    text = grub_drop_in(wishes)
    again = read_drop_in(text) if text else ()
    assert again is not None
    drop = [w for w in again if not w.present]
    shown = shell(text, " ".join(linux), " ".join(default))
    assert shown[1] == list(with_wishes(default, drop))
    assert set(with_wishes(linux, again)) == {x for x in shown[0] if not any(w.found([x]) for w in drop)} | {
        w.argument for w in again if w.present
    }


def test_a_drop_in_that_somebody_changed_is_not_taken_for_the_agents() -> None:
    text = grub_drop_in((ADD, NO_PT))
    assert read_drop_in(text) is not None
    for changed in (text + "\n", text.replace("set -f", "set -e"), "GRUB_CMDLINE_LINUX=x\n", ""):
        assert read_drop_in(changed) is None


@pytest.mark.parametrize(
    "argument", ["x='; reboot", 'x="a b"', "x=$(reboot)", "x=`id`", "a b", "x\ny", "x\\"]
)
def test_what_could_be_more_than_a_word_in_a_shell_is_not_written(argument: str) -> None:
    assert unsafe([Wish(argument, present=True)]) == [argument]


def test_the_edit_of_a_command_line_changes_only_the_words_that_it_must() -> None:
    text = 'root=ZFS=rpool/ROOT/pve-1  boot=zfs iommu=pt dyndbg="file a.c +p"\n'
    edited = edited_cmdline(text, (ADD, NO_PT))
    assert edited == 'root=ZFS=rpool/ROOT/pve-1 boot=zfs dyndbg="file a.c +p" pcie_aspm=off\n'
    assert edited_cmdline(edited, (ADD, NO_PT)) == edited
    assert edited_cmdline(text, (Wish("quiet", present=False),)) == text


@pytest.mark.parametrize(
    "pattern",
    ["*", "r*", "?o", "*=*", "root=*", "root=/dev/sda1", "ro", "rd.*", "rd.lvm.lv=vg/root", "*resume*", "con*", "b??t=*",
     "cryptdevice=*", "init=*", "*_*", "[r]o", "net*", "s*", "*zfs*"],
)  # fmt: skip
def test_a_pattern_that_could_take_the_root_or_the_way_in_is_not_carried_out(pattern: str) -> None:
    assert [p for p, _ in dangerous([Wish(pattern, present=False)])] == [pattern]


@pytest.mark.parametrize(
    "pattern",
    ["quiet", "iommu=*", "iommu*=pt", "vfio-pci.ids=*", "pcie_*", "amd_iommu=on", "video=*", "nouveau.*", "module_blacklist=*",
     "console=ttyS0*", "net.ifnames=0", "systemd.unified_cgroup_hierarchy=0"],
)  # fmt: skip
def test_what_a_boot_can_do_without_may_be_taken_away(pattern: str) -> None:
    assert dangerous([Wish(pattern, present=False)]) == []


def test_no_wish_of_the_agents_own_is_dangerous() -> None:
    for spec in (
        PlatformSpec(sev_snp="enabled"),
        PlatformSpec(iommu="passthrough"),
        PlatformSpec(sev_snp="disabled"),
    ):
        assert dangerous(all_wishes(spec)) == []


@given(NEAR, st.sampled_from(NEEDED))
def test_every_pattern_that_matches_a_needed_word_is_found_dangerous(pattern: str, word: str) -> None:
    named = pattern.startswith(("console=", "net.ifnames=", "systemd."))
    if Wish(pattern, present=False).found([word]) and not named:
        assert endangered(pattern)


@given(
    st.lists(NEAR, max_size=3),
    st.lists(st.sampled_from(NEEDED), min_size=1, max_size=5),
    st.lists(PLAIN, max_size=3),
)
def test_an_edit_never_takes_a_needed_word_away(
    patterns: list[str], needed: list[str], others: list[str]
) -> None:
    asked = [Wish(p, present=False) for p in patterns]
    risky = {p for p, _ in dangerous(asked)}
    named = [p for p in patterns if p.startswith(("console=", "net.ifnames=", "systemd."))]
    wishes = (ADD, *(w for w in asked if w.argument not in risky and w.argument not in named))
    edited = edited_cmdline(" ".join([*others, *needed]) + "\n", wishes)
    assert [w for w in split_cmdline(edited) if w in NEEDED] == [*(o for o in others if o in NEEDED), *needed]


@settings(max_examples=40)  # each starts a shell
@given(st.lists(NEAR, max_size=3), st.lists(st.sampled_from(NEEDED), min_size=1, max_size=5))
def test_grubs_drop_in_never_takes_a_needed_word_away(patterns: list[str], needed: list[str]) -> None:
    asked = [Wish(p, present=False) for p in patterns]
    risky = {p for p, _ in dangerous(asked)}
    named = [p for p in patterns if p.startswith(("console=", "net.ifnames=", "systemd."))]
    text = grub_drop_in((ADD, *(w for w in asked if w.argument not in risky and w.argument not in named)))
    linux, default = shell(text, " ".join(needed), " ".join(needed))
    assert linux == [*needed, "pcie_aspm=off"]
    assert default == needed


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("root=/dev/sda1 ro\nroot=/dev/sdb1 ro\n", "2 lines"),
        ("", "0 lines"),
        ("# nothing but a comment\n", "0 lines"),
        ("ro quiet\n", "no root="),
    ],
)
def test_a_command_line_file_that_is_not_one_line_with_a_root_is_left_alone(text: str, why: str) -> None:
    assert why in unusable_cmdline(text)


def test_a_command_line_file_with_a_comment_is_read_without_it_and_not_edited() -> None:
    text = "# iommu=pt was for the test\nroot=/dev/sda1 pcie_aspm=off\n"
    assert words_of_file(text) == ("root=/dev/sda1", "pcie_aspm=off")
    assert edited_cmdline(text, (ADD, NO_PT)) == text
    assert "comment" in unusable_cmdline(text)


def test_a_pattern_of_any_length_is_weighed() -> None:
    for pattern in ("root=" + "a" * 5000, "rd." + "x" * 5000, "*" * 5000):
        assert endangered(pattern)
    assert not endangered("quiet" * 1000 + "*")


def test_what_is_said_of_a_next_boot_that_cannot_be_read_follows_what_was_done() -> None:
    wish, words = (ADD,), ("ro",)
    hidden = Platform(
        boot_loader=Known("proxmox-grub"),
        next_cmdline=Unknown("not mounted"),
        configured_cmdline=Known(("ro", "pcie_aspm=off")),
    )
    edited = replace(hidden, configured_cmdline=Known(("ro",)))
    begun = next_step(wish, words, edited, editing=True)
    cut_short = next_step(wish, words, hidden, editing=True, owed=True)
    done = next_step(wish, words, hidden, editing=True)
    by_hand = next_step(wish, words, hidden, editing=False)
    assert begun.startswith("the agent edits /etc/default/grub.d/gpu-host-agent.cfg and runs")
    assert cut_short.startswith("the agent runs proxmox-boot-tool refresh")
    assert cut_short.endswith("then reboot")
    assert done.startswith("reboot: ")
    assert by_hand.startswith("run proxmox-boot-tool refresh")


def test_quotes_on_a_command_line_hold_words_together() -> None:
    assert split_cmdline('a "b c" d="e  f"') == ("a", "b c", "d=e  f")
