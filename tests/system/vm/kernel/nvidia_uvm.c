// SPDX-License-Identifier: GPL-2.0
/* Stand-in of the tests for nvidia_uvm: its name, its parameter, its place on top of nvidia and its device node. */
#include <linux/device.h>
#include <linux/fs.h>
#include <linux/module.h>

const char *nvidia_stand_in_version(void);

static int uvm_disable_hmm;
module_param(uvm_disable_hmm, int, 0444);
MODULE_PARM_DESC(uvm_disable_hmm, "read by nobody here");

static const struct class node_class = { .name = "nvidia-uvm" };
static const struct file_operations node_ops = { .owner = THIS_MODULE };
static int major; /* dynamic, as the real one's */

static int __init uvm_init(void)
{
	int error = class_register(&node_class);

	if (error)
		return error;
	major = register_chrdev(0, "nvidia-uvm", &node_ops);
	if (major < 0) {
		class_unregister(&node_class);
		return major;
	}
	device_create(&node_class, NULL, MKDEV(major, 0), NULL, "nvidia-uvm");
	pr_info("nvidia-uvm: stand-in on top of %s\n", nvidia_stand_in_version());
	return 0;
}

static void __exit uvm_exit(void)
{
	device_destroy(&node_class, MKDEV(major, 0));
	unregister_chrdev(major, "nvidia-uvm");
	class_unregister(&node_class);
}

module_init(uvm_init);
module_exit(uvm_exit);
MODULE_DESCRIPTION("Stand-in of the tests for nvidia_uvm");
MODULE_LICENSE("GPL");
