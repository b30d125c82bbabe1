// SPDX-License-Identifier: GPL-2.0
/*
 * Stand-in of the tests for NVIDIA's kernel driver: its name, its device nodes, its /proc files and, above all, its
 * remove(), which loops in the kernel until nobody uses the device. Nothing is computed here.
 */
#include <linux/cdev.h>
#include <linux/delay.h>
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>
#include <linux/pci.h>
#include <linux/proc_fs.h>
#include <linux/seq_file.h>

#define VERSION "590.48.01"
#define MAJOR_NUMBER 195
#define CONTROL_MINOR 255
#define CARDS 32

static int fail_probe;
module_param(fail_probe, int, 0644);
MODULE_PARM_DESC(fail_probe, "errno that probe() returns; 0: it succeeds");
static int probe_ms;
module_param(probe_ms, int, 0644);
MODULE_PARM_DESC(probe_ms, "milliseconds that probe() takes");
static int remove_ms;
module_param(remove_ms, int, 0644);
MODULE_PARM_DESC(remove_ms, "milliseconds that remove() takes when nobody uses the device");

/* A forged line of the kernel log, for what no emulation can bring about. */
static int say(const char *line, const struct kernel_param *unused)
{
	printk(KERN_ERR "%s", line);
	return 0;
}

static const struct kernel_param_ops say_ops = { .set = say };
module_param_cb(say, &say_ops, NULL, 0200);
MODULE_PARM_DESC(say, "write a line here to have it in the kernel log, verbatim");

struct card {
	struct pci_dev *pdev;
	int minor;
	int uses; /* under cards_lock: open files, and one for persistence mode */
	bool persistence;
	struct proc_dir_entry *directory;
};

static struct card *cards[CARDS];
static DEFINE_MUTEX(cards_lock);
static struct proc_dir_entry *proc_root, *proc_gpus;
static struct cdev nodes;

static char *node_mode(const struct device *device, umode_t *mode)
{
	if (mode)
		*mode = 0666;
	return NULL;
}

static const struct class node_class = { .name = "nvidia", .devnode = node_mode };

static int node_open(struct inode *inode, struct file *file)
{
	unsigned int minor = iminor(inode);
	int error = 0;

	if (minor == CONTROL_MINOR)
		return 0;
	mutex_lock(&cards_lock);
	if (minor < CARDS && cards[minor]) {
		cards[minor]->uses++;
		file->private_data = cards[minor];
	} else {
		error = -ENODEV;
	}
	mutex_unlock(&cards_lock);
	return error;
}

static int node_release(struct inode *inode, struct file *file)
{
	struct card *card = file->private_data;

	if (!card)
		return 0;
	mutex_lock(&cards_lock);
	card->uses--;
	mutex_unlock(&cards_lock);
	return 0;
}

static const struct file_operations node_ops = {
	.owner = THIS_MODULE,
	.open = node_open,
	.release = node_release,
};

static int version_show(struct seq_file *out, void *unused)
{
	seq_puts(out, "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  " VERSION
		      "  Release Build  (stand-in of the tests)\n");
	seq_puts(out, "GCC version:  none\n");
	return 0;
}

static int information_show(struct seq_file *out, void *unused)
{
	struct card *card = out->private;
	struct pci_dev *pdev = card->pdev;

	seq_puts(out, "Model: \t\t NVIDIA RTX PRO 6000 Blackwell Server Edition (stand-in)\n");
	seq_printf(out, "GPU UUID: \t GPU-00000000-0000-4000-8000-%04x%04x%02x%02x\n", 0, pci_domain_nr(pdev->bus),
		   pdev->bus->number, pdev->devfn);
	seq_puts(out, "Bus Type: \t PCIe\n");
	seq_printf(out, "Bus Location: \t %s\n", pci_name(pdev));
	seq_printf(out, "Device Minor: \t %d\n", card->minor);
	return 0;
}

static int persistence_show(struct seq_file *out, void *unused)
{
	struct card *card = out->private;

	seq_printf(out, "%d\n", card->persistence);
	return 0;
}

static int persistence_open(struct inode *inode, struct file *file)
{
	return single_open(file, persistence_show, pde_data(inode));
}

static ssize_t persistence_write(struct file *file, const char __user *text, size_t size, loff_t *position)
{
	struct card *card = pde_data(file_inode(file));
	bool on;
	int error = kstrtobool_from_user(text, size, &on);

	if (error)
		return error;
	mutex_lock(&cards_lock);
	card->uses += on - card->persistence;
	card->persistence = on;
	mutex_unlock(&cards_lock);
	return size;
}

static const struct proc_ops persistence_ops = {
	.proc_open = persistence_open,
	.proc_read = seq_read,
	.proc_write = persistence_write,
	.proc_lseek = seq_lseek,
	.proc_release = single_release,
};

