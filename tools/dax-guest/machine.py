"""A machine with persistent memory, emulated by QEMU from Debian packages: kernel, images, start, power cut."""

import dataclasses
import fcntl
import lzma
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent

# Program that is needed, and the package that has it.
PACKAGES = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "mke2fs": "e2fsprogs",
    "dpkg-deb": "dpkg",
}

# Its dependency is the newest kernel for virtual machines: small, with ext4, DAX and NVMe built in.
KERNEL_PACKAGE = "linux-image-cloud-amd64"

# What is not built in, in the order of their dependencies.
MODULES = [
    "libnvdimm",
    "nd_btt",
    "nd_pmem",
    "nfit",
    "virtio_ring",
    "virtio",
    "virtio_pci_modern_dev",
    "virtio_pci_legacy_dev",
    "virtio_pci",
    "virtio_console",
]

# The guest writes its page descriptors' settings at 4 KiB; data, that is the file system, begins here.
PMEM_DATA_OFFSET = 2 << 20


# The call that makes a machine (linux/kvm.h).
KVM_CREATE_VM = 0xAE01


# Where the guest has its persistent memory: above its other memory.
PMEM_ADDRESS = 4 << 30


class Skip(Exception):
    """The machine cannot run here, and why."""


class Failure(Exception):
    """A test failed, or the guest ended when it should not."""


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """What executes the guest's instructions."""

    name: str
    arguments: tuple[str, ...]
    # How much slower than a processor it is, roughly.
    slowdown: int


ACCELERATORS = {
    # The guest sees the flush instructions that the host's processor has.
    "kvm": Accelerator("kvm", ("-accel", "kvm", "-cpu", "host"), 1),
    "tcg": Accelerator("tcg", ("-accel", "tcg,thread=multi", "-cpu", "max"), 10),
}

# For the plug-in, whose guest's processors have to take turns.
EMULATION_IN_TURNS = Accelerator("tcg", ("-accel", "tcg,thread=single", "-cpu", "max"), 20)


def choose_accelerator(wanted: str) -> Accelerator:
    """The wanted one; of `auto`, KVM where it can be used."""
    if wanted == "tcg":
        return ACCELERATORS["tcg"]
    problem = problem_of_kvm()
    if problem is None:
        return ACCELERATORS["kvm"]
    if wanted == "kvm":
        raise Skip(f"KVM cannot be used: {problem}")
    print(f"no KVM: {problem}", flush=True)
    return ACCELERATORS["tcg"]


