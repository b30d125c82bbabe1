"""The boot loader's files, edited only where policy.bootFiles says so. Nothing here takes effect before a reboot."""

from dataclasses import replace

from agent.core.boot import GRUB_DROP_IN, LOADERS, Loader, Wish, all_wishes, words_of_file
from agent.core.boot_edit import (
    dangerous,
    edited_cmdline,
    grub_drop_in,
    read_drop_in,
    unsafe,
    unusable_cmdline,
    with_wishes,
)
from agent.core.errors import TransientError
from agent.core.fact import Absent, Fact, Known, Unknown, value_or
from agent.core.inputs import Inputs
from agent.core.model import with_memory
from agent.core.plan import Action, Disruption, Drift, Refusal, Stage
from agent.core.spec import Spec
from agent.ports import Ports

VERB = "edit-boot-files"


def boot_files(spec: Spec) -> tuple[str, ...]:
    """Files to observe: none where the agent only tells."""
    if spec.policy.boot_files != "edit":
        return ()
    return tuple(dict.fromkeys(loader.edited for loader in LOADERS.values() if loader.edited))


def editing(inputs: Inputs) -> bool:
    """The policy allows it, this host's loader is one that can be edited, and nothing speaks against the edit."""
    loader = _edited(inputs)
    return loader is not None and _obstacle(inputs, loader) is None


def owed(inputs: Inputs) -> bool:
    """An edit of ours has begun, and the loader's own files are not known to have been made anew since."""
    loader = _edited(inputs)
    return loader is not None and inputs.memory.unrefreshed == loader.edited


def _obstacle(inputs: Inputs, loader: Loader) -> tuple[str, str] | None:
    """Why the agent leaves the file alone, and what an operator does instead."""
    wishes = all_wishes(inputs.spec.platform)
    by_hand = "edit the boot loader's files by hand"
    if bad := unsafe(wishes):
        step = f"{by_hand}, or write the argument without quotes and blanks"
        return f"{bad[0][:40]!r} cannot be written to {loader.edited}", step
    if risks := dangerous(wishes):
        pattern, word = risks[0]
        message = f"{pattern[:40]!r} under forbid would also take {word} away, which a boot may need"
        return message, f"name the argument itself under forbid, or {by_hand}"
    observed = inputs.obs.host_files.get(loader.edited)
    if loader.edited == GRUB_DROP_IN or not wishes or not isinstance(observed, Known):
        return None
    due = edited_cmdline(observed.value, wishes) != observed.value
    if due and (why := unusable_cmdline(observed.value)):
        step = f"mend {loader.edited}, as the boot loader's documentation says, and run {loader.refresh}"
        return f"{loader.edited} is not edited: {why}", step
    return None


def _edited(inputs: Inputs) -> Loader | None:
    fact = inputs.obs.platform.boot_loader
    loader = LOADERS.get(fact.value) if isinstance(fact, Known) else None
    return loader if loader and loader.edited and inputs.spec.policy.boot_files == "edit" else None


def _text(inputs: Inputs, loader: Loader) -> Fact[str]:
    """What the file must hold; "" where it must not be there. A right boot loader gets no file of the agent's."""
    observed = inputs.obs.host_files.get(loader.edited, Unknown("it was not read"))
    wishes = all_wishes(inputs.spec.platform)
    if isinstance(observed, Unknown):
        return observed
    if loader.edited != GRUB_DROP_IN:
        if isinstance(observed, Absent):
            return Unknown(f"there is no {loader.edited}")
        return Known(edited_cmdline(observed.value, wishes))
    configured = inputs.obs.platform.configured_cmdline
    if isinstance(observed, Known):
        return Known(grub_drop_in(wishes))
    if not isinstance(configured, Known):
        return Unknown(configured.reason)
    return Known("" if all(w.met(configured.value) for w in wishes) else grub_drop_in(wishes))


def _needed(inputs: Inputs) -> tuple[Loader, str] | None:
    """The loader and the file's new text, where the file differs or the loader's own files lag behind it."""
    loader = _edited(inputs)
    if loader is None or not editing(inputs):
        return None
    text = _text(inputs, loader)
    if not isinstance(text, Known):
        return None
    if not _written(inputs, loader, text.value):
        return loader, text.value
    following = inputs.obs.platform.next_cmdline
    lags = isinstance(following, Known) and any(
        not w.met(following.value) for w in all_wishes(inputs.spec.platform)
    )
    return (loader, text.value) if lags or owed(inputs) else None


