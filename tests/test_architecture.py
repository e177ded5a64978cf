"""Who may know whom, where files may lie, how long they may get: docs/structure.md, enforced.

The imports are read from the syntax trees, so those inside functions and under TYPE_CHECKING
count as well.
"""

from __future__ import annotations

import ast
import configparser
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOT_FILES = {"__init__.py", "__main__.py", "cli.py", "errors.py"}
NOT_PACKAGES = {"benchmarks", "docs", "tests", "build"}

# Each part of the package, and the other parts it may import.
MAY_KNOW = {
    "errors": set(),
    "formats": {"errors"},
    "calibration": {"errors", "formats"},
    "quantize": {"errors", "formats", "calibration"},
    "runtime": {"errors", "formats"},
    "commands": {"errors", "formats", "calibration", "quantize", "runtime"},
    # Inside command bodies only: importing qtool.cli imports nothing heavy.
    "cli": {"errors", "quantize", "runtime", "commands"},
    "__main__": {"cli"},
    "__init__": {"runtime"},
}

# Inside runtime a module may import its own layer and those below.
RUNTIME_LAYERS = [
    {"server", "scoring"},
    {"llm"},
    {"startup", "progress"},
    {"engine_thread"},
    {"cache_sweep"},
    {"cache_quality", "needle"},
    {"engine", "evaluate"},
    {"load_plan", "cache_cases"},
    {"generation", "capacity", "loaded_model", "machine"},
    {"native_decoder", "window_run", "self_check"},
    {"model", "loader", "weight_source", "warm_up", "sampler", "logprobs", "tokenizer"},
    {"moe", "key_smoothing"},
    {"batch", "config", "families", "linear", "layers", "rope_config", "rotary"}
    | {"kv_cache", "kv_fused", "kv_layers", "kv_codes", "kv_segments", "attention_votes"},
    {"kernels"},
]
# These hold no tensors: any runtime module may import them, and they import only each other.
RUNTIME_PLAIN = {
    "options",
    "sampling_params",
    "outputs",
    "request",
    "sequence",
    "prefix_cache",
    "kv_schemes",
    "tails",
    "eviction",
    "blocks",
    "block_refs",
    "kv_groups",
    "admission",
    "scheduled_step",
    "scheduler",
    "detokenizer",
    "tasks",
    "task_files",
}

# What `from qtool import name` loads.
PUBLIC = {"LLM": "qtool.runtime.llm", "SamplingParams": "qtool.runtime.sampling_params"}

# Packages from outside, and the only modules that may import them.
ONLY_IN = {
    "triton": {"qtool.runtime.kernels.triton"},
    "datasets": {"qtool.calibration"},
    "click": {"qtool.cli", "qtool.commands.cli_groups", "qtool.commands.cli_options"},
    "rich": {"qtool.cli", "qtool.commands", "qtool.runtime.progress"},
    "openai": {"qtool.commands"},
    "lm_eval": {"qtool.commands.harness"},
    "fastapi": {"qtool.runtime.server"},
    "starlette": {"qtool.runtime.server"},
    "uvicorn": {"qtool.runtime.server"},
    "prometheus_client": {"qtool.runtime.server"},
}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60  # kernels are exempt: a tile loop reads best in one piece


@dataclass(frozen=True)
class Import:
    """One imported module: by whom, on which line, and whether inside a function."""

    importer: str
    target: str
    line: int
    deferred: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.target}"


def _module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    if parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(("qtool", *parts))


@cache
def _modules() -> dict[str, Path]:
    """Module name to file, for all that is installed."""
    folders = (p for p in ROOT.iterdir() if p.is_dir() and (p / "__init__.py").exists())
    files = [*ROOT.glob("*.py"), *(f for p in folders for f in p.rglob("*.py"))]
    return {_module_name(path): path for path in sorted(files)}


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _resolve(module: str, name: str) -> str:
    """What ``from module import name`` imports: a submodule if there is one, else the module."""
    candidate = f"{module}.{name}"
    if candidate in _modules():
        return candidate
    return PUBLIC.get(name, module) if module == "qtool" else module


def _targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif node.level:
        yield "." * node.level + (node.module or "")
    else:
        yield from sorted({_resolve(node.module or "", alias.name) for alias in node.names})


def _walk(node: ast.AST, importer: str, deferred: bool = False) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            for target in _targets(child):
                yield Import(importer, target, child.lineno, deferred)
        inside = deferred or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _walk(child, importer, inside)


@cache
def _imports() -> tuple[Import, ...]:
    return tuple(i for name, path in _modules().items() for i in _walk(_tree(path), name))


