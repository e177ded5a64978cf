"""Native code: compiled on first use by the system's compiler, kept in the cache folder, loaded.

One library for each instruction set level, made of all ``native/*.cpp`` with that level's flags.
Its name has a hash of everything that decides what it is: sources, flags, compiler, CPU. A library
appears under its name only when it is complete, and processes that start together build it once.

Environment: ``$QTOOL_NATIVE=0`` switches native code off, ``$QTOOL_CPU_ISA`` forces a lower level,
``$CXX`` names the compiler.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from qtool.errors import UsageError
from qtool.formats.model_source import cache_folder
from qtool.runtime.kernels.cpu.cores import available_cores

SOURCES = Path(__file__).parent / "native"
COMPILERS = ("c++", "g++", "clang++")
CPUINFO = Path("/proc/cpuinfo")

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "fma", "f16c")
# A level needs these CPU features, in /proc/cpuinfo's spelling; best first.
LEVELS = {
    "amx": (*_AVX512, "amx_tile", "amx_int8"),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
    "plain": (),
}
# Used within a level where the CPU has them.
EXTRAS = {"amx": ("avx512_bf16",), "avx512": ("avx512_bf16",), "avx2": (), "plain": ()}
FLAGS = (
    "-std=c++17",
    "-O2",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fno-exceptions",
    "-fno-rtti",
    # Rounding and square roots become single instructions.
    "-fno-math-errno",
    "-Wall",
    # gcc 12 warns about its own intrinsics, and about vectors as arguments of inline functions.
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
    "-Wno-psabi",
)
TIMEOUT_S = 300


class BuildError(Exception):
    """Why there is no native code, in a few words; callers turn it into a note or an error."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that decides what a library is.

    Attributes:
        level: one of :data:`LEVELS`.
        compiler: command and its options.
        version: what the compiler says it is.
        flags: of this level and CPU.
        sources: folder of the ``.cpp`` and ``.h`` files.
    """

    level: str
    compiler: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    sources: Path = SOURCES

    def path(self) -> Path:
        """Where the library is kept."""
        digest = hashlib.sha256()
        for part in (*self.compiler, self.version, *self.flags):
            digest.update(part.encode() + b"\0")
        for source in sorted(self.sources.glob("*.*")):
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        name = f"qtool-{self.level}-{digest.hexdigest()[:16]}.so"
        return cache_folder() / "native" / name


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library, or the reason why there is none.

    Attributes:
        library: its functions; ``None`` without native code.
        level: the instruction set, for the load plan.
        reason: one sentence, empty when there is a library.
        path: the library's file.
    """

    library: ctypes.CDLL | None
    level: str = ""
    reason: str = ""
    path: Path | None = None


def load_native() -> Native:
    """The library of the best level this CPU has; built first if the cache has none.

    Raises:
        UsageError: ``$QTOOL_CPU_ISA`` names no level, or one the CPU or the system does not have.
    """
    return _load(_environment(), cache_folder())


def will_compile() -> bool:
    """Whether :func:`load_native` would run the compiler, which takes some twenty seconds.

    Raises:
        UsageError: as :func:`load_native`.
    """
    off, forced = _environment()[:2]
    if off == "0":
        return False
    level = choose_level(cpu_features(), forced)
    try:
        return not recipe(level).path().exists()
    except BuildError:
        return False


def _environment() -> tuple[str, ...]:
    """The variables that decide which library is loaded."""
    return tuple(os.environ.get(n, "") for n in ("QTOOL_NATIVE", "QTOOL_CPU_ISA", "CXX", "PATH"))


@functools.cache
def _load(environment: tuple[str, ...], folder: Path) -> Native:
    """The arguments are what the result depends on."""
    if environment[0] == "0":
        return Native(None, reason="native code is switched off by $QTOOL_NATIVE=0")
    level = choose_level(cpu_features(), environment[1])
    try:
        path = build(recipe(level))
        library = ctypes.CDLL(str(path))
    except (BuildError, OSError) as error:
        return Native(None, reason=f"no native code: {error}")
    library.qt_pool_start(available_cores())
    library.qt_level.restype = ctypes.c_char_p
    # A system may keep the matrix unit from a process; the library then computes without it.
    usable = library.qt_level().decode()
    if environment[1] and usable != level:
        raise UsageError(f"QTOOL_CPU_ISA={level!r}: this system lets programs use {usable}")
    return Native(library, usable, path=path)


