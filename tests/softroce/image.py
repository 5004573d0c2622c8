"""Prepares what the guest boots from: host packages, an unpacked Debian kernel, an initramfs.

Invariants: everything prepared lives in one cache folder, a kernel under its version and an
initramfs under the kernel's version and a hash of all that goes into it, so that an edited source
never boots an old image. An entry appears by rename, whole or not at all, and one lock covers the
preparing, so that runs may start side by side. Nothing here writes to standard output.
"""

import fcntl
import gzip
import hashlib
import lzma
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PACKAGES = (
    "qemu-system-x86",
    "busybox-static",
    "cpio",
    "kmod",
    "iproute2",
    "rdma-core",
    "ibverbs-providers",
    "ibverbs-utils",
    "python3-pyverbs",
    "perftest",
)

# Loaded in this order, each after its dependencies; rdma_rxe fails without crc32_generic.
MODULES = (
    "virtio_pci",
    "virtio_console",
    "9pnet_virtio",
    "9p",
    "overlay",
    "crc32_generic",
    "crc32_pclmul",
    "ipv6",
    "veth",
    "rdma_rxe",
    "ib_uverbs",
    "rdma_ucm",
    "sch_netem",
    "sch_tbf",
    "sch_htb",
)

EXIT_FAILED = 125
EXIT_MISSING = 77
KERNEL_PREFIX = "linux-image-"
BUSYBOX = Path("/bin/busybox")
GUEST_INIT = Path(__file__).with_name("guest_init.sh")


class SoftRoceError(Exception):
    """A failure of the runner or the guest, never of the command that runs in it."""

    def __init__(self, message: str, exit_status: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.exit_status = exit_status


@dataclass(frozen=True)
class Image:
    """Paths of a bootable image; `modules` is the kernel's whole module tree."""

    kernel: Path
    initramfs: Path
    modules: Path


def say(message: str) -> None:
    """Prints one line of the runner's own on standard error."""
    print(f"softroce: {message}", file=sys.stderr, flush=True)


def ensure_image(*, refresh: bool) -> Image:
    """Returns the image to boot, preparing whatever is missing.

    Args:
        refresh: Take the kernel that apt offers now; otherwise the one prepared last is good.

    Errors: SoftRoceError, with EXIT_MISSING where only root can add what is missing.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pycomm" / "softroce"
    cache.mkdir(parents=True, exist_ok=True)
    cache = cache.resolve()
    with open(cache / "lock", "w", encoding="ascii") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _ensure_packages()
        kernels = sorted(cache.glob("kernel-*"), key=lambda path: path.stat().st_mtime)
        tree = _fetch_kernel(cache) if refresh or not kernels else kernels[-1]
        version = tree.name.removeprefix("kernel-")
        return Image(
            kernel=tree / "boot" / f"vmlinuz-{version}",
            initramfs=_build_initramfs(cache, tree, version),
            modules=tree / "lib" / "modules" / version,
        )


def _run(command: Sequence[str], *, cwd: Path | None = None) -> str:
    """Returns the command's standard output; its standard error is shown only if it fails."""
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, env=_tool_env(), check=False
    )
    if done.returncode != 0:
        raise SoftRoceError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def _tool_env() -> dict[str, str]:
    """The environment for Debian's tools: plain language, no questions, and sbin on the path."""
    path = os.environ.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
    return os.environ | {"LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", "PATH": path}


def _ensure_packages() -> None:
    if shutil.which("dpkg-query") is None or os.uname().machine != "x86_64":
        raise SoftRoceError("needs Debian packages on an x86-64 machine", EXIT_MISSING)
    query = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *PACKAGES]
    known = subprocess.run(query, capture_output=True, text=True, env=_tool_env(), check=False)
    lines = known.stdout.splitlines()
    present = {line.split()[0] for line in lines if line.endswith(" installed")}
    missing = [package for package in PACKAGES if package not in present]
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise SoftRoceError(
            f"missing packages: {' '.join(missing)}\n  install them: sudo {' '.join(install)}",
            EXIT_MISSING,
        )
    say(f"installing missing packages: {' '.join(missing)}")
    _apt([*install, "-o", "DPkg::Lock::Timeout=120"])


