"""Measures the Python standard library with a tree of sandboxes.

This program runs in a sandbox. It delegates every package or module of the library to a child, a
sandbox of its own, which delegates each sub-package one level deeper. It combines what comes back,
writes a table and a chart, and returns the list. On the way it meets two planted faults: a child
whose value does not fit its contract, and a recursion without an end.

    hutch run examples/programs/stdlib_census.py --max-depth 3 --out out/stdlib_census
"""

import csv
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from html import escape
from pathlib import Path

from hutch import InvocationFailed, ReturnType, ReturnTypeError, invoke

LIBRARY = Path(os.__file__).parent
NOT_MEASURED = {"__pycache__", "dist-packages", "lib-dynload", "site-packages", "test"}
AT_ONCE = 8
PLANTED = "this"  # the item whose first answer will not fit


@dataclass
class ModuleStats:
    """What is known about one module."""

    name: str
    lines: int
    functions: int
    classes: int
    imports: int
    longest_function: str
    longest_function_lines: int


# What a child runs. It has nothing but its inputs: `path`, `name`, `lines_as_text`, and `source`,
# which is this text, for children of its own.
MEASURE = """
import ast
from pathlib import Path

from hutch import RecursionLimitError, invoke

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def length(function):
    return function.end_lineno - function.lineno + 1


def measure(file, name):
    text = file.read_bytes()
    nodes = list(ast.walk(ast.parse(text)))
    functions = [node for node in nodes if isinstance(node, FUNCTIONS)]
    longest = max(functions, key=length, default=None)
    lines = text.count(b"\\n")
    return {
        "name": name,
        "lines": f"{lines} lines" if lines_as_text else lines,
        "functions": len(functions),
        "classes": sum(isinstance(node, ast.ClassDef) for node in nodes),
        "imports": sum(isinstance(node, (ast.Import, ast.ImportFrom)) for node in nodes),
        "longest_function": longest.name if longest else "",
        "longest_function_lines": length(longest) if longest else 0,
    }


def census(place, name):
    if place.is_file():
        return [measure(place, name)]
    found = []
    for file in sorted(place.glob("*.py")):
        found.append(measure(file, name if file.stem == "__init__" else f"{name}.{file.stem}"))
    for folder in sorted(place.iterdir()):
        if not (folder / "__init__.py").is_file() or "test" in folder.name:
            continue
        below = f"{name}.{folder.name}"
        try:
            found += invoke(
                program=source, label=below,
                source=source, path=str(folder), name=below, lines_as_text=lines_as_text,
            )
        except RecursionLimitError:
            found += census(folder, below)  # as deep as this tree may go: do it here
    return found


return census(Path(path), name)
"""

# A program that would call itself for ever.
ENDLESS = """
import hutch

try:
    return hutch.invoke(program=again, label="endless", again=again)
except hutch.RecursionLimitError as error:
    return f"{error.reason}, an exception like any other: {error}"
"""


def find_items():
    """The packages and modules directly in the library."""
    return sorted(
        path
        for path in LIBRARY.iterdir()
        if path.name not in NOT_MEASURED
        and ((path.suffix == ".py" and path.is_file()) or (path / "__init__.py").is_file())
    )


def delegate(item, lines_as_text):
    """Has one item measured by a child of this sandbox."""
    return invoke(
        ReturnType(list[ModuleStats]),
        program=MEASURE,
        label=item.stem,
        source=MEASURE,
        path=str(item),
        name=item.stem,
        lines_as_text=lines_as_text,
    )


def census_of(item):
    """One item's modules. A value that does not fit is asked for again, with the correction."""
    try:
        return delegate(item, lines_as_text=item.stem == PLANTED)
    except ReturnTypeError as misfit:
        print(f"{item.stem}: the child's value does not fit its contract")
        print(f"    at {misfit.path}: expected {misfit.expected}, got {misfit.got}")
        print("    asking again, with lines as a number")
        return delegate(item, lines_as_text=False)
    except InvocationFailed as failure:
        print(f"{item.stem}: left out, {failure}")
        return []


def write_table(rows, file):
    """One line for each module."""
    with file.open("w", newline="", encoding="utf-8") as table:
        writer = csv.DictWriter(table, [field.name for field in fields(ModuleStats)])
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def draw_chart(rows, bars=24):
    """The largest packages as horizontal bars, as the text of an SVG file."""
    packages = {}
    for row in rows:
        lines, modules = packages.get(row.name.partition(".")[0], (0, 0))
        packages[row.name.partition(".")[0]] = (lines + row.lines, modules + 1)
    largest = sorted(packages.items(), key=lambda item: -item[1][0])[:bars]
    top = max([lines for _, (lines, _) in largest], default=1) or 1
    step = next(s for s in (10**e * m for e in range(9) for m in (1, 2, 5)) if top / s <= 5)
    left, right, head, pitch = 150, 640, 88, 22
    foot = head + pitch * len(largest)

    def x(lines):
        return round(left + (right - left) * lines / top, 1)

    parts = []
    for mark in range(0, top + 1, step):
        parts.append(
            f'<line class="grid" x1="{x(mark)}" x2="{x(mark)}" y1="{head - 6}" y2="{foot}"/>'
        )
        parts.append(
            f'<text class="soft" x="{x(mark)}" y="{head - 12}" text-anchor="middle">{mark:,}</text>'
        )
    for index, (name, (lines, modules)) in enumerate(largest):
        y = head + pitch * index
        middle = y + 13
        count = f"{modules} modules" if modules > 1 else "1 module"
        parts.append(f'<text x="{left - 10}" y="{middle}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<rect class="bar" x="{left}" y="{y + 2}" width="{x(lines) - left}" height="15"'
            f' rx="2"><title>{escape(name)}: {lines:,} lines, {count}</title></rect>'
        )
        parts.append(
            f'<text x="{x(lines) + 7}" y="{middle}">{lines:,}'
            f'<tspan class="soft" dx="6">{count}</tspan></text>'
        )
    total = sum(row.lines for row in rows)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {foot + 20}" role="img"
  aria-label="Lines of code of the largest packages of the standard library">
<style>
  svg {{ background: #fff; font: 12px system-ui, sans-serif; fill: #1f2933; }}
  .title {{ font-size: 17px; font-weight: 600; }}
  .soft {{ fill: #697586; font-size: 11px; }}
  .bar {{ fill: #2f6f8f; }}
  .grid {{ stroke: #e3e8ee; }}
</style>
<text class="title" x="20" y="30">The largest packages of the standard library</text>
<text class="soft" x="20" y="50">lines; {len(rows):,} modules, {total:,} lines in all</text>
{chr(10).join(parts)}
</svg>
"""


items = find_items()
print(f"{len(items)} packages and modules in {LIBRARY}")
with ThreadPoolExecutor(AT_ONCE) as pool:
    rows = [row for part in pool.map(census_of, items) for row in part]
rows.sort(key=lambda row: row.name)

print("an endless recursion ends with", invoke(program=ENDLESS, label="endless", again=ENDLESS))

reports = Path("artifacts")
reports.mkdir(exist_ok=True)
write_table(rows, reports / "report.csv")
(reports / "report.svg").write_text(draw_chart(rows), encoding="utf-8")

print(f"\nthe largest of {len(rows)} modules")
for row in sorted(rows, key=lambda row: -row.lines)[:10]:
    print(f"{row.lines:8,} lines  {row.functions:4} functions  {row.classes:3} classes  {row.name}")
return rows
