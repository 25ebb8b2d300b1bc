"""Kernels launched past Triton's dispatch are the variants that Triton would choose."""

from offline import run

PROGRAM, SCHEDULES = "replayed_launches.py", "schedule_launches.py"
KERNELS = (
    "_attention_kernel", "_collapse_kernel", "_count_kernel", "_finish_kernel",
    "_logp_blocks_kernel", "_logp_row_kernel", "_merge_kernel", "_metrics_kernel",
    "_norm_add_norm_kernel", "_norm_rope_kernel", "_pick_kernel", "_pieces_hopper_kernel",
    "_prepare_kernel", "_reduce_kernel", "_rms_norm_fwd_kernel", "_rope_kernel", "_schedule_kernel",
    "_shared_kernel", "_swiglu_fwd_kernel", "_tiles_hopper_kernel", "_write_kernel",
)  # fmt: skip


REPLAYED = (
    "_attention_kernel", "_collapse_kernel", "_finish_kernel", "_merge_kernel", "_pick_kernel",
    "_pieces_hopper_kernel", "_schedule_kernel", "_shared_kernel", "_tiles_hopper_kernel",
)  # fmt: skip


def test_every_kernel_that_is_launched_again_is_triton_s_choice():
    status, lines = run(PROGRAM)
    assert lines["other:"] == []
    assert status == 0
    assert set(lines["relaunched:"]) >= set(KERNELS)
    assert lines["differ:"] == []
    assert lines["unneeded:"] == []
    assert set(lines["sequences:"]) >= set(REPLAYED)


def test_a_cache_of_another_shape_is_noticed():
    status, lines = run(PROGRAM, "--fault")
    assert status == 1
    assert "_finish_kernel" in lines["other:"]


def test_a_recording_for_other_numbers_is_noticed():
    status, lines = run(PROGRAM, "--short-keys")
    assert status == 1
    assert {"_attention_kernel", "_pieces_hopper_kernel"} <= set(lines["differ:"])


def test_a_shared_schedule_changes_no_launch():
    status, lines = run(SCHEDULES)
    assert lines["other:"] == ["0"]
    assert status == 0
    assert {"_attention_kernel", "_merge_kernel", "_pieces_hopper_kernel"} <= set(
        lines["relaunched:"]
    )


def test_a_launch_that_is_left_out_with_a_schedule_is_noticed():
    status, lines = run(SCHEDULES, "--fault")
    assert status == 1
    assert int(lines["other:"][0]) > 100
