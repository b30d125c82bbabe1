from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.catalog.kernel_log import kernel_log_catalog
from agent.core.kernel_log import (
    MAX_CODES,
    MAX_RECORDS,
    MAX_SAMPLE,
    Folded,
    fold,
    is_fault,
    is_lost,
    note,
    pci_address,
    severity,
)
from agent.core.kernel_log_state import KernelLogState, from_file, to_file
from agent.core.observation import KernelEvent, Pci, PciFunction

GPU, PEER = "0000:c1:00.0", "0000:e1:00.0"
AMD = f"nvidia {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002c address=0x24000000000 flags=0x0030]"


def counted(lines: list[tuple[float, str]], pci: Pci | None = None) -> tuple[KernelEvent, ...]:
    return fold(Folded(), lines, pci).events


def one(line: str, pci: Pci | None = None) -> KernelEvent:
    (event,) = counted([(5.0, line)], pci)
    return event


def in_turn(*lines: str) -> tuple[KernelEvent, ...]:
    return counted([(float(n), line) for n, line in enumerate(lines)])


@pytest.mark.parametrize(
    ("line", "sort", "address", "code"),
    [
        (AMD, "page-fault", GPU, 0x30),
        (f"vfio-pci {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0000 address=0x0 flags=0x000a]",
         "page-fault", GPU, 0xA),
        (f"AMD-Vi: Event logged [IO_PAGE_FAULT device={GPU} domain=0x0 address=0x10 flags=0x0020 rdx=0x1 more",
         "page-fault", GPU, 0x20),
        ("AMD-Vi: Event logged [IO_PAGE_FAULT device=c1:00.0 domain=0x0003 address=0x80000040 flags=0x0020]",
         "page-fault", GPU, 0x20),
        ("AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0003 address=0x80000040 flags=0x0020]", "page-fault", "", 0x20),
        ("DMAR: [DMA Write NO_PASID] Request device [c1:00.0] fault addr 0xbadb000 [fault reason 0x71] x",
         "page-fault", GPU, 0x71),
        ("DMAR: [DMA Read] Request device [c1:00.0] fault addr badb000 [fault reason 05] PTE Write access is not set",
         "page-fault", GPU, 5),
        ("NVRM: Xid (PCI:0000:c1:00): 31, pid=12, name=python3, Ch 00000008", "xid", GPU, 31),
        ("NVRM: Xid (PCI:0000:C1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
         "bus-lost", GPU, 79),
        ("NVRM: Xid (PCI:0000:c1:00): 79, pid=1", "bus-lost", GPU, 79),
        (f"NVRM: GPU {GPU}: GPU has fallen off the bus.", "bus-lost", GPU, None),
        (f"NVRM: The NVIDIA GPU {GPU} (PCI ID: 10de:2bb5) NVRM: installed in this system has NVRM: fallen off the bus",
         "bus-lost", GPU, None),
        ("NVRM: GPU has fallen off the bus.", "bus-lost", "", None),
        (f"vfio-pci {GPU}: Unable to change power state from D3cold to D0, device inaccessible", "d3cold", GPU, None),
        (f"vfio-pci {GPU}: can't change power state from D3cold to D0 (config space inaccessible)", "d3cold", GPU, None),
        (f"vfio-pci {GPU}: not ready 65535ms after FLR; giving up", "flr-failed", GPU, None),
        (f"pci {GPU}: not ready 65535ms after bus reset; giving up", "flr-failed", GPU, None),
        ("aer_uncor_status: 0x00000020", "aer", "", 0x20),
        (f"nvidia {GPU}: AER: aer_uncor_status: 0x00000020, aer_uncor_mask: 0x04500000", "aer", GPU, 0x20),
        (f"NVRM: Attempting to remove device {GPU} with non-zero usage count!", "in-use", GPU, None),
        (f"vfio-pci {GPU}: Relaying device request to user (#0)", "vfio-blocked", GPU, None),
        (f"vfio-pci {GPU}: No device request channel registered, blocked until released by user", "vfio-blocked", GPU, None),
        ("pci 0000:00:09.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0000 address=0x0 flags=0x000a]",
         "page-fault", "0000:00:09.0", 0xA),
        (f"amdgpu {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT pasid=0x1 domain=0x1 address=0x10 flags=0x0020 new=0x5]",
         "page-fault", GPU, 0x20),
        (f"AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0 address=0x10 flags=0x0020 device={GPU}]", "page-fault", GPU, 0x20),
        ("DMAR: [DMA Write NO_PASID] Request device [04:00.0] fault addr 0xbadb000 [fault reason 0x05] PTE Write access is not set",
         "page-fault", "0000:04:00.0", 5),
        ("DMAR: [DMA Read PASID 0x1a] Request device [c1:00.0] fault addr 0x10 [fault reason 0x71] SM: x", "page-fault", GPU, 0x71),
        ("DMAR: [DMA Read] Request device [c1:00.0] PASID ffffffff fault addr 10 [fault reason 12] non-zero x",
         "page-fault", GPU, 12),
        (f"vfio-pci {GPU}: AMD-Vi: Event logged [RMP_PAGE_FAULT vmg_tag=0x0000, gpa=0x740b8784, flags_rmp=0x0000, flags=0x0020]",
         "rmp-fault", GPU, 0x20),
        (f"AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device={GPU} address=0x100]", "iotlb-timeout", GPU, None),
        ("NVRM: Xid (PCI:0000:c1:00 GPU-I:05): 13, pid=1, name=x", "xid", GPU, 13),
        ("NVRM: Xid (0000:c1:00): 31, Ch 0000000b", "xid", GPU, 31),
        ("NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
         "recovery-action", GPU, 2),
        (f"NVRM: GPU {GPU}: rm_init_adapter failed, device minor number 5", "init-failed", GPU, None),
        (f"NVRM: GPU {GPU}: RmInitAdapter failed! (0x23:0xf:1426)", "bus-lost", GPU, None),
        (f"pci {GPU}: unknown header type 7f, ignoring device", "bus-lost", GPU, None),
        (f"pcieport {GPU}: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)", "aer-corrected", GPU, None),
        (f"nvidia {GPU}: AER: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Inaccessible, (Unregistered Agent ID)",
         "aer", GPU, None),
        ("AMD-Vi: SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported.", "snp-refused", "", None),
    ],
)  # fmt: skip
def test_every_catalogued_line_is_recognised(line: str, sort: str, address: str, code: int | None):
    event = one(line)
    assert (event.sort, event.address, event.code, event.count) == (sort, address, code, 1)
    assert (event.first, event.last) == (5.0, 5.0)


