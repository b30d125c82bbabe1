"""The initramfs, listed by the tool that made it: once for each image."""

import asyncio
import os
from pathlib import Path

from agent.core.fact import Absent, Known, Unknown
from agent.host.initramfs import InitramfsReader, parse_listing
from tests.host.trees import Tree

LISTING = """\
.
usr/lib/modules/6.12/updates/dkms/nvidia.ko.xz
usr/lib/modules/6.12/kernel/drivers/vfio/pci/vfio-pci.ko
usr/lib/modules/6.12/kernel/drivers/net/e1000e.ko.zst
etc/modprobe.d/gpu-host-agent.conf
usr/lib/udev/rules.d/80-drivers.rules
"""


def lsinitramfs(tree: Tree, script: str) -> Path:
    program = tree.file("usr/bin/lsinitramfs", f"#!/bin/sh\necho ran >> {tree.root}/ran\n{script}\n")
    program.chmod(0o755)
    tree.file("boot/initrd.img-6.12", "image")
    return tree.root / "ran"


async def test_drivers_and_settings_inside_are_listed_once_for_each_image(tree: Tree) -> None:
    ran = lsinitramfs(tree, f"cat <<'X'\n{LISTING}X")
    reader = InitramfsReader(tree.root)
    first = await reader.read("6.12")
    assert isinstance(first, Known)
    assert first.value.image == "/boot/initrd.img-6.12"
    assert first.value.modules == ("nvidia", "vfio_pci")
    assert first.value.files == ("/etc/modprobe.d/gpu-host-agent.conf", "/lib/udev/rules.d/80-drivers.rules")
    assert await reader.read("6.12") == first
    assert ran.read_text() == "ran\n"
    tree.file("boot/initrd.img-6.12", "another image")
    await reader.read("6.12")
    assert ran.read_text() == "ran\nran\n"


async def test_a_listing_that_fails_is_unknown_and_not_tried_again_for_the_same_image(tree: Tree) -> None:
    ran = lsinitramfs(tree, "echo broken >&2; exit 1")
    reader = InitramfsReader(tree.root)
    for _ in range(2):
        found = await reader.read("6.12")
        assert isinstance(found, Unknown)
        assert "broken" in found.reason
    assert ran.read_text() == "ran\n"


async def test_a_slow_listing_is_unknown_until_it_is_there(tree: Tree) -> None:
    fifo = tree.root / "fifo"
    os.mkfifo(fifo)
    ran = lsinitramfs(tree, f"cat {fifo}")
    reader = InitramfsReader(tree.root, patience=0.01)
    found = await reader.read("6.12")
    assert isinstance(found, Unknown)
    assert "still being listed" in found.reason
    await asyncio.to_thread(fifo.write_text, LISTING)  # opening it waits for the reader
    while isinstance(found, Unknown):
        found = await reader.read("6.12")
    assert isinstance(found, Known)
    assert found.value.modules == ("nvidia", "vfio_pci")
    assert ran.read_text() == "ran\n"


async def test_an_image_without_its_tool_is_unknown_and_no_image_is_absent(tree: Tree) -> None:
    reader = InitramfsReader(tree.root)
    assert isinstance(await reader.read("6.12"), Absent)
    tree.file("boot/initramfs-6.12.img", "image")
    assert isinstance(await reader.read("6.12"), Unknown)


def test_the_long_listing_of_dracut_is_read_too() -> None:
    text = (
        "Image: /boot/x: 30M\n-rw-r--r-- 1 root root 10 Jan 1 2026 usr/lib/modules/6.12/extra/nouveau.ko.xz\n"
    )
    assert parse_listing(text, "/boot/x", "dracut --force").modules == ("nouveau",)


def test_a_line_of_a_listing_that_names_nothing_is_passed_over():
    listing = " -> nowhere\n\n   \nusr/lib/modules/6.1/kernel/drivers/vfio/vfio-pci.ko\n"
    assert parse_listing(listing, "/boot/initrd.img", "update-initramfs -u").modules == ("vfio_pci",)
