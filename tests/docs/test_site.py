"""The documentation site builds without a warning, and has the generated reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_site_builds_strictly_with_the_generated_reference(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        check=True,
        timeout=500,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
    )
    assert "optimizer.lr" in (tmp_path / "reference/settings/index.html").read_text()
    assert "accelmark explain" in (tmp_path / "reference/commands/index.html").read_text()