@pytest.mark.parametrize(
    "line",
    [
        "DMAR: DRHD: handling fault status reg 2",
        "{1}[Hardware Error]:    aer_uncor_status: 0x00000000, aer_uncor_mask: 0x04500000",
        f"pcieport {GPU}:   device [8086:7f44] error status/mask=00200000/00000000",
        f"NVRM: GPU {GPU}: RmInitAdapter failed! (0x62:0x65:1792)",
        f"pci {GPU}: not ready 1023ms after FLR; waiting",
        "AMD-Vi: Unknown option - 'on'",
        "net_ratelimit: 12 callbacks suppressed",
        "",
    ],
)
def test_other_lines_leave_no_record(line: str):
    assert in_turn(line) == ()


def test_P7_a_flood_of_50000_lines_is_one_counted_record_per_gpu():
    gpus = [f"0000:{bus:02x}:00.0" for bus in (1, 0x11, 0x61, 0x71)]
    lines = [
        (
            float(n),
            f"nvidia {gpus[n % 4]}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x3 address={n:#x} flags=0x0020]",
        )
        for n in range(50_000)
    ]
    events = counted(lines)
    assert [(e.address, e.count) for e in events] == [(gpu, 12_500) for gpu in gpus]
    assert (events[0].first, events[0].last) == (0.0, 49_996.0)


def test_P7_folding_goes_on_where_the_last_pass_ended():
    once = fold(Folded(), [(1.0, AMD), (2.0, AMD), (3.0, AMD)], None)
    twice = fold(fold(Folded(), [(1.0, AMD)], None), [(2.0, AMD), (3.0, AMD)], None)
    assert once == twice
    assert fold(once, [], None) == once


