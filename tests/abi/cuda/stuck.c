/* A process that no signal ends, made without a kernel of our own.
 *
 * vfork holds its caller in state D until the child is gone. SIGKILL still reaches that wait; but the child also traces
 * its parent, and so the dying parent stops where it leaves, with its files open, until its tracer is gone.
 */
#define _GNU_SOURCE
#include <linux/close_range.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda.h"
#include "state.h"

void stuck(const char *what, int a, int b) {
  pid_t held = getpid();
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
  if (vfork() != 0) return;
  setsid(); /* or the signal for the group would end it too */
  syscall(SYS_close_range, 0u, ~0u, 0u);
  long held_fast = ptrace(PTRACE_SEIZE, held, NULL, PTRACE_O_TRACEEXIT);
  trace("stuck %s", held_fast == 0 ? what : "but SIGKILL will end it: no right to trace");
  for (double left = state_for("stuck", what, a, b); left > 0; left -= 0.05) {
    pause_for(0.05);
    state_read();
    if (state_for("stuck", what, a, b) <= 0) break;
  }
  _exit(0);
}
