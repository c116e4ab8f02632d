"""No module of AccelMark takes part in an import cycle, imports inside functions included."""

from __future__ import annotations

import grimp
from networkx import DiGraph, strongly_connected_components


def test_no_modules_import_each_other_in_a_cycle() -> None:
    graph = grimp.build_graph("accelmark", cache_dir=None)
    imports = DiGraph(
        (name, other) for name in graph.modules for other in graph.find_modules_directly_imported_by(name)
    )
    cycles = [sorted(component) for component in strongly_connected_components(imports) if len(component) > 1]
    assert cycles == []
