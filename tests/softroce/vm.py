#!/usr/bin/env python3
"""Boots a throw-away guest with soft RDMA devices and runs one command of this host in it.

Invariants: the guest cannot change the host's files; the command's standard output and error come
back byte for byte, apart from each other and from the kernel's console; the exit status is the
command's, or one of the runner's own with a line on standard error that says so; the only process
started is QEMU, which ends with this one, however this one ends.
"""

import argparse
import contextlib
import os
import re
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

from image import EXIT_FAILED, Image, SoftRoceError, ensure_image, say

NUM_PROCESSORS = 2
MEMORY_MIB = 3072
BOOT_TIMEOUT_S = 180.0
EXIT_TIMEOUT = 124

EPILOG = """\
examples:
  vm.py run -- ibv_devinfo
  vm.py run --timeout 60 --links 2 -- python3 -m pytest tests/ib
  vm.py run -- sh -c 'tc qdisc add dev va root netem loss 1%; exec build/ib_test'
  vm.py shell

exit status: the command's (128 + N if signal N ended it), or
  77   Debian packages are missing and only root may install them
  124  the command ran past --timeout
  125  the guest did not boot, or died, or could not be prepared
"""


class Port:
    """Splits one guest stream into output, passed on at once, and marker lines, kept as words."""

    def __init__(self, nonce: str, sink: int) -> None:
        self.host, self.guest = socket.socketpair()
        self.words: list[str] = []
        self._marker = b"\0" + nonce.encode() + b" "
        self._sink = sink
        self._pending = b""

    def feed(self, data: bytes) -> None:
        """Takes the next bytes of the stream, however they are cut; none mean that it broke off."""
        self._pending += data
        while (start := self._pending.find(self._marker)) >= 0:
            end = self._pending.find(b"\n", start)
            if end < 0:
                self._emit(start)
                return
            word = self._pending[start + len(self._marker) : end]
            self.words.append(word.decode("ascii"))
            self._pending = self._pending[:start] + self._pending[end + 1 :]
        # What may be the beginning of a marker waits for its rest, while there may be one.
        ended = not data or self.exit_status() is not None
        held = 0 if ended else min(len(self._marker) - 1, len(self._pending))
        while not self._pending.endswith(self._marker[:held]):
            held -= 1
        self._emit(len(self._pending) - held)

    def exit_status(self) -> int | None:
        """The command's exit status once this stream has ended, before that None."""
        last = self.words[-1] if self.words else ""
        return int(last.removeprefix("exit ")) if last.startswith("exit ") else None

    def _emit(self, num_bytes: int) -> None:
        data, self._pending = self._pending[:num_bytes], self._pending[num_bytes:]
        while data:
            data = data[os.write(self._sink, data) :]


def write_job(folder: Path, image: Image, nonce: str, args: argparse.Namespace) -> None:
    """Writes the two scripts that tell the guest what to run, with any argument kept exactly."""
    size = shutil.get_terminal_size()
    settings = {
        "nonce": nonce,
        "links": str(args.links),
        "tty": str(int(args.action == "shell")),
        "rows": str(size.lines),
        "columns": str(size.columns),
        "modules": str(image.modules),
    }
    setup = "".join(f"{name}={shlex.quote(value)}\n" for name, value in settings.items())
    (folder / "setup.sh").write_bytes(os.fsencode(setup))

    path = os.environ.get("PATH", "")
    sane = [*path.split(":"), "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
    environment = os.environ | {"PATH": ":".join(dict.fromkeys(filter(None, sane)))}
    words = ["env", "-i", *(f"{name}={value}" for name, value in environment.items())]
    words += ["/bin/sh", "-c", 'exec "$@"', "softroce", *args.command]
    script = f"cd {shlex.quote(os.getcwd())} || exit 125\nexec {shlex.join(words)}\n"
    (folder / "command.sh").write_bytes(os.fsencode(script))


def qemu_command(image: Image, job: Path, ports: dict[str, Port], *, tty: bool) -> list[str]:
    """The QEMU command line; KVM is left alone, as not every host that offers it can use it."""
    share = "security_model=none,readonly=on,multidevs=remap"
    command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max"]
    command += ["-smp", str(NUM_PROCESSORS), "-m", str(MEMORY_MIB)]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-kernel", str(image.kernel), "-initrd", str(image.initramfs)]
    command += ["-append", "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic"]
    command += ["-virtfs", f"local,path=/,mount_tag=hostroot,{share}"]
    command += ["-virtfs", f"local,path={str(job).replace(',', ',,')},mount_tag=job,{share}"]
    command += ["-device", "virtio-serial-pci"]
    for name, port in ports.items():
        command += ["-chardev", f"socket,id={name},fd={port.guest.fileno()}"]
        command += ["-device", f"virtserialport,chardev={name},name={name}"]
    console = str(job / "console.log").replace(",", ",,")
    return [*command, "-serial", "mon:stdio" if tty else f"file:{console}"]


@contextlib.contextmanager
def qemu(command: Sequence[str], ports: dict[str, Port], *, tty: bool) -> Iterator[None]:
    """Runs QEMU while the body runs and no longer, and gives the terminal back as it was."""
    saved = termios.tcgetattr(0) if tty else None
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "--", *command],
        stdin=None if tty else subprocess.DEVNULL,
        stdout=None if tty else sys.stderr,
        pass_fds=[port.guest.fileno() for port in ports.values()],
        process_group=None if tty else 0,  # Ctrl-C reaches this process alone
    )
    try:
        for port in ports.values():
            port.guest.close()
        yield
    finally:
        process.kill()
        process.wait()
        for port in ports.values():
            port.host.close()
        if saved is not None:
            termios.tcsetattr(0, termios.TCSADRAIN, saved)