def test_P7_lines_that_the_kernel_left_out_are_added_to_the_device_seen_last():
    other = AMD.replace(GPU, PEER)
    suppressed = "amd_iommu_report_page_fault: 30 callbacks suppressed"
    events = counted([(1.0, AMD), (2.0, other), (7.0, suppressed)])
    assert {e.address: e.count for e in events} == {GPU: 1, PEER: 31}
    assert events[1].last == 7.0


def test_suppressed_lines_alone_are_counted_for_the_host():
    (event,) = counted([(1.0, "dmar_fault: 8 callbacks suppressed")])
    assert (event.sort, event.address, event.count) == ("page-fault", "", 8)


def test_P5_a_fault_inside_another_gpus_bar_names_the_peer():
    functions = {
        GPU: PciFunction(GPU, 0x10DE, 0x2BB5, 0x030200, bars=((0x10000000000, 0x1FFFFFFFFFF),)),
        PEER: PciFunction(PEER, 0x10DE, 0x2BB5, 0x030200, bars=((0x24000000000, 0x25FFFFFFFFF),)),
    }
    assert one(AMD, Pci(functions=functions)).peer == PEER
    assert one(AMD.replace("0x24", "0x99"), Pci(functions=functions)).peer == ""
    assert one(AMD.replace("0x240", "0x100"), Pci(functions=functions)).peer == ""  # its own BAR is no peer


def test_D8_a_firmware_record_is_attributed_to_the_device_it_names():
    lines = [
        (1.0, "{1}[Hardware Error]:   device_id: 0000:c0:01.1"),
        (1.0, "{1}[Hardware Error]:   aer_uncor_status: 0x00000020, aer_uncor_mask: 0x04500000"),
    ]
    (event,) = counted(lines)
    assert event.address == "0000:c0:01.1"
    assert "pcie_aspm=off pcie_port_pm=off" in note(event).next_step


def test_a_flood_of_one_sort_does_not_push_out_another():
    flood = [(1.0, f"nvidia 0000:{n >> 5:02x}:{n & 31:02x}.0: AMD-Vi: Event logged [IO_PAGE_FAULT address=0x1 flags=0x1]")
             for n in range(2000)]  # fmt: skip
    lost = [(2.0, f"NVRM: Xid (PCI:0000:{bus:02x}:00): 79, x") for bus in range(8)]
    events = counted(flood + lost)
    assert len(events) <= MAX_RECORDS
    assert sum(e.count for e in events) == 2008
    assert len([e for e in events if e.sort == "bus-lost"]) == 8


def test_many_codes_of_one_device_are_counted_together():
    lines = [(float(n), f"NVRM: Xid (PCI:0000:c1:00): {n + 200}, x") for n in range(500)]
    events = counted(lines)
    assert len(events) == MAX_CODES + 1
    assert events[-1].code is None
    assert sum(e.count for e in events) == 500


def test_a_long_line_is_kept_short():
    assert len(one(AMD + " x" * 5000).sample) == MAX_SAMPLE


CARDS = Pci(
    functions={
        f"0000:{n:02x}:00.0": PciFunction(
            f"0000:{n:02x}:00.0", 0x10DE, 0x2BB5, 0x030200, bars=((n << 32, (n << 32) + 0xFFFFFFFF),)
        )
        for n in range(8)
    }
)
LINES = st.one_of(
    st.builds(
        lambda a, w, f: (
            f"nvidia 0000:{a:02x}:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT address={w << 32:#x} flags={f:#x}]"
        ),
        st.integers(0, 9) | st.integers(0, 255),
        st.integers(0, 9),
        st.integers(0, 5) | st.integers(0, 65535),
    ),
    st.builds(
        lambda a, to: (
            f"NVRM: Xid (PCI:0000:{a:02x}:00): 154, GPU recovery action changed from 0x0 (x) to {to:#x} (y)"
        ),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    st.builds(
        lambda a, x: f"NVRM: Xid (PCI:0000:{a:02x}:00): {x}, z", st.integers(0, 255), st.integers(0, 999)
    ),
    st.sampled_from(
        [
            "dmar_fault: 3 callbacks suppressed",
            "NVRM: GPU has fallen off the bus",
            "{1}[Hardware Error]:   device_id: 0000:c0:01.1",
            "{1}[Hardware Error]:   aer_uncor_status: 0x00000020, aer_uncor_mask: 0x0",
            "pcieport 0000:c0:01.1: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer",
            "pcieport 0000:c0:01.1: PCIe Bus Error: severity=Correctable, type=Physical Layer",
            "pcieport 0000:c0:01.1:   device [8086:7f44] error status/mask=00000020/00000000",
        ]
    ),
    st.text(max_size=60),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e9), LINES), max_size=400), st.lists(st.integers(0, 400), max_size=5))
