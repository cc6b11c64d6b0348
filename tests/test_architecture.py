"""The house rules that a test can hold: imports run one way, extras stay outside, the public surface is small."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path

import meshmend
from meshmend.extras import TESTED
from meshmend.planning.auto import CHOICES

SOURCE = Path(meshmend.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))
# In order: a part may import itself and lines above its own, neither what is below nor what is beside it.
PACKAGES = [
    ["topology"],
    ["machines", "routing"],
    ["schedule"],
    ["cost", "numpy"],
    ["planning", "drawing"],
    ["quarantine"],
    ["launch"],
    ["meshmend"],
    ["jax", "torch"],
    ["doctor"],
    ["cli"],
]
ROOMS = ["engine", "train", "data", "session", "state", "compile", "checks", "job"]
ROOMS_OF_STATE = ["layout", "memory", "disk"]
ORDER = [["errors"], ["extras", "files"], ["buckets"], *PACKAGES, ["__main__"]]
FLOORS = {part: number for number, parts in enumerate(ORDER) for part in parts}
# A planner makes schedules and knows nothing to the right of them; only what chooses and proves plans may.
PLANNERS_MAY = {"errors", "topology", "routing", "schedule", "planning"}
CHOOSERS = {"proven.py", "cache.py", "auto.py", "shards.py", "step.py", "compare.py", "plot.py", "__init__.py"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


def part_of(path: Path) -> str:
    inside = path.relative_to(SOURCE)
    return "meshmend" if inside == Path("__init__.py") else inside.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Parts of meshmend that a file imports; "meshmend" stands for the package's own public names."""
    found = set()
    for node in nodes_of(path):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "meshmend" else [f"meshmend.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            if name.split(".")[0] == "meshmend":
                part = [*name.split("."), "meshmend"][1]
                found.add(part if part in FLOORS else "meshmend")
    return found


def test_imports_run_one_way() -> None:
    wrong = []
    for path in FILES:
        part, others = part_of(path), imports_of(path)
        wrong += [f"{path} imports {other}" for other in others - {part} if FLOORS[other] >= FLOORS[part]]
        if part == "planning" and path.name not in CHOOSERS:
            wrong += [f"{path}, a planner, imports {other}" for other in others - PLANNERS_MAY]
    assert not wrong


def rooms_imported(text: str) -> set[tuple[str, ...]]:
    """What a file imports of `meshmend.jax`, below it: ("state", "memory", "copies"); () for what is public there."""
    found: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {tuple(name.split(".")[2:]) for name in names if f"{name}.".startswith("meshmend.jax.")}
    return found


def enters_wrongly(room: tuple[str, ...], other: tuple[str, ...]) -> bool:
    """Whether a file of a room imports what is below it, or the names that are made of all rooms."""
    if not other or other[0] not in ROOMS:
        return True
    if room[0] == other[0] == "state" and len(other) > 1 and {room[1], other[1]} <= set(ROOMS_OF_STATE):
        return ROOMS_OF_STATE.index(other[1]) > ROOMS_OF_STATE.index(room[1])
    return ROOMS.index(other[0]) > ROOMS.index(room[0])


def test_imports_between_rooms_run_one_way() -> None:
    wrong = []
    for path in sorted((SOURCE / "jax").rglob("*/*.py")):
        room = path.relative_to(SOURCE / "jax").with_suffix("").parts
        others = rooms_imported(path.read_text(encoding="utf-8"))
        wrong += [f"{'/'.join(room)} reaches {'/'.join(other)}" for other in others if enters_wrongly(room, other)]
    assert not wrong


def test_imports_against_the_order_of_rooms_are_found() -> None:
    text = (
        "import meshmend.jax.state.disk.read\nfrom meshmend.jax.engine import tiles\nfrom meshmend.jax import Job\n"
        "import meshmend.jax as mmj\ndef f():\n    from meshmend.jax.job.job import Job"
    )
    others = {("state", "disk", "read"), ("engine", "tiles"), ("Job",), (), ("job", "job", "Job")}
    assert rooms_imported(text) == others
    assert {other for other in others if enters_wrongly(("data", "feed"), other)} == others - {("engine", "tiles")}
    assert enters_wrongly(("state", "layout", "flat"), ("state", "memory", "copies"))
    assert not enters_wrongly(("state", "disk", "disk"), ("state", "memory", "copies"))
    assert not enters_wrongly(("state", "keeper"), ("state", "disk", "read"))


def test_every_package_and_room_has_its_place_in_the_three_tables() -> None:
    def folders(path: Path) -> set[str]:
        return {file.parent.name for file in path.glob("*/__init__.py")}

    listed = {part for parts in PACKAGES for part in parts}
    assert listed == folders(SOURCE) | {"meshmend", "numpy"}
    assert set(ROOMS) == folders(SOURCE / "jax")
    assert set(ROOMS_OF_STATE) == folders(SOURCE / "jax/state")
    table = [*map(", ".join, PACKAGES), "", *(f"jax/{room}" for room in ROOMS)]
    (first,) = re.findall(r"\n\n((?:    .*\n|\n)+)$", meshmend.__doc__ or "")
    lines = [line.strip() for line in first.splitlines()]
    assert [line.partition(":")[0] for line in lines] == table
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```text\n(topology: .*?)```", text, re.S)
    assert block.splitlines() == lines
    (inside,) = re.findall(r"jax/state: .*; in it (.*), in this order", block)
    assert re.split(r", | and ", inside) == ROOMS_OF_STATE


def test_the_laboratory_imports_the_product_and_never_the_other_way() -> None:
    root = Path(__file__).parents[1]
    files = [path for folder in (SOURCE, root / "tests", root / "examples") for path in folder.rglob("*.py")]
    assert len(files) > 300
    for path in files:
        for node in nodes_of(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] == "meshmend_lab" for name in names), path


