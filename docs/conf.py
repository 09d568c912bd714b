"""How Sphinx builds the pages; run `scripts/docs`."""

from __future__ import annotations

project = "Wake requests for Airflow's partitioned assets"
author = "the authors of this patch set"
copyright = f"2026, {author}"

extensions = ["sphinx.ext.graphviz"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "Wake requests"
html_copy_source = False
html_show_sphinx = False
html_static_path = ["_static"]
html_css_files = ["page.css"]

# Diagrams are text in the pages, drawn at each build.
graphviz_output_format = "svg"
graphviz_dot_args = [
    "-Gbgcolor=transparent",
    "-Gfontname=sans-serif",
    "-Nfontname=sans-serif",
    "-Efontname=sans-serif",
    "-Gfontsize=11",
    "-Nfontsize=11",
    "-Efontsize=10",
    "-Nshape=box",
    "-Nstyle=rounded,filled",
    "-Nfillcolor=#f4f7fb",
    "-Ncolor=#4a6fa5",
    # Both are read on a light and on a dark page.
    "-Ecolor=#7a8aa0",
    "-Efontcolor=#7a8aa0",
    "-Gfontcolor=#7a8aa0",
]
highlight_language = "text"