def test_P7_lines_come_to_the_same_whatever_pieces_they_are_read_in_and_whenever_they_are_saved(
    lines: list[tuple[float, str]], cuts: list[int]
):
    whole = fold(Folded(), lines, CARDS)
    assert len(whole.events) <= MAX_RECORDS
    edges = [0, *sorted(cuts), len(lines)]
    state = KernelLogState()
    for start, end in pairwise(edges):
        folded = fold(state.folded, lines[start:end], CARDS)
        state = from_file(to_file(KernelLogState(f"boot:{end}", folded)))
    assert state.folded == whole


def test_B12_B13_D4_devices_that_do_not_come_back_are_told_from_the_rest():
    lost = {entry.sort for entry in kernel_log_catalog().sorts if entry.severity == "lost"}
    assert lost == {"bus-lost", "d3cold", "flr-failed"}
    assert is_lost(one(f"vfio-pci {GPU}: not ready 65535ms after FLR; giving up"))
    assert not is_lost(one(AMD))
    assert not is_lost(KernelEvent("of another version", "", 1, 0.0, 0.0, "x"))


@pytest.mark.parametrize(
    "code",
    [13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 92, 94, 95, 109, 119, 120, 121, 140, 143, *range(144, 151), 154],
)
def test_a_well_known_xid_has_a_meaning_and_a_next_step_of_its_own(code: int):
    event = one(f"NVRM: Xid (PCI:0000:c1:00): {code}, x")
    unknown = one("NVRM: Xid (PCI:0000:c1:00): 999, x")
    assert note(event).meaning != note(unknown).meaning


def test_D1_the_advice_on_snp_removes_iommu_pt_and_never_adds_it():
    step = note(
        one("AMD-Vi: SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported.")
    ).next_step
    assert step.startswith("remove iommu=pt")


def test_an_address_without_a_segment_is_in_segment_0000():
    assert pci_address("C1:00.0") == "0000:c1:00.0"
    assert pci_address("0000:c1:00") == "0000:c1:00.0"
    assert pci_address("00000000:C1:00.1") == "0000:c1:00.1"


# -- what is counted, and what is not --------------------------------------------------------------------------------


def test_P5_faults_that_reach_for_two_peers_are_two_records():
    lines = [
        f"nvidia 0000:01:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT address={n << 32:#x} flags=0x20]"
        for n in (2, 3, 2)
    ]
    events = counted([(1.0, line) for line in lines], CARDS)
    assert [(e.address, e.peer, e.count) for e in events] == [
        ("0000:01:00.0", "0000:02:00.0", 2),
        ("0000:01:00.0", "0000:03:00.0", 1),
    ]


def test_P5_an_intel_fault_names_its_peer_too():
    line = "DMAR: [DMA Write NO_PASID] Request device [01:00.0] fault addr 0x200001000 [fault reason 0x05] x"
    assert one(line, CARDS).peer == "0000:02:00.0"


UNCORRECTABLE = f"pcieport {GPU}: PCIe Bus Error: severity=Uncorrectable (Non-Fatal), type=Transaction Layer, (Receiver ID)"
CORRECTED = f"pcieport {GPU}: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)"
STATUS = f"pcieport {GPU}:   device [8086:7f44] error status/mask=00000020/00000000"


def test_D8_a_status_register_counts_by_the_severity_that_stands_before_it():
    (bad,) = in_turn(UNCORRECTABLE, STATUS)
    assert (bad.sort, bad.address, bad.code, bad.count) == ("aer", GPU, 0x20, 1)
    assert is_fault(bad)
    (corrected,) = in_turn(CORRECTED, STATUS)
    assert corrected.sort == "aer-corrected"
    assert not is_fault(corrected)
    assert (
        in_turn(UNCORRECTABLE.replace(GPU, PEER), STATUS) == ()
    )  # another device's severity says nothing of this one


