"""An interactive box: cells one after the other, an interrupt, files in and out.

.venv/bin/python examples/box.py
"""

from __future__ import annotations

import hutch

SETUP = """
import statistics

class Table:
    def __init__(self, rows): self.rows = rows
    def _repr_html_(self):
        cells = "".join(f"<tr><td>{name}</td><td>{size}</td></tr>" for name, size in self.rows)
        return f"<table>{cells}</table>"
"""


def main() -> None:
    """Talks to one box."""
    with hutch.connect() as client, client.sandbox(label="example", max_depth=1) as box:
        box.run(SETUP).raise_for_failure()

        box.files.write("data/numbers.txt", "3\n1\n4\n1\n5\n")
        result = box.run(
            "numbers = [int(line) for line in open('data/numbers.txt')]\n"
            "print(len(numbers), 'numbers')\n"
            "statistics.mean(numbers)"
        )
        print(result.stdout.strip(), "- mean", result.text)

        shown = box.run("Table([('numbers', len(numbers))])").displays[-1]
        print("shown as", [item.media_type for item in shown.data])

        endless = box.submit("print('spinning', flush=True)\nwhile True: pass")
        next(endless.output())  # it runs
        endless.interrupt()
        print("the endless cell was", endless.result().outcome)

        failed = box.run("numbers[10]")
        print("and this one", failed.outcome, "-", failed.failure and failed.failure.type_name)

        box.run("open('data/sorted.txt', 'w').write(repr(sorted(numbers)))").raise_for_failure()
        print("the box is still there:", box.files.read("data/sorted.txt").decode())


if __name__ == "__main__":
    main()
