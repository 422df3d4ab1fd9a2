"""Sphinx: `sphinx-build -W --keep-going docs SITE` makes the site (`pip install '.[docs]'`).

Warnings are errors. Not nitpicky (`-n`): type hints name types of numpy, typer and torch, which could only be resolved
with an inventory from the network, and the build reads nothing from there.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS.parent), str(DOCS)]

import hrm  # noqa: E402

project = "hrm"
author = "the hrm authors"
version = release = hrm.__version__
html_title = f"hrm {release}"
html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "site_pages"]
exclude_patterns = ["_build", "measured/*/*"]
default_role = "code"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 4
myst_links_external_new_tab = False

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
napoleon_google_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
autodoc_mock_imports = [
    name for name in ("torch", "safetensors", "tokenizers") if importlib.util.find_spec(name) is None
]
# Docstrings name types as the code does, without their module, and some modules have a class of the same name.
suppress_warnings = ["ref.python"]
