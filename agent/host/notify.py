"""sd_notify(3): readiness, status line and watchdog to systemd; silence where nobody listens."""

import os

import sdnotify


def watchdog_seconds() -> float:
    """After how long without WATCHDOG=1 systemd kills this process; 0.0 when it does not (sd_watchdog_enabled(3))."""
    if os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0.0
    value = os.environ.get("WATCHDOG_USEC", "")
    return int(value) / 1e6 if value.isdecimal() else 0.0


class SystemdNotify:
    """``NotifyPort``. Without NOTIFY_SOCKET it does nothing."""

    def __init__(self) -> None:
        self._notifier = sdnotify.SystemdNotifier() if os.environ.get("NOTIFY_SOCKET") else None

    def send(self, state: str) -> None:
        if self._notifier is not None:
            # The library sends Latin-1 and drops what does not fit, message and all.
            self._notifier.notify(state.encode("utf-8", "replace").decode("latin-1"))

    def close(self) -> None:
        if self._notifier is not None and self._notifier.socket is not None:
            self._notifier.socket.close()
            self._notifier = None