static int take_minor(struct card *card)
{
	int minor;

	mutex_lock(&cards_lock);
	for (minor = 0; minor < CARDS && cards[minor]; minor++)
		;
	if (minor < CARDS) {
		card->minor = minor;
		cards[minor] = card;
	}
	mutex_unlock(&cards_lock);
	return minor < CARDS ? 0 : -ENOSPC;
}

static int card_probe(struct pci_dev *pdev, const struct pci_device_id *id)
{
	struct card *card;
	int error;

	if (probe_ms)
		msleep(probe_ms);
	if (fail_probe)
		return -fail_probe;
	card = kzalloc(sizeof(*card), GFP_KERNEL);
	if (!card)
		return -ENOMEM;
	card->pdev = pdev;
	error = pci_enable_device(pdev);
	if (!error)
		error = take_minor(card);
	if (error) {
		kfree(card);
		return error;
	}
	pci_set_drvdata(pdev, card);
	card->directory = proc_mkdir(pci_name(pdev), proc_gpus);
	proc_create_single_data("information", 0444, card->directory, information_show, card);
	proc_create_data("persistence", 0644, card->directory, &persistence_ops, card);
	device_create(&node_class, NULL, MKDEV(MAJOR_NUMBER, card->minor), NULL, "nvidia%d", card->minor);
	return 0;
}

/* As long as somebody uses the device this does not return, and no signal ends it. */
static void wait_until_unused(struct card *card)
{
	bool told = false;

	mutex_lock(&cards_lock);
	while (card->uses) {
		if (!told) {
			struct pci_dev *pdev = card->pdev;

			printk(KERN_ERR
			       "NVRM: Attempting to remove device %04x:%02x:%02x.%x with non-zero usage count!\n",
			       pci_domain_nr(pdev->bus), pdev->bus->number, PCI_SLOT(pdev->devfn),
			       PCI_FUNC(pdev->devfn));
			told = true;
		}
		mutex_unlock(&cards_lock);
		msleep(500);
		mutex_lock(&cards_lock);
	}
	cards[card->minor] = NULL;
	mutex_unlock(&cards_lock);
}

static void card_remove(struct pci_dev *pdev)
{
	struct card *card = pci_get_drvdata(pdev);

	wait_until_unused(card);
	if (remove_ms)
		msleep(remove_ms);
	device_destroy(&node_class, MKDEV(MAJOR_NUMBER, card->minor));
	proc_remove(card->directory);
	pci_disable_device(pdev);
	kfree(card);
}

static const struct pci_device_id ids[] = {
	{ .vendor = PCI_VENDOR_ID_NVIDIA, .device = PCI_ANY_ID, .subvendor = PCI_ANY_ID, .subdevice = PCI_ANY_ID,
	  .class = PCI_BASE_CLASS_DISPLAY << 16, .class_mask = 0xff0000 },
	{ }
};
MODULE_DEVICE_TABLE(pci, ids);

static struct pci_driver driver = {
	.name = "nvidia",
	.id_table = ids,
	.probe = card_probe,
	.remove = card_remove,
};

/* nvidia_uvm stands on this module, as the real one does. */
const char *nvidia_stand_in_version(void);
const char *nvidia_stand_in_version(void)
{
	return VERSION;
}
EXPORT_SYMBOL_GPL(nvidia_stand_in_version);

static int __init nvidia_init(void)
{
	int error = register_chrdev_region(MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1, "nvidia");

	if (error)
		return error;
	error = class_register(&node_class);
	if (error)
		goto no_class;
	cdev_init(&nodes, &node_ops);
	nodes.owner = THIS_MODULE;
	error = cdev_add(&nodes, MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1);
	if (error)
		goto no_nodes;
	device_create(&node_class, NULL, MKDEV(MAJOR_NUMBER, CONTROL_MINOR), NULL, "nvidiactl");
	proc_root = proc_mkdir("driver/nvidia", NULL);
	proc_gpus = proc_mkdir("gpus", proc_root);
	proc_create_single("version", 0444, proc_root, version_show);
	error = pci_register_driver(&driver);
	if (!error)
		return 0;
	proc_remove(proc_root);
	device_destroy(&node_class, MKDEV(MAJOR_NUMBER, CONTROL_MINOR));
	cdev_del(&nodes);
no_nodes:
	class_unregister(&node_class);
no_class:
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1);
	return error;
}

static void __exit nvidia_exit(void)
{
	pci_unregister_driver(&driver);
	proc_remove(proc_root);
	device_destroy(&node_class, MKDEV(MAJOR_NUMBER, CONTROL_MINOR));
	cdev_del(&nodes);
	class_unregister(&node_class);
	unregister_chrdev_region(MKDEV(MAJOR_NUMBER, 0), CONTROL_MINOR + 1);
}

module_init(nvidia_init);
module_exit(nvidia_exit);
MODULE_DESCRIPTION("Stand-in of the tests for NVIDIA's kernel driver");
MODULE_VERSION(VERSION);
MODULE_LICENSE("GPL");