def cpu_features(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Features the kernel lets programs use; none where it does not say."""
    if not cpuinfo.exists():
        return frozenset()
    lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    flags = (line.partition(":")[2] for line in lines if line.startswith("flags"))
    return frozenset(next(flags, "").split())


def choose_level(features: frozenset[str], forced: str) -> str:
    """The best level of a CPU, or the forced one.

    Raises:
        UsageError: an unknown level, or one the CPU cannot run.
    """
    possible = [name for name, needs in LEVELS.items() if features.issuperset(needs)]
    if forced and forced not in possible:
        raise UsageError(f"QTOOL_CPU_ISA={forced!r}: this CPU runs {', '.join(possible)}")
    return forced or possible[0]


def recipe(level: str, extra_flags: tuple[str, ...] = ()) -> Recipe:
    """How to build a level here.

    Raises:
        BuildError: the system is not Linux, or has no compiler.
    """
    if platform.system() != "Linux":
        raise BuildError(f"it is for Linux, this is {platform.system()}")
    compiler = find_compiler()
    extras = [name for name in EXTRAS[level] if name in cpu_features()]
    options = [_option(name) for name in (*LEVELS[level], *extras)]
    version = _run([*compiler, "--version"])
    return Recipe(level, compiler, version, (*FLAGS, *options, *extra_flags))


def _option(feature: str) -> str:
    """The compiler's spelling: amx-int8, but avx512vnni."""
    joined = feature.replace("_", "-" if feature.startswith("amx") else "")
    return f"-m{joined}"


def find_compiler() -> tuple[str, ...]:
    """$CXX, or the first of :data:`COMPILERS` on the path.

    Raises:
        BuildError: there is none.
    """
    if chosen := shlex.split(os.environ.get("CXX", "")):
        candidates = [tuple(chosen)]
    else:
        candidates = [(name,) for name in COMPILERS]
    for command in candidates:
        if shutil.which(command[0]):
            return command
    names = ", ".join(command[0] for command in candidates)
    raise BuildError(f"no C++ compiler ({names} not found); install one, or set CXX")


def build(recipe: Recipe) -> Path:
    """The library's file, made if the cache has none.

    Raises:
        BuildError: the compiler refused, or the cache folder cannot be written.
    """
    path = recipe.path()
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.with_suffix(".lock")):
            if not path.exists():
                _compile(recipe, path)
    except OSError as error:
        raise BuildError(f"{path.parent} cannot be written ({error})") from error
    return path


@contextmanager
def _only_one(lock: Path) -> Iterator[None]:
    """Hold a lock that ends with the process, however it ends."""
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(recipe: Recipe, path: Path) -> None:
    """Objects side by side in a folder of their own, linked there, renamed into place."""
    with tempfile.TemporaryDirectory(prefix="build-", dir=path.parent) as folder:
        compiler = [*recipe.compiler, *recipe.flags]

        def compile_one(source: Path) -> str:
            target = str(Path(folder) / f"{source.stem}.o")
            _run([*compiler, "-c", str(source), "-o", target])
            return target

        # The longest first, so that it does not run alone at the end.
        sources = sorted(recipe.sources.glob("*.cpp"), key=_size, reverse=True)
        with ThreadPoolExecutor(max_workers=os.cpu_count()) as workers:
            objects = list(workers.map(compile_one, sources))
        library = Path(folder) / path.name
        _run([*compiler, "-shared", *objects, "-o", str(library)])
        os.replace(library, path)


def _size(path: Path) -> int:
    return path.stat().st_size


def _run(command: list[str]) -> str:
    """Output of a compiler's run.

    Raises:
        BuildError: it failed; with the first error it printed.
    """
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} did not run ({error})") from error
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line.lower()]
        message = (lines or result.stderr.splitlines() or ["no message"])[0]
        raise BuildError(f"{command[0]} failed: {message}")
    return result.stdout