def module_of(path: Path) -> str:
    """The name by which a file is imported."""
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def modules_imported(tree: ast.AST, modules: Collection[str]) -> set[str]:
    """The modules of meshmend that a file imports anywhere, but not under TYPE_CHECKING."""
    found: set[str] = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            found |= modules_imported(ast.Module(node.orelse, []), modules)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & set(modules)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & set(modules) or {node.module or ""} & set(modules)
        else:
            found |= modules_imported(node, modules)
    return found


def import_cycle(imports: Mapping[str, Collection[str]]) -> list[str]:
    """Modules of which each imports the next, and the last the first; none if there is no such cycle."""
    left = {name: set(others) for name, others in imports.items()}
    while left:
        free = {name for name, others in left.items() if not others & set(left)}
        if not free:
            found = [min(left)]
            while found[-1] not in found[:-1]:
                found.append(min(left[found[-1]] & set(left)))
            return found[found.index(found[-1]) :]
        left = {name: others for name, others in left.items() if name not in free}
    return []


def test_no_modules_import_each_other() -> None:
    paths = {module_of(path): path for path in SOURCE.rglob("*.py")}
    trees = {name: tree_of(path) for name, path in paths.items()}
    assert import_cycle({name: modules_imported(tree, paths) for name, tree in trees.items()}) == []


def test_an_import_cycle_is_found() -> None:
    modules = {
        "m.a": "from m import b",
        "m.b": "def f():\n    import m.c",
        "m.c": "if TYPE_CHECKING:\n    from m.b import g\nelse:\n    from m.a import f",
        "m.d": "from m.a import f",
    }
    imports = {name: modules_imported(ast.parse(text), modules) for name, text in modules.items()}
    assert imports == {"m.a": {"m.b"}, "m.b": {"m.c"}, "m.c": {"m.a"}, "m.d": {"m.a"}}
    assert import_cycle(imports) == ["m.a", "m.b", "m.c", "m.a"]
    assert import_cycle(imports | {"m.c": set()}) == []


# What an engine may use of planning: a plan from any planner, the cache of plans, and what a weight update costs.
ENGINES_MAY = {"PlanCache", "PlanFunction", "Planner", "plan"}
ENGINES_MAY |= {"StepDemands", "StepPlan", "Workload", "plan_broadcast", "plan_shards", "plan_step", "round_payload"}
PLANNER_FREE = ("cost", "drawing", "jax", "numpy", "torch")


def uses_a_planner(node: ast.AST, part: str) -> bool:
    """Whether a node imports what its part may not have of planning, or asks for a planner by its name."""
    if isinstance(node, ast.Import):
        return any(alias.name.startswith("meshmend.planning") for alias in node.names)
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("meshmend.planning"):
        names = {alias.name for alias in node.names}
        return part not in ("jax", "torch") or node.module != "meshmend.planning" or not names <= ENGINES_MAY
    if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "plan":
        given = [*node.args, *(word.value for word in node.keywords)]
        return bool({one.value for one in given if isinstance(one, ast.Constant)} & {kind.name for kind in CHOICES})
    return False


