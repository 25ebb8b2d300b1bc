"""The units of a comparison, and their inputs."""

from synthetic import SHAPE

from rlk_align.engines.vllm.info import VLLM
from rlk_align.model.sites import model_sites
from rlk_align.probe.graph import late_sites, unit_graphs

SITES = model_sites(SHAPE)


def test_without_regions_each_site_is_a_unit_with_its_inputs() -> None:
    units = unit_graphs(SITES, (), ())
    assert [u.name for u in units] == [s.name for s in SITES]
    assert all(
        (u.inputs, u.prefix_inputs) == (s.inputs, s.prefix_inputs)
        for u, s in zip(units, SITES, strict=True)
    )
    assert not any(u.is_region for u in units)


def test_vllm_adds_the_residual_inside_the_next_norm() -> None:
    units = {u.name: u for u in unit_graphs(SITES, VLLM.fused, ())}
    regions = [u for u in units.values() if u.is_region]
    assert [u.name for u in regions] == [
        "layers.0.attn_residual+mlp_norm",
        "layers.0.mlp_residual+layers.1.attn_norm",
        "layers.1.attn_residual+mlp_norm",
        "layers.1.mlp_residual+final_norm",
    ]
    assert regions[1].inputs == ("layers.0.attn_residual", "layers.0.down_proj")
    assert units["layers.1.q_proj"].inputs == ("layers.1.attn_norm",)
    # The first norm adds nothing.
    assert units["layers.0.attn_norm"].inputs == ("embed",)
    assert late_sites(SITES, VLLM.fused) == tuple(u.sites[0].name for u in regions)
    assert {s.name for u in units.values() for s in u.sites} == {s.name for s in SITES}


def test_what_cannot_be_shown_is_inside_of_what_reads_it() -> None:
    hidden = {f"layers.{i}.{op}" for i in (0, 1) for op in ("attn_norm", "mlp_norm")}
    units = {u.name: u for u in unit_graphs(SITES, (), hidden)}
    assert not hidden & units.keys()
    assert units["layers.1.q_proj"].inputs == ("layers.0.mlp_residual",)
    assert units["layers.0.gate_proj"].inputs == ("layers.0.attn_residual",)
    fused = {u.name: u for u in unit_graphs(SITES, VLLM.fused, hidden)}
    inside = ("layers.0.attn_residual", "layers.0.down_proj")
    assert fused["layers.0.mlp_residual"].inputs == inside
    # The stream is overwritten after the norm, and so also q_proj, has read the live value.
    assert fused["layers.1.q_proj"].inputs == inside
