"""Tables, plots and the pages that show a run. Torch-free: reports are written where there is no GPU, too."""

from maieutic.report.html_report import write_report
from maieutic.report.terminal import terminal_table
from maieutic.report.viewer import write_viewer

__all__ = ["terminal_table", "write_report", "write_viewer"]
