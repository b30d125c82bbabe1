"""Kernel arguments: wishes against words, the edits that bring them about, and the shell that reads one of them."""

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.core.boot import (
    Wish,
    all_wishes,
    edited_cmdline,
    grub_drop_in,
    iommu_wishes,
    next_step,
    read_drop_in,
    split_cmdline,
    state_of,
    unsafe,
    with_wishes,
)
from agent.core.fact import Known, Unknown
from agent.core.laws import proposes_untranslated
from agent.core.observation import Platform
from agent.core.spec import Platform as PlatformSpec

ADD, NO_PT = Wish("pcie_aspm=off", present=True), Wish("iommu=pt", present=False)
PLAIN = st.text("abcdefgh=.,-_0129:/@%+", min_size=1, max_size=9).filter(lambda t: not t.startswith("="))
PATTERN = st.text("abcd=-_*?", min_size=1, max_size=6)
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


def test_quotes_on_a_command_line_hold_words_together() -> None:
    assert split_cmdline('a "b c" d="e  f"') == ("a", "b c", "d=e  f")