def _apt(command: Sequence[str], *, cwd: Path | None = None) -> None:
    """Runs an apt-get command, again after an update if the package lists were stale (as root)."""
    try:
        _run(command, cwd=cwd)
    except SoftRoceError:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update"])
        _run(command, cwd=cwd)


def _current_kernel_package() -> str:
    for line in _run(["apt-cache", "depends", "linux-image-amd64"]).splitlines():
        name = line.split()[-1]
        if "Depends:" in line and name.startswith(KERNEL_PREFIX):
            return name
    raise SoftRoceError("apt knows no kernel that linux-image-amd64 depends on: apt-get update?")


def _fetch_kernel(cache: Path) -> Path:
    """Unpacks the current Debian kernel, without installing it, and returns its tree."""
    try:
        package = _current_kernel_package()
    except SoftRoceError:
        if os.geteuid() != 0:
            raise
        _run(["apt-get", "update"])
        package = _current_kernel_package()
    version = package.removeprefix(KERNEL_PREFIX)
    tree = cache / f"kernel-{version}"
    if tree.exists():
        tree.touch()  # the newest by time is the one that runs take
        return tree
    say(f"unpacking kernel {version} into {cache}")
    with tempfile.TemporaryDirectory(dir=cache, prefix="tmp-") as scratch:
        work = Path(scratch)
        # apt otherwise changes to its own user, who may not write here.
        _apt(["apt-get", "download", "-o", "APT::Sandbox::User=root", package], cwd=work)
        (deb,) = work.glob("*.deb")
        root = work / "root"
        _run(["dpkg", "-x", str(deb), str(root)])
        _run(["depmod", "-b", str(root), version])
        root.rename(tree)
    return tree


def _module_files(tree: Path, version: str) -> list[Path]:
    """The files to load, in order, without the modules that are built into the kernel."""
    files: dict[Path, None] = {}
    # Without the host's configuration, whose options would follow the paths.
    modprobe = ["modprobe", "-C", "/dev/null", "-d", str(tree), "-S", version, "--show-depends"]
    for module in MODULES:
        query = [*modprobe, module]
        for line in _run(query).splitlines():
            action, _, path = line.strip().partition(" ")
            if action == "insmod":
                files[Path(path.strip())] = None
    return list(files)


def _build_initramfs(cache: Path, tree: Path, version: str) -> Path:
    digest = hashlib.sha256()
    for source in (Path(__file__), GUEST_INIT, BUSYBOX):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    initramfs = cache / f"initramfs-{version}-{digest.hexdigest()[:16]}.gz"
    if initramfs.exists():
        return initramfs
    say(f"building {initramfs.name}")
    with tempfile.TemporaryDirectory(dir=cache, prefix="tmp-") as scratch:
        root = Path(scratch) / "root"
        for folder in ("bin", "modules", "proc", "sys", "dev", "job", "lower", "rw", "newroot"):
            (root / folder).mkdir(parents=True)
        shutil.copy(BUSYBOX, root / "bin" / "busybox")
        shutil.copy(GUEST_INIT, root / "init")
        (root / "init").chmod(0o755)
        names = []
        for index, path in enumerate(_module_files(tree, version)):
            content = path.read_bytes()
            if path.suffix == ".xz":
                content = lzma.decompress(content)
            names.append(f"{index:02d}-{path.name.removesuffix('.xz')}")
            (root / "modules" / names[-1]).write_bytes(content)
        listing = "\n".join(str(path.relative_to(root)) for path in sorted(root.rglob("*")))
        pack = ["cpio", "--quiet", "-o", "-H", "newc", "-R", "0:0"]
        done = subprocess.run(
            pack, input=listing.encode(), capture_output=True, cwd=root, check=False
        )
        if done.returncode != 0:
            raise SoftRoceError(f"cpio failed: {done.stderr.decode(errors='replace')}")
        packed = Path(scratch) / "packed"
        packed.write_bytes(gzip.compress(done.stdout, compresslevel=1))
        packed.rename(initramfs)
    return initramfs
