import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.catalog.kernel_log import kernel_log_catalog
from agent.core.kernel_log import MAX_CODES, MAX_RECORDS, MAX_SAMPLE, fold, is_lost, note, pci_address
from agent.core.observation import KernelEvent, Pci, PciFunction

GPU, PEER = "0000:c1:00.0", "0000:e1:00.0"
AMD = f"nvidia {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x002c address=0x24000000000 flags=0x0030]"


def one(line: str, pci: Pci | None = None) -> KernelEvent:
    (event,) = fold((), [(5.0, line)], pci)
    return event


@pytest.mark.parametrize(
    ("line", "sort", "address", "code"),
    [
        (AMD, "page-fault", GPU, 0x30),
        (f"[  12.3] vfio-pci {GPU}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0000 address=0x0 flags=0x000a]",
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
        (f"NVRM: The NVIDIA GPU {GPU} (PCI ID: 10de:2bb5)\\x0aNVRM: installed in this system has\\x0aNVRM: fallen off the bus",
         "bus-lost", GPU, None),
        ("NVRM: GPU has fallen off the bus.", "bus-lost", "", None),
        (f"vfio-pci {GPU}: Unable to change power state from D3cold to D0, device inaccessible", "d3cold", GPU, None),
        (f"vfio-pci {GPU}: can't change power state from D3cold to D0 (config space inaccessible)", "d3cold", GPU, None),
        (f"vfio-pci {GPU}: not ready 65535ms after FLR; giving up", "flr-failed", GPU, None),
        (f"pci {GPU}: not ready 65535ms after bus reset; giving up", "flr-failed", GPU, None),
        ("aer_uncor_status: 0x00000020", "aer", "", 0x20),
        (f"nvidia {GPU}: AER: aer_uncor_status: 0x00000020, aer_uncor_mask: 0x04500000", "aer", GPU, 0x20),
        (f"nvidia {GPU}: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer", "aer", GPU, None),
        (f"NVRM: Attempting to remove device {GPU} with non-zero usage count!", "in-use", GPU, None),
        (f"vfio-pci {GPU}: Relaying device request to user (#0)", "in-use", GPU, None),
        (f"vfio-pci {GPU}: No device request channel registered, blocked until released by user", "in-use", GPU, None),
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
        f"pcieport {GPU}: PCIe Bus Error: severity=Correctable, type=Physical Layer",
        f"pci {GPU}: not ready 1023ms after FLR; waiting",
        "AMD-Vi: Unknown option - 'on'",
        "net_ratelimit: 12 callbacks suppressed",
        "",
    ],
)
def test_other_lines_leave_no_record(line: str):
    assert fold((), [(1.0, line)], None) == ()


def test_P7_a_flood_of_50000_lines_is_one_counted_record_per_gpu():
    gpus = [f"0000:{bus:02x}:00.0" for bus in (1, 0x11, 0x61, 0x71)]
    lines = [
        (
            float(n),
            f"nvidia {gpus[n % 4]}: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x3 address={n:#x} flags=0x0020]",
        )
        for n in range(50_000)
    ]
    events = fold((), lines, None)
    assert [(e.address, e.count) for e in events] == [(gpu, 12_500) for gpu in gpus]
    assert (events[0].first, events[0].last) == (0.0, 49_996.0)


def test_P7_folding_goes_on_where_the_last_pass_ended():
    once = fold((), [(1.0, AMD), (2.0, AMD), (3.0, AMD)], None)
    twice = fold(fold((), [(1.0, AMD)], None), [(2.0, AMD), (3.0, AMD)], None)
    assert once == twice
    assert fold(once, [], None) == once


def test_P7_lines_that_the_kernel_left_out_are_added_to_the_device_seen_last():
    other = AMD.replace(GPU, PEER)
    suppressed = "amd_iommu_report_page_fault: 30 callbacks suppressed"
    events = fold((), [(1.0, AMD), (2.0, other), (7.0, suppressed)], None)
    assert {e.address: e.count for e in events} == {GPU: 1, PEER: 31}
    assert events[1].last == 7.0


def test_suppressed_lines_alone_are_counted_for_the_host():
    (event,) = fold((), [(1.0, "dmar_fault: 8 callbacks suppressed")], None)
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
    (event,) = fold((), lines, None)
    assert event.address == "0000:c0:01.1"
    assert "pcie_aspm=off pcie_port_pm=off" in note(event).next_step


def test_a_flood_of_one_sort_does_not_push_out_another():
    flood = [(1.0, f"nvidia 0000:{n >> 5:02x}:{n & 31:02x}.0: AMD-Vi: Event logged [IO_PAGE_FAULT address=0x1 flags=0x1]")
             for n in range(2000)]  # fmt: skip
    lost = [(2.0, f"NVRM: Xid (PCI:0000:{bus:02x}:00): 79, x") for bus in range(8)]
    events = fold((), flood + lost, None)
    assert len(events) <= MAX_RECORDS
    assert sum(e.count for e in events) == 2008
    assert len([e for e in events if e.sort == "bus-lost"]) == 8


def test_many_codes_of_one_device_are_counted_together():
    lines = [(float(n), f"NVRM: Xid (PCI:0000:c1:00): {n + 200}, x") for n in range(500)]
    events = fold((), lines, None)
    assert len(events) == MAX_CODES + 1
    assert events[-1].code is None
    assert sum(e.count for e in events) == 500


def test_a_long_line_is_kept_short():
    assert len(one(AMD + " x" * 5000).sample) == MAX_SAMPLE


LINES = st.one_of(
    st.builds(
        lambda a, f: (
            f"nvidia 0000:{a:02x}:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT address=0x1 flags={f:#x}]"
        ),
        st.integers(0, 255),
        st.integers(0, 65535),
    ),
    st.builds(
        lambda a, x: f"NVRM: Xid (PCI:0000:{a:02x}:00): {x}, z", st.integers(0, 255), st.integers(0, 999)
    ),
    st.sampled_from(
        ["dmar_fault: 3 callbacks suppressed", "fallen off the bus", "aer_uncor_status: 0x1", "device_id: "]
    ),
    st.text(max_size=60),
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1e9), LINES), max_size=400), st.integers(0, 400))
def test_any_lines_fold_the_same_in_one_pass_or_two(lines: list[tuple[float, str]], cut: int):
    whole = fold((), lines, None)
    assert len(whole) <= MAX_RECORDS
    parts = fold(fold((), lines[:cut], None), lines[cut:], None)
    assert sum(e.count for e in parts) == sum(e.count for e in whole)


def test_B12_B13_D4_devices_that_do_not_come_back_are_told_from_the_rest():
    lost = {entry.sort for entry in kernel_log_catalog().sorts if entry.lost}
    assert lost == {"bus-lost", "d3cold", "flr-failed"}
    assert is_lost(one(f"vfio-pci {GPU}: not ready 65535ms after FLR; giving up"))
    assert not is_lost(one(AMD))
    assert not is_lost(KernelEvent("of another version", "", 1, 0.0, 0.0, "x"))


@pytest.mark.parametrize("code", [13, 31, 43, 45, 48, 61, 62, 63, 64, 74, 94, 95, 109, 119, 120, 154])
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