def test_a_later_recovery_action_replaces_an_earlier_one():
    asked = "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
    over = "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)"
    other = asked.replace("c1:00", "e1:00")
    assert [is_fault(e) for e in in_turn(asked)] == [True]
    assert [(e.address, e.code, is_fault(e)) for e in in_turn(asked, other, over)] == [
        (PEER, 1, True),
        (GPU, 0, False),
    ]


@pytest.mark.parametrize(
    "line",
    [
        f"overlayfs: failed to resolve '/tmp/nvidia {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT address=0x1 flags=0x1]': -2",
        "overlayfs: failed to resolve '/tmp/NVRM: Xid (PCI:0000:c1:00): 79, x': -2",
        f"usb 1-1: Product: {GPU}: GPU has fallen off the bus",
        f"usb 1-1: Product: vfio-pci {GPU}: not ready 65535ms after FLR; giving up",
        "process 'dmar_fault: 9 callbacks suppressed' launched",
    ],
)
def test_text_that_a_user_has_put_into_a_kernel_line_is_no_fault(line: str):
    assert in_turn(line) == ()


def test_a_process_name_does_not_hide_the_xid_that_it_stands_in():
    assert one("NVRM: Xid (PCI:0000:c1:00): 31, pid=1, name=x): 79, y").sort == "xid"


@pytest.mark.parametrize(
    "line",
    [
        "NVRM: Xid (PCI:::::): 31, x",
        "NVRM: Xid (PCI:0000:c1:00): 99999999999999999999, x",
        "AMD-Vi: Event logged [IO_PAGE_FAULT device=.:. address=0x flags=0x]",
        "AMD-Vi: Event logged [IO_PAGE_FAULT " + "address=0x1 " * 400,
        "DMAR: [DMA Write NO_PASID] Request device [zz:00.0] fault addr 0x",
        "NVRM: GPU " + "0" * 900 + "fallen off the bus",
        "amd_iommu_report_page_fault: \u0663 callbacks suppressed",
    ],
)
def test_a_line_that_only_looks_like_one_does_no_harm(line: str):
    assert sum(e.count for e in in_turn(line)) <= 1


def test_every_sort_and_code_says_what_to_do_next():
    for entry in kernel_log_catalog().sorts:
        for code in (None, *entry.codes):
            told = entry.note(code)
            assert told.meaning
            assert told.next_step


def test_every_sort_of_the_catalogue_is_recognised_by_a_line_of_its_own():
    named = {one(line).sort for line in EXAMPLES}
    assert named == {entry.sort for entry in kernel_log_catalog().sorts}


EXAMPLES = [
    AMD,
    f"vfio-pci {GPU}: AMD-Vi: Event logged [RMP_PAGE_FAULT vmg_tag=0x0000, gpa=0x7, flags_rmp=0x0000, flags=0x0020]",
    f"AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device={GPU} address=0x100]",
    "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.",
    f"NVRM: GPU {GPU}: rm_init_adapter failed, device minor number 5",
    "NVRM: Xid (PCI:0000:c1:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    "NVRM: Xid (PCI:0000:c1:00): 31, x",
    f"vfio-pci {GPU}: Unable to change power state from D3cold to D0, device inaccessible",
    f"vfio-pci {GPU}: not ready 65535ms after FLR; giving up",
    f"nvidia {GPU}: AER: aer_uncor_status: 0x00000020, aer_uncor_mask: 0x04500000",
    CORRECTED,
    f"NVRM: Attempting to remove device {GPU} with non-zero usage count!",
    f"vfio-pci {GPU}: Relaying device request to user (#0)",
    "AMD-Vi: SNP: IOMMU disabled or configured in passthrough mode, SNP cannot be supported.",
]


def test_what_a_program_did_is_no_fault_of_the_gpu():
    assert severity(one("NVRM: Xid (PCI:0000:c1:00): 31, x")) == "program"
    assert severity(one("NVRM: Xid (PCI:0000:c1:00): 119, x")) == "fault"
    assert severity(KernelEvent("of another version", "", 1, 0.0, 0.0, "x")) == "info"