def watch(ports: dict[str, Port], timeout_s: float | None) -> int | None:
    """Passes the streams on until both have ended.

    Returns the command's exit status, or None where the machine went before its command ended.
    Errors: SoftRoceError when the guest or the command is late; `timeout_s` of None waits forever.
    """
    out = ports["out"]
    deadline: float | None = time.monotonic() + BOOT_TIMEOUT_S
    started = False
    with selectors.DefaultSelector() as selector:
        for port in ports.values():
            selector.register(port.host, selectors.EVENT_READ, port)
        while selector.get_map():
            left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = selector.select(left_s)
            if deadline is not None and time.monotonic() >= deadline:
                if started:
                    raise SoftRoceError(f"command timed out after {timeout_s:g} s", EXIT_TIMEOUT)
                raise SoftRoceError(f"guest did not boot in {BOOT_TIMEOUT_S:g} s")
            for key, _ in events:
                port = key.data
                data = port.host.recv(1 << 16)
                port.feed(data)
                if not data or port.exit_status() is not None:
                    selector.unregister(port.host)
            if not started and out.words:
                started = True
                deadline = None if timeout_s is None else time.monotonic() + timeout_s
    if not started:
        raise SoftRoceError("guest did not boot")
    return out.exit_status()


def console_tail(log: Path) -> str:
    """The last lines of the guest's console without its terminal escapes, or nothing."""
    if not log.exists():
        return ""
    text = re.sub(r"\x1b[\[c][0-9;?]*[A-Za-z]?|\r", "", log.read_text(errors="replace"))
    lines = [line for line in text.splitlines() if line.strip()][-60:]
    return "".join(f"\n  | {line}" for line in lines)


def run_guest(args: argparse.Namespace, image: Image) -> int:
    """Boots the guest for one command and returns the exit status to leave with."""
    tty = args.action == "shell"
    nonce = secrets.token_hex(8)
    ports = {"out": Port(nonce, 1), "err": Port(nonce, 2)}
    with tempfile.TemporaryDirectory(prefix="softroce-") as folder:
        job = Path(folder)
        write_job(job, image, nonce, args)
        try:
            with qemu(qemu_command(image, job, ports, tty=tty), ports, tty=tty):
                status = watch(ports, None if tty else args.timeout)
            if status is None and not tty:
                raise SoftRoceError("guest died before the command ended")
            return status or 0
        except SoftRoceError as error:
            tail = console_tail(job / "console.log")
            raise SoftRoceError(f"{error}{tail}", error.exit_status) from error


def seconds(text: str) -> float:
    """An argument that is a positive, finite number of seconds."""
    value = float(text)
    if not 0 < value < 1e9:
        raise ValueError(text)
    return value


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Reads the command line; `command` is what the guest runs."""
    parser = argparse.ArgumentParser(
        prog="vm.py",
        description="Runs a command of this host in a guest that has soft RDMA devices.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    actions = parser.add_subparsers(dest="action", required=True)
    run = actions.add_parser("run", help="run one command and exit with its status")
    run.add_argument(
        "--timeout",
        type=seconds,
        default=300.0,
        metavar="SECONDS",
        help="time the command may take, boot not counted (default 300)",
    )
    shell = actions.add_parser("shell", help="an interactive shell; Ctrl-A X ends the guest")
    actions.add_parser("prepare", help="only prepare, with the kernel that apt offers now")
    for action in (run, shell):
        action.add_argument(
            "--links", type=int, choices=(1, 2), default=1, help="veth pairs (default 1)"
        )
    run.add_argument("command", nargs="+", metavar="COMMAND", help="after --, with its arguments")
    shell.set_defaults(command=["/bin/bash", "-i"])
    return parser.parse_args(argv)


def _stop(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + signum)


def main(argv: Sequence[str]) -> int:
    """Does what the command line says and returns the exit status."""
    args = parse(argv)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _stop)
    try:
        if args.action == "shell" and not os.isatty(0):
            raise SoftRoceError("shell needs a terminal")
        image = ensure_image(refresh=args.action == "prepare")
        return 0 if args.action == "prepare" else run_guest(args, image)
    except SoftRoceError as error:
        say(str(error))
        return error.exit_status
    except BrokenPipeError:  # whoever read the output has gone
        return 128 + signal.SIGPIPE
    except OSError as error:
        say(str(error))
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
