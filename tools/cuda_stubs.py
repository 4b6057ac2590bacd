"""Make a CUDA build of PyTorch importable without the GPU libraries: `python tools/cuda_stubs.py .../torch/lib`.

For tests only, on Linux. For each GPU library that the libraries in that folder need and that is missing there
(libcudart.so.12, libcublas.so.12 and so on, several GB in all), this compiles a stub with the same name, versions and
symbols, in which every function returns "no device", as the real ones do without a GPU. Needs a C compiler.
"""

from __future__ import annotations

import argparse
import mmap
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

GPU_LIBRARY = re.compile(r"lib(cu|nccl|nv|cupti|caffe2_nvrtc)")
GPU_SYMBOL = re.compile(r"_{0,2}(cu|nccl|nv)")

DYNAMIC, DYNSYM, VERNEED, VERSYM = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF
NEEDED = 1

# 100 is cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE, and no success anywhere else.
SOURCE = """
static const char text[] = "a stub: this machine has no GPU libraries";
const char *stub_text(void) { return text; }
int stub(void) { return 100; }
"""


class Library:
    """The dependencies, versions and symbols of a 64-bit little-endian ELF file."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if self.data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{path} is not a 64-bit little-endian ELF file")
        (start,) = struct.unpack_from("<Q", self.data, 40)
        size, count = struct.unpack_from("<HH", self.data, 58)
        # name, type, flags, address, offset, size, link, info, alignment, size of an entry
        self.sections = [struct.unpack_from("<IIQQQQIIQQ", self.data, start + i * size) for i in range(count)]

    def section(self, kind: int) -> tuple[int, int, int] | None:
        """Return offset, size, and the offset of its string table."""
        for found in self.sections:
            if found[1] == kind:
                return found[4], found[5], self.sections[found[6]][4]
        return None

    def text(self, at: int) -> str:
        return self.data[at : self.data.find(b"\0", at)].decode()

    def needed(self) -> Iterator[str]:
        """Yield the names of the libraries that it needs."""
        if found := self.section(DYNAMIC):
            offset, size, names = found
            for at in range(offset, offset + size, 16):
                tag, value = struct.unpack_from("<QQ", self.data, at)
                if tag == NEEDED:
                    yield self.text(names + value)

    def versions(self) -> dict[int, tuple[str, str]]:
        """Return the versions that it needs, by index: library and name."""
        versions: dict[int, tuple[str, str]] = {}
        if found := self.section(VERNEED):
            at, _, names = found
            while True:
                _, count, file, first, step = struct.unpack_from("<HHIII", self.data, at)
                inner = at + first
                for _ in range(count):
                    _, _, number, name, further = struct.unpack_from("<IHHII", self.data, inner)
                    versions[number & 0x7FFF] = self.text(names + file), self.text(names + name)
                    inner += further
                if not step:
                    break
                at += step
        return versions

    def symbols(self) -> Iterator[tuple[str, bool, tuple[str, str] | None]]:
        """Yield GPU symbols: name, whether it is defined here, and the library and version that it is needed from."""
        found, numbers, versions = self.section(DYNSYM), self.section(VERSYM), self.versions()
        if found is None:
            return
        offset, size, names = found
        for i in range(size // 24):
            name, where = struct.unpack_from("<I2xH", self.data, offset + 24 * i)
            text = self.text(names + name)
            if GPU_SYMBOL.match(text):
                number = struct.unpack_from("<H", self.data, numbers[0] + 2 * i)[0] if numbers else 0
                yield text, where != 0, versions.get(number & 0x7FFF)


def missing(folder: Path) -> dict[str, dict[str, set[str]]]:
    """Return library to version to symbols, for every GPU library that is needed and not in the folder.

    Symbols without a version are assigned to the first library, because any library may define them.
    """
    libraries = [Library(path) for path in sorted(folder.glob("*.so*"))]
    there = {path.name for path in folder.glob("*.so*")}
    needed = {name for library in libraries for name in library.needed()} - there
    wanted: dict[str, dict[str, set[str]]] = {name: {} for name in needed if GPU_LIBRARY.match(name)}
    defined: set[str] = set()
    anywhere: set[str] = set()
    for library in libraries:
        for file, version in library.versions().values():
            if file in wanted:
                wanted[file].setdefault(version, set())
        for symbol, is_defined, version_of in library.symbols():
            if is_defined:
                defined.add(symbol)
            elif version_of is None:
                anywhere.add(symbol)
            elif version_of[0] in wanted:
                wanted[version_of[0]][version_of[1]].add(symbol)
    if wanted:
        wanted[min(wanted)].setdefault("", set()).update(anywhere - defined)
    return wanted


def build(name: str, versions: dict[str, set[str]], folder: Path, compiler: str) -> None:
    """Compile a stub into the folder."""
    source = [SOURCE]
    script = []
    for version, symbols in sorted(versions.items()):
        for symbol in sorted(symbols):
            is_text = re.search(r"(Error|Status)(String|Name)|GetLastError", symbol) and "cudaGetLast" not in symbol
            target, kind = ("stub_text", "const char *") if is_text else ("stub", "int ")
            source.append(f'{kind}{symbol}(void) __attribute__((alias("{target}")));')
        if version:
            script.append(f"{version} {{ {'global: ' + '; '.join(sorted(symbols)) + ';' if symbols else ''} }};")
    with tempfile.TemporaryDirectory() as work:
        Path(work, "stub.c").write_text("\n".join(source) + "\n")
        Path(work, "stub.map").write_text("\n".join(script) + "\n")
        options = [f"-Wl,--version-script={work}/stub.map"] if script else []
        command = [compiler, "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}", *options, "-o", str(folder / name)]
        subprocess.run([*command, f"{work}/stub.c"], check=True, timeout=120)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the lib folder of an installed PyTorch")
    folder = parser.parse_args().folder
    compiler = shutil.which("cc") or shutil.which("gcc")
    wanted = missing(folder)
    if wanted and compiler is None:
        print("no C compiler found", file=sys.stderr)
        return 1
    for name, versions in sorted(wanted.items()):
        build(name, versions, folder, str(compiler))
    print(f"{len(wanted)} stubs: {' '.join(sorted(wanted))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
