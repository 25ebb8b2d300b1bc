"""Files for Model Explorer: graphs that hang together, and data for each of their nodes."""

import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import HOSTILE, report_run

from rlk_align.model.sites import model_sites
from rlk_align.trace.run import Run

OVER = "layers.1.act"
FILES = {
    *("canonical.json", "engines.json", "navigation.json"),
    *("relative-l2.json", "introduced.json", "inherited.json", "side.json"),
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return report_run(tmp_path_factory.mktemp("run") / "run", over=[OVER])


@pytest.fixture
def files(run: Run, tmp_path: Path, cli) -> dict[str, Any]:
    done = cli("report", "model-explorer", run.folder, "-o", tmp_path / "out")
    assert done.code == 0, done.err
    found = {p.name: json.loads(p.read_text()) for p in (tmp_path / "out").iterdir()}
    assert found.keys() == FILES
    return found


def graphs(files: dict[str, Any]) -> dict[str, dict[str, Any]]:
    both = [*files["canonical.json"]["graphs"], *files["engines.json"]["graphs"]]
    return {g["id"]: g for g in both}


def broken(graph: dict[str, Any]) -> list[str]:
    """What Model Explorer could not draw: ids given twice, edges from nowhere, odd namespaces."""
    ids = [node["id"] for node in graph["nodes"]]
    found = [f"twice: {i}" for i in ids if ids.count(i) > 1]
    for node in graph["nodes"]:
        outputs = {n["id"]: {o["id"] for o in n["outputsMetadata"]} for n in graph["nodes"]}
        for edge in node["incomingEdges"]:
            if edge["sourceNodeOutputId"] not in outputs.get(edge["sourceNodeId"], ()):
                found.append(f"from nowhere: {edge['sourceNodeId']}")
        if node["namespace"] and not all(node["namespace"].split("/")):
            found.append(f"namespace: {node['namespace']}")
    return found


def test_the_graphs_hang_together(files: dict[str, Any], run: Run) -> None:
    found = graphs(files)
    assert found.keys() == {"canonical", "rollout", "train"}
    names = [s.site for s in run.comparison.edges[0].sites]
    for graph in found.values():
        assert not broken(graph)
        assert len(graph["nodes"]) == len(names)
        # Only the embedding reads no other operator.
        assert sum(not node["incomingEdges"] for node in graph["nodes"]) == 1
    assert [n["id"] for n in found["canonical"]["nodes"]] == names
    spaces = {n["namespace"] for n in found["canonical"]["nodes"]}
    assert spaces == {"", "layers/0/attn", "layers/0/mlp", "layers/1/attn", "layers/1/mlp"}


def test_edges_are_the_operators_inputs(files: dict[str, Any]) -> None:
    from synthetic import SHAPE

    wanted = {s.name: {*s.inputs, *s.prefix_inputs} for s in model_sites(SHAPE)}
    for node in graphs(files)["canonical"]["nodes"]:
        assert {e["sourceNodeId"] for e in node["incomingEdges"]} == wanted[node["id"]]


def test_broken_graphs_are_seen(files: dict[str, Any]) -> None:
    graph = graphs(files)["canonical"]
    first, second = graph["nodes"][:2]
    second["incomingEdges"][0]["sourceNodeId"] = "nowhere"
    second["namespace"] = "layers//0"
    graph["nodes"].append(first)
    assert {b.partition(":")[0] for b in broken(graph)} == {"twice", "from nowhere", "namespace"}


def test_node_data_speaks_of_nodes_that_are_there(files: dict[str, Any]) -> None:
    found = graphs(files)
    for name in ("relative-l2.json", "introduced.json", "inherited.json", "side.json"):
        assert files[name].keys() == found.keys()
        for graph, data in files[name].items():
            ids = {n["id"] for n in found[graph]["nodes"]}
            assert data["results"].keys() <= ids
            assert data["results"]
            if name != "side.json":
                assert [g["stop"] for g in data["gradient"]] == [0, 0.5, 1]
    assert files["side.json"]["canonical"]["results"][OVER]["value"] == "train"
    introduced = files["introduced.json"]["canonical"]["results"]
    assert introduced[OVER]["value"] == max(v["value"] for v in introduced.values())
    assert introduced["embed"]["value"] == min(v["value"] for v in introduced.values())


def test_the_mapping_leads_from_one_engines_module_to_the_others(files: dict[str, Any]) -> None:
    navigation, found = files["navigation.json"], graphs(files)
    assert navigation["type"] == "sync_navigation"
    assert navigation["showDiffHighlights"] is True
    left, right = ({n["id"] for n in found[g]["nodes"]} for g in ("rollout", "train"))
    assert navigation["mapping"].keys() == left
    assert set(navigation["mapping"].values()) == right
    assert navigation["mapping"][f"model.{OVER}:{OVER}"] == f"decoder.{OVER}:{OVER}"


def test_without_a_probe_nothing_is_said_to_be_introduced(tmp_path: Path, cli) -> None:
    run = report_run(tmp_path / HOSTILE.replace("/", "").replace("\x00", ""), probed=False)
    assert cli("report", "model-explorer", run.folder, "-o", tmp_path / "out").code == 0
    introduced = json.loads((tmp_path / "out" / "introduced.json").read_text())
    assert introduced["canonical"]["results"] == {}
    label = json.loads((tmp_path / "out" / "canonical.json").read_text())["label"]
    assert "\\x1b" in label
    assert "\x1b" not in label


def test_a_run_that_was_stopped_has_no_graph(tmp_path: Path, cli) -> None:
    from report_runs import hostile_mismatch

    run = report_run(tmp_path / "run", mismatches=[hostile_mismatch()], edges=[], controls=None)
    done = cli("report", "model-explorer", run.folder, "-o", tmp_path / "out")
    assert done.code == 2
    assert "no graph" in done.err