def _part(module: str) -> str:
    """The part of the package a module belongs to: ``qtool.formats.packing`` is ``formats``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _runtime_layer(module: str) -> int:
    """The index in RUNTIME_LAYERS; plain modules lie below all others, unknown ones above."""
    name = module.split(".")[2]
    if name in RUNTIME_PLAIN:
        return len(RUNTIME_LAYERS)
    return next((depth for depth, layer in enumerate(RUNTIME_LAYERS) if name in layer), -1)


def _assert_none(violations: list[object], rule: str) -> None:
    assert not violations, "\n".join([rule, *map(str, violations)])


def test_only_known_parts_lie_at_the_root() -> None:
    unknown = {_part(name) for name in _modules()} - set(MAY_KNOW)
    _assert_none(sorted(unknown), "give these a row in MAY_KNOW and in docs/structure.md:")


def test_parts_import_only_parts_they_may_know() -> None:
    def allowed(i: Import) -> bool:
        ours, theirs = _part(i.importer), _part(i.target)
        # `from qtool import __version__` knows nothing but the version.
        return theirs in {ours, *MAY_KNOW[ours]} or i.target == "qtool"

    ours = [i for i in _imports() if _within(i.target, "qtool")]
    _assert_none([i for i in ours if not allowed(i)], "docs/structure.md, 'Who may know whom':")


def test_our_modules_are_imported_by_their_full_name() -> None:
    bare = set(MAY_KNOW) | NOT_PACKAGES
    wrong = [i for i in _imports() if i.target.split(".")[0] in {"", *bare}]
    _assert_none(wrong, "write qtool.…: a bare or relative import makes a second copy:")


def test_every_runtime_module_has_its_layer() -> None:
    known = RUNTIME_PLAIN.union(*RUNTIME_LAYERS)
    names = {m.split(".")[2] for m in _modules() if m.startswith("qtool.runtime.")}
    _assert_none(sorted(names - known), "give these a layer here and in docs/structure.md:")


def test_runtime_imports_point_downwards() -> None:
    inside = [
        i
        for i in _imports()
        if i.importer.startswith("qtool.runtime.") and i.target.startswith("qtool.runtime.")
    ]
    upwards = [i for i in inside if _runtime_layer(i.importer) > _runtime_layer(i.target)]
    _assert_none(upwards, "server may know the engine, the engine never the server:")


def test_scheduling_is_plain_python() -> None:
    plain = {f"qtool.runtime.{name}" for name in RUNTIME_PLAIN}
    foreign = [
        i
        for i in _imports()
        if i.importer in plain
        and i.target not in plain | {"qtool.errors"}
        and i.target.split(".")[0] not in sys.stdlib_module_names
    ]
    _assert_none(foreign, "these modules import the standard library and each other only:")


def test_modules_import_each_other_without_a_cycle() -> None:
    edges: dict[str, set[str]] = {name: set() for name in _modules()}
    for i in _imports():
        if i.target in edges and i.target not in {i.importer, "qtool"} and i.importer != "qtool":
            edges[i.importer].add(i.target)
    while leaves := {name for name, targets in edges.items() if not targets}:
        edges = {name: targets - leaves for name, targets in edges.items() if name not in leaves}
    _assert_none(sorted(edges), "on a cycle, or above one:")


@pytest.mark.parametrize("package", sorted(ONLY_IN))
def test_outside_packages_stay_in_their_place(package: str) -> None:
    strays = [
        i
        for i in _imports()
        if _within(i.target, package)
        and not any(_within(i.importer, owner) for owner in ONLY_IN[package])
    ]
    _assert_none(strays, f"{package} is imported only in {sorted(ONLY_IN[package])}:")


def test_formats_knows_transformers_only_inside_functions_of_model_source() -> None:
    wrong = [
        i
        for i in _imports()
        if _within(i.importer, "qtool.formats")
        and _within(i.target, "transformers")
        and not (i.importer == "qtool.formats.model_source" and i.deferred)
    ]
    _assert_none(wrong, "what lies on disk is described without transformers:")


def test_the_command_line_defers_its_commands() -> None:
    eager = [
        i
        for i in _imports()
        if i.importer in ONLY_IN["click"]
        and not i.deferred
        and _within(i.target, "qtool.commands")
        and i.target not in ONLY_IN["click"]
    ]
    _assert_none(eager, "import a command inside the body that runs it:")


@pytest.mark.parametrize("module", ["qtool", "qtool.cli", "qtool.runtime.scheduler"])
def test_importing_is_light(module: str, checkout_env: dict[str, str]) -> None:
    if module not in _modules():
        pytest.skip(f"{module} does not exist")
    heavy = "{'torch', 'transformers', 'datasets', 'numpy', 'triton', 'fastapi'}"
    script = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    command = [sys.executable, "-c", script]
    result = subprocess.run(command, env=checkout_env, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_setup_cfg_lists_every_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    listed = config["options"]["packages"].split()
    present = {name for name, path in _modules().items() if path.name == "__init__.py"}
    assert set(listed) == present, "a package that is not listed is not in the wheel"


def test_a_folder_with_modules_is_a_package() -> None:
    folders = {p.parent for p in ROOT.glob("*/**/*.py") if p.relative_to(ROOT).parts[0][0] != "."}
    ours = {p for p in folders if p.relative_to(ROOT).parts[0] not in NOT_PACKAGES}
    missing = [p.relative_to(ROOT) for p in sorted(ours) if not (p / "__init__.py").exists()]
    _assert_none(missing, "these folders lack __init__.py, so they are not in the wheel:")


def test_only_the_package_lies_at_the_root() -> None:
    strays = {p.name for p in ROOT.glob("*.py")} - ROOT_FILES
    _assert_none(sorted(strays), "a .py file at the root ships in the wheel:")
    assert not (ROOT / "qtool").exists(), "a link qtool -> . makes the wheel contain itself"


def test_the_tests_are_no_package() -> None:
    packages = [p for p in (ROOT / "tests").rglob("__init__.py")]
    _assert_none(packages, "pytest imports by path here; a package would be imported twice:")


def test_files_stay_short() -> None:
    others = [p for name in ("tests", "benchmarks") for p in (ROOT / name).rglob("*.py")]
    lengths = {
        p.relative_to(ROOT): len(p.read_text(encoding="utf-8").splitlines())
        for p in [*_modules().values(), *others]
    }
    long = [f"{path}: {lines}" for path, lines in lengths.items() if lines > MAX_FILE_LINES]
    _assert_none(long, f"split a file before it has {MAX_FILE_LINES} lines:")


def test_functions_stay_short() -> None:
    long = [
        f"{name}.{node.name}: {node.end_lineno - node.lineno + 1}"
        for name, path in _modules().items()
        if not _within(name, "qtool.runtime.kernels")
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= MAX_FUNCTION_LINES
    ]
    _assert_none(long, f"split a function before it has {MAX_FUNCTION_LINES} lines:")
