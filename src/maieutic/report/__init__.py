"""Tables, plots and the pages that show a run."""
