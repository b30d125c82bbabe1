// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in cards of the tests: emulated devices answer to NVIDIA's PCI identity.
 *
 * QEMU's nvme controller (1b36:0010) becomes a 3D controller 10de:2bb5 for this kernel, also after it was removed and
 * found again; ati-vga (1002:5046) does, too, and stays a VGA controller that can be the boot console. With edu=1 the
 * edu device (1234:11e8, it can be told to do DMA) is such a card as well.
 * Config space is left alone: what is changed is what the kernel matches drivers by and shows in sysfs.
 */
#include <linux/module.h>
#include <linux/pci.h>

#define NVIDIA_CARD 0x2bb5 /* RTX PRO 6000 Blackwell Server Edition */

static bool edu;
module_param(edu, bool, 0444);
MODULE_PARM_DESC(edu, "edu devices are cards, too");

static void rename_device(struct pci_dev *pdev)
{
	bool is_vga = pdev->vendor == PCI_VENDOR_ID_ATI && pdev->device == 0x5046;
	bool is_nvme = pdev->vendor == PCI_VENDOR_ID_REDHAT && pdev->device == 0x0010;
	bool is_edu = edu && pdev->vendor == 0x1234 && pdev->device == 0x11e8;

	if (!is_vga && !is_nvme && !is_edu)
		return;
	if (!is_vga)
		pdev->class = PCI_CLASS_DISPLAY_3D << 8 | (pdev->class & 0xff);
	pdev->vendor = PCI_VENDOR_ID_NVIDIA;
	pdev->device = NVIDIA_CARD;
}

/* ADD_DEVICE comes before the uevent and before drivers are matched. */
static int on_bus_event(struct notifier_block *block, unsigned long event, void *data)
{
	if (event == BUS_NOTIFY_ADD_DEVICE)
		rename_device(to_pci_dev(data));
	return NOTIFY_DONE;
}

static struct notifier_block bus_events = { .notifier_call = on_bus_event };

static int __init cards_init(void)
{
	struct pci_dev *pdev = NULL;
	int error = bus_register_notifier(&pci_bus_type, &bus_events);

	if (error)
		return error;
	for_each_pci_dev(pdev)
		rename_device(pdev);
	return 0;
}

/* No exit: a card that changes its identity under a driver would be a new kind of fault. */
module_init(cards_init);
MODULE_DESCRIPTION("Stand-in cards of the tests: emulated devices with NVIDIA's PCI identity");
MODULE_LICENSE("GPL");
