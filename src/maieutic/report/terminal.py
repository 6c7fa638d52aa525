"""The table before/after for the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from maieutic.report.measures import TABLE, measure, written
from maieutic.report.run_data import load_run


def terminal_table(run_dir: Path) -> Table:
    """Measures of the first and last evaluation (or training step) of a run, as a rich table; its caption says how far the run is.

    Raises :class:`~maieutic.errors.RunFolderError` when there is no such folder.
    """
    data = load_run(Path(run_dir))
    table = Table(title=Text(data.name), caption=Text("\n".join([data.status, *data.notices])))
    table.add_column("measure")
    moments = [m for m in (data.first, data.last) if m is not None]
    for moment in moments:
        table.add_column(moment.title, justify="right")
    if data.first:
        table.add_column("difference", justify="right")
    for name in TABLE:
        values = [moment.values.get(name) for moment in moments]
        if all(value is None for value in values):
            continue
        cells = [written(name, value) for value in values]
        if data.first:
            before, after = values
            change = None if before is None or after is None else after - before
            cells.append(written(name, change, difference=True))
        table.add_row(measure(name).label, *cells)
    return table