def test_nothing_right_of_the_schedule_imports_a_planner() -> None:
    """Only engines plan, and only what they run."""
    wrong = [
        f"{path}:{getattr(node, 'lineno', 0)}"
        for path in FILES
        if part_of(path) in PLANNER_FREE
        for node in nodes_of(path)
        if uses_a_planner(node, part_of(path))
    ]
    assert not wrong


def test_importing_meshmend_brings_no_extra() -> None:
    code = (
        "import sys, meshmend, meshmend.cli, meshmend.drawing, meshmend.schedule.split, meshmend.numpy; "
        "extras = 'jax jaxlib optax flax grain torch matplotlib simgrid starlette uvicorn yaml'; "
        "print([m for m in extras.split() if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_scipy_is_imported_where_it_is_used() -> None:
    """It takes as long to import as the rest of the command line, and most commands and workers have no use for it."""
    at_once = [
        f"{path}:{node.lineno}"
        for path in FILES
        for node in tree_of(path).body
        if isinstance(node, ast.Import | ast.ImportFrom) and "scipy" in ast.unparse(node)
    ]
    assert at_once == []


PRIVATE = {
    "jax/engine/private.py": {"jax"},
    "torch/private.py": {"torch"},
    "torch/private_torchft.py": {"torchft"},
}
"""The only files that may use what a library does not promise to keep, and the library whose private names they use."""


def private_names(tree: ast.Module) -> set[str]:
    """Names with a leading underscore that a file takes from elsewhere, and that it does not define itself."""
    own: set[str] = {"_exit"}  # os._exit is public
    used: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute):
            is_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            (own if is_self else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used |= {*(node.module or "").split("."), *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Import):
            used |= {part for alias in node.names for part in alias.name.split(".")}
    return {name for name in used - own if name.startswith("_") and not name.startswith("__")}


def libraries(tree: ast.Module) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found & {"jax", "jaxlib", "torch", "torchft", "optax", "orbax", "grain", "flax"}


def test_private_names_of_libraries_stay_in_one_file_for_each() -> None:
    wrong = {}
    for path in FILES:
        tree, file = tree_of(path), path.relative_to(SOURCE).as_posix()
        if libraries(tree) and file not in PRIVATE and (names := private_names(tree)):
            wrong[file] = names
    assert not wrong, f"put them into one of {sorted(PRIVATE)}, each with a test of its own"


def test_private_names_would_be_found() -> None:
    imports = "from jax._src import a\nfrom torch.utils import _pytree\n"
    code = "b._c = self._d\nclass E:\n  def _f(self): self._d = g._f"
    assert private_names(ast.parse(imports + code)) == {"_src", "_pytree", "_c"}
    for file, known in PRIVATE.items():
        assert libraries(ast.parse((SOURCE / file).read_text(encoding="utf-8"))) >= known


def test_what_is_used_of_jax_and_torch_has_no_upper_bound() -> None:
    """Whether a version has what is needed is looked up when it is imported; and CI tests a version of each."""
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    wanted = dict(re.findall(r"^(\w+)==([\d.]+)", (root / "constraints.txt").read_text(encoding="utf-8"), re.M))
    for library in sorted(set().union(*PRIVATE.values())):
        (bounds,) = [text for extra in ("jax", "torch") for text in extras[extra] if re.match(rf"{library}[<>=]", text)]
        assert "<" not in bounds
        assert wanted[library] in TESTED[library]


def test_no_function_is_longer_than_a_hundred_lines() -> None:
    long = [
        f"{path.name}: {node.name}"
        for path in SOURCE.rglob("*.py")
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno >= 100
    ]
    assert not long


def test_no_file_is_two_ideas() -> None:
    long = {p.name: n for p in SOURCE.rglob("*.py") if (n := len(p.read_text(encoding="utf-8").splitlines())) > 600}
    assert not long


def test_every_protected_row_of_the_threat_model_has_a_test_that_exists() -> None:
    root = Path(__file__).parents[1]
    rows = [row for row in (root / "SECURITY.md").read_text(encoding="utf-8").splitlines() if row.startswith("|")]
    named = [re.findall(r"`((?:lab/)?tests/[\w/]+\.py)::(\w+)`", row) for row in rows]
    assert sum(map(len, named)) >= 8
    for row, tests in zip(rows, named, strict=True):
        is_head = row.startswith(("|---", "| socket", "| file"))
        is_open = "| nothing" in row or "whoever writes the shared folder" in row
        assert is_head or bool(tests) != is_open, row
        for path, name in tests:
            assert f"def {name}(" in (root / path).read_text(encoding="utf-8"), name