def problem_of_kvm() -> str | None:
    """Why a machine cannot be run by the processor. That the device is there says little."""
    try:
        device = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
    except OSError as problem:
        return str(problem)
    try:
        os.close(fcntl.ioctl(device, KVM_CREATE_VM, 0))
    except OSError as problem:
        return f"a machine cannot be made: {problem}"
    finally:
        os.close(device)
    flags = set(pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    if not flags & {"vmx", "svm"}:
        # The host is a guest whose KVM runs kernels made for it, and interprets all others an instruction at a time.
        return "there is /dev/kvm, but the processor shows neither vmx nor svm"
    return None


def install_packages() -> None:
    """Makes sure that the programs are there; installs them where that is allowed."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        raise Skip("needs Linux on x86-64")
    missing = sorted(package for program, package in PACKAGES.items() if not shutil.which(program))
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise Skip(f"needs {', '.join(missing)} and there is no apt-get to install them")
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0:
        raise Skip(f"needs packages; install them with: sudo {' '.join(install)}")
    print(f"installing {', '.join(missing)}", flush=True)
    quiet = {"stdout": subprocess.DEVNULL, "env": {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}}
    for command in [["apt-get", "update"], install]:
        if subprocess.run(command, check=False, **quiet).returncode != 0:
            raise Skip(f"{' '.join(command)} failed")


def fetch_kernel(work: pathlib.Path) -> pathlib.Path:
    """The folder with the kernel and its modules, downloaded and unpacked the first time."""
    kernel = work / "kernel"
    if (kernel / "complete").exists():
        return kernel
    shutil.rmtree(kernel, ignore_errors=True)
    kernel.mkdir(parents=True)
    with tempfile.TemporaryDirectory(dir=work) as name:
        download = pathlib.Path(name)
        package = kernel_package()
        # As this user, who owns the folder.
        command = ["apt-get", "download", "-o", "APT::Sandbox::User=root", package]
        if subprocess.run(command, cwd=download, check=False, stdout=subprocess.DEVNULL).returncode != 0:
            raise Skip(f"apt-get cannot download {package}")
        (archive,) = download.glob("*.deb")
        unpack_kernel(archive, kernel)
    (kernel / "complete").write_text(f"{package}\n", encoding="utf-8")
    return kernel


def kernel_package() -> str:
    """Name of the package that has the kernel itself."""
    for attempt in range(2):
        command = ["apt-cache", "depends", KERNEL_PACKAGE]
        listing = subprocess.run(command, check=False, capture_output=True, text=True).stdout
        for line in listing.split("\n"):
            relation, _, package = line.strip().partition(": ")
            if relation == "Depends" and package.startswith("linux-image"):
                return package
        if attempt == 0 and os.geteuid() == 0:
            subprocess.run(["apt-get", "update"], check=False, stdout=subprocess.DEVNULL)
    raise Skip(f"apt-cache knows no {KERNEL_PACKAGE}; apt-get update, or not Debian?")


def unpack_kernel(archive: pathlib.Path, kernel: pathlib.Path) -> None:
    """Takes vmlinuz and the modules out of a package."""
    order = []
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as files:
        with tarfile.open(fileobj=files.stdout, mode="r|") as tar:
            for member in tar:
                name = pathlib.PurePosixPath(member.name).name
                module = name.partition(".ko")[0].replace("-", "_")
                if name.startswith("vmlinuz-"):
                    (kernel / "vmlinuz").write_bytes(tar.extractfile(member).read())
                elif ".ko" in name and module in MODULES:
                    content = tar.extractfile(member).read()
                    if name.endswith(".xz"):
                        content = lzma.decompress(content)
                    elif not name.endswith(".ko"):
                        raise Skip(f"the kernel's modules are packed in a way not known here: {name}")
                    (kernel / f"{module}.ko").write_bytes(content)
                    order.append(module)
                elif name == "modules.builtin":
                    builtin = tar.extractfile(member).read().decode()
                    order += [m for m in MODULES if f"/{m}.ko" in builtin.replace("-", "_")]
    if missing := sorted(set(MODULES) - set(order)):
        raise Skip(f"the kernel has no {', '.join(missing)}")
    loaded = [module for module in MODULES if (kernel / f"{module}.ko").exists()]
    (kernel / "order").write_text("\n".join(loaded) + "\n", encoding="utf-8")


def cpio(files: dict[str, tuple[int, bytes]]) -> bytes:
    """An archive of files (path: mode and content) in the format that the kernel unpacks ("newc")."""
    archive = bytearray()
    for number, (path, (mode, content)) in enumerate([*files.items(), ("TRAILER!!!", (0, b""))], 1):
        name = path.encode() + b"\0"
        fields = [number, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name), 0]
        archive += b"070701" + b"".join(b"%08x" % field for field in fields) + name
        archive += bytes(-len(archive) % 4) + content
        archive += bytes(-len(archive) % 4)
    return bytes(archive)


FOLDER, PROGRAM, FILE = 0o40755, 0o100755, 0o100644


def first_file_system(kernel: pathlib.Path, programs: list[pathlib.Path]) -> bytes:
    """What the kernel starts with: busybox, the modules, init.sh and the programs to run, under /tests."""
    files = {folder: (FOLDER, b"") for folder in ["bin", "modules", "tests"]}
    files["bin/busybox"] = (PROGRAM, pathlib.Path(shutil.which("busybox")).read_bytes())
    files["init"] = (PROGRAM, (HERE / "init.sh").read_bytes())
    for file in [kernel / "order", *kernel.glob("*.ko")]:
        files[f"modules/{file.name}"] = (FILE, file.read_bytes())
    for program in programs:
        files[f"tests/{program.name}"] = (PROGRAM, program.read_bytes())
    return cpio(files)


def make_image(image: pathlib.Path, size_bytes: int, offset_bytes: int = 0) -> None:
    """A new file system in a sparse file. Blocks are pages, as DAX needs it."""
    image.unlink(missing_ok=True)
    with image.open("wb") as file:
        file.truncate(size_bytes)
    blocks = (size_bytes - offset_bytes) // 4096
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-b", "4096", "-E", f"offset={offset_bytes}"]
    subprocess.run([*command, image, str(blocks)], check=True)


def build_plugin(work: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The plug-in that keeps what was flushed and fenced, and the program that it is tested with in the guest."""
    if not shutil.which("gcc"):
        raise Skip("needs gcc to build the plug-in")
    built = []
    for name, flags in [("durable_lines.so", ["-shared", "-fPIC"]), ("lines_test", ["-static"])]:
        source = HERE / f"{name.removesuffix('.so')}.c"
        command = ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", *flags, "-o", work / name, source]
        subprocess.run(command, check=True)
        built.append(work / name)
    return built[0], built[1]


def copy_sparse(source: pathlib.Path, target: pathlib.Path) -> None:
    """Copies a file without its zeros."""
    block = 1 << 20
    with source.open("rb") as reader, target.open("wb") as writer:
        size_bytes = source.stat().st_size
        while content := reader.read(block):
            if content.count(0) == len(content):
                writer.seek(len(content), 1)
            else:
                writer.write(content)
        writer.truncate(size_bytes)
    shutil.copymode(source, target)


class Machine:
    """One run of the emulated machine, from power on to power off."""

    def __init__(
        self,
        work: pathlib.Path,
        kernel: pathlib.Path,
        base: bytes,
        images: tuple[pathlib.Path, pathlib.Path],
        command: str,
        accelerator: Accelerator,
        persistence: str,
        plugin: pathlib.Path | None = None,
    ) -> None:
        """Boots with the images of persistent memory and disk, and runs a shell command in the guest.

        With the plug-in, persistent memory keeps only what was flushed and fenced.
        """
        pmem, disk = images
        self.pmem = pmem
        self.was_cut = False
        self.durable = work / "durable.img" if plugin else None
        recording = []
        if plugin:
            copy_sparse(pmem, self.durable)
            files = f"image={pmem},durable={self.durable}"
            recording = ["-plugin", f"{plugin},{files},address={PMEM_ADDRESS}"]
        archive = work / "initrd"
        # The kernel unpacks one archive after the other.
        archive.write_bytes(base + cpio({"command": (FILE, command.encode() + b"\n")}))
        self.port = work / "port"
        self.port.unlink(missing_ok=True)
        pmem_bytes = pmem.stat().st_size
        arguments = [
            *["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-serial", "stdio"],
            *["-machine", f"q35,nvdimm=on,nvdimm-persistence={persistence}"],
            *[*accelerator.arguments, "-smp", "2"],
            *["-m", f"1G,slots=2,maxmem={2 + pmem_bytes // (1 << 30)}G"],
            # Shared: a store of the guest is in the file at once, and stays there when QEMU is killed.
            *["-object", f"memory-backend-file,id=pmem,share=on,mem-path={pmem},size={pmem_bytes},align=2M"],
            *["-device", f"nvdimm,id=nvdimm0,memdev=pmem,addr={PMEM_ADDRESS}"],
            # Unsafe: what the guest's kernel wrote is in the file, but the host need not sync it. What is
            # only in the guest's page cache is gone when QEMU is killed.
            *["-drive", f"file={disk},format=raw,if=none,id=disk,cache=unsafe"],
            *["-device", "nvme,serial=disk,drive=disk"],
            *["-device", "virtio-serial-pci", "-chardev", f"file,id=port,path={self.port}"],
            *["-device", "virtserialport,chardev=port,name=port"],
            *["-kernel", kernel / "vmlinuz", "-initrd", archive],
            *["-append", "console=ttyS0 quiet panic=-1 no_timer_check"],
            *recording,
        ]
        self.process = subprocess.Popen(
            ["qemu-system-x86_64", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read_console, daemon=True)
        self.reader.start()

    def _read_console(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip())

    def __enter__(self) -> "Machine":
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_running():
            self.cut_power()
        if self.durable:
            self.durable.replace(self.pmem)

    def is_running(self) -> bool:
        return self.process.poll() is None

    def follow(self, patience_s: float) -> int:
        """Prints the console until the machine is off; the result of its command."""
        shown = 0
        patience = Patience(patience_s)
        while self.is_running() or self.reader.is_alive() or shown < len(self.lines):
            while shown < len(self.lines):
                print(f"    {self.lines[shown]}", flush=True)
                patience = Patience(patience_s)
                shown += 1
            if patience.is_over():
                print(f"    no line for {patience_s} s", flush=True)
                self.cut_power()
                return 96
        return self.result()

    def wait_for(self, wanted: str, patience_s: float) -> None:
        """Waits for a line of the console."""
        patience = Patience(patience_s)
        while wanted not in self.lines:
            if patience.is_over() or not self.is_running():
                raise Failure(f"no line {wanted!r}:\n" + "\n".join(self.lines[-20:]))

    def result(self) -> int:
        """The result of the command, after the machine has turned itself off."""
        self.reader.join()
        for line in reversed(self.lines):
            if line.startswith("GUEST_RESULT="):
                return int(line.partition("=")[2])
        return 98

    def cut_power(self) -> None:
        """Ends the machine between two instructions: memory and page cache are gone."""
        self.was_cut = True
        if self.durable:
            # QEMU stops between two instructions by itself, and the plug-in not within a line.
            self.process.terminate()
        else:
            self.process.kill()
        self.process.wait()
        self.reader.join()

    def check_plugin(self) -> None:
        """Fails if a machine with the plug-in ran without it, or it found that it does not understand its guest."""
        if not self.durable:
            return
        said = [line for line in self.lines if line.startswith("durable_lines: ")]
        if not said or "failed" in said[-1]:
            raise Failure(f"the plug-in has not recorded to the end: {said[-1:]}")


class Patience:
    """Time that was waited while this process was running: it may be stopped, and the guest with it."""

    def __init__(self, limit_s: float) -> None:
        self.left_s = limit_s
        self.polled = time.monotonic()

    def is_over(self) -> bool:
        """Waits until the next poll; whether there should be none."""
        time.sleep(0.002)
        now = time.monotonic()
        self.left_s -= min(now - self.polled, 0.1)
        self.polled = now
        return self.left_s < 0