def _written(inputs: Inputs, loader: Loader, text: str) -> bool:
    return value_or(inputs.obs.host_files.get(loader.edited, Absent()), "") == text


def edit_drift(inputs: Inputs) -> list[Drift]:
    needed = _needed(inputs)
    if needed is None:
        return []
    loader, text = needed
    same = _written(inputs, loader, text)
    observed = f"not yet in the boot loader's own files ({loader.refresh})" if same else "different"
    wanted = "as rendered" if text else "none"
    return [Drift("platform", "host", loader.edited, wanted, observed, "policy.bootFiles is edit")]


def edit_actions(inputs: Inputs) -> list[Action]:
    needed = _needed(inputs)
    if needed is None:
        return []
    loader, text = needed
    wishes = all_wishes(inputs.spec.platform)
    first = (
        f"{'write' if text else 'remove'} {loader.edited}, then "
        if not _written(inputs, loader, text)
        else ""
    )
    return [
        Action(
            "platform", VERB, "host", f"{first}run {loader.refresh}",
            Stage.PREPARE, Disruption.NONE,
            params={
                "path": loader.edited, "text": text,
                "add": " ".join(w.argument for w in wishes if w.present),
                "drop": " ".join(["drop", *(w.argument for w in wishes if not w.present)]),
            },
            undo=f"put back {loader.edited} and run {loader.refresh}",
            why="policy.bootFiles is edit; it takes effect with a reboot, which stays with the operator", optional=True,
        )
    ]  # fmt: skip


def edit_refusals(inputs: Inputs) -> list[Refusal]:
    loader = _edited(inputs)
    if loader is None:
        return []
    if (obstacle := _obstacle(inputs, loader)) is not None:
        return [Refusal("platform", "host", "NotRenderable", *obstacle, terminal=True)]
    text = _text(inputs, loader)
    if isinstance(text, Unknown) and all_wishes(inputs.spec.platform):
        message = f"{loader.edited} is not edited: {text.reason}"
        return [Refusal("platform", loader.edited, "NotObserved", message, "wait for the next pass")]
    return []


def wishes_of(action: Action) -> tuple[Wish, ...]:
    add, drop = action.params["add"].split(), action.params["drop"].split()[1:]
    return (*(Wish(a, present=True) for a in add), *(Wish(p, present=False) for p in drop))


def predict_edit(action: Action, inputs: Inputs) -> Inputs:
    path, text = action.params["path"], action.params["text"]
    platform = inputs.obs.platform
    words = value_or(platform.configured_cmdline, ())
    after = words_of_file(text) if path != GRUB_DROP_IN else with_wishes(words, read_drop_in(text) or ())
    following = Known(after) if isinstance(platform.next_cmdline, Known) else platform.next_cmdline
    files = {**inputs.obs.host_files, path: Known(text) if text else Absent()}
    platform = replace(platform, configured_cmdline=Known(after), next_cmdline=following)
    inputs = with_memory(inputs, unrefreshed="")
    return replace(inputs, obs=replace(inputs.obs, platform=platform, host_files=files))


async def edit_boot_files(action: Action, ports: Ports) -> None:
    """Write, have the loader's own files made anew, and read back what it will hand over next (law 6)."""
    path, text = action.params["path"], action.params["text"]
    host = ports.targets("host")
    if (await host.read_file(path) or "") != text:
        await (host.write_file(path, text) if text else host.remove_file(path))
        if (await host.read_file(path) or "") != text:
            raise TransientError(
                f"{path} reads back different from what was written", reason="ReadBackFailed"
            )
    await ports.platform.refresh_boot_loader()
    platform = await ports.platform.read()
    read_back = platform.next_cmdline
    if not isinstance(
        read_back, Known
    ):  # of ESPs that are not mounted the command's own success is all there is
        read_back = platform.configured_cmdline
    if not isinstance(read_back, Known):
        raise TransientError(
            f"the next command line cannot be read: {read_back.reason}", reason="ReadBackFailed"
        )
    if wrong := [w.argument for w in wishes_of(action) if not w.met(read_back.value)]:
        message = (
            f"{path} was written and the boot loader still has {' '.join(wrong)} wrong for the next boot"
        )
        raise TransientError(message, reason="ReadBackFailed")
